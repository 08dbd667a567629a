"""Cached features: what the target computes, kept across kills, and never mistaken for another run's."""

import json
from dataclasses import replace

import pytest
import torch

import tiny
import tiny_training as setup
from whiflash.errors import WhiFlashError
from whiflash.target.load import load_target
from whiflash.training import features
from whiflash.training.features import Cached, Online, read_texts, split
from whiflash.training.teacher import Teacher, draft_vocabulary


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return setup.target(tmp_path_factory.mktemp("features"))


@pytest.fixture
def texts(target, tmp_path, monkeypatch):
    monkeypatch.setattr(features, "SHARD_TEXTS", 3)
    return read_texts(setup.write_texts(target, tmp_path / "texts.jsonl", 8), target)


def build(directory, target, texts, taps=setup.TAPS):
    store = Cached(directory, target, texts, taps)
    return store, list(store.build(batch_tokens=150))


def test_cached_states_are_the_targets(target, texts, tmp_path):
    store, progress = build(tmp_path / "cache", target, texts)
    assert progress == [(3, 8), (6, 8), (8, 8)]
    online = Online(target, texts, setup.TAPS)
    assert online.fingerprint == store.fingerprint
    for index in range(len(texts)):
        cached, fresh = store[index].to("cpu"), online[index]
        assert torch.equal(cached.tokens, fresh.tokens) and cached.start == fresh.start
        torch.testing.assert_close(cached.features, fresh.features, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(cached.hidden, fresh.hidden, rtol=2e-3, atol=2e-3)
        # hidden state q predicts token q+1: these are the target's own greedy answers
        predicted = target.network.head(cached.hidden[cached.start - 1 : -1]).argmax(-1)
        assert (predicted == cached.tokens[cached.start :]).float().mean() > 0.95


def test_only_missing_shards_are_computed(target, texts, tmp_path, monkeypatch):
    build(tmp_path, target, texts)
    files = {p: p.stat().st_mtime_ns for p in tmp_path.glob("*.npy")}
    lost = sorted(files)[1]
    lost.unlink()
    (tmp_path / ".00001.1.tmp").write_bytes(b"half")
    computed = []
    states = features.states
    monkeypatch.setattr(features, "states", lambda *a: computed.append(1) or states(*a))
    build(tmp_path, target, texts)
    assert len(computed) <= 3 and lost.exists()
    assert all(p.stat().st_mtime_ns == t for p, t in files.items() if p != lost)


def test_damage_and_strangers_are_refused(target, texts, tmp_path):
    build(tmp_path / "cache", target, texts)
    before = {p.name: p.read_bytes() for p in (tmp_path / "cache").iterdir()}
    other = load_target(tiny.build(tmp_path / "other", width=64))
    for arguments, what in (
        ((other, texts, setup.TAPS), "target"),
        ((target, texts, (1, 2, 5)), "taps"),
        ((target, [replace(texts[0], start=3), *texts[1:]], setup.TAPS), "texts"),
    ):
        with pytest.raises(WhiFlashError, match=f"features with {what} = .*choose another directory"):
            build(tmp_path / "cache", *arguments)
    assert {p.name: p.read_bytes() for p in (tmp_path / "cache").iterdir()} == before
    shard = sorted((tmp_path / "cache").glob("*.npy"))[0]
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
    with pytest.raises(WhiFlashError, match=r"is damaged .* delete that file and run again"):
        build(tmp_path / "cache", target, texts)


def test_full_disk(target, texts, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(features.np, "save", full)
    with pytest.raises(WhiFlashError, match=r"No space left on device.*online features"):
        build(tmp_path / "cache", target, texts)
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["manifest.json"]


def test_bad_texts(target, tmp_path):
    file = tmp_path / "bad.jsonl"
    for row, message in (
        ("{", "line 1: expected a JSON object"),
        ('{"prompt": "a"}', "line 1: expected a JSON object with 'prompt' and 'response_ids'"),
        ('{"prompt": "a", "response_ids": [999999]}', "exceed the vocabulary"),
        ('{"prompt": "a", "response_ids": [1]}', "no text with an answer of two tokens"),
    ):
        file.write_text(row + "\n")
        with pytest.raises(WhiFlashError, match=message):
            read_texts(file, target)


def test_split_is_stratified_stable_and_never_parts_a_prompt(texts):
    many = [replace(t, tokens=[i, *t.tokens[1:]]) for i in range(10) for t in texts]
    train, held = split([*many, *many], 8)
    assert len(train) + len(held) == 160
    assert {t.category for t in held} == {"chat", "math"} and len(held) == 8
    assert not {tuple(t.tokens[: t.start]) for t in train} & {tuple(t.tokens[: t.start]) for t in held}
    assert split([*many, *many], 8) == (train, held)


def test_draft_vocabulary_and_teacher_rows(target, texts, tmp_path):
    ids = draft_vocabulary(texts, target.vocab_size, 50, keep=[258])
    frequency = torch.bincount(torch.tensor([t for text in texts for t in text.answer]), minlength=target.vocab_size)
    assert 258 in ids and len(ids) == 50 and torch.equal(ids, ids.unique())
    left_out = torch.ones(target.vocab_size, dtype=torch.bool).index_fill(0, ids, False)
    assert frequency[ids[ids != 258]].min() >= frequency[left_out].max()
    hidden = torch.randn(4, target.width)
    torch.testing.assert_close(
        Teacher(target, ids).logits(hidden), target.network.head(hidden)[:, ids], rtol=1e-5, atol=1e-5
    )
    with pytest.raises(WhiFlashError, match="draft_vocab must lie in"):
        draft_vocabulary(texts, target.vocab_size, target.vocab_size + 1)
    assert json.loads(json.dumps(features.describe(texts)))["texts chat"] == 4
