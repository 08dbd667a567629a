"""Figures of an analysis against ones worked out by hand."""

import json
from pathlib import Path

import numpy as np
import pytest

from whiflash.decoding.session import PHASES
from whiflash.errors import WhiFlashError
from whiflash.evaluation import analysis, positions, runs
from whiflash.evaluation.latency import CatchUp, Profile
from whiflash.evaluation.positions import Record, Roots
from whiflash.evaluation.record import Text
from whiflash.evaluation.runs import Routed, Run, Shape

SHAPES = (Shape("df", 3), Shape("e3", 2))
ENTROPY = Routed("W", "entropy", 0.5, SHAPES, "lazy catch-up")


def roots(first, second, score=None, picked=None, prompt="p", category="chat") -> Roots:
    score = np.arange(len(first)) / len(first) if score is None else np.array(score, float)
    picked = np.zeros(len(first), bool) if picked is None else np.array(picked, bool)
    return Roots(prompt, category, np.array([first, second]), score, score, picked)


def test_wins_are_counted_within_each_answer():
    first, second = analysis.wins(
        [roots([1, 2, 3, 4], [2, 2, 1, 4]), roots([1, 1], [3, 3], prompt="q"), roots([5], [1], prompt="q")]
    )
    assert (first["positions"], first["shares"]) == (4, [0.25, 0.5, 0.25])
    assert (second["positions"], second["shares"]) == (3, [pytest.approx(1 / 3), 0, pytest.approx(2 / 3)])


def test_run_lengths():
    assert analysis.run_lengths(["df", "df", "e3", "df", "df", "e3", "e3", "e3"]) == {2: 2, 1: 1, 3: 1}
    assert not analysis.run_lengths([])


def test_at_a_tie_the_best_slot_so_far_stays():
    assert analysis.best_slots(roots([2, 1, 1, 3, 1], [2, 1, 4, 3, 1])) == [0, 0, 1, 1, 1]
    assert analysis.best_slots(roots([1, 1, 3], [2, 1, 1])) == [1, 1, 0]


def test_decoding_visits_the_roots_that_the_slots_lead_to():
    part = roots([2, 9, 1, 1, 1], [1, 1, 2, 1, 1])
    assert analysis.decoded(part, [0, 1, 1, 1, 0]) == [0, 1, 0]  # roots 0, 2, 4
    assert analysis.decoded(part, [1, 1, 0, 0, 0]) == [1, 1, 0, 0, 0]


def test_an_edge_belongs_to_the_decile_below():
    """Eleven entropies 0 … 10: the edges are 1, 2, …, 9, so the lowest decile holds 0 and 1, the others one each."""
    found = analysis.deciles([roots(range(1, 12), [2] * 11, score=range(11))])
    assert [d["positions"] for d in found] == [2] + [1] * 9
    assert [(d["low"], d["high"]) for d in found] == [(n, n + 1) for n in range(10)]
    assert found[0]["acceptance_length"] == [1.5, 2] and found[9]["acceptance_length"] == [11, 2]


def test_deciles_where_one_value_repeats():
    found = analysis.deciles([roots([1] * 20, [3] * 20, score=[0.0] * 19 + [5.0])])
    assert [d["positions"] for d in found] == [19, 1] and sum(d["positions"] for d in found) == 20


def test_the_router_is_judged_where_there_is_something_to_win():
    """ΔAL is -2, 1, 0, 3: it picks wrong, right, whatever, wrong."""
    part = roots([3, 1, 2, 1], [1, 2, 2, 4], score=[1, 2, 0, 1], picked=[1, 1, 1, 0])
    found = analysis.judge([part], predicts=True)
    assert found["ties"] == 0.25 and found["accuracy"] == pytest.approx(1 / 3)
    assert found["accuracy_always"] == pytest.approx([1 / 3, 2 / 3])
    assert found["regret"] == (2 + 0 + 0 + 3) / 4 and found["regret_always"] == [(1 + 3) / 4, 2 / 4]
    # the mean gain is 0.5: residuals of the scores 9 + 1 + 0 + 4 against a spread of 6.25 + 0.25 + 0.25 + 6.25
    assert found["r2"] == pytest.approx(1 - 14 / 13)
    straight = analysis.judge([part], predicts=False)
    assert straight["r2"] == pytest.approx(np.corrcoef([1, 2, 0, 1], [-2, 1, 0, 3])[0, 1] ** 2)


