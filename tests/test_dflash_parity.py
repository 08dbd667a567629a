"""Our DFlash against the `dflash` and `speculators` packages, on tiny random models saved in every published layout."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

import tiny
from whiflash.drafters.load import load_dflash
from whiflash.nn.weights import Weights
from whiflash.target.load import load_target

TARGET_LAYERS, CONTEXT, BLOCK, MASK = 6, 15, 4, 258
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 264,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
NESTED = {"dflash_config": {"target_layer_ids": [0, 2, 4], "mask_token_id": MASK, "block_size": BLOCK}}
SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
YARN = {"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, "original_max_position_embeddings": 8}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}

# name → config keys, edits to the saved file, boundary taps expected
CASES = {
    "full": (NESTED, {}, (1, 3, 5)),
    "block size on top": (NESTED | {"dflash_config": {"mask_token_id": MASK}, "block_size": BLOCK}, {}, (2, 3, 4)),
    "one layer": (
        NESTED | {"dflash_config": {"mask_token_id": MASK, "block_size": BLOCK}, "num_hidden_layers": 1},
        {},
        (4,),
    ),
    "last output id": (NESTED | {"dflash_config": NESTED["dflash_config"] | {"target_layer_ids": [1, 5]}}, {}, (2, 7)),
    "biases": (NESTED | {"attention_bias": True}, {}, (1, 3, 5)),
    "sliding": (NESTED | SLIDING, {}, (1, 3, 5)),
    "sliding, not causal": (NESTED | SLIDING | {"is_causal": False}, {}, (1, 3, 5)),
    "all causal": (NESTED | {"is_causal": True}, {}, (1, 3, 5)),
    "sliding from layer 1": (NESTED | SLIDING | {"layer_types": None, "max_window_layers": 1}, {}, (1, 3, 5)),
    "yarn": (NESTED | {"rope_parameters": YARN}, {}, (1, 3, 5)),
    "linear, old keys": (NESTED | {"rope_parameters": LINEAR}, {"style": "old"}, (1, 3, 5)),
    "model. prefix": (NESTED, {"style": "prefix"}, (1, 3, 5)),
    "bin": (NESTED, {"style": "bin"}, (1, 3, 5)),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(tiny.build(tmp_path_factory.mktemp("target"), layers=TARGET_LAYERS), device="cpu")


def randomize(model):
    """Norms and biases as random as the matrices."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model.eval()


def rewrite(path, style):
    """Turn what `save_pretrained` wrote into another layout in the wild."""
    weights, config = path / "model.safetensors", json.loads((path / "config.json").read_text())
    if style == "prefix":
        save_file({f"model.{k}": v for k, v in load_file(weights).items()}, weights)
    if style == "bin":
        torch.save(load_file(weights), path / "pytorch_model.bin")
        weights.unlink()
    if style == "old":
        rope = config.pop("rope_parameters")
        config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {"type": rope.pop("rope_type"), **rope}}
        (path / "config.json").write_text(json.dumps(config))


def close(found, expected):
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def inputs(taps):
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(1, CONTEXT, taps * 32, generator=generator)
    return features, torch.tensor([[77, *[MASK] * (BLOCK - 1)]])


@torch.inference_mode()
def block_states(model, features, block):
    """Hidden states of the block, its context written in two pieces and a stale one before them overwritten."""
    cache = model.new_cache(CONTEXT + BLOCK)
    model.write_context(torch.randn_like(features), torch.arange(CONTEXT), cache)
    for start, end in ((0, 9), (9, CONTEXT)):
        model.write_context(features[:, start:end], torch.arange(start, end), cache)
        cache.advance(end - start)
    return model(block, torch.arange(CONTEXT, CONTEXT + BLOCK), cache)


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_against_the_dflash_package(case, target, tmp_path):
    from dflash.model import DFlashDraftModel

    options, edit, taps = CASES[case]
    torch.manual_seed(0)
    judge = randomize(DFlashDraftModel(Qwen3Config(**SHAPE | {"num_target_layers": TARGET_LAYERS} | options)))
    judge.save_pretrained(tmp_path)
    rewrite(tmp_path, edit.get("style"))
    model = load_dflash(tmp_path, target)
    assert model.taps == taps
    assert model.config.block_size == BLOCK and model.config.mask_token_id == MASK
    features, block = inputs(len(taps))
    with torch.inference_mode():
        expected = judge(
            target_hidden=features,
            noise_embedding=target.network.embed(block),
            position_ids=torch.arange(CONTEXT + BLOCK)[None],
        )
    found = block_states(model, features, block)
    close(found, expected)
    close(model.logits(found), target.network.head(expected))


