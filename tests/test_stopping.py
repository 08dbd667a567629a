"""Where an answer ends, and that its text, tokens and counts tell the same story, streamed or not."""

import json
from dataclasses import replace
from itertools import chain as joined
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import tiny
from toy import MASK, MODES, PROMPT, VOCAB, decode
from whiflash.decoding.stopping import Answer, Stopping
from whiflash.drafters.dflash import DFlashDrafter
from whiflash.drafters.draft import chain, tree
from whiflash.errors import WhiFlashError
from whiflash.model import WhiFlash
from whiflash.nn.cache import KVCache
from whiflash.target.target import Target, stop_ids

COUNT = 40
SOME = ["none", "df", "ddt", "e3t", "df-e3/entropy"]


@pytest.fixture(scope="module")
def greedy(toy) -> list[int]:
    return decode(toy.mode("none"), PROMPT, COUNT)


def check(model: WhiFlash, output, pieces: list) -> None:
    """Text, token ids and counts agree."""
    assert "".join(piece.text for piece in pieces) == output.text
    assert [t for piece in pieces for t in piece.tokens] == output.tokens
    assert output.stats.tokens == len(output.tokens)
    assert [t for r in output.rounds for t in r.tokens] == output.tokens[1:]
    assert all(r.accepted <= len(r.tokens) <= r.accepted + 1 and r.accepted <= r.drafted for r in output.rounds)
    assert sum(output.stats.drafted_tokens.values()) == sum(r.accepted for r in output.rounds)
    if output.rounds:
        assert output.stats.acceptance_length == (len(output.tokens) - 1) / len(output.rounds)


def run(model: WhiFlash, **options):
    stream = model.stream(PROMPT, **options)
    pieces = list(stream)
    output = stream.output()
    check(model, output, pieces)
    return output


@pytest.mark.parametrize("mode", MODES)
def test_the_budget_is_met_exactly(toy, greedy, mode):
    model = toy.model(mode)
    longest = max((d.rows for d in model.drafters), default=1)
    for count in range(1, longest + 3):
        output = run(model, max_new_tokens=count)
        assert (output.tokens, output.finish_reason) == (greedy[:count], "length")


@pytest.mark.parametrize("mode", SOME)
def test_any_token_can_end_an_answer_wherever_it_stands_in_a_block(toy, greedy, mode):
    """Every token in turn is declared a stop id, the mask id among them; a drafted one that is refused ends nothing."""
    model, inside = toy.model(mode), 0
    for token in range(VOCAB):
        output = run(model, max_new_tokens=COUNT, stop_token_ids=[token])
        end = greedy.index(token) + 1 if token in greedy else COUNT
        assert output.tokens == greedy[:end]
        assert output.finish_reason == ("stop" if token in greedy else "length")
        inside += bool(output.rounds) and output.rounds[-1].accepted == len(output.rounds[-1].tokens)
    assert inside > 0 or mode == "none", "no answer ended on a drafted token"


class Scripted:
    """Drafts what it is told at every position, whatever the model says."""

    name, family, rows = "scripted", "autoregressive", 8

    def __init__(self, draft):
        self.model = SimpleNamespace(
            taps=(0,), new_cache=lambda capacity: KVCache(1, 1, 2, capacity, torch.float32, "cpu")
        )
        self._draft = draft

    def catch_up(self, state, log, kv_only=True):
        state.cache.reserve(log.length)
        count = log.length - state.cursor
        state.cache.advance(count)
        return count

    def draft(self, state, log, choose):
        return self._draft(log.tokens[log.length : log.length + 1], log.length)


