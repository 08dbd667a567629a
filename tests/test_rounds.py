"""One round, many ways to run it: whatever the switches, shapes and history, the same tokens from the same rounds."""

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import toy as toys
from toy import MODES, PROMPT, Toy, decode, rounds, sampler
from whiflash.decoding.session import Round, Session
from whiflash.drafters.ddtree import DDTreeDrafter
from whiflash.drafters.dflash import DFlashDrafter
from whiflash.drafters.draft import tree
from whiflash.drafters.drafter import FeatureLog
from whiflash.drafters.eagle3 import Eagle3Drafter
from whiflash.routers.fixed import FixedRouter

COUNT = 40
WAYS = {
    "as it is": {},
    "eager": {"lazy": False},
    "full catch-up": {"kv_only": False},
    "eager full": {"lazy": False, "kv_only": False},
    "prompt in chunks": {"prefill_chunk": 2},
    "eager in chunks": {"prefill_chunk": 3, "lazy": False},
    "short backlog": {"backlog": 4},
    "no room at first": {"capacity": 1},
}


@pytest.fixture(scope="module")
def judge(toy):
    """Greedy continuations by transformers."""
    model = LlamaForCausalLM.from_pretrained(toy.path, dtype=torch.float32)

    @cache
    def continuation(prompt: tuple[int, ...], count: int = COUNT) -> list[int]:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        return out[0, len(prompt) :].tolist()

    return continuation


@pytest.fixture(scope="module")
def plain(toy):
    """Rounds of a fresh session without any switch."""

    @cache
    def run(
        mode: str, prompt: tuple[int, ...] = tuple(PROMPT), seed: int | None = None
    ) -> tuple[list[int], list[Round]]:
        return rounds(toy.mode(mode), prompt, COUNT, None if seed is None else sampler(seed))

    return run


def essence(done: list[Round]) -> list:
    """What must agree between two ways to run the same rounds: all but times and when catching up happened."""
    return [
        (r.slot, r.position, r.tokens, r.accepted, r.drafted, pytest.approx(r.entropy, abs=1e-4, nan_ok=True),
         pytest.approx(r.score, abs=1e-4, nan_ok=True))
        for r in done
    ]  # fmt: skip


@pytest.mark.parametrize("length", [1, len(PROMPT), 80])
@pytest.mark.parametrize("mode", MODES)
def test_greedy_output_is_what_transformers_generates(toy, judge, mode, length):
    tokens, done = rounds(toy.mode(mode), toy.text[:length], COUNT)
    assert tokens[:COUNT] == judge(tuple(toy.text[:length]))
    assert sum(len(r.tokens) for r in done) + 1 == len(tokens)
    if mode != "none" and length > 1:
        assert len(done) < 0.8 * COUNT, "the drafter hardly ever guessed right: this test would prove little"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["df", "e3", "e3t", "df-e3/entropy", "ddt-e3/neural", "df-ddt/entropy"])
def test_switches_change_nothing(toy, plain, mode, way):
    assert essence(rounds(toy.mode(mode, **WAYS[way]), PROMPT, COUNT)[1]) == essence(plain(mode)[1])


@pytest.mark.parametrize("way", WAYS)
def test_switches_change_no_draws(toy, plain, way):
    mode = "ddt-e3/entropy"
    done = rounds(toy.mode(mode, **WAYS[way]), PROMPT, COUNT, sampler(5))[1]
    assert essence(done) == essence(plain(mode, seed=5)[1])


def test_lazy_sessions_do_less(toy):
    """The switch does something: an unpicked drafter consumes nothing until its turn comes."""
    lazy, eager = (toy.mode("df-e3/fixed", lazy=lazy) for lazy in (True, False))
    for session in (lazy, eager):
        decode(session, PROMPT, COUNT)
    cursors = [[session._state(d).cursor for d in session.drafters] for session in (lazy, eager)]
    assert cursors[0][0] == 0
    assert cursors[0][1] >= COUNT
    assert min(cursors[1]) >= COUNT


def test_a_backlog_is_bounded(toy):
    session = toy.mode("df-e3/fixed", backlog=8)
    for _ in decode(session, PROMPT, 5):
        session.round()
        assert session.log.length - session._state(session.drafters[0]).cursor <= 8 + max(
            d.rows for d in session.drafters
        )