SPECULATORS = {
    "own vocabulary": ({"draft_vocab_size": 40}, {}),
    "target's vocabulary": ({"draft_vocab_size": 264}, {}),
    "embedding in the file": ({"draft_vocab_size": 40}, {"embedding": True}),
    "default taps": ({"draft_vocab_size": 40, "aux_hidden_state_layer_ids": None}, {}),
    "sliding": ({"draft_vocab_size": 264}, {"layers": SLIDING | {"sliding_window": 2 * CONTEXT}}),
    "sliding, not causal": (
        {"draft_vocab_size": 264, "sliding_window_non_causal": True},
        {"layers": SLIDING | {"sliding_window": 2 * CONTEXT}},
    ),
}


@pytest.mark.parametrize("case", SPECULATORS)
def test_hidden_states_against_speculators(case, target, tmp_path):
    """Windows here only switch causality: the package windows a block's context otherwise than every server does."""
    pytest.importorskip("speculators")
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashSpeculatorConfig
    from speculators.models.dflash.core import DFlashDraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    options, extra = SPECULATORS[case]
    torch.manual_seed(0)
    layer = Qwen3Config(**SHAPE | extra.get("layers", {}))
    layer._attn_implementation = "eager"
    keys = {"aux_hidden_state_layer_ids": [1, 3, 6], "mask_token_id": MASK, "block_size": BLOCK} | options
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **keys | {"aux_hidden_state_layer_ids": keys["aux_hidden_state_layer_ids"] or [2, 3, TARGET_LAYERS - 3]},
    )
    judge = randomize(DFlashDraftModel(config))
    kept = torch.zeros(264, dtype=torch.bool)
    kept[torch.randperm(264)[: keys["draft_vocab_size"]]] = True
    judge.load_vocab_mappings(kept, kept.nonzero()[:, 0] - torch.arange(keys["draft_vocab_size"]))
    embedding = Weights(target.path).take("model.embed_tokens.weight")
    if extra.get("embedding"):
        embedding = torch.randn_like(embedding)
    judge.embed_tokens.weight.data = embedding
    judge.lm_head.weight.data = 0.2 * torch.randn_like(judge.lm_head.weight)
    judge.save_pretrained(tmp_path)
    if extra.get("embedding"):
        file = tmp_path / "model.safetensors"
        save_file(load_file(file) | {"embed_tokens.weight": embedding}, file)
    if keys["aux_hidden_state_layer_ids"] is None:
        raw = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(raw | {"aux_hidden_state_layer_ids": None}))

    model = load_dflash(tmp_path, target)
    assert model.taps == tuple(config.aux_hidden_state_layer_ids)
    features, block = inputs(3)
    anchor = torch.arange(CONTEXT + BLOCK + 1) == CONTEXT
    later = torch.randn(1, BLOCK + 1, features.shape[-1])  # features the block must not see
    with torch.inference_mode():
        expected, logits, *_ = judge._backbone_forward(
            torch.cat([features, later], 1),
            torch.where(anchor, 77, 5)[None],
            anchor[None],
            torch.zeros(1, CONTEXT + BLOCK + 1, 32),
            torch.zeros(1, CONTEXT + BLOCK + 1, dtype=torch.long),
            max_anchors=1,
        )
    found = block_states(model, features, block)
    close(found, expected)
    if keys["draft_vocab_size"] == 40:
        close(model.logits(found), logits)
        assert torch.equal(model.target_ids, kept.nonzero()[:, 0])
    else:
        assert model.target_ids is None
        close(model.logits(found), target.network.head(expected))


def test_the_meaning_of_tap_ids_can_be_overridden(target, tmp_path):
    from dflash.model import DFlashDraftModel

    config = Qwen3Config(**SHAPE | NESTED | {"num_target_layers": TARGET_LAYERS})
    DFlashDraftModel(config).save_pretrained(tmp_path)
    assert load_dflash(tmp_path, target, tap_ids="boundary").taps == (0, 2, 4)
    assert load_dflash(tmp_path, target, tap_ids="output").taps == (1, 3, 5)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["dflash_config"]["target_layer_ids"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_dflash(tmp_path, target, tap_ids="boundary").taps == (2, 3, 4), "default ids are what they are"


def test_a_mask_token_outside_the_table_reads_its_side_file(target, tmp_path):
    from dflash.model import DFlashDraftModel

    config = Qwen3Config(**SHAPE | {"num_target_layers": TARGET_LAYERS, "block_size": BLOCK, "mask_token_id": 300})
    judge = randomize(DFlashDraftModel(config))
    judge.save_pretrained(tmp_path)
    features, block = inputs(3)
    vector = torch.randn(32)
    noise = torch.cat([target.network.embed(block[:, :1]), vector.expand(1, BLOCK - 1, -1)], 1)
    with torch.inference_mode():
        expected = judge(
            target_hidden=features, noise_embedding=noise, position_ids=torch.arange(CONTEXT + BLOCK)[None]
        )
    for stored in (vector, {"embedding": vector[None]}):
        torch.save(stored, tmp_path / "mask_embedding.pt")
        model = load_dflash(tmp_path, target)
        close(block_states(model, features, torch.where(block == MASK, 300, block)), expected)
