"""`whiflash calibrate` and `--threshold auto`, on tiny models: what is written, who reads it, and what is refused."""

import json
from pathlib import Path

import pytest

import bench_kit
import tiny
from bench_kit import Kit, profile
from whiflash import Drafting, WhiFlash, WhiFlashError, cli
from whiflash.calibration import Setting, parse_threshold
from whiflash.evaluation.calibrate import Request, calibrate
from whiflash.evaluation.latency import Profile
from whiflash.evaluation.methods import Flags, mode, plan
from whiflash.target.load import load_target

PROMPT = "Name a letter."


@pytest.fixture(scope="module")
def kit(tmp_path_factory) -> Kit:
    return bench_kit.build(tmp_path_factory.mktemp("kit"), prompts=4)


@pytest.fixture(scope="module")
def router(tmp_path_factory) -> Path:
    return bench_kit.router(tmp_path_factory.mktemp("router") / "neural", "ddt-e3", 16)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def in_home(home, monkeypatch):
    monkeypatch.setenv("WHIFLASH_HOME", str(home))


def request(kit: Kit, **given) -> Request:
    models = {"target": str(kit.target), "dflash": str(kit.dflash), "eagle3": str(kit.eagle3)}
    return Request(**{"datasets": (str(kit.prompts),), "max_new_tokens": 24, **models, **given})


