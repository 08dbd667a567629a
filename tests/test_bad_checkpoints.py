"""Checkpoints that cannot be used: each gets one sentence that names what is wrong."""

import json
import pickle
import shutil

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from whiflash.drafters.load import load_dflash, load_eagle3
from whiflash.errors import WhiFlashError
from whiflash.model import WhiFlash
from whiflash.nn.rotary import RopeConfig
from whiflash.nn.weights import resolve
from whiflash.target.load import load_target

LAYERS, VOCAB = 6, 264


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(tiny.build(tmp_path_factory.mktemp("target") / "tiny", layers=LAYERS), device="cpu")


def refused(match, load, *args, **kwargs):
    with pytest.raises(WhiFlashError, match=match) as error:
        load(*args, **kwargs)
    sentence = str(error.value)
    assert "\n" not in sentence and len(sentence) < 500, sentence


# ---- the target


def truncate(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def change(path, **keys):
    config = json.loads((path / "config.json").read_text()) | keys
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def tensors(path, edit):
    stored = load_file(path / "model.safetensors")
    edit(stored)
    save_file(stored, path / "model.safetensors")


def shards(path, index):
    (path / "model.safetensors.index.json").write_text(index)


TARGETS = {
    "no config": (lambda p: (p / "config.json").unlink(), "has no config.json"),
    "config is no JSON": (lambda p: (p / "config.json").write_text("{"), "config.json is not valid JSON"),
    "config is a list": (lambda p: (p / "config.json").write_text("[]"), "expected a JSON object"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "has no model.safetensors"),
    "truncated": (truncate, "truncated or damaged"),
    "missing tensor": (lambda p: tensors(p, lambda t: t.pop("model.norm.weight")), "no tensor model.norm.weight"),
    "tensor of another shape": (
        lambda p: tensors(p, lambda t: t.update({"model.norm.weight": torch.ones(31)})),
        r"model.norm.weight .* has shape \[31\], expected \[32\]",
    ),
    "tensor left over": (lambda p: tensors(p, lambda t: t.update(extra=torch.ones(1))), r"does not use \(extra\)"),
    "other sizes in the config": (lambda p: change(p, intermediate_size=65), "expected .*65"),
    "key missing": (lambda p: change(p, intermediate_size=None), "lacks 'intermediate_size'"),
    "unknown layer type": (
        lambda p: change(p, layer_types=["chunked_attention"] * LAYERS, sliding_window=8),
        "not a list of 6 full_attention / sliding_attention",
    ),
    "rope without a factor": (lambda p: change(p, rope_parameters={"rope_type": "yarn"}), "'yarn' needs a 'factor'"),
    "shard missing": (lambda p: shards(p, '{"weight_map": {"a": "1.safetensors"}}'), "lacks 1.safetensors"),
    "index is nonsense": (lambda p: shards(p, "[]"), "is no index of weight files"),
    "no tokenizer": (lambda p: [f.unlink() for f in p.glob("token*")], "no tokenizer that transformers can load"),
}


@pytest.mark.parametrize("case", TARGETS)
def test_target(case, target, tmp_path):
    path = shutil.copytree(target.path, tmp_path / "target")
    edit, match = TARGETS[case]
    edit(path)
    refused(match, load_target, path, device="cpu")


@pytest.mark.parametrize(
    ("case", "match"),
    [
        ("no weights", "no file named model.safetensors"),
        ("truncated", "cannot load a causal language model"),
        ("missing tensor", r"missing keys: model.norm.weight\)"),
        ("tensor left over", r"unexpected keys: extra\)"),
        ("tensor of another shape", "cannot load a causal language model|mismatched"),
    ],
)
def test_target_through_the_adapter(case, match, target, tmp_path):
    path = shutil.copytree(target.path, tmp_path / "target")
    TARGETS[case][0](path)
    refused(match, load_target, path, device="cpu", runtime=False)


@pytest.mark.parametrize("load", [load_target, load_eagle3, load_dflash])
def test_names_that_lead_nowhere(load, target, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    rest = () if load is load_target else (target,)
    refused("neither a path that exists nor a hub id", load, "no/such/path", *rest)
    refused("not in the local hub cache, and the hub cannot be reached", load, "nobody/nothing-such", *rest)


def test_dtype_and_file(target):
    refused("dtype 'float8' is not known", load_target, target.path, dtype="float8")
    refused("is a file; expected a model directory", load_target, target.path / "config.json")


# ---- drafters: (kind, edit of config and tensors, sentence)


def speculators(config, stored, **keys):
    config |= {"speculators_model_type": "eagle3", "transformer_layer_config": dict(config)} | keys


E3, DF = "eagle3", "dflash"
ROPE = {"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, "original_max_position_embeddings": 8}
DRAFTERS = {
    "e3, missing tensor": (E3, lambda c, t: t.pop("norm.weight"), "no tensor norm.weight"),
    "e3, no head": (E3, lambda c, t: t.pop("lm_head.weight"), "no tensor lm_head.weight"),
    "e3, left over": (E3, lambda c, t: t.update(extra=torch.ones(1)), r"does not use \(extra\)"),
    "e3, wrong shape": (E3, lambda c, t: t.update({"norm.weight": torch.ones(3)}), r"shape \[3\], expected \[32\]"),
    "e3, other width": (E3, lambda c, t: t.update({"fc.weight": torch.ones(32, 3 * 48)}), "features of width 48"),
    "e3, fc of two taps": (
        E3,
        lambda c, t: c.update(target_hidden_size=32) or t.update({"fc.weight": torch.ones(32, 64)}),
        "not 3 tapped layers of width 32",
    ),
    "e3, other vocabulary": (E3, lambda c, t: c.update(vocab_size=200), "d2t .* below 200|vocabulary of 200"),
    "e3, head unlike config": (E3, lambda c, t: c.update(draft_vocab_size=41), "has 40 rows, its config says 41"),
    "e3, no d2t": (E3, lambda c, t: t.pop("d2t"), "has no d2t tensor"),
    "e3, d2t beyond": (E3, lambda c, t: t["d2t"].__setitem__(-1, VOCAB), "target id = draft id \\+ d2t"),
    "e3, d2t negative": (E3, lambda c, t: t["d2t"].__setitem__(0, -1), "target id = draft id \\+ d2t"),
    "e3, d2t absolute": (
        E3,
        lambda c, t: t.update(d2t=(t["d2t"] + torch.arange(40)).flip(0)),
        "target id = draft id \\+ d2t",
    ),
    "e3, stale t2d": (E3, lambda c, t: t.update(t2d=t["t2d"].roll(1)), "vocabulary map is stale"),
    "e3, taps beyond": (
        E3,
        lambda c, t: c.update(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 5, 9]}),
        r"taps layers \[2, 5, 9\]",
    ),
    "e3, a norm the config denies": (
        E3,
        lambda c, t: c.update(norm_before_fc=False) or t.update({"input_norm.weight": torch.ones(96)}),
        "has input_norm.weight, but its config says norm_before_fc = False",
    ),
    "e3, a norm the config wants": (E3, lambda c, t: c.update(fc_norm=True), "lacks fc_norm.0.weight"),
    "e3, no head count": (E3, lambda c, t: c.pop("num_attention_heads"), "no num_attention_heads"),
    "e3, odd heads": (E3, lambda c, t: c.update(num_attention_heads=3), "not 3 even heads"),
    "e3, other activation": (E3, lambda c, t: c.update(hidden_act="gelu"), "activation 'gelu'"),
    "e3, rope": (E3, lambda c, t: c.update(rope_scaling={"type": "mrope"}), "rope type 'mrope' is not supported"),
    "e3, a rope a layer type": (
        E3,
        lambda c, t: c.update(rope_parameters={"full_attention": ROPE, "sliding_attention": {"rope_theta": 1e6}}),
        "each layer type its own rope_parameters",
    ),
    "e3, P-EAGLE": (E3, lambda c, t: t.update(mask_hidden=torch.ones(1, 1, 96)), "is P-EAGLE"),
    "e3, other speculator": (
        E3,
        lambda c, t: speculators(c, t, speculators_model_type="mtp"),
        "speculators model of type 'mtp'",
    ),
    "e3 is dflash": (E3, lambda c, t: t.clear() or t.update(tiny.dflash_model(VOCAB, LAYERS)[1]), "kind dflash"),
    "e3 is something else": (E3, lambda c, t: t.clear() or t.update({"wte.weight": torch.ones(2)}), "is neither"),
    "df, missing tensor": (DF, lambda c, t: t.pop("layers.1.self_attn.k_norm.weight"), "layers.1.self_attn.k_norm"),
    "df, left over": (DF, lambda c, t: t.update({"layers.0.extra": torch.ones(1)}), r"does not use \(layers.0.extra\)"),
    "df, d2t without a head": (DF, lambda c, t: t.update(d2t=torch.zeros(40)), r"does not use \(d2t\)"),
    "df, wrong shape": (DF, lambda c, t: t.update({"norm.weight": torch.ones(3)}), r"shape \[3\], expected \[32\]"),
    "df, other width": (DF, lambda c, t: t.update({"fc.weight": torch.ones(32, 3 * 48)}), "features of width 48"),
    "df, fc between taps": (DF, lambda c, t: t.update({"fc.weight": torch.ones(32, 97)}), "not a multiple of its 3"),
    "df, other vocabulary": (DF, lambda c, t: c.update(vocab_size=200), "vocabulary of 200 tokens"),
    "df, other depth": (DF, lambda c, t: c.update(num_target_layers=7), "target of 7 layers, .* has 6"),
    "df, taps beyond": (DF, lambda c, t: c["dflash_config"].update(target_layer_ids=[1, 2, 9]), "taps layers"),
    "df, no mask": (DF, lambda c, t: c["dflash_config"].pop("mask_token_id"), "gives no mask_token_id"),
    "df, no block size": (DF, lambda c, t: c.pop("block_size"), "gives no block_size"),
    "df, mask beyond": (DF, lambda c, t: c["dflash_config"].update(mask_token_id=VOCAB), "no mask_embedding.pt"),
    "df, mask negative": (DF, lambda c, t: c["dflash_config"].update(mask_token_id=-1), "-1 .* is not a token id"),
    "df, anchor drafts": (DF, lambda c, t: c.update(sample_from_anchor=True), "anchor slot"),
    "df, window missing": (DF, lambda c, t: c.update(use_swa=True), "use_swa without a swa_window_size"),
    "df is eagle3": (DF, lambda c, t: t.clear() or t.update(tiny.eagle3_head(VOCAB)[1]), "kind eagle3"),
    "df, DSpark": (DF, lambda c, t: t.update({"markov_head.markov_w1.weight": torch.ones(2)}), "is DSpark"),
    "df, DSpark confidence": (DF, lambda c, t: t.update({"confidence_head.proj.bias": torch.ones(1)}), "is DSpark"),
    "df, Laguna": (DF, lambda c, t: t.update({"layers.0.self_attn.qkv_proj.weight": torch.ones(2)}), "is Laguna"),
    "df, Laguna gate": (DF, lambda c, t: t.update({"layers.0.self_attn.g_proj.weight": torch.ones(2)}), "is Laguna"),
    "df, Laguna norms": (DF, lambda c, t: t.update({"aux_hidden_norms.0.weight": torch.ones(2)}), "is Laguna"),
}
for key, value, owner in (
    ("projector_type", "domino", "Domino"),
    ("conv_kernel_size", 4, "DFlash 2"),
    ("selector_rank", 64, "DFlash 2"),
    ("attention_sink_bias", True, "attention sinks"),
    ("attention_value_scale", 0.5, "scaled values"),
    ("output_multiplier", 2.0, "scaled logits"),
    ("input_embedding_scale", 8.0, "scaled embeddings"),
    ("final_logit_softcapping", 30.0, "capped logits"),
):
    DRAFTERS[f"df, {key}"] = (DF, lambda c, t, k=key, v=value: c.update({k: v}), owner)
    DRAFTERS[f"df, nested {key}"] = (DF, lambda c, t, k=key, v=value: c["dflash_config"].update({k: v}), owner)


def write(directory, kind, edit=lambda config, stored: None):
    config, stored = tiny.eagle3_head(VOCAB) if kind == E3 else tiny.dflash_model(VOCAB, LAYERS)
    edit(config, stored)
    return tiny.write(directory, config, stored)


LOAD = {E3: load_eagle3, DF: load_dflash}


@pytest.mark.parametrize("kind", LOAD)
def test_the_sound_checkpoints_load(kind, target, tmp_path):
    """Without this, everything below could fail for a reason of its own."""
    model = LOAD[kind](write(tmp_path / kind, kind), target)
    assert model.taps == ((2, 3, 5) if kind == E3 else (1, 3, 5))
    off = {"output_multiplier": 1.0, "final_logit_softcapping": None, "projector_type": None, "conv_kernel_size": 0}
    LOAD[kind](write(tmp_path / "off", kind, lambda c, t: c.update(off)), target)


@torch.inference_mode()
def test_oddities_in_the_wild_load(target, tmp_path):
    """A biased fc, a tie flag beside a separate head, a draft vocabulary under another key, a head of another width."""

    def odd(config, stored):
        config |= {"tie_word_embeddings": True, "truncated_vocab_size": config.pop("draft_vocab_size")}
        config["architectures"] = ["LlamaForCausalLM"]
        stored["fc.bias"] = torch.arange(32.0)

    plain = load_eagle3(write(tmp_path / "plain", E3), target)
    biased = load_eagle3(write(tmp_path / "biased", E3, odd), target)
    features, y = torch.randn(1, 3, 96), torch.randn(1, 3, 32)
    torch.testing.assert_close(biased.fuse(features) - plain.fuse(features), torch.arange(32.0).expand(1, 3, -1))
    assert torch.equal(biased.logits(y), plain.logits(y))

    config, stored = tiny.eagle3_head(VOCAB, width=48)
    stored |= {"fc.weight": torch.randn(48, 96), "embed_tokens.weight": torch.randn(VOCAB, 48)}
    config["target_hidden_size"] = 32
    wide = load_eagle3(tiny.write(tmp_path / "wide", config, stored), target)
    assert wide.fuse(features).shape == (1, 3, 48)
    assert torch.equal(wide.embed(torch.tensor([7])), stored["embed_tokens.weight"][7:8])
    del stored["embed_tokens.weight"]
    refused("brings no embedding of its own", load_eagle3, tiny.write(tmp_path / "bare", config, stored), target)


@pytest.mark.parametrize("kind", LOAD)
def test_a_rope_is_read_wherever_it_stands(kind, target, tmp_path):
    """Of transformers 5, by layer type, and of transformers 4 with either name of the kind."""
    old = {key: value for key, value in ROPE.items() if key not in ("rope_type", "rope_theta")}
    ways = (
        {"rope_parameters": ROPE},
        {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
        {"rope_theta": 300.0, "rope_scaling": old | {"type": "yarn"}},
        {"rope_theta": 300.0, "rope_scaling": old | {"rope_type": "yarn"}},
        {"rope_parameters": ROPE, "rope_scaling": old | {"type": "yarn"}},
    )
    angles = []
    for number, way in enumerate(({}, *ways)):
        model = LOAD[kind](write(tmp_path / str(number), kind, lambda c, t, way=way: c.update(way)), target)
        angles.append(torch.cat(model.rope(torch.arange(40), torch.float32)))
    assert not torch.allclose(angles[0], angles[1])
    assert all(torch.equal(other, angles[1]) for other in angles[2:])


def test_two_ropes_in_one_config_are_refused():
    other = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(WhiFlashError, match="both rope_parameters"):
        RopeConfig.from_config({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": other})


@pytest.mark.parametrize("kind", LOAD)
def test_a_drafter_bent_on_padding_rows_changes_no_token(kind, target, tmp_path):
    """Its table is padded further than the target's; rows that both have may be drafted, and are refused."""
    rows, padded = VOCAB + 16, range(VOCAB - tiny.PADDING, VOCAB + 16)

    def edit(config, stored):
        config.update(vocab_size=rows)
        for name in ("d2t", "t2d", "draft_vocab_size"):
            (config if name in config else stored).pop(name, None)
        head = torch.zeros(rows, 32)
        for row in padded:  # opposite rows: whatever the state, the likeliest token is one of these
            head[row] = row * (-1.0) ** row
        stored |= {"lm_head.weight": head, "embed_tokens.weight": torch.ones(rows, 32)}

    path = write(tmp_path / kind, kind, edit)
    options = {"eagle3": path, "drafters": "e3"} if kind == E3 else {"dflash": path, "drafters": "df"}
    prompt, count = list(b"a prompt"), {"max_new_tokens": 20, "ignore_eos": True}
    output = WhiFlash.from_pretrained(target, **options).generate(prompt, **count)
    assert output.tokens == WhiFlash.from_pretrained(target, drafters="none").generate(prompt, **count).tokens
    assert sum(r.drafted for r in output.rounds) > 20 and sum(r.accepted for r in output.rounds) == 0
    assert max(output.tokens) < VOCAB - tiny.PADDING


@pytest.mark.parametrize("case", DRAFTERS)
def test_drafter(case, target, tmp_path):
    kind, edit, match = DRAFTERS[case]
    refused(match, LOAD[kind], write(tmp_path / "drafter", kind, edit), target)


def test_another_tokenizer_is_refused_but_other_padding_is_not(target, tmp_path):
    def widen(config, stored):
        config["vocab_size"] = 300
        stored["t2d"] = torch.cat([stored["t2d"], torch.zeros(36, dtype=torch.bool)])

    wide = write(tmp_path / "wide", E3, widen)
    assert load_eagle3(wide, target).config.vocab_size == VOCAB
    for kind in LOAD:  # own heads over tables padded to 280 and to 261 rows
        for rows in (280, 261):
            own = {"lm_head.weight": torch.ones(rows, 32), "embed_tokens.weight": torch.ones(rows, 32)}

            def edit(config, stored, rows=rows, own=own):
                config.update(vocab_size=rows)
                config.pop("draft_vocab_size", None)
                for name in ("d2t", "t2d"):
                    stored.pop(name, None)
                stored.update(own)

            model = LOAD[kind](write(tmp_path / f"{kind}{rows}", kind, edit), target)
            assert model.logits(torch.ones(1, 32)).shape[-1] == model.config.draft_vocab_size == min(rows, VOCAB)
            assert model.embed(torch.tensor([VOCAB - 1])).shape == (1, 32)
    narrow = write(tmp_path / "narrow", DF, lambda c, t: c.update(vocab_size=200))
    refused("vocabulary of 200 tokens", load_dflash, narrow, target)


class Payload:
    def __reduce__(self):
        return (print, ("this must not run",))


def test_bin_files_hold_tensors_only(target, tmp_path, capsys):
    path = write(tmp_path / "drafter", E3)
    (path / "model.safetensors").unlink()
    refused("has no model.safetensors", load_eagle3, path, target)
    for content in (Payload(), {"norm.weight": Payload()}):
        torch.save(content, path / "pytorch_model.bin", pickle_module=pickle)
        refused("unsafe to load", load_eagle3, path, target)
    torch.save([torch.ones(1)], path / "pytorch_model.bin")
    refused("other than named tensors", load_eagle3, path, target)
    (path / "pytorch_model.bin").write_bytes(b"PK\x03\x04 no archive")
    refused("is damaged", load_eagle3, path, target)
    assert "must not run" not in capsys.readouterr().out


def test_mask_side_files(target, tmp_path):
    path = write(tmp_path / "drafter", DF, lambda c, t: c["dflash_config"].update(mask_token_id=VOCAB + 3))
    for content in (torch.ones(31), {"other": torch.ones(32)}, [1, 2]):
        torch.save(content, path / "mask_embedding.pt")
        refused("does not hold one vector of 32 values", load_dflash, path, target)
    torch.save(Payload(), path / "mask_embedding.pt")
    refused("unsafe to load", load_dflash, path, target)
    torch.save({"embedding": torch.full((1, 32), 2.0)}, path / "mask_embedding.pt")
    model = load_dflash(path, target)
    embedded = model.embed(torch.tensor([5, VOCAB + 3]))
    assert torch.equal(embedded[1], torch.full((32,), 2.0))
    assert torch.equal(embedded[0], target.network.embed(torch.tensor(5)))


def test_only_what_is_read_is_fetched(monkeypatch, tmp_path):
    """Hub repositories hold the same weights several times over."""

    def snapshot(name, allow_patterns, ignore_patterns):
        kept = huggingface_hub.utils.filter_repo_objects(
            files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        fetched.extend(kept)
        return tmp_path

    wanted = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "mask_embedding.pt"]
    wanted += ["pytorch_model.bin", "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja"]
    files = [*wanted, "README.md", "consolidated.safetensors", "original/params.json", "onnx/model.onnx", "onnx/x.json"]
    fetched = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve("org/model") == tmp_path
    assert fetched == wanted