def test_the_log_forgets_what_all_have_read_and_nothing_else(toy):
    session = toy.mode("df-e3/entropy", backlog=8)
    session.log = log = FeatureLog(session.log.taps, toys.WIDTH, torch.float32, torch.device("cpu"), capacity=16)
    tokens = decode(session, PROMPT, 100)
    assert tokens == decode(toy.mode("df-e3/entropy"), PROMPT, 100)
    assert log._rows.shape[0] <= 32
    assert log.first > 60
    _, features = toy.target.network(torch.tensor([PROMPT + tokens])[:, : log.length], taps=log.taps)
    held = log.features(log.taps, log.first, log.length)
    torch.testing.assert_close(held, features[:, log.first :], atol=1e-4, rtol=1e-4)
    with pytest.raises(IndexError, match="not all held"):
        log.features(log.taps, log.first - 1, log.length)


class AsTree:
    """A drafter whose chain is handed over as a tree of width one, with masks and compaction."""

    def __init__(self, inner):
        self.inner, self.model, self.name, self.family, self.rows = (
            inner,
            inner.model,
            inner.name,
            inner.family,
            inner.rows,
        )

    def catch_up(self, *given):
        return self.inner.catch_up(*given)

    def draft(self, state, log, choose):
        draft = self.inner.draft(state, log, choose)
        return replace(tree(draft.tokens, draft.parents, len(draft)), probs=draft.probs)


class Beam1(Eagle3Drafter):
    """The dynamic tree with a beam of one."""

    def draft(self, state, log, choose):
        state.cache.reserve(log.length + self.depth)
        x = self.model.fuse(log.features(self.model.taps, log.length - 1, log.length))
        root = log.tokens[None, log.length : log.length + 1]
        y = self.model(x, root, torch.tensor([log.length - 1]), state.cache)
        state.cache.advance(1)
        draft = self._tree(y, root, state)
        state.cache.truncate(log.length)
        return draft


def chains(toy: Toy) -> dict:
    return {
        "block": (toy.drafter("df"), AsTree(toy.drafter("df"))),
        "chain": (toy.drafter("e3"), AsTree(toy.drafter("e3"))),
        "dynamic": (toy.drafter("e3"), Beam1(toy.eagle3, depth=3)),
        "one node": (DFlashDrafter(toy.dflash, block_size=2), DDTreeDrafter(toy.dflash, tree_budget=1, block_size=2)),
    }


@pytest.mark.parametrize("case", ["block", "chain", "dynamic", "one node"])
def test_a_tree_of_width_one_is_a_chain(toy, case):
    results = []
    for drafter in chains(toy)[case]:
        session = Session(toy.target, [drafter], FixedRouter())
        results.append([(r.position, r.tokens, r.drafted) for r in rounds(session, PROMPT, COUNT)[1]])
    assert results[0] == results[1]


@pytest.mark.parametrize(("wide", "narrow"), [("ddt", "df"), ("e3t", "e3")])
def test_a_wider_tree_needs_no_more_rounds(toy, wide, narrow):
    assert len(rounds(toy.mode(wide), PROMPT, 200)[1]) <= len(rounds(toy.mode(narrow), PROMPT, 200)[1])


def test_scattered_nodes_are_committed_as_if_decoded_one_by_one(toy):
    """Accepted nodes need not be the first ones; the cache rows and features behind them must be moved."""
    session, scattered = toy.mode("ddt"), 0
    keep_path = session.cache.keep_path

    def counted(start, path):
        nonlocal scattered
        scattered += 1
        keep_path(start, path)

    session.cache.keep_path = counted
    tokens = decode(session, PROMPT, 150)
    assert scattered > 5
    plain = toy.mode("none")
    decode(plain, PROMPT, len(tokens))
    count = plain.cache.length
    torch.testing.assert_close(
        session.cache.rows[..., :count, :], plain.cache.rows[..., :count, :], atol=1e-4, rtol=1e-4
    )
    text = torch.tensor([[*PROMPT, *tokens]])[:, : session.log.length]
    _, features = toy.target.network(text, taps=session.log.taps)
    held = session.log.features(session.log.taps, 0, session.log.length)
    torch.testing.assert_close(held, features, atol=1e-4, rtol=1e-4)


FOLLOW_UPS = {
    "shorter": lambda prompt, answer: [5, 1],
    "same": lambda prompt, answer: prompt,
    "prompt cut": lambda prompt, answer: prompt[:30],
    "next turn": lambda prompt, answer: [*prompt, *answer[:-7], 3, 3, 4],
    "answer edited": lambda prompt, answer: [*prompt, *answer[:20], 9, 9, *answer[20:]],
    "all but the end": lambda prompt, answer: [*prompt, *answer],
}


@pytest.mark.parametrize("follow_up", FOLLOW_UPS)
@pytest.mark.parametrize("mode", ["df", "e3t", "ddt-e3/entropy"])
def test_a_used_session_is_as_good_as_a_fresh_one(toy, plain, mode, follow_up):
    used, long = toy.mode(mode), [1, 5, 2, 8] * 20
    prompt = FOLLOW_UPS[follow_up](long, decode(used, long, COUNT))
    assert essence(rounds(used, prompt, COUNT)[1]) == essence(plain(mode, tuple(prompt))[1])