def test_a_refused_stop_id_ends_nothing_and_an_accepted_one_does(toy, greedy):
    """Two right tokens, then the stop id where the target says otherwise; as a chain, and beside the right token."""
    stop = next(t for t in range(VOCAB) if t not in greedy)

    def right(position: int, count: int) -> list[int]:
        start = position - len(PROMPT) + 1
        return greedy[start : start + count]

    def as_chain(root, position):
        return chain(torch.cat([root, torch.tensor([*right(position, 2), stop, stop])]))

    def as_tree(root, position):
        tokens = [*right(position, 2), stop, stop][:4]
        return tree(
            torch.cat([root, torch.tensor([stop, *tokens])]), torch.tensor([-1, 0, 0, 2, 3, 4][: len(tokens) + 2]), 5
        )

    for draft in (as_chain, as_tree):
        output = run(WhiFlash(toy.target, [Scripted(draft)]), max_new_tokens=COUNT - 4, stop_token_ids=[stop])
        assert (output.tokens, output.finish_reason) == (greedy[: COUNT - 4], "length")
        assert max(len(r.tokens) for r in output.rounds) == 3
        last = greedy[9]
        output = run(WhiFlash(toy.target, [Scripted(draft)]), max_new_tokens=COUNT - 4, stop_token_ids=[stop, last])
        assert output.tokens == greedy[: greedy.index(last) + 1]


@pytest.mark.parametrize("token", range(VOCAB))
def test_a_mask_id_that_is_a_real_token_stays_in_the_text(toy, greedy, token):
    model = toy.dflash
    config, model.config = model.config, replace(model.config, mask_token_id=token)
    try:
        output = run(WhiFlash(toy.target, [DFlashDrafter(model)]), max_new_tokens=COUNT)
    finally:
        model.config = config
    assert output.tokens == greedy
    assert output.text == toy.target.decode(greedy)


def test_the_mask_id_may_be_a_stop_id(toy, greedy):
    assert MASK not in greedy
    output = run(toy.model("df"), max_new_tokens=COUNT, stop_token_ids=[MASK])
    assert (output.tokens, output.finish_reason) == (greedy, "length")


@pytest.mark.parametrize("mode", SOME)
def test_stop_strings_end_text_tokens_and_counts_alike(toy, greedy, mode):
    model, text = toy.model(mode), toy.target.decode(greedy)
    for start in range(0, 18, 3):
        for length in (1, 2, 4):
            stop = text[start : start + length]
            output = run(model, max_new_tokens=COUNT, stop=["zz", stop])
            begin = text.index(stop)
            assert output.text == text[:begin]
            assert output.tokens == greedy[: begin + length]
            assert output.finish_reason == "stop"


@pytest.mark.parametrize(
    ("generation", "config", "own", "wanted"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": 1}, 3, {7}),
        ({"eos_token_id": [7, 8, 2]}, None, 3, {7, 8, 2}),
        ({"eos_token_id": None}, {"eos_token_id": 5}, 3, {5}),
        ({}, {}, 3, {3}),
        (None, None, 3, {3}),
        (None, None, None, set()),
    ],
)
def test_every_end_of_sequence_id_is_read(tmp_path, generation, config, own, wanted):
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert stop_ids(tmp_path, SimpleNamespace(eos_token_id=own)) == wanted


def test_a_targets_own_ends_count_unless_ignored(toy, greedy, monkeypatch):
    monkeypatch.setattr(toy.target, "stop_ids", frozenset(greedy[4:6]))
    model, first = toy.model("ddt"), min(greedy.index(t) for t in greedy[4:6])
    assert run(model, max_new_tokens=COUNT).tokens == greedy[: first + 1]
    assert run(model, max_new_tokens=COUNT, ignore_eos=True).tokens == greedy
    assert run(model, max_new_tokens=COUNT, ignore_eos=True, stop_token_ids=[greedy[0]]).tokens == greedy[:1]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"stop": ["a", ""]}, "stop string is empty"),
        ({"stop_token_ids": [VOCAB]}, "stop token ids must lie in 0..9"),
        ({"max_new_tokens": 5000}, "reads at most 4096"),
    ],
)
def test_ends_that_cannot_be(toy, options, sentence):
    with pytest.raises(WhiFlashError, match=sentence):
        toy.model("df").stream(PROMPT, **options)


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2 and Mistral spell: words with their space in front, and bytes for what has no token."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁the", "▁a", "s", "▁", "é", "."]
    inner = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