@pytest.fixture(scope="module")
def written(kit, router, home, tmp_path_factory) -> dict:
    """Calibrations in the cache: ddt-e3 with both routers, timed here; df-e3 for a machine where e3 costs little."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHIFLASH_HOME", str(home))
        (first,) = calibrate(request(kit, pairs=("ddt-e3",), router=str(router)))
        cheap = profile(tmp_path_factory.mktemp("profile") / "cheap.json", df=1.0, e3=0.1)
        (second,) = calibrate(request(kit, latency_profile=cheap))
    return {"ddt-e3": first, "df-e3": second}


def load(kit: Kit, **given) -> WhiFlash:
    return WhiFlash.from_pretrained(kit.target, dflash=kit.dflash, eagle3=kit.eagle3, **given)


def test_a_calibration_says_what_was_chosen_and_from_what(kit, written):
    found = json.loads(written["ddt-e3"].read_text())
    assert written["ddt-e3"] == Setting.of(load_target(kit.target), "ddt-e3").default_path
    assert set(found["routers"]) == {"entropy", "neural"} and found["texts"] == 4 and found["positions"] > 40
    for routed in found["routers"].values():
        assert set(routed["categories"]) == {"chat", "math", "overall"}
        best = routed["categories"]["overall"]
        assert best["tokens_per_second"] == max(speed for _, speed in best["curve"])
        assert [best["threshold"], best["tokens_per_second"]] in best["curve"]
        for alone in best["alone"].values():
            assert alone["tokens_per_second"] <= best["tokens_per_second"]
        assert 0.5 < routed["held_out"] <= 1.0
    # a neural router is refused with another budget than its own
    assert found["routers"]["neural"]["categories"]["overall"]["lengths"]["ddt"] == 16
    measured = Profile.read(written["ddt-e3"])
    assert measured.as_json() == json.loads(json.dumps(measured.as_json()), object_hook=_numbers)
    assert {name: len(rows) for name, rows in measured.rounds.items()} == {"ddt": 5, "e3": 7}
    assert all(measured.seconds(name, n) > 0 for name, rows in measured.rounds.items() for n in rows)
    assert list(written["ddt-e3"].parent.glob("*.tmp")) == []


def _numbers(found: dict) -> dict:
    return {int(key) if key.isdigit() else key: value for key, value in found.items()}


def shape(name: str, best: dict) -> str:
    least = "" if best["p_min"] is None else f", p ≥ {best['p_min']:g}"
    return f"{name} (≤ {best['lengths'][name]} drafted{least})"


def test_auto_takes_the_threshold_and_the_lengths_that_are_not_set(kit, router, written):
    found = {pair: json.loads(path.read_text())["routers"] for pair, path in written.items()}
    best = found["df-e3"]["entropy"]["categories"]["overall"]
    assert best["second_share"] > 0.9
    wanted = f"{shape('df', best)}, {shape('e3', best)}, entropy router at {best['threshold']:g}"
    assert wanted in mode(load(kit, threshold="auto"))
    drafting = Drafting(block_rows=3, eagle3_depth=7, p_min=0.01)
    model = load(kit, threshold=str(written["df-e3"]), drafting=drafting)
    assert "df (≤ 2 drafted, p ≥ 0.01), e3 (≤ 7 drafted, p ≥ 0.01)" in mode(model)
    neural = load(kit, drafters="ddt-e3", router=router, threshold="auto")
    best = found["ddt-e3"]["neural"]["categories"]["overall"]
    assert f"{shape('e3', best)}, neural router at {best['threshold']:g}" in mode(neural)
    plain = load(kit, drafters="none").generate(PROMPT, max_new_tokens=40).tokens
    assert all(m.generate(PROMPT, max_new_tokens=40).tokens == plain for m in (model, neural))


def test_the_commands_read_it(kit, written, monkeypatch, capsys, tmp_path):
    def run(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["whiflash", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0), *capsys.readouterr()

    models = ["--target", kit.target, "--dflash", kit.dflash, "--eagle3", kit.eagle3]
    best = json.loads(written["df-e3"].read_text())["routers"]["entropy"]["categories"]["overall"]
    code, out, _ = run("generate", PROMPT, *models, "-n", 8, "--json", "--threshold", "auto")
    assert code == 0 and f"entropy router at {best['threshold']:g}" in json.loads(out)["mode"]
    code, _, err = run("generate", PROMPT, *models, "--threshold", "soon")
    assert code == 2 and "--threshold takes a number, auto, or the .json file of a calibration, got 'soon'" in err
    code, _, err = run("generate", PROMPT, *models, "-d", "df-ddt", "--threshold", "auto")
    assert code == 2 and "there is no calibration of" in err and "--drafters df-ddt" in err

    # ddt-e3 was timed here with drafters that know nothing, so it may have found that not drafting is fastest
    found = json.loads(written["ddt-e3"].read_text())
    for routed in found["routers"].values():
        routed["categories"]["overall"]["p_min"] = None
    written["ddt-e3"].write_text(json.dumps(found))
    arguments = kit.arguments(tmp_path / "run", 8, "--whiflash-entropy-threshold", "auto")
    arguments += ["--whiflash-drafters", "df-e3,ddt-e3", "--max-samples", "1"]
    code, _, err = run(*arguments)
    assert code == 0, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert f"entropy router at {best['threshold']:g}" in summary["methods"]["WhiFlash-Entropy df-e3"]["mode"]
    assert "WhiFlash-Entropy ddt-e3 auto" in summary["methods"]
    assert f"at {best['threshold']:g}" in summary["settings"]["WhiFlash-Entropy df-e3 ran as"]


def test_a_killed_recording_goes_on_and_ends_the_same(kit, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WHIFLASH_HOME", str(tmp_path))
    given = profile(tmp_path / "profile.json", df=1.0, e3=1.0)
    asked = request(kit, latency_profile=given, output=tmp_path / "out" / "calibration.json")
    (path,) = calibrate(asked)
    (record,) = (tmp_path / "calibration").glob("record-*.jsonl")
    whole, found = record.read_bytes(), json.loads(path.read_text())
    lines = whole.splitlines(keepends=True)
    record.write_bytes(b"".join(lines[:2]) + b'{"id": "p/2", "surprise": 1}\n')
    with pytest.raises(WhiFlashError, match=r"record-.*\.jsonl, line 3 is damaged .*all after it, and run again"):
        calibrate(asked)
    record.write_bytes(b"".join(lines[:2]) + lines[2][:40])
    capsys.readouterr()
    calibrate(asked)
    assert f"resuming {record}: 2 of 4 prompts recorded" in capsys.readouterr().err
    assert record.read_bytes() == whole
    assert json.loads(path.read_text())["routers"] == found["routers"]


def test_another_machines_profile_changes_the_choice(kit, tmp_path, monkeypatch):
    monkeypatch.setenv("WHIFLASH_HOME", str(tmp_path))
    shares = []
    for cost in (0.01, 100.0):
        asked = request(kit, latency_profile=profile(tmp_path / "p.json", df=1.0, e3=cost))
        (path,) = calibrate(asked)
        shares.append(json.loads(path.read_text())["routers"]["entropy"]["categories"]["overall"]["second_share"])
    assert shares[0] > 0.9 and shares[1] == 0.0


def test_what_was_made_for_something_else_is_refused(kit, router, written, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    config, tensors = tiny.eagle3_head(json.loads((kit.target / "config.json").read_text())["vocab_size"], seed=9)
    tensors["norm.weight"] += 1
    tiny.write(other, config, tensors)
    with pytest.raises(WhiFlashError, match="made for another e3 checkpoint"):
        WhiFlash.from_pretrained(kit.target, dflash=kit.dflash, eagle3=other, threshold="auto")
    with pytest.raises(WhiFlashError, match=r"made for another pair \(ddt-e3, not df-e3\)"):
        load(kit, threshold=str(written["ddt-e3"]))
    found = json.loads(written["ddt-e3"].read_text())
    for change, sentence in (
        ({"routers": {"entropy": found["routers"]["entropy"]}}, "made with no neural router"),
        ({"routers": {"neural": {**found["routers"]["neural"], "identity": "0"}}}, "made with another neural router"),
        ({"target_fingerprint": "0"}, "made for another target"),
        ({"version": 99}, "no calibration of this version"),
        ({"routers": {"neural": {**found["routers"]["neural"], "categories": {}}}}, "is damaged"),
    ):
        file = tmp_path / "changed.json"
        file.write_text(json.dumps({**found, **change}))
        with pytest.raises(WhiFlashError, match=sentence):
            load(kit, drafters="ddt-e3", router=router, threshold=str(file))
    file.write_text("{")
    with pytest.raises(WhiFlashError, match="cannot be read"):
        load(kit, drafters="ddt-e3", threshold=str(file))
    with pytest.raises(WhiFlashError, match="there is no file"):
        load(kit, threshold=str(tmp_path / "none.json"))
    with pytest.raises(WhiFlashError, match="this router takes no threshold"):
        load(kit, router="fixed", threshold="auto")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"pairs": ("df",)}, "--drafters takes pairs"),
        ({"pairs": ()}, "--drafters takes pairs"),
        ({"max_new_tokens": 1}, "--max-new-tokens must be at least 2"),
        ({"pairs": ("df-e3", "ddt-e3"), "router": "r"}, "--router belongs to one pair"),
        ({"pairs": ("df-e3", "ddt-e3"), "output": Path("c.json")}, "--output belongs to one pair"),
        ({"pairs": ("df-ddt",)}, "--eagle3 has no effect on df-ddt"),
        ({"latency_profile": Path("none.json")}, "cannot be read"),
        ({"router": "none"}, "none"),
        ({"router": "entropy"}, "--router names a neural router's checkpoint"),
        ({"output": Path("c.txt")}, "which ends in .json"),
        ({"output": Path("/")}, "which ends in .json"),
    ],
)
def test_what_cannot_apply_is_refused(kit, given, sentence):
    with pytest.raises(WhiFlashError, match=sentence):
        calibrate(request(kit, **given))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"plain": None}, "is no latency profile"),
        ({"rounds": {"df": {"3": {"sleep": 1.0}}}}, "sleep is no phase"),
        ({"rounds": {"df": {"3": {"draft": -1.0}}}}, "at least 0 seconds"),
        ({"rounds": {"df": {"3": {"draft": 1.0}}}}, "times no round of e3"),
        ({"catch_up": {}}, "times no round of"),
    ],
)
def test_a_profile_that_cannot_be_replayed_is_refused(kit, tmp_path, change, sentence):
    path = profile(tmp_path / "p.json", df=1.0, e3=1.0)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(WhiFlashError, match=sentence):
        calibrate(request(kit, latency_profile=path))


def test_a_place_that_cannot_be_written_is_named(kit, written, tmp_path):
    """The record is kept, so that the same command with another place is done at once."""
    (tmp_path / "file").write_text("")
    with pytest.raises(WhiFlashError, match="cannot be written"):
        calibrate(request(kit, output=tmp_path / "file" / "calibration.json"))


def test_thresholds_are_read():
    assert [parse_threshold(t) for t in (None, "auto", "0.2", "-1", "a/b.json")] == [
        None,
        "auto",
        0.2,
        -1.0,
        "a/b.json",
    ]


def test_a_calibrated_budget_gives_way_to_one_that_is_asked_for():
    def names(**given) -> list[str]:
        methods, _ = plan(Flags(pairs=("ddt-e3",), entropy_threshold="auto", **given))
        return [method.name for method in methods[1:]]

    assert names() == ["WhiFlash-Entropy ddt-e3 auto"]
    assert names(tree_budgets=(32,)) == ["WhiFlash-Entropy ddt-e3 32"]


def test_a_machine_where_plain_decoding_wins_is_told(kit, tmp_path, capsys):
    costly = profile(tmp_path / "p.json", df=90.0, e3=90.0)
    calibrate(request(kit, latency_profile=costly, output=tmp_path / "c.json"))
    assert "plain decoding is faster here than any threshold" in capsys.readouterr().out
    cheap = profile(tmp_path / "p.json", df=0.1, e3=0.1)
    calibrate(request(kit, latency_profile=cheap, output=tmp_path / "c.json"))
    assert "plain decoding is faster" not in capsys.readouterr().out