def test_what_cannot_be_told_is_null():
    found = analysis.judge([roots([2, 2], [2, 2], score=[1, 1])], predicts=True)
    assert found["accuracy"] is found["r2"] is found["correlation"] is None and found["regret"] == 0


def test_least_looks_past_the_next_round():
    """Taking 3 at once lands on a root that leads on by one only; taking 2 first gets there in two rounds."""
    lengths = np.array([[3, 1, 1, 1, 1], [2, 1, 3, 1, 1]])
    assert analysis.least(lengths, np.ones((2, 5))) == 2
    assert analysis.least(lengths, np.array([[1] * 5, [5] * 5])) == 3  # slot 1 is dear: 3, 1, 1 by slot 0
    assert analysis.least(lengths, np.array([[9, 9, 1, 1, 1], [1, 9, 1, 9, 9]])) == 2  # but for its two first rounds


def recorded(seed: int, count: int = 60) -> Text:
    random = np.random.default_rng(seed)
    paths = {
        name: [list(range(1, 1 + int(random.integers(0, most + 1)))) for _ in range(count)]
        for name, most in (("df", 3), ("e3", 2))
    }
    return Text(f"t{seed}", "chat", 10, {"entropy": random.random(count).round(4).tolist()}, paths, {})


def profile(df: float = 1.0, e3: float = 0.7) -> Profile:
    return Profile({}, {"verify": 0.5}, {"df": {3: {"verify": df}}, "e3": {2: {"verify": e3}}},
                   {name: CatchUp(0.05, 0.001) for name in ("df", "e3")})  # fmt: skip


@pytest.mark.parametrize("costs", [(1.0, 1.0), (1.0, 0.7), (0.6, 1.2)])
def test_no_choice_beats_the_bound(costs):
    texts = [recorded(seed) for seed in range(4)]
    found = analysis.bounds(texts, ENTROPY, profile(*costs))
    bound, alone = found["bound"], [found["df alone"], found["e3 alone"]]
    for name, f in found.items():
        assert f["acceptance_length"] <= bound["acceptance_length"] + 1e-9, name
        assert f["tokens_per_second"] <= bound["tokens_per_second"] + 1e-9, name
    router, best, useful = found["W"], found["oracle, best AL"], found["oracle, best utility"]
    assert max(f["acceptance_length"] for f in (*alone, router)) < best["acceptance_length"]
    # where df costs half of e3, always df is the best that can be done
    assert max(f["tokens_per_second"] for f in (*alone, router)) <= useful["tokens_per_second"] + 1e-9
    assert best["tokens_per_second"] <= useful["tokens_per_second"] + 1e-9
    assert alone[0]["second_share"] == 0 and alone[1]["second_share"] == 1 and 0 < router["second_share"] < 1


def test_bounds_of_a_text_worked_by_hand():
    """Five roots; df commits 3 1 1 1 1 (the last ones cut by the end), e3 2 1 3 2 1; catching up is free."""
    paths = {"df": [[1, 2], [], [], [], []], "e3": [[1], [], [1, 2], [1], []]}
    text = Text("t", "chat", 0, {"entropy": [0, 0, 1, 0, 0]}, paths, {})
    free = Profile({}, {}, {"df": {3: {"draft": 1.0}}, "e3": {2: {"draft": 2.0}}},
                   {name: CatchUp(0.0, 0.0) for name in ("df", "e3")})  # fmt: skip
    found = analysis.bounds([text], ENTROPY, free)
    assert found["df alone"] == {"acceptance_length": 5 / 3, "tokens_per_second": 5 / 3, "second_share": 0}
    assert found["e3 alone"] == {"acceptance_length": 5 / 2, "tokens_per_second": 5 / 4, "second_share": 1}
    # df takes three, then e3 two: 1 + 2 seconds
    assert found["oracle, best AL"]["acceptance_length"] == 5 / 2
    assert found["oracle, best AL"]["tokens_per_second"] == pytest.approx(5 / 3)
    assert found["bound"]["acceptance_length"] == 5 / 2
    assert found["bound"]["tokens_per_second"] == pytest.approx(5 / 3)