class Speller:
    """A tokenizer with Target's way of decoding, and byte-wise spelling."""

    def __init__(self, tokenizer, byte_offset: int | None = None):
        self.tokenizer, self.byte_offset, self.size = tokenizer, byte_offset, len(tokenizer)
        self.byte_ids = Target.byte_ids.func(self)

    decode = Target.decode

    def spell(self, text: str) -> list[int]:
        if self.byte_offset is None:
            return self.tokenizer(text, add_special_tokens=False).input_ids
        return [self.byte_offset + b for b in text.encode()]


SPELLERS = {"byte level": Speller(tiny.tokenizer()), "byte fallback": Speller(byte_fallback(), 3)}
WORDS = ["😀", "é€", " the", "漢字", "\n", "s.", "👩‍👩‍👧", "\ufffd", "a"]


def test_byte_tokens_are_found():
    assert SPELLERS["byte level"].byte_ids == frozenset()
    assert SPELLERS["byte fallback"].byte_ids == set(range(259))  # and the three special ones


@pytest.mark.parametrize("speller", SPELLERS.values(), ids=SPELLERS)
@settings(max_examples=250, deadline=None)
@given(st.data())
def test_pieces_are_the_text_whatever_the_bytes(speller, data):
    """Whole characters, parts of them and any other token, cut anywhere and streamed in rounds of any size."""
    token = st.integers(0, speller.size - 1).map(lambda t: [t])
    parts = st.lists(st.one_of(st.sampled_from(WORDS).map(speller.spell), token), min_size=1, max_size=30)
    tokens = list(joined.from_iterable(data.draw(parts)))
    tokens = tokens[: data.draw(st.integers(1, len(tokens)))]
    stops = data.draw(st.lists(st.sampled_from(["s.", "漢", "😀😀", " t", "\n", "é"]), max_size=2))
    answer, pieces, at = Answer(speller.decode, Stopping(10**6, stop=tuple(stops)), speller.byte_ids), [], 0
    while at < len(tokens) and answer.finish_reason is None:
        size = data.draw(st.integers(1, 6))
        assert answer.take(tokens[at : at + size]) <= size
        at += size
        pieces.append(answer.piece())
    answer.end("length")
    pieces.append(answer.piece())
    text = speller.decode(answer.tokens)
    cuts = [text.index(s) for s in stops if s in text]
    assert "".join(pieces) == answer.text == (text[: min(cuts)] if cuts else text)
    assert (answer.finish_reason == "stop") == bool(cuts)


@pytest.mark.parametrize("speller", SPELLERS.values(), ids=SPELLERS)
@pytest.mark.parametrize("stop", ["😀😀", "é€", "漢字", "a😀a"])
def test_a_stop_string_is_held_back_while_its_next_character_is_half_there(speller, stop):
    """Cut at every pair of bytes: nothing of the stop string may be given out before it is known not to be one."""
    tokens = speller.spell("the " + stop)
    for first in range(len(tokens)):
        for second in range(first, len(tokens)):
            answer, text = Answer(speller.decode, Stopping(10**6, stop=(stop,)), speller.byte_ids), ""
            for part in (tokens[:first], tokens[first:second], tokens[second:]):
                answer.take(part)
                text += answer.piece()
            assert (answer.finish_reason, text) == ("stop", "the ")


@pytest.mark.parametrize("speller", SPELLERS.values(), ids=SPELLERS)
def test_characters_come_whole_and_soon(speller):
    """No piece holds half a character, and long text is given out as it comes, not at the end."""
    tokens = speller.spell("".join(WORDS[:5]) * 20 + " the")
    answer, late = Answer(speller.decode, Stopping(10**6), speller.byte_ids), 0
    for token in tokens:
        answer.take([token])
        assert "\ufffd" not in answer.piece()
        late = max(late, len(speller.decode(answer.tokens).rstrip("\ufffd")) - len(answer.text))
    if speller.byte_offset is None:
        assert late <= 1


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_none():
    answer = Answer(lambda tokens: "".join(map(chr, tokens)), Stopping(100, stop=("END", "NO")))
    pieces = []
    for character in "an E, an EN, an END":
        answer.take([ord(character)])
        pieces.append(answer.piece())
    assert "".join(pieces) == "an E, an EN, an "
    assert pieces[3:5] == ["", "E,"]
