"""The own decoder against transformers, on tiny random models of every family, rope and config style it reads."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from whiflash.nn.weights import Weights, read_config
from whiflash.target.config import TargetConfig
from whiflash.target.decoder import Decoder

ROWS = 40
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, "original_max_position_embeddings": 16}
MSCALE = YARN | {"mscale": 0.7, "mscale_all_dim": 0.4, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}
SLIDING = {"use_sliding_window": True, "sliding_window": 8}

# name → family, config keys, how the file differs from what transformers writes
CASES = {
    "llama": ("llama", {}, ""),
    "llama-tied": ("llama", {"tie_word_embeddings": True}, ""),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}, ""),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}, ""),
    "llama-llama3-old": ("llama", {"rope_parameters": LLAMA3}, "old"),
    "llama-linear-old": ("llama", {"rope_parameters": LINEAR}, "old"),
    "llama-one-head-each": ("llama", {"num_key_value_heads": 4, "head_dim": 4}, ""),
    "llama-wide-heads": ("llama", {"head_dim": 32}, ""),
    "llama-sharded": ("llama", {}, "sharded"),
    "mistral": ("mistral", {"sliding_window": None, "rope_parameters": {"rope_theta": 1e6}}, "old"),
    "mistral-sliding": ("mistral", {"sliding_window": 8}, ""),
    "mistral-yarn": ("mistral", {"sliding_window": None, "rope_parameters": YARN}, ""),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_theta": 1e6}}, "old"),
    "qwen2-tied-linear": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": LINEAR}, ""),
    "qwen2-sliding": ("qwen2", SLIDING | {"max_window_layers": 2}, ""),
    "qwen2-sliding-old": ("qwen2", SLIDING | {"max_window_layers": 2}, "old"),
    "qwen2-not-sliding-old": ("qwen2", {"sliding_window": 8, "max_window_layers": 0}, "old"),
    "qwen3": ("qwen3", {}, ""),
    "qwen3-biases": ("qwen3", {"attention_bias": True}, ""),
    "qwen3-yarn-old": ("qwen3", {"rope_parameters": YARN}, "old"),
    "qwen3-yarn-mscale": ("qwen3", {"rope_parameters": MSCALE}, ""),
    "qwen3-layer-types": (
        "qwen3",
        SLIDING | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]},
        "",
    ),
    "qwen3-tied-sharded": ("qwen3", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}, "sharded"),
}


def save(model, path, style):
    """Save a model whose norms and biases are as random as its matrices."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(path, max_shard_size="20KB" if style == "sharded" else "1GB")
    if style == "old":
        file = path / "config.json"
        config = json.loads(file.read_text())
        rope = dict(config.pop("rope_parameters"))
        config["rope_theta"] = rope.pop("rope_theta")
        kind = rope.pop("rope_type")
        config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
        config.pop("layer_types", None)
        file.write_text(json.dumps(config))


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """(transformers' model, ours) with the same weights."""
    family, options, style = CASES[request.param]
    keys = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    save(AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **keys | options)), path, style)
    assert (style == "sharded") == (path / "model.safetensors.index.json").is_file()
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ours = Decoder.load(TargetConfig.from_config(read_config(path)), Weights(path), torch.float32, "cpu")
    return reference, ours


def close(found, expected):
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def tokens(count, seed=1):
    return torch.randint(64, (1, count), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def test_logits_and_every_tap(pair):
    reference, ours = pair
    before_norm = []
    hook = reference.model.norm.register_forward_pre_hook(lambda module, args: before_norm.append(args[0]))
    expected = reference(tokens(ROWS), output_hidden_states=True)
    hook.remove()
    hidden, tapped = ours(tokens(ROWS), taps=range(6))
    close(ours.head(hidden), expected.logits)
    states = [*expected.hidden_states[:4], before_norm[0], expected.hidden_states[4]]
    for state, wanted in zip(tapped.chunk(6, -1), states, strict=True):
        close(state, wanted)


@torch.inference_mode()
def test_pieces_give_what_the_whole_gives(pair):
    _, ours = pair
    whole, _ = ours(tokens(ROWS))
    cache, pieces = ours.new_cache(8), []
    for piece in tokens(ROWS).split([7, 5, 1, 1, 9, 1, 16], 1):
        cache.reserve(cache.length + piece.shape[1])
        pieces.append(ours(piece, cache)[0])
        cache.advance(piece.shape[1])
    close(torch.cat(pieces, 1), whole)


@torch.inference_mode()
def test_a_tree_gives_what_its_paths_give(pair):
    """Behind a prefix longer than the window; then one path is kept, and decoding goes on as if it had been a chain."""
    _, ours = pair
    parents = [-1, 0, 0, 1, 2, 4]
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 4, 5]]
    sees = torch.tensor([[j in path for j in range(6)] for path in paths])
    assert [path[-2] if len(path) > 1 else -1 for path in paths] == parents
    prefix, nodes, after = tokens(20), tokens(6, seed=2), tokens(3, seed=3)
    cache = ours.new_cache(32)
    ours(prefix, cache)
    cache.advance(20)
    found, _ = ours(nodes, cache, 20 + sees.sum(1) - 1, sees)
    for node, path in enumerate(paths):
        close(found[:, node], ours(torch.cat([prefix, nodes[:, path]], 1))[0][:, -1])
    alone, _ = ours(nodes, None, sees.sum(1) - 1, sees)
    close(alone[:, 5], ours(nodes[:, paths[5]])[0][:, -1])
    cache.keep_path(20, torch.tensor(paths[5]))
    assert cache.length == 24
    close(ours(after, cache)[0], ours(torch.cat([prefix, nodes[:, paths[5]], after], 1))[0][:, -3:])


@pytest.mark.parametrize(
    ("family", "missing"),
    [
        ("llama", ["num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "rope_parameters"]),
        ("mistral", ["sliding_window", "rms_norm_eps", "head_dim", "max_position_embeddings"]),
        ("qwen2", ["use_sliding_window", "max_window_layers", "layer_types", "rope_parameters"]),
        ("qwen3", ["use_sliding_window", "max_window_layers", "layer_types", "head_dim", "attention_bias"]),
    ],
)
def test_a_key_left_out_means_what_transformers_takes_it_to_mean(family, missing):
    full = AutoConfig.for_model(family, num_hidden_layers=30, sliding_window=4096).to_dict()
    sparse = {key: value for key, value in full.items() if key not in (*missing, "model_type")}
    complete = AutoConfig.for_model(family, **sparse).to_dict()
    assert TargetConfig.from_config(sparse | {"model_type": family}) == TargetConfig.from_config(complete)
