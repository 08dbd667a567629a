"""Figures against values worked out by hand, and the bootstrap against what is known of it."""

import math

import numpy as np
import pytest

from whiflash.decoding.session import PHASES
from whiflash.evaluation.statistics import OVERALL, bootstrap, figures, never_drafted, summarise


def turn(lengths, slots, *, seconds, prefill=1.0, tokens=None, drafted=3):
    count = len(lengths)
    times = {phase: [0.0] * count for phase in PHASES} | {"verify": [0.3] * count, "draft": [0.1] * count}
    return {
        "prompt_tokens": 5,
        "tokens": tokens or list(range(1 + sum(lengths))),
        "finish_reason": "length",
        "prefill_seconds": prefill,
        "decode_seconds": seconds,
        "rounds": {
            "slot": slots,
            "position": list(range(count)),
            "acceptance_length": lengths,
            "accepted": [n - 1 for n in lengths],
            "drafted": [drafted] * count,
            "caught_up": [0] * count,
            "entropy": [None] * count,
            "score": [None] * count,
            **times,
        },
    }


def row(prompt, method, *turns, category="chat", memory=100):
    return {
        "prompt": prompt, "dataset": "d", "category": category, "method": method, "mode": "m", "turns": list(turns),
        "left_out": None, "peak_memory": memory, "rank": 0,
    }  # fmt: skip


def test_figures_by_hand():
    ar = row("a", "AR", turn([1] * 6, [None] * 6, seconds=6.0, drafted=0))
    mine = row("a", "M", turn([3, 1, 2], ["df", "e3", "df"], seconds=2.0, prefill=0.5), memory=300)
    f = figures([mine], {"a": ar}, greedy=True)
    assert f["decode_tokens_per_second"] == 6 / 2.0
    assert f["decode_ratio"]["value"] == pytest.approx(3.0)
    assert math.isnan(f["decode_ratio"]["low"])  # one prompt has no spread
    assert f["end_to_end_tokens_per_second"] == 7 / 2.5
    assert f["ttft_seconds"] == 0.5
    assert f["acceptance_length_with_bonus"] == 2.0
    assert f["accepted_without_bonus"] == 1.0
    assert f["histogram"] == {"1": 1, "2": 1, "3": 1}
    assert f["slots"] == {"df": {"rounds": 2, "tokens": 5 / 6}, "e3": {"rounds": 1, "tokens": 1 / 6}}
    assert f["switches_per_100_rounds"] == pytest.approx(200 / 3)
    assert f["phases"]["verify"] == pytest.approx(0.75) and sum(f["phases"].values()) == pytest.approx(1)
    assert f["peak_memory_bytes"] == 300
    assert f["differing"] == []


def test_switches_do_not_count_from_one_answer_to_the_next():
    mine = row("a", "M", turn([1, 1], ["df", "df"], seconds=1), turn([1, 1], ["e3", "e3"], seconds=1))
    assert figures([mine], {}, greedy=True)["switches_per_100_rounds"] == 0


def test_differing_outputs_are_named_and_only_when_greedy():
    base = {"a": row("a", "AR", turn([1], [None], seconds=1, tokens=[1, 2]))}
    mine = row("a", "M", turn([1], ["df"], seconds=1, tokens=[1, 3]))
    assert figures([mine], base, greedy=True)["differing"] == ["a"]
    assert figures([mine], base, greedy=False)["differing"] is None


def test_categories_and_overall():
    rows = [
        row(p, m, turn([2, 2], ["df", "df"], seconds=s), category=c)
        for p, c in (("a", "chat"), ("b", "math"))
        for m, s in (("AR", 4.0), ("M", 2.0))
    ]
    found = summarise(rows, "AR", True)
    assert list(found) == ["AR", "M"] and list(found["M"]) == ["chat", "math", OVERALL]
    assert found["M"][OVERALL]["prompts"] == 2 and found["M"]["chat"]["prompts"] == 1
    assert found["M"][OVERALL]["decode_ratio"]["value"] == pytest.approx(2.0)
    assert found["AR"]["chat"]["decode_ratio"]["value"] == 1.0


def test_a_prompt_without_a_baseline_or_without_turns_does_not_enter_the_ratio():
    rows = [
        row("a", "AR", turn([2], [None], seconds=4.0)),
        row("a", "M", turn([2], ["df"], seconds=2.0)),
        row("b", "M", turn([2], ["df"], seconds=100.0)),
        row("c", "AR"),
        row("c", "M"),
    ]
    f = summarise(rows, "AR", True)["M"]["chat"]
    assert f["decode_ratio"] == {"value": pytest.approx(2.0), "low": pytest.approx(float("nan"), nan_ok=True),
                                 "high": pytest.approx(float("nan"), nan_ok=True), "prompts": 1}  # fmt: skip
    assert f["prompts"] == 2


def test_pairs_are_compared_with_their_drafters():
    rows = [
        row("a", m, turn([2, 2], [None, None], seconds=s)) for m, s in (("AR", 8.0), ("DFlash", 4.0), ("pair", 2.0))
    ]
    found = summarise(rows, "AR", True, {"pair": ["DFlash", "absent"]})
    assert list(found["pair"]["chat"]["against"]) == ["DFlash"] and found["DFlash"]["chat"]["against"] == {}
    assert found["pair"]["chat"]["against"]["DFlash"]["value"] == pytest.approx(2.0)


def test_never_drafted():
    rows = [
        row("a", "AR", turn([1], [None], seconds=1, drafted=0)),
        row("a", "idle", turn([1], ["df"], seconds=1, drafted=0)),
        row("a", "busy", turn([1], ["df"], seconds=1)),
        row("b", "busy", turn([1], ["df"], seconds=1, drafted=0)),
    ]
    assert never_drafted(rows, "AR") == ["idle"]


def test_bootstrap_of_a_constant_ratio_has_no_width():
    assert bootstrap([10, 20, 30], [1, 2, 3], [10, 20, 30], [2, 4, 6]) == pytest.approx((2.0, 2.0, 2.0))


def test_bootstrap_is_that_of_the_ratio_of_sums():
    value, low, high = bootstrap([10, 90], [1, 3], [10, 90], [2, 2])
    assert value == pytest.approx((100 / 4) / (100 / 4))
    # the draws are (a, a), (a, b), (b, b): ratios 2, 1, 2/3
    assert (low, high) == pytest.approx((2 / 3, 2.0))


def test_bootstrap_agrees_with_the_normal_interval():
    """Equal tokens and a constant baseline make the ratio one over a mean, whose standard error is known."""
    seconds = np.random.default_rng(0).normal(1.0, 0.1, 400)
    value, low, high = bootstrap([100] * 400, seconds, [100] * 400, [1.0] * 400)
    half = 1.96 * seconds.std(ddof=1) / math.sqrt(400) / seconds.mean() ** 2
    assert value == pytest.approx(1 / seconds.mean())
    assert (high - low) / 2 == pytest.approx(half, rel=0.08)


def test_bootstrap_covers_the_truth_as_often_as_it_says():
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(300):
        base = random.gamma(20, 1 / 20, 40)
        mine = base / 1.5 * random.gamma(50, 1 / 50, 40)
        _, low, high = bootstrap([100] * 40, mine, [100] * 40, base, resamples=400)
        covered += low <= 1.5 <= high
    assert 0.90 <= covered / 300 <= 0.98


def test_bootstrap_is_reproducible():
    arguments = ([10, 20, 35], [1, 2, 3], [10, 20, 35], [2, 5, 6])
    assert bootstrap(*arguments) == bootstrap(*arguments)