def turn(slots, lengths, caught=None, tokens=None, prompt=10, entropy=0.7, **phases) -> dict:
    """A turn as results.jsonl has it. Its answer is 0, 1, 2, … unless given."""
    count = len(slots)
    table = {
        "slot": slots,
        "position": [prompt + sum(lengths[:n]) for n in range(count)],
        "acceptance_length": lengths,
        "accepted": [n - 1 for n in lengths],
        "drafted": [3] * count,
        "caught_up": caught or [0] * count,
        "entropy": [entropy] * count,
        "score": [entropy] * count,
        **{p: phases.get(p, [0.0] * count) for p in PHASES},
    }
    return {"prompt_tokens": prompt, "tokens": tokens or list(range(1 + sum(lengths))), "rounds": table}


MODES = {
    "AR": "no drafter, float32, cpu",
    "DFlash": "df (≤ 3 drafted), float32, cpu",
    "EAGLE-3": "e3 (≤ 2 drafted), float32, cpu",
    "W": "df (≤ 3 drafted), e3 (≤ 2 drafted), entropy router at 0.5, lazy catch-up, float32, cpu",
}


def run(temperature: float = 0.0, **turns: dict) -> Run:
    """A run of one prompt."""
    methods = {name: {"drafting": {"eagle3_top_k": 1}} for name in turns}
    settings = {"temperature": temperature, "target": "t (feed)", "methods": methods}
    rows = {
        name: {"p": {"prompt": "p", "category": "chat", "method": name, "mode": MODES[name], "turns": [one]}}
        for name, one in turns.items()
    }
    return Run(Path("run"), rows, {"settings": settings, "machine": {}})


def test_a_mode_says_what_was_routed():
    (found,) = run(AR=turn([None] * 2, [1, 1]), W=turn(["df", "e3"], [1, 1])).routed()
    assert found == Routed("W", "entropy", 0.5, SHAPES, MODES["W"]) and found.pair == "df-e3"


def test_a_mode_says_what_was_left_out():
    mode = MODES["W"].replace("3 drafted", "3 drafted, p ≥ 0.05")
    measured = run(AR=turn([None] * 2, [1, 1]), W=turn(["df", "e3"], [1, 1]))
    measured.rows["W"]["p"]["mode"] = mode
    assert measured.routed()[0].shapes == (Shape("df", 3, 0.05), Shape("e3", 2))
    assert measured.routed()[0].label == "df (3 drafted, p ≥ 0.05), e3 (2 drafted)"


def test_positions_that_two_methods_drafted_from():
    """W is at 10 (df), 12 (e3), 13 (df); DFlash was at 10, 12, 15; EAGLE-3 at 10, 11, 13: all three are known."""
    measured = run(
        AR=turn([None] * 6, [1] * 6),
        DFlash=turn(["df"] * 3, [2, 3, 1]),
        W=turn(["df", "e3", "df"], [2, 1, 3]),
        **{"EAGLE-3": turn(["e3"] * 3, [1, 2, 3])},
    )
    (found,) = positions.from_run(measured, measured.routed()[0], positions.known(measured))
    assert found.lengths.tolist() == [[2, 3, 3], [1, 1, 3]] and found.picked.tolist() == [False, True, False]
    assert found.entropy.tolist() == [0.7] * 3


def test_positions_of_another_answer_are_not_compared():
    """DFlash's answer leaves the baseline's at its fourth token: only its round at 10 speaks of the same text."""
    other = [0, 1, 2, 9, 9, 9, 9]
    turns = {"AR": turn([None] * 6, [1] * 6), "DFlash": turn(["df"] * 3, [2, 3, 1], tokens=other),
             "W": turn(["e3"] * 6, [1] * 6)}  # fmt: skip
    measured = run(**turns)
    (found,) = positions.from_run(measured, measured.routed()[0], positions.known(measured))
    assert found.lengths.tolist() == [[2], [1]]
    sampled = run(temperature=1.0, **turns)
    assert positions.from_run(sampled, sampled.routed()[0], positions.known(sampled)) == []


