"""Exported drafters reload as they were, in the layouts that other engines read."""

import json

import pytest
import torch
from safetensors.torch import load_file

import tiny_training as setup
from whiflash.drafters.load import load_dflash
from whiflash.errors import WhiFlashError
from whiflash.nn.weights import Weights, digest, load_parts
from whiflash.training import dflash, eagle3
from whiflash.training.dflash import DFlashTrainee, new_drafter
from whiflash.training.eagle3 import Eagle3Trainee, new_head


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return setup.target(tmp_path_factory.mktemp("export"))


def trained(kind, target, ids):
    if kind == "eagle3":
        recipe = setup.eagle3_recipe()
        return Eagle3Trainee(new_head(target, setup.TAPS, ids, recipe), target, recipe)
    recipe = setup.dflash_recipe()
    return DFlashTrainee(new_drafter(target, setup.TAPS, recipe), target, recipe, ids)


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_export_reloads_bit_equal(kind, target, tmp_path):
    ids = torch.arange(3, 203)
    trainee = trained(kind, target, ids)
    trainee.module.half().float()  # so that float16 holds it exactly
    trainee.export(tmp_path, {"history": []})
    again = trained(kind, target, ids)
    for parameter in again.module.parameters():
        torch.nn.init.zeros_(parameter)
    weights = Weights(tmp_path)
    load_parts(again.module.parts(), weights, torch.float32, "cpu")
    weights.finish(ignore=("d2t", "t2d"))
    for name, value in trainee.module.state_dict().items():
        assert torch.equal(again.module.state_dict()[name], value), name


def test_eagle3_layout(target, tmp_path):
    ids = torch.arange(3, 203)
    trained("eagle3", target, ids).export(tmp_path, {"history": []})
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [t - 1 for t in setup.TAPS]
    assert config["eagle_aux_hidden_state_layer_ids"] == list(setup.TAPS) and "eagle_aux_layer_semantics" not in config
    assert torch.equal(torch.arange(200) + tensors["d2t"], ids)
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], ids)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 64)
    assert tensors["fc.weight"].dtype == torch.float16 and tensors["fc.weight"].shape == (32, 96)
    assert {n for n in tensors if not n.startswith("midlayer.")} == {
        "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d",
    }  # fmt: skip


def test_dflash_layout(target, tmp_path):
    trained("dflash", target, torch.arange(200)).export(tmp_path, {"history": []})
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["dflash_config"]["target_layer_ids"] == [t - 1 for t in setup.TAPS]
    assert config["dflash_config"]["mask_token_id"] < target.vocab_size and config["block_size"] == 4
    assert {n.split(".")[0] for n in tensors} == {"fc", "hidden_norm", "norm", "layers"}
    assert tensors["layers.1.self_attn.q_norm.weight"].shape == (8,)
    assert json.loads((tmp_path / "draft_vocabulary.json").read_text()) == list(range(200))


def test_dflash_drafts_from_the_vocabulary_it_learned(target, tmp_path):
    ids = torch.arange(3, 203)
    trained("dflash", target, ids).export(tmp_path, {"history": []})
    hidden = torch.randn(5, 32)
    for packed in (False, True):
        model = load_dflash(tmp_path, target, packed=packed)
        assert model.config.draft_vocab_size == 200 and torch.equal(model.target_ids, ids)
        torch.testing.assert_close(model.logits(hidden), target.network.head(hidden)[:, ids], rtol=1e-5, atol=1e-5)
    before = digest(tmp_path)
    (tmp_path / "draft_vocabulary.json").unlink()
    whole = load_dflash(tmp_path, target)
    assert whole.target_ids is None and torch.equal(whole.logits(hidden), target.network.head(hidden))
    assert digest(tmp_path) != before


@pytest.mark.parametrize("content", ["", "[]", "{}", "[2, 1]", "[-1, 3]", "[5, 10000]", '["a"]', "3"])
def test_a_damaged_draft_vocabulary_is_refused(content, target, tmp_path):
    trained("dflash", target, torch.arange(200)).export(tmp_path, {"history": []})
    (tmp_path / "draft_vocabulary.json").write_text(content)
    with pytest.raises(WhiFlashError, match="delete it to draft from the whole"):
        load_dflash(tmp_path, target)


def test_card_tells_acceptance_and_recipe(target, tmp_path):
    row = {"rounds": 1.5, "positions": 1.7, "first": 0.4}
    history = [{"step": 10, "hours": 0.1, "loss": 3.0, "acceptance": {"chat": row, "overall": row}}]
    trained("eagle3", target, torch.arange(200)).export(tmp_path, {"history": history, "data": {"texts": 6}})
    card = (tmp_path / "README.md").read_text()
    assert "| chat | 1.500 | 1.700 | 0.400 |" in card and '"draft_vocab": 200' in card and '"texts": 6' in card


def test_drafters_start_from_the_target(target):
    weights, ids = Weights(target.path), torch.arange(200)
    head = new_head(target, setup.TAPS, ids, setup.eagle3_recipe())
    q = weights.take("model.layers.5.self_attn.q_proj.weight")
    assert torch.equal(head.layer.attention.qkv.weight[:32, 32:], q)
    torch.testing.assert_close(head.lm_head.weight, weights.take("lm_head.weight")[:200], rtol=1e-5, atol=1e-5)
    drafter = new_drafter(target, setup.TAPS, setup.dflash_recipe())
    assert torch.equal(drafter.layers[1].mlp.down.weight, weights.take("model.layers.5.mlp.down_proj.weight"))
    assert torch.equal(drafter.norm.weight, weights.take("model.norm.weight"))
    assert dflash.mask_token(target) not in target.stop_ids
    assert eagle3.Eagle3Recipe().loop.precision == "bfloat16"