def test_a_next_turn_computes_only_what_is_new(toy, monkeypatch):
    session, rows, network = toy.mode("df-e3/entropy"), [], toy.target.network
    answer = decode(session, PROMPT * 10, COUNT)
    forward = type(network).forward
    monkeypatch.setattr(type(network), "forward", lambda *a, **k: (rows.append(a[1].shape[1]), forward(*a, **k))[1])
    session.prefill([*PROMPT * 10, *answer[:-1], 3, 3, 4])
    assert sum(rows) <= 3 + 2  # the new tokens, and the last two of the old


def interrupt(session: Session, prompt: list[int], line: int) -> bool:
    """Raise KeyboardInterrupt at the `line`-th line of the code that keeps state; False if the request ends before."""
    left = line

    def trace(frame, event, argument):
        nonlocal left
        if Path(frame.f_code.co_filename).name not in ("session.py", "drafter.py", "cache.py"):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        decode(session, prompt, 8)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_an_interrupt_anywhere_leaves_a_sound_session(toy):
    mode, first = "ddt-e3/entropy", PROMPT * 4
    second = [*first, *decode(toy.mode(mode), first, 8), 3, 3]
    third = [*second, *decode(toy.mode(mode), second, 8)[:6], 4, 1, 7]
    wanted = [essence(rounds(toy.mode(mode), prompt, 12)[1]) for prompt in (second, third)]
    line, points = 1, 0
    while True:
        session = toy.mode(mode, prefill_chunk=16)
        session.log = FeatureLog(session.log.taps, toys.WIDTH, torch.float32, torch.device("cpu"), capacity=24)
        decode(session, first, 8)
        if not interrupt(session, second, line):
            break
        follow_up = points % 2
        assert essence(rounds(session, (second, third)[follow_up], 12)[1]) == wanted[follow_up], f"line {line}"
        line, points = line + 7, points + 1
    assert points > 30


def test_a_head_of_two_layers_runs_in_full(toy):
    """With a second layer K/V depend on attention, so catching up must run the whole head."""
    text = decode(toy.mode("none"), PROMPT, 150)
    model = toys.eagle3(toy.target, text, layers=2)
    drafts = []
    for options in ({}, {"lazy": False}, {"prefill_chunk": 2}):
        session = Session(toy.target, [Eagle3Drafter(model, 3)], FixedRouter(), **options)
        drafts.append(essence(rounds(session, PROMPT, COUNT)[1]))
    assert drafts[0] == drafts[1] == drafts[2]


def test_a_third_slot_needs_no_change(toy):
    class Turns:
        name, count = "turns", 0

        def __call__(self, signal):
            self.count += 1
            return torch.tensor(self.count % 3), torch.tensor(float(self.count))

    session = Session(toy.target, [toy.drafter(n) for n in ("df", "ddt", "e3t")], Turns())
    tokens, done = rounds(session, PROMPT, COUNT)
    assert tokens[:COUNT] == decode(toy.mode("none"), PROMPT, COUNT)
    assert [r.slot for r in done[:6]] == ["ddt", "e3", "df"] * 2


def test_two_shapes_of_one_model_share_a_cache(toy):
    assert len(toy.mode("df-ddt/entropy").states) == 1
    assert len(toy.mode("df-e3/entropy").states) == 2


def test_the_same_seed_gives_the_same_answer_whatever_ran_between(toy):
    session = toy.mode("df-e3/entropy")
    first = decode(session, PROMPT, COUNT, sampler(11))
    other = decode(session, [2, 4], COUNT, sampler(12))
    torch.manual_seed(99)
    assert decode(session, PROMPT, COUNT, sampler(11)) == first
    assert other != first


@pytest.mark.parametrize("mode", ["none", "df", "e3", "e3t", "ddt-e3/entropy"])
@pytest.mark.parametrize("temperature", [1e-6, 1e-30])
def test_the_smallest_temperatures_answer_greedily(toy, mode, temperature):
    greedy = decode(toy.mode(mode), PROMPT, COUNT)
    assert decode(toy.mode(mode), PROMPT, COUNT, sampler(1, temperature=temperature))[:COUNT] == greedy[:COUNT]


def test_prompts_beyond_a_drafters_own_limit(toy):
    """Rotary angles are computed, not looked up: nothing ends at the position a drafter was trained up to."""
    prompt = (toy.text * 8)[:2100]
    wanted = decode(toy.mode("none"), prompt, 20)
    for mode in ("df", "e3t"):
        assert decode(toy.mode(mode), prompt, 20)[:20] == wanted
