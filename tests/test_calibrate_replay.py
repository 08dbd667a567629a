"""Replayed decoding is real decoding: the same rounds, by the same slots, with the same catch-up."""

import random

import numpy as np
import pytest

from toy import PROMPT, Toy
from whiflash.drafters.ddtree import DDTreeDrafter
from whiflash.drafters.dflash import DFlashDrafter
from whiflash.drafters.eagle3 import Eagle3Drafter
from whiflash.evaluation.latency import CatchUp, Profile
from whiflash.evaluation.record import P_MINS, Text, record
from whiflash.evaluation.replay import Pair, above, committed, thresholds, walk
from whiflash.evaluation.search import closed_form, oracle, search
from whiflash.model import WhiFlash
from whiflash.routers.entropy import EntropyRouter
from whiflash.routers.neural import NeuralRouter

TOKENS = 90
LENGTHS = {"df": (1, 3), "ddt": (4, 9), "e3": (2, 4)}
BUILD = {
    "df": lambda toy, n, p_min: DFlashDrafter(toy.dflash, block_rows=n + 1, p_min=p_min),
    "ddt": lambda toy, n, p_min: DDTreeDrafter(toy.dflash, n, p_min=p_min),
    "e3": lambda toy, n, p_min: Eagle3Drafter(toy.eagle3, n, p_min=p_min),
}
ROUTERS = {
    "entropy": lambda toy, t: EntropyRouter(t),
    "neural": lambda toy, t: NeuralRouter(toy.mlp, t),
}


def profile(**costs: float) -> Profile:
    """Seconds of a round by drafter; a node costs a hundredth, catching up a row a thousandth, and once a tenth."""
    return Profile(
        {},
        {"verify": 0.005},
        {name: {n: {"draft": cost, "verify": n / 100} for n in range(1, 20)} for name, cost in costs.items()},
        {name: CatchUp(0.1, 0.001, int(name == "e3")) for name in costs},
    )


@pytest.fixture(scope="module")
def text(toy: Toy) -> Text:
    drafters = {name: build(toy, max(LENGTHS[name]), 0.0) for name, build in BUILD.items()}
    routers = {name: build(toy, 0.0) for name, build in ROUTERS.items()}
    answer = toy.text[: len(PROMPT) + TOKENS]
    return Text("toy", "chat", len(PROMPT), *record(toy.target, drafters, routers, answer, len(PROMPT)))


def between(scores: list[float], share: float) -> float:
    """A threshold that a share of the scores lies below, and none near."""
    ordered = sorted(scores)
    place = int(share * (len(ordered) - 1))
    return (ordered[place] + ordered[place + 1]) / 2


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("names", ["df-e3", "ddt-e3", "df-ddt"])
def test_a_replayed_threshold_gives_the_rounds_of_a_real_run(toy: Toy, text: Text, names, router):
    costs = profile(df=1.0, ddt=2.0, e3=3.0)
    tried = [between(text.scores[router], share) for share in (0.2, 0.5, 0.8)]
    slots = names.split("-")
    pair = Pair.of(slots, LENGTHS, costs, (None, 0.15, 0.3))
    walked = walk(text, pair, above(text, router, tried))
    seen, drafted = set(), set()
    for shape in range(12):
        shapes = {slot.name: slot.shapes[shape] for slot in (pair.first, pair.second)}
        for place, threshold in enumerate(tried):
            drafters = [BUILD[name](toy, *shapes[name]) for name in slots]
            out = WhiFlash(toy.target, drafters, ROUTERS[router](toy, threshold)).generate(
                PROMPT, max_new_tokens=TOKENS
            )
            assert out.tokens == toy.text[len(PROMPT) :][:TOKENS]
            second = sum(r.slot == slots[1] for r in out.rounds)
            cost = sum(
                costs.seconds(r.slot, shapes[r.slot][0], r.drafted) + bool(r.caught_up) * 0.1 + r.caught_up * 0.001
                for r in out.rounds
            )
            assert walked.rounds[shape, place] == len(out.rounds)
            assert walked.second[shape, place] == second
            assert walked.tokens[shape, place] == TOKENS - 1 == sum(len(r.tokens) for r in out.rounds)
            assert walked.seconds[shape, place] == pytest.approx(cost)
            seen |= {r.slot for r in out.rounds}
            drafted |= {(r.slot, r.drafted) for r in out.rounds}
    assert seen == set(slots)
    assert len(drafted) > 4, "p_min left nothing out"


@pytest.mark.parametrize("name", BUILD)
def test_recorded_scores_and_lengths_are_those_of_the_rounds(toy: Toy, text: Text, name):
    for length in LENGTHS[name]:
        drafters = [BUILD[name](toy, length, None)]
        out = WhiFlash(toy.target, drafters, EntropyRouter(1e9)).generate(PROMPT, max_new_tokens=TOKENS)
        table = committed(text, name, length)
        assert max(table) > 1
        for r in out.rounds:
            root = r.position - len(PROMPT)
            assert table[root] == len(r.tokens)
            assert text.scores["entropy"][root] == pytest.approx(r.entropy, abs=1e-5)