def test_latencies_of_a_run_are_medians_and_a_line():
    caught, seconds = [9, 1, 4], [0.19, 0.03, 0.09]  # 0.01 and 0.02 a row
    measured = run(
        AR=turn([None] * 3, [1] * 3, verify=[0.1, 0.3, 0.2]),
        W=turn(["df"] * 3, [1, 1, 1], caught, verify=[1.0, 3.0, 2.0], catch_up=seconds),
    )
    found = runs.profile(measured)
    assert found.plain["verify"] == 0.2 and found.seconds("df", 3) == 2.0 and set(found.rounds) == {"df"}
    assert found.catch_up["df"].row == pytest.approx(0.02) and found.catch_up["df"].fixed == pytest.approx(0.01)
    assert found.catch_up["df"].behind == 1


def test_switching_tells_rounds_after_a_switch_from_others():
    measured = run(
        AR=turn([None], [1]),
        W=turn(
            ["df", "df", "e3", "e3", "df"],
            [1] * 5,
            [10, 1, 12, 1, 2],
            catch_up=[0.5, 0.1, 0.4, 0.1, 0.2],
            verify=[0.14] * 5,
        ),
    )
    found = analysis.switching(measured, measured.routed()[0])
    assert found["catch_up"]["first"] == {"rounds": 1, "seconds": 0.5, "rows": 10}
    assert found["catch_up"]["stayed"]["seconds"] == pytest.approx(0.1) and found["catch_up"]["stayed"]["rounds"] == 2
    assert found["catch_up"]["switched"]["seconds"] == pytest.approx(0.3) and found["catch_up"]["switched"]["rows"] == 7
    assert found["switch_seconds"] == pytest.approx(0.2) and found["switches_per_100_rounds"] == 40
    assert found["catch_up_share"] == pytest.approx(1.3 / 2)


def test_agreement_counts_rounds_unlike_the_record():
    text = Text("p", "chat", 10, {"entropy": [0.0] * 8}, {"df": [[1], [], [1, 2], *([[]] * 5)], "e3": [[]] * 8}, {})
    measured = run(AR=turn([None] * 8, [1] * 8), W=turn(["df", "e3", "e3", "df"], [2, 1, 2, 3]))
    method = measured.routed()[0]
    # df commits 2 at 10 as recorded; e3 1 at 12 as recorded, but 2 at 13 unlike it; the last round is cut by the end
    assert positions.agreement(measured, method, [text]) == (2, 3)


def record(**settings) -> Record:
    return Record(Path("r.jsonl"), [recorded(0)], settings, None)


@pytest.mark.parametrize(
    ("method", "settings", "told"),
    [
        (Routed("W", "entropy", 0.5, (Shape("ddt", 3), Shape("e3", 2)), ""), {}, "no ddt"),
        (Routed("W", "neural", 0.5, SHAPES, ""), {}, "no neural df-e3 router"),
        (ENTROPY, {"longest": {"df": 2, "e3": 8}}, "no df with 3 nodes"),
        (Routed("W", "entropy", 0.5, SHAPES, "", tree=True), {}, "no EAGLE-3 trees"),
    ],
)
def test_a_record_without_what_the_method_did_is_refused(method, settings, told):
    with pytest.raises(WhiFlashError, match=told):
        positions.from_record(record(**settings), method)


def test_roots_of_a_record_are_what_the_router_would_do():
    (found,) = positions.from_record(record(longest={"df": 3, "e3": 2}), ENTROPY)
    text = recorded(0)
    assert found.picked.tolist() == [score > 0.5 for score in text.scores["entropy"]]
    assert found.lengths[0, :50].tolist() == [len(path) + 1 for path in text.paths["df"][:50]]
    assert found.lengths[:, -1].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("content", "told"),
    [("{}", "is no latency profile"), ('{"plain": {"verify": 1}, "rounds": {}, "catch_up": {}}', "not name")],
)
def test_a_file_that_names_no_record(tmp_path, content, told):
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(WhiFlashError, match=told):
        positions.read_record(tmp_path / "c.json")


def test_a_damaged_or_empty_record(tmp_path):
    file = tmp_path / "record.jsonl"
    with pytest.raises(WhiFlashError, match="cannot be read"):
        positions.read_record(file)
    file.write_text('{"id": 1}\n')
    with pytest.raises(WhiFlashError, match="line 1 is damaged"):
        positions.read_record(file)
    file.write_text(json.dumps({"id": "p", "left_out": True}) + "\n")
    with pytest.raises(WhiFlashError, match="holds no answer"):
        positions.read_record(file)
