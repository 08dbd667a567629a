"""Our EAGLE-3 head against the `speculators` package over four fed-back steps, saved in every published layout."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import tiny
from whiflash.drafters.load import load_eagle3
from whiflash.nn.weights import Weights
from whiflash.target.load import load_target

TARGET_LAYERS, ROWS, STEPS, VOCAB, DRAFT_VOCAB = 6, 14, 4, 264, 40
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 5}
YARN = {"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, "original_max_position_embeddings": 8}
# how a checkpoint of layout 1 or 2 is written: tap ids of eagle_config are output ids when the first is 1
OLD = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "use_aux_hidden_state": True}}

# name → layer keys, speculator keys, layout of the file, boundary taps expected
CASES = {
    "plain": ({}, {}, "speculators", (1, 3, 5)),
    "norm before residual": ({}, {"norm_before_residual": True}, "speculators", (1, 3, 5)),
    "norm before fc": ({}, {"norm_before_fc": True}, "speculators", (1, 3, 5)),
    "fc norm": ({}, {"fc_norm": True}, "speculators", (1, 3, 5)),
    "norm output": ({}, {"norm_output": True, "fc_norm": True}, "speculators", (1, 3, 5)),
    "qwen3": ({"model_type": "qwen3"}, {"norm_output": True, "norm_before_residual": True}, "speculators", (1, 3, 5)),
    "biases": ({"attention_bias": True, "mlp_bias": True}, {}, "speculators", (1, 3, 5)),
    "three layers": ({"num_hidden_layers": 3}, {"norm_output": True}, "speculators", (1, 3, 5)),
    "whole vocabulary": ({}, {"draft_vocab_size": VOCAB}, "speculators", (1, 3, 5)),
    "two taps": ({}, {"eagle_aux_hidden_state_layer_ids": [2, 6]}, "speculators", (2, 6)),
    "default taps": ({}, {"eagle_aux_hidden_state_layer_ids": None}, "speculators", (2, 3, 3)),
    "no embedding in the file": ({}, {}, "speculators, shared embedding", (1, 3, 5)),
    "yarn": ({"rope_parameters": YARN}, {}, "speculators", (1, 3, 5)),
    "sliding": ({"model_type": "qwen3", "layer_types": ["sliding_attention"]} | SLIDING, {}, "speculators", (1, 3, 5)),
    "official": ({}, {}, "official", (2, 3, 3)),
    "SpecForge": ({}, {}, "SpecForge", (2, 3, 5)),
    "SpecForge, whole vocabulary": ({}, {"draft_vocab_size": VOCAB}, "SpecForge", (2, 3, 5)),
    "SpecForge, old rope keys": ({"rope_parameters": YARN}, {}, "SpecForge, old rope", (2, 3, 5)),
    "SGLang norms": ({}, {"fc_norm": True}, "SpecForge, aux norms", (2, 3, 5)),
    "SGLang extra layers": ({"num_hidden_layers": 2}, {}, "SpecForge, hidden norms", (2, 3, 5)),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(tiny.build(tmp_path_factory.mktemp("target"), layers=TARGET_LAYERS), device="cpu")


def build_judge(target, layer_keys, keys, shared):
    pytest.importorskip("speculators")
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    family = layer_keys.get("model_type", "llama")
    layer = AutoConfig.for_model(family, **SHAPE | {k: v for k, v in layer_keys.items() if k != "model_type"})
    layer._attn_implementation = "eager"
    defaults = {"draft_vocab_size": DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **defaults | keys,
    )
    torch.manual_seed(0)
    judge = Eagle3DraftModel(config).eval()
    for parameter in judge.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    judge.lm_head.weight.data = 0.2 * torch.randn_like(judge.lm_head.weight)
    embedding = Weights(target.path).take("model.embed_tokens.weight")
    judge.embed_tokens.weight.data = embedding if shared else torch.randn_like(embedding)
    kept = torch.zeros(VOCAB, dtype=torch.bool)
    kept[torch.randperm(VOCAB)[: config.draft_vocab_size]] = True
    judge.load_vocab_mappings(kept, kept.nonzero()[:, 0] - torch.arange(config.draft_vocab_size))
    return judge, kept.nonzero()[:, 0]


def save(judge, path, layout):
    """Write the judge's weights in one of the layouts in the wild."""
    judge.save_pretrained(path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    if layout.endswith("shared embedding"):
        tensors.pop("embed_tokens.weight", None)
    else:
        tensors["embed_tokens.weight"] = judge.embed_tokens.weight.data
    if not layout.startswith("speculators"):
        tensors = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
        raw = judge.config.transformer_layer_config.to_dict()
        raw |= {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": judge.draft_vocab_size}
        raw |= {} if layout == "official" else OLD
        if layout == "official":
            raw = {k: v for k, v in raw.items() if k != "rope_parameters"}  # no theta in the file means 10000
        if layout.endswith("old rope"):
            rope = raw.pop("rope_parameters")
            raw |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
        if layout.endswith("aux norms"):
            for i, part in enumerate(("low", "mid", "high")):
                tensors[f"aux_norm_{part}.weight"] = tensors.pop(f"fc_norm.{i}.weight")
            raw["use_aux_norm"] = True
        if layout.endswith("hidden norms"):
            tensors["layers.1.hidden_norm.weight"] = tensors.pop("layers.1.input_layernorm.weight")
        (path / "config.json").write_text(json.dumps(raw))
    file.unlink()
    if layout == "official":
        torch.save(tensors, path / "pytorch_model.bin")
    else:
        save_file(tensors, file)


@torch.inference_mode()
def judge_steps(judge, features, tokens):
    """Outputs y [STEPS, ROWS, width] and logits: at step i row p reads token p+1+i and its own output of step i-1."""
    outputs, logits = [], []
    hooks = [
        judge.norm.register_forward_pre_hook(lambda module, args: outputs.append(args[0][0])),
        judge.lm_head.register_forward_hook(lambda module, args, out: logits.append(out[0])),
    ]
    judge(features, tokens[None, 1:], torch.zeros(1, ROWS, dtype=torch.long), ttt_steps=STEPS)
    for hook in hooks:
        hook.remove()
    return outputs, logits


@torch.inference_mode()
def our_steps(model, features, tokens, row):
    """The same for one row: catch up to it, run it, feed its output back three times. With and without KV-only."""
    runs = []
    for kv_only in (True, False):
        cache = model.new_cache(ROWS + STEPS)
        if row:
            write = model.write_kv if kv_only and not model.extra else model
            write(model.fuse(features[:, :row]), tokens[None, 1 : row + 1], torch.arange(row), cache)
            cache.advance(row)
        x, outputs = model.fuse(features[:, row : row + 1]), []
        for step in range(STEPS):
            at = row + step
            y = model(x, tokens[None, at + 1 : at + 2], torch.tensor([at]), cache)
            cache.advance(1)
            outputs.append(y[0, 0])
            x = model.feedback(y)
        runs.append(torch.stack(outputs))
    torch.testing.assert_close(*runs)
    return runs[0]


def close(found, expected):
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("case", CASES)
def test_four_fed_back_steps(case, target, tmp_path):
    layer_keys, keys, layout, taps = CASES[case]
    judge, kept = build_judge(target, layer_keys, keys, shared=layout.endswith("shared embedding"))
    save(judge, tmp_path, layout)
    model = load_eagle3(tmp_path, target)
    assert model.taps == taps
    if judge.use_draft_vocab:
        assert torch.equal(model.target_ids, kept)
    else:
        assert model.target_ids is None
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(1, ROWS, len(taps) * 32, generator=generator)
    tokens = torch.randint(VOCAB, (ROWS + 1,), generator=generator)
    expected, logits = judge_steps(judge, features, tokens)
    # later, the package pads tokens with 0; and a window ends where the row's first step saw it end, not where it is
    rows, steps = (range(ROWS), 1) if "sliding" in case else (range(ROWS - STEPS + 1), STEPS)
    for row in rows:
        found = our_steps(model, features, torch.cat([tokens, tokens.new_zeros(STEPS)]), row)
        close(found[:steps], torch.stack([y[row] for y in expected[:steps]]))
        close(model.logits(found[:steps]), torch.stack([out[row] for out in logits[:steps]]))


@pytest.mark.parametrize(
    ("ids", "extra", "override", "expected"),
    [
        ([1, 2, 4], {}, None, (2, 3, 5)),
        ([2, 3, 5], {}, None, (2, 3, 5)),
        ([2, 3, 5], {}, "output", (3, 4, 6)),
        ([1, 2, 4], {}, "boundary", (1, 2, 4)),
        ([2, 3, 4], {"eagle_aux_layer_semantics": "sglang"}, None, (3, 4, 5)),
    ],
)
@pytest.mark.parametrize("nested", [True, False])
def test_tap_id_conventions(nested, ids, extra, override, expected, target, tmp_path):
    judge, _ = build_judge(target, {}, {}, shared=False)
    save(judge, tmp_path, "SpecForge")
    raw = {k: v for k, v in json.loads((tmp_path / "config.json").read_text()).items() if k != "eagle_config"}
    keys = {"eagle_aux_hidden_state_layer_ids": ids} | extra
    (tmp_path / "config.json").write_text(json.dumps(raw | ({"eagle_config": keys} if nested else keys)))
    assert load_eagle3(tmp_path, target, tap_ids=override).taps == expected


@pytest.mark.parametrize("taps", [(2, 3, 5), (1, 3, 4), (3, 4, 6)])
def test_a_config_with_both_counts_is_not_guessed_at(taps, target, tmp_path):
    judge, _ = build_judge(target, {}, {}, shared=False)
    save(judge, tmp_path, "SpecForge")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["eagle_aux_hidden_state_layer_ids"] = list(taps)
    raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_eagle3(tmp_path, target).taps == taps


def test_specforge_norm_output_feeds_back_only_when_asked(target, tmp_path):
    judge, _ = build_judge(target, {}, {}, shared=False)
    save(judge, tmp_path, "SpecForge")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"norm_output": True}))
    y = torch.randn(1, 2, 32)
    assert torch.equal(load_eagle3(tmp_path, target).feedback(y), y)
    normed = load_eagle3(tmp_path, target, norm_output=True)
    assert torch.equal(normed.feedback(y), normed.norm(y))