def made_up(count: int, seed: int, roots: int = 60) -> list[Text]:
    """Texts where the second drafter pays from a score of 1 on, with noise."""
    rng, texts = random.Random(seed), []
    for number in range(count):
        scores = [rng.uniform(0, 2) for _ in range(roots)]
        first = [list(range(1, 1 + rng.choice([0, 1, 2, 3]) + (2 if s < 1 else 0))) for s in scores]
        second = [list(range(1, 1 + rng.choice([0, 1, 2, 3]) + (2 if s > 1 else 0))) for s in scores]
        category = ("chat", "math")[number % 2]
        # a drafter that knows itself, but for a node too many
        likely = {
            name: [[max(len(path) + rng.choice([0, 0, 1]), 0)] * len(P_MINS) for path in paths]
            for name, paths in (("df", first), ("e3", second))
        }
        texts.append(Text(str(number), category, 20, {"entropy": scores}, {"df": first, "e3": second}, likely))
    return texts


def naive(
    texts: list[Text], threshold: float, lengths: dict[str, int], costs: Profile, p_min: float | None = None
) -> float:
    """Tokens a second, one round after the other."""
    tokens = seconds = 0
    for text in texts:
        root, cursor = 0, {"df": -20, "e3": -20}
        while root < text.roots:
            name = "e3" if text.scores["entropy"][root] > threshold else "df"
            backlog = root - cursor[name] - costs.catch_up[name].behind
            nodes = lengths[name]
            if p_min is not None:
                nodes = min(nodes, text.likely[name][root][P_MINS.index(p_min)])
            seconds += costs.seconds(name, lengths[name], nodes) + (0.1 + 0.001 * backlog) * (backlog > 0)
            cursor[name] = root
            took = min(sum(n <= nodes for n in text.paths[name][root]) + 1, text.roots - root)
            root, tokens = root + took, tokens + took
    return tokens / seconds


def test_the_search_finds_the_best_of_all_and_says_what_it_brings():
    texts, costs, lengths = made_up(12, 0), profile(df=1.0, e3=1.2), {"df": (1, 3, 5), "e3": (2, 5)}
    found = search(texts, ("df", "e3"), "entropy", lengths, costs)
    tried = thresholds(texts, "entropy")
    for category, best in found["categories"].items():
        members = [t for t in texts if category in (t.category, "overall")]
        shortest = {name: min(options) for name, options in lengths.items()}
        speeds = {
            (t, df, e3, p_min): naive(members, t, {"df": df, "e3": e3}, costs, p_min)
            for t in tried
            for df in lengths["df"]
            for e3 in lengths["e3"]
            for p_min in (None, P_MINS[0])  # all of them leave out alike here
        }
        chosen = (best["threshold"], best["lengths"]["df"], best["lengths"]["e3"], best["p_min"])
        assert best["p_min"] == P_MINS[0], "leaving out what fails saves its seconds"
        assert speeds[chosen] == max(speeds.values())
        assert best["tokens_per_second"] == pytest.approx(speeds[chosen], abs=1e-3)
        assert 0.8 < best["threshold"] < 1.2 and best["texts"] == len(members)
        alone = {
            name: max(
                naive(members, always, {**shortest, name: n}, costs, p_min)
                for n in lengths[name]
                for p_min in (None, P_MINS[0])
            )
            for name, always in (("df", 9.0), ("e3", -1.0))
        }
        assert {n: f["tokens_per_second"] for n, f in best["alone"].items()} == pytest.approx(alone, abs=1e-3)
        assert max(alone.values()) < best["tokens_per_second"] < best["oracle_tokens_per_second"]
        assert best["closed_form"]["tokens_per_second"] > 0.97 * best["tokens_per_second"]
    assert 0.9 < found["held_out"] <= 1.0


def test_the_closed_form_moves_with_the_price_of_a_round():
    """Where a round of the second drafter costs more, a greater gain is asked of it, until it is never picked."""
    texts = made_up(12, 1)
    for text in texts:
        # a predictor of the gain, as a neural router is: exact on average
        text.scores["neural"] = [2.0 if s > 1 else -2.0 for s in text.scores["entropy"]]
    chosen = []
    for cost in (0.2, 1.0, 30.0):
        costs = profile(df=1.0, e3=cost)
        pair = Pair.of(("df", "e3"), {"df": (5,), "e3": (5,)}, costs)
        found = closed_form(texts, pair, "neural")
        margin = found["predicted_tokens_per_second"] * float(costs.seconds("e3", 5) - costs.seconds("df", 5))
        assert found["predicted"] == pytest.approx(margin, abs=0.05)
        share = np.concatenate([above(t, "neural", [found["predicted"]])[0] for t in texts]).mean()
        chosen.append(share)
        assert oracle(texts, pair) >= found["predicted_tokens_per_second"] - 1e-3
    assert chosen[0] == 1.0 and 0.3 < chosen[1] < 0.7 and chosen[2] == 0.0
