"""Benchmark runs over a tiny target: what is recorded, what agrees, what resumes, and what fails with a sentence."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pyarrow import parquet
from typer.testing import CliRunner

import bench_kit
from bench_kit import Kit, answers, rows, run
from whiflash.cli import app
from whiflash.decoding.session import PHASES
from whiflash.errors import WhiFlashError
from whiflash.evaluation import benchmark, results
from whiflash.evaluation.methods import Flags

METHODS = ["AR", "EAGLE-3", "DFlash", "DDTree 16", "WhiFlash-Entropy df-e3"]


@pytest.fixture(scope="module")
def kit(tmp_path_factory) -> Kit:
    return bench_kit.build(tmp_path_factory.mktemp("kit"))


@pytest.fixture(scope="module")
def whole(kit, tmp_path_factory) -> Path:
    """An uninterrupted run of every method."""
    return run(kit.request(tmp_path_factory.mktemp("runs") / "whole"))


def summary(output: Path) -> dict:
    return json.loads((output / "summary.json").read_text())


def test_every_prompt_went_to_every_method_prompt_by_prompt(whole):
    order = [(row["prompt"], row["method"]) for row in rows(whole)]
    assert len(order) == len(set(order)) == 4 * len(METHODS)
    for start in range(0, len(order), len(METHODS)):
        block = order[start : start + len(METHODS)]
        assert len({prompt for prompt, _ in block}) == 1
        assert block[0][1] == "AR" and sorted(m for _, m in block) == sorted(METHODS)
    firsts = {order[start + 1][1] for start in range(0, len(order), len(METHODS))}
    assert len(firsts) > 1, "the same method always came right after the baseline"


def test_greedy_outputs_agree_and_are_counted(whole):
    found = answers(whole)
    for (prompt, _), tokens in found.items():
        assert tokens == found[prompt, "AR"]
    for method, figures in summary(whole)["methods"].items():
        assert figures["categories"]["overall"]["differing"] == [], method


def test_turns_share_the_baselines_history(kit, whole):
    by_prompt = {}
    for row in rows(whole):
        by_prompt.setdefault(row["prompt"], set()).add(tuple(turn["prompt_tokens"] for turn in row["turns"]))
    assert {len(lengths) for lengths in by_prompt.values()} == {1}
    two = next(iter(by_prompt["p/1"]))
    assert len(two) == 2 and two[1] > two[0] + len("more")


def test_rounds_add_up(whole):
    """Every token after the first belongs to a round, in results.jsonl and in rounds.parquet alike."""
    table = parquet.read_table(whole / "rounds.parquet").to_pylist()
    seen = {}
    for r in table:
        seen.setdefault((r["prompt"], r["method"], r["turn"]), []).append(r)
    for row in rows(whole):
        for number, turn in enumerate(row["turns"]):
            mine = seen.pop((row["prompt"], row["method"], number), [])
            assert sum(r["acceptance_length"] for r in mine) == len(turn["tokens"]) - 1
            assert [r["round"] for r in mine] == list(range(len(mine)))
            position = turn["prompt_tokens"]
            for r in mine:
                assert r["position"] == position
                assert r["accepted"] <= r["drafted"] and r["accepted"] <= r["acceptance_length"]
                position += r["acceptance_length"]
            assert {r["slot"] for r in mine} <= ({"df", "e3"} if "Whi" in row["method"] else {None, "e3", "df", "ddt"})
            if "WhiFlash" in row["method"]:
                assert all(r["entropy"] is not None and (r["slot"] == "e3") == (r["score"] > 0.2) for r in mine)
    assert not seen


def test_summary(whole):
    found = summary(whole)
    assert found["complete"] and found["resumed_from"] is None and list(found["methods"]) == METHODS
    assert found["machine"]["threads"] and found["machine"]["torch"] and found["settings"]["dtype"] == "float32"
    modes = {name: m["mode"] for name, m in found["methods"].items()}
    assert modes["AR"].startswith("no drafter")
    assert "df (≤ 3 drafted), e3 (≤ 5 drafted), entropy router at 0.2, lazy" in modes["WhiFlash-Entropy df-e3"]
    for name, method in found["methods"].items():
        assert set(method["categories"]) == {"chat", "math", "overall"}
        f = method["categories"]["overall"]
        assert f["prompts"] == 4 and f["rounds"] > 0
        assert sum(f["phases"].values()) == pytest.approx(1) and set(f["phases"]) == set(PHASES)
        assert sum(f["histogram"].values()) == f["rounds"]
        assert f["accepted_without_bonus"] <= f["acceptance_length_with_bonus"] <= f["accepted_without_bonus"] + 1
        if name != "AR":
            assert sum(s["rounds"] for s in f["slots"].values()) == f["rounds"]
    assert found["methods"]["AR"]["categories"]["overall"]["decode_ratio"]["value"] == 1
    assert found["methods"]["AR"]["categories"]["overall"]["acceptance_length_with_bonus"] == 1


def test_a_complete_run_is_not_measured_again(kit, whole, monkeypatch, capsys):
    def never(*_, **__):
        raise AssertionError("measured again")

    monkeypatch.setattr(benchmark, "answer", never)
    before = (whole / "results.jsonl").read_bytes()
    run(kit.request(whole))
    assert (whole / "results.jsonl").read_bytes() == before
    assert "holds all 20 answers already" in capsys.readouterr().err


@pytest.mark.parametrize("cut", [0.1, 0.5, 0.97])
def test_a_cut_file_resumes_to_the_same(kit, whole, tmp_path, cut, capsys):
    """As a kill leaves it: whole lines, then half of one."""
    data = (whole / "results.jsonl").read_bytes()
    data = data[: int(cut * len(data))]
    (tmp_path / "results.jsonl").write_bytes(data)
    (tmp_path / "results.settings.json").write_bytes((whole / "results.settings.json").read_bytes())
    run(kit.request(tmp_path))
    assert answers(tmp_path) == answers(whole)
    kept = data.count(b"\n")
    assert (tmp_path / "results.jsonl").read_bytes().startswith(data[: data.rfind(b"\n") + 1])
    assert f"{kept} of 20 answers are there" in capsys.readouterr().err or kept == 0
    assert summary(tmp_path)["resumed_from"] == (kept or None)


def test_rows_that_another_rank_left_are_taken_in(kit, whole, tmp_path, monkeypatch):
    """As a kill of two ranks leaves it; one answer is in both files, and half a line at the end."""
    lines = (whole / "results.jsonl").read_text().splitlines(True)
    for name, part in (("results", lines[:11]), ("results.rank1", [*lines[10:], lines[0][:50]])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
        (tmp_path / f"{name}.settings.json").write_text((whole / "results.settings.json").read_text())
    monkeypatch.setattr(benchmark, "answer", None)
    run(kit.request(tmp_path))
    assert answers(tmp_path) == answers(whole)
    assert not list(tmp_path.glob("results.rank*"))


def test_other_settings_do_not_resume(kit, whole):
    with pytest.raises(WhiFlashError, match="max_new_tokens = 12, but this run has 13"):
        run(kit.request(whole, tokens=13))
    with pytest.raises(WhiFlashError, match=r"methods\.EAGLE-3\.drafting\.eagle3_depth = None, but this run has 2"):
        run(kit.request(whole, flags=kit.flags(eagle_depth=2)))


def test_two_runs_do_not_share_a_directory(kit, whole):
    with results.exclusive(whole / ".lock"), pytest.raises(WhiFlashError, match="another run is writing"):
        run(kit.request(whole))


def test_sampling_is_the_same_again_whatever_came_before(kit, tmp_path):
    flags = kit.flags(("DFLASH",))
    request = kit.request(tmp_path / "a", flags=flags)
    request = replace(request, protocol=replace(request.protocol, temperature=1.0, seed=3))
    run(request)
    found = answers(tmp_path / "a")
    assert summary(tmp_path / "a")["methods"]["DFlash"]["categories"]["overall"]["differing"] is None
    (tmp_path / "b").mkdir()
    lines = (tmp_path / "a" / "results.jsonl").read_text().splitlines(True)
    (tmp_path / "b" / "results.jsonl").write_text("".join(lines[:3]))
    (tmp_path / "b" / "results.settings.json").write_text((tmp_path / "a" / "results.settings.json").read_text())
    run(replace(request, output=tmp_path / "b"))
    assert answers(tmp_path / "b") == found


def test_a_drafter_that_never_drafted_fails(kit, tmp_path):
    with pytest.raises(WhiFlashError, match="DFlash never drafted a token"):
        run(kit.request(tmp_path, tokens=1, flags=kit.flags(("DFLASH",))))
    assert len(rows(tmp_path)) == 8


def test_a_router_that_takes_one_slot_only_is_told(kit, tmp_path, capsys):
    run(kit.request(tmp_path, flags=kit.flags(("WHIFLASH",), entropy_threshold=50.0)))
    f = summary(tmp_path)["methods"]["WhiFlash-Entropy df-e3"]["categories"]["overall"]
    assert set(f["slots"]) == {"df"}
    assert "e3 was never picked" in capsys.readouterr().out


def test_prompts_too_long_are_left_out_and_named(kit, tmp_path, capsys):
    own = bench_kit.write_rows(
        tmp_path / "own.jsonl",
        [
            {"id": "long", "category": "chat", "turns": ["x" * 500]},
            {"id": "later", "category": "chat", "turns": ["hi", "x" * 450]},
        ],
    )
    run(replace(kit.request(tmp_path / "out", flags=kit.flags(("DFLASH",))), datasets=(str(own),)))
    assert {(row["prompt"], len(row["turns"])) for row in rows(tmp_path / "out")} == {("long", 0), ("later", 1)}
    printed = capsys.readouterr().out
    assert "long: turn 0 has" in printed and "later: turn 1 has" in printed
    assert summary(tmp_path / "out")["methods"]["DFlash"]["categories"]["chat"]["prompts"] == 1


def test_a_run_that_measured_nothing_fails(kit, tmp_path):
    with pytest.raises(WhiFlashError, match=r"nothing was measured: turn 0 has .* too many for the context"):
        run(kit.request(tmp_path / "out", tokens=500, flags=kit.flags(("DFLASH",))))


def test_a_full_disk_keeps_what_was_measured(kit, whole, tmp_path, monkeypatch):
    real, written = Path.open, []

    def full(self, mode="r", *args, **options):
        if self.name == "results.jsonl" and "a" in mode:
            written.append(self)
            if len(written) > 3:
                raise OSError(28, "No space left on device")
        return real(self, mode, *args, **options)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(WhiFlashError, match=r"No space left on device.*rows it holds are kept"):
        run(kit.request(tmp_path / "out"))
    monkeypatch.undo()
    assert len(rows(tmp_path / "out")) == 3
    run(kit.request(tmp_path / "out"))
    assert answers(tmp_path / "out") == answers(whole)


def test_an_output_that_cannot_be_written_is_a_sentence(kit, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WhiFlashError, match="cannot be written"):
        run(kit.request(tmp_path / "file" / "out"))


def test_a_summary_that_cannot_be_written_keeps_the_rows(kit, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results.os, "replace", full)
    with pytest.raises(WhiFlashError, match=r"rounds\.parquet cannot be written"):
        results.write_rounds(tmp_path, [])
    assert not list(tmp_path.iterdir())


def test_interrupting_says_how_to_go_on(kit, tmp_path, monkeypatch, capsys):
    real = benchmark.answer

    def interrupted(prompt, method, *rest):
        if method.name == "DDTree 16":
            raise KeyboardInterrupt
        return real(prompt, method, *rest)

    monkeypatch.setattr(benchmark, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(kit.request(tmp_path))
    assert "the same command goes on from there" in capsys.readouterr().err
    assert [row["method"] for row in rows(tmp_path)] == ["AR", "EAGLE-3", "DFlash"]


def test_without_pyarrow_the_rest_is_there(kit, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("whiflash.evaluation.measure.has_parquet", lambda: False)
    run(kit.request(tmp_path, flags=kit.flags(("DFLASH",))))
    assert not (tmp_path / "rounds.parquet").exists() and (tmp_path / "summary.json").exists()
    assert "pip install 'whiflash[bench]'" in capsys.readouterr().err


def test_the_command_line_measures_the_same(kit, whole, tmp_path):
    found = CliRunner().invoke(app, kit.arguments(tmp_path / "cli"))
    assert found.exit_code == 0, found.output
    assert answers(tmp_path / "cli") == answers(whole)
    for words in ("ratio to AR", "AL with", "accepted", "ran as: no drafter", "greedy output is not AR's: none"):
        assert words in found.output


def test_sweep_leaves_out_routers_that_do_not_exist(kit, tmp_path):
    found = CliRunner().invoke(
        app,
        ["sweep", "--model-name-or-path", str(kit.target), "--draft-name-or-path", str(kit.dflash),
         "--whiflash-eagle-draft", str(kit.eagle3), "--dataset", str(kit.prompts), "--max-samples", "1",
         "--max-new-tokens", "6", "--ddtree-tree-budget", "4,8", "--output", str(tmp_path)],
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    names = list(summary(tmp_path)["methods"])
    assert names == [
        "AR", "EAGLE-3", "DFlash", "DDTree 4", "DDTree 8", "WhiFlash-Entropy df-e3", "WhiFlash-Entropy ddt-e3 4",
        "WhiFlash-Entropy ddt-e3 8", "WhiFlash-Entropy df-ddt 4", "WhiFlash-Entropy df-ddt 8",
    ]  # fmt: skip
    assert "WhiFlash-Neural df-e3 is left out" in found.stderr
    for name in names:
        assert summary(tmp_path)["methods"][name]["categories"]["overall"]["differing"] == []


def test_a_neural_router_that_does_not_exist_fails_where_it_was_asked_for(kit, tmp_path):
    with pytest.raises(WhiFlashError, match="router"):
        run(kit.request(tmp_path, flags=kit.flags(("WHIFLASH",), routers=("neural",))))


def test_neural_router(kit, whole, tmp_path):
    flags = kit.flags(
        ("WHIFLASH",), pairs=("ddt-e3",), routers=("neural",), tree_budgets=(8,), neural_threshold=0.25,
        router_path=str(bench_kit.router(tmp_path / "router", "ddt-e3", 8)),
    )  # fmt: skip
    run(kit.request(tmp_path / "out", flags=flags))
    name = "WhiFlash-Neural ddt-e3 8"
    assert "neural router at 0.25" in summary(tmp_path / "out")["methods"][name]["mode"]
    for row in rows(tmp_path / "out"):
        assert [turn["tokens"] for turn in row["turns"]] == answers(whole)[row["prompt"], "AR"]
        for turn in row["turns"] if row["method"] == name else ():
            assert all(
                (slot == "e3") == (score > 0.25)
                for slot, score in zip(turn["rounds"]["slot"], turn["rounds"]["score"], strict=True)
            )


def test_a_router_that_drafts_deeper_now_is_another_run(kit, tmp_path):
    router = bench_kit.router(tmp_path / "router", "df-e3", None)
    flags = kit.flags(("WHIFLASH",), pairs=("df-e3",), routers=("neural",), router_path=str(router))
    run(kit.request(tmp_path / "out", tokens=4, flags=flags))
    config = json.loads((router / "config.json").read_text())
    (router / "config.json").write_text(json.dumps({**config, "eagle3_depth": 2}))
    with pytest.raises(WhiFlashError, match=r"ran as = .*but this run has"):
        run(kit.request(tmp_path / "out", tokens=4, flags=flags))


@pytest.mark.parametrize(
    ("pair", "budget", "words"), [("df-e3", None, "the pair df-e3"), ("ddt-e3", 16, "tree budget of 16")]
)
def test_a_router_for_another_setting_is_refused(kit, tmp_path, pair, budget, words):
    flags = kit.flags(
        ("WHIFLASH",), pairs=("ddt-e3",), routers=("neural",), tree_budgets=(8,),
        router_path=str(bench_kit.router(tmp_path / "router", pair, budget)),
    )  # fmt: skip
    with pytest.raises(WhiFlashError, match=f"was trained for (a )?{words}"):
        run(kit.request(tmp_path / "out", flags=flags))
    assert not (tmp_path / "out").exists()


def test_the_same_command_finds_its_directory(kit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    request = kit.request(None, tokens=4, flags=Flags(("NONE",)))
    assert run(request) == run(request)
    assert run(replace(request, max_samples=1)) != run(request)
