"""`whiflash analyse` on runs over a tiny target: what is written, what it agrees with, and what is refused."""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

import bench_kit
from bench_kit import Kit, rows
from whiflash.cli import app
from whiflash.errors import WhiFlashError
from whiflash.evaluation import plots, positions, runs
from whiflash.evaluation.analyse import Request, analyse, measure
from whiflash.evaluation.calibrate import Request as Calibration
from whiflash.evaluation.calibrate import calibrate
from whiflash.evaluation.latency import Profile
from whiflash.target.load import load_target

ENTROPY, NEURAL = "WhiFlash-Entropy df-e3", "WhiFlash-Neural df-e3"
TOKENS = 30
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture(scope="module")
def kit(tmp_path_factory) -> Kit:
    return bench_kit.build(tmp_path_factory.mktemp("kit"), prompts=4)


@pytest.fixture(scope="module")
def router(tmp_path_factory) -> Path:
    return bench_kit.router(tmp_path_factory.mktemp("router") / "neural", "df-e3")


@pytest.fixture(scope="module")
def lazy(kit, router, tmp_path_factory) -> Path:
    flags = kit.flags(("EAGLE3", "DFLASH", "WHIFLASH"), routers=("entropy", "neural"), router_path=str(router),
                      entropy_threshold=0.9)  # fmt: skip
    return bench_kit.run(kit.request(tmp_path_factory.mktemp("runs") / "lazy", TOKENS, flags))


@pytest.fixture(scope="module")
def eager(kit, tmp_path_factory) -> Path:
    flags = kit.flags(("WHIFLASH",), no_lazy_catchup=True, no_kv_only=True, entropy_threshold=0.9)
    return bench_kit.run(kit.request(tmp_path_factory.mktemp("runs") / "eager", TOKENS, flags))


@pytest.fixture(scope="module")
def calibration(kit, router, lazy, tmp_path_factory) -> Path:
    """Recorded on the run's prompts; replayed with the latencies of the run."""
    directory = tmp_path_factory.mktemp("calibration")
    (directory / "profile.json").write_text(json.dumps(runs.profile(runs.read_run(lazy)).as_json()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHIFLASH_HOME", str(directory / "home"))
        (path,) = calibrate(
            Calibration(
                datasets=(str(kit.prompts),), max_new_tokens=TOKENS, target=str(kit.target), dflash=str(kit.dflash),
                eagle3=str(kit.eagle3), router=str(router), latency_profile=directory / "profile.json",
                output=directory / "calibration.json",
            )
        )  # fmt: skip
    return path


@pytest.fixture(scope="module")
def page(lazy, eager, calibration, tmp_path_factory) -> Path:
    return analyse(Request(lazy, (eager,), calibration, output=tmp_path_factory.mktemp("report")))


def figures(page: Path) -> dict:
    return json.loads((page.parent / "analysis.json").read_text("utf-8"))


def test_replayed_routers_are_the_run(page, lazy):
    """All first turns were recorded, so replaying a router must take the very rounds that the run took."""
    found = figures(page)
    assert found["notes"] == []
    for name in (ENTROPY, NEURAL):
        first = [row["turns"][0]["rounds"] for row in rows(lazy) if row["method"] == name]
        slots = Counter(slot for table in first for slot in table["slot"])
        bound = found["methods"][name]["bounds"][name]
        lengths = [n for table in first for n in table["acceptance_length"]]
        assert bound["acceptance_length"] == pytest.approx(sum(lengths) / len(lengths))
        assert bound["second_share"] == pytest.approx(slots["e3"] / sum(slots.values()))
        assert len(slots) == 2 or name == NEURAL


def test_figures_of_a_run_with_a_record(page, lazy):
    for name, found in figures(page)["methods"].items():
        assert found["source"] == "record" and found["positions"] == sum(d["positions"] for d in found["deciles"])
        assert found["slots"] == [["df", 3, None], ["e3", 5, None]]
        bounds = found["bounds"]
        assert list(bounds)[2:] == [name, "oracle, best AL", "oracle, best utility", "bound"]
        for other in bounds.values():
            assert other["acceptance_length"] <= bounds["bound"]["acceptance_length"] + 1e-9
            assert other["tokens_per_second"] <= bounds["bound"]["tokens_per_second"] + 1e-9
        assert sum(found["wins"]["shares"]) == pytest.approx(1) and len(found["wins"]["answers"]) == 4
        assert found["judged"]["regret"] >= 0 and found["judged"]["positions"] == found["positions"]
        slots = [turn["rounds"]["slot"] for row in rows(lazy) if row["method"] == name for turn in row["turns"]]
        lengths = found["run_lengths"][name.split("-")[1].split()[0].lower()]
        assert sum(int(n) * count for n, count in lengths.items()) == sum(map(len, slots))
    assert figures(page)["methods"][NEURAL]["score_deciles"] and not figures(page)["methods"][ENTROPY]["score_deciles"]


def test_switching_is_compared_across_runs(page, lazy, eager):
    """An eager drafter is never behind, so a switch brings it no more rows than the last round committed."""
    found = figures(page)["switching"]
    assert list(found) == [str(lazy), str(eager)]
    before, after = found[str(lazy)][ENTROPY], found[str(eager)][ENTROPY]
    assert (before["catching"], after["catching"]) == ("lazy, KV only", "eager, full passes")
    assert before["switches_per_100_rounds"] == after["switches_per_100_rounds"] > 0
    assert after["catch_up"]["switched"]["rows"] < before["catch_up"]["switched"]["rows"] * 2
    assert after["catch_up"]["stayed"]["rows"] > before["catch_up"]["stayed"]["rows"]


@pytest.fixture(scope="module")
def bare(lazy, tmp_path_factory) -> Path:
    """Without a record and a tokenizer, of a run whose category is no plain word."""
    copy = shutil.copytree(lazy, tmp_path_factory.mktemp("bare") / "run")
    text = (copy / "results.jsonl").read_text("utf-8").replace('"category": "chat"', '"category": "<b>&chat"')
    (copy / "results.jsonl").write_text(text, "utf-8")
    summary = json.loads((copy / "summary.json").read_text("utf-8"))
    summary["settings"]["target"] = "/nowhere/model (feed)"
    (copy / "summary.json").write_text(json.dumps(summary), "utf-8")
    return analyse(Request(copy))


def test_without_a_record_the_rounds_of_the_run_serve(bare):
    found = figures(bare)
    assert "calibrate" in found["notes"][0] and "calibrate" in bare.read_text("utf-8")
    for method in found["methods"].values():
        assert method["source"] == "run" and method["bounds"] is None and 0 < method["rounds_covered"] <= 1


def test_a_pair_alone_has_nothing_to_compare_with(eager, tmp_path):
    page = analyse(Request(eager, output=tmp_path))
    method = figures(page)["methods"][ENTROPY]
    assert method["source"] is None and method["judged"] is None and method["wins"] is None
    assert "cannot be compared" in page.read_text("utf-8") and method["run_lengths"]["entropy"]


class Page(HTMLParser):
    """Text of the painted answers by their slot, and everything that points outside."""

    def __init__(self, text: str):
        super().__init__()
        self.answers: list[str] = []
        self.tips: list[str] = []
        self.ids: Counter[str] = Counter()
        self.references: list[str] = []
        self.tags: Counter[str] = Counter()
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags[tag] += 1
        self.ids[given.get("id") or ""] += 1
        self.references += [value for name, value in attributes if name in ("href", "xlink:href", "src", "action")]
        if tag == "div":
            self.inside = given.get("class") == "answer"
            self.answers += [""] if self.inside else []
        if self.inside and tag == "span":
            self.tips.append(given["data-tip"])

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "div"

    def handle_data(self, data):
        if self.inside:
            self.answers[-1] += data


def test_the_page_needs_nothing_beside_it(page):
    text = page.read_text("utf-8")
    found = Page(text)
    assert found.tags["svg"] == 2 + 4 + 5 and not {"script", "link", "img", "iframe", "object"} & set(found.tags)
    assert found.references and all(reference.startswith("#") for reference in found.references)
    for name in {*(r[1:] for r in found.references), *re.findall(r"url\(#([^)]+)\)", text)}:
        assert found.ids[name] == 1, name
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    assert "prefers-color-scheme: dark" in text and "@media print" in text
    assert text.count(plots.INK) == 1, "only the page itself says what its ink is"


def test_painted_answers_are_the_answers(page, lazy, kit):
    target = load_target(kit.target)
    texts = {
        target.decode(row["turns"][0]["tokens"]): row["turns"][0] for row in rows(lazy) if row["method"] == ENTROPY
    }
    found = Page(page.read_text("utf-8"))
    assert len(found.answers) == 2 and set(found.answers) <= set(texts)
    told = [tip for tip in found.tips if tip.startswith("round")]
    tables = [texts[answer]["rounds"] for answer in found.answers]
    wanted = [
        f"round {number}: {slot}, AL {length} ({accepted} of {drafted} drafted)"
        for table in tables
        for number, (slot, length, accepted, drafted) in enumerate(
            zip(*(table[name] for name in ("slot", "acceptance_length", "accepted", "drafted")), strict=True), 1
        )
    ]
    assert [tip.splitlines()[0] for tip in told] == wanted


def test_text_is_escaped(bare):
    assert "&lt;b&gt;&amp;chat" in (text := bare.read_text("utf-8")) and "<b>&chat" not in text


def test_without_the_tokenizer_ids_stand_for_the_text(bare, lazy):
    text = bare.read_text("utf-8")
    assert "token ids stand for the texts" in text
    tokens = {" ".join(map(str, row["turns"][0]["tokens"])) for row in rows(lazy) if row["method"] == ENTROPY}
    assert {answer.strip() for answer in Page(text).answers} <= tokens


def test_every_plot_is_there_twice(page):
    drawn = {path.stem for path in page.parent.glob("*.svg")}
    assert drawn == {path.stem for path in page.parent.glob("*.png")} and len(drawn) == 11
    for path in page.parent.glob("*.png"):
        assert path.read_bytes()[:4] == b"\x89PNG"


def measured(run: Path, record: Path, profile: Profile | None = None) -> dict:
    """Figures without plots and report."""
    found = runs.read_run(run)
    return measure(found, found.routed(), positions.read_record(record), profile)


def test_a_record_of_other_drafters_is_told(lazy, calibration, tmp_path):
    record = Path(json.loads(calibration.read_text())["made_of"]["record"])
    texts = [json.loads(line) for line in record.read_text().splitlines()]
    for text in texts:
        text["paths"]["df"] = [[1, 2, 3] for _ in text["paths"]["df"]]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    found = measured(lazy, tmp_path / "other.jsonl")
    assert re.search(r"only \d+ of \d+ rounds committed what the record says", " ".join(found["notes"]))


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["analyse", *map(str, arguments)])
    assert isinstance(result.exception, WhiFlashError), result.output
    return str(result.exception)


def changed(run: Path, directory: Path, change) -> Path:
    """A copy of a run whose summary `change` edits."""
    copy = shutil.copytree(run, directory / "copy")
    summary = json.loads((copy / "summary.json").read_text("utf-8"))
    change(summary)
    (copy / "summary.json").write_text(json.dumps(summary), "utf-8")
    return copy


def test_what_is_no_run_is_refused(lazy, tmp_path):
    assert "is no directory" in invoke(tmp_path / "nothing")
    assert "holds no results.jsonl" in invoke(tmp_path)
    assert "is not complete" in invoke(changed(lazy, tmp_path / "a", lambda summary: summary.update(complete=False)))
    assert "is damaged" in invoke(changed(lazy, tmp_path / "b", lambda summary: summary.pop("settings")))
    torn = shutil.copytree(lazy, tmp_path / "c")
    with (torn / "results.jsonl").open("a") as file:
        file.write('{"prompt": "p')
    assert re.search(r"line \d+ is damaged", invoke(torn))
    (torn / "summary.json").unlink()
    assert "same command again" in invoke(torn)


def test_what_holds_no_router_is_refused(kit, lazy, tmp_path):
    alone = bench_kit.run(kit.request(tmp_path / "alone", 12, kit.flags(("DFLASH",)), max_samples=1))
    assert "AR, DFlash; measure a pair" in invoke(alone)
    assert "AR, DFlash; measure a pair" in invoke(lazy, alone, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(WhiFlashError, match="never drafted"):
        bench_kit.run(kit.request(tmp_path / "short", 1))
    assert "took a round" in invoke(tmp_path / "short")


def test_what_cannot_be_replayed_is_refused(lazy, calibration, tmp_path):
    assert "another target" in invoke(
        changed(lazy, tmp_path / "a", lambda s: s["settings"].update(target="t (feed)")), "--record", calibration
    )
    assert "give --record too" in invoke(lazy, "--latency-profile", calibration)
    assert "cannot be read" in invoke(lazy, "--record", tmp_path / "none.json")


def test_latencies_without_the_drafted_length_are_told(lazy, calibration, tmp_path):
    found = json.loads(calibration.read_text())["profile"]
    found["rounds"]["e3"] = {"2": found["rounds"]["e3"]["5"]}
    (tmp_path / "profile.json").write_text(json.dumps(found))
    found = measured(lazy, calibration, Profile.read(tmp_path / "profile.json"))
    assert "time no round of e3 with 5 nodes" in " ".join(found["notes"])
    assert found["methods"][ENTROPY]["source"] == "run"


@pytest.mark.parametrize("library", ["matplotlib", "jinja2"])
def test_a_missing_library_is_one_sentence(lazy, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    assert f"{library} is not installed: pip install 'whiflash[analyse]'" in invoke(lazy)


def browse(page: Path, *options: str) -> str:
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *options, page.as_uri()]
    profile = f"--user-data-dir={page.parent / 'browser'}"
    done = subprocess.run([*command[:-1], profile, command[-1]], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def colors(file: Path) -> Counter:
    from PIL import Image

    with Image.open(file) as image:
        return Counter({color: count for count, color in image.convert("RGB").getcolors(2**24)})


def rgb(color: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(color.lstrip("#")))


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium (chromium, chromium-browser or google-chrome) on the PATH")
def test_in_a_browser(page, tmp_path):
    """Light and dark both show every slot's colour on their own ground, and nothing is wider than the window."""
    for scheme, ground in (("light", "#ffffff"), ("dark", "#14171c")):
        picture = tmp_path / f"{scheme}.png"
        number = ("dark", "light").index(scheme)
        browse(page, "--window-size=1280,6000", f"--screenshot={picture}",
               f"--blink-settings=preferredColorScheme={number}")  # fmt: skip
        seen = colors(picture)
        assert seen.most_common(1)[0][0] == rgb(ground)
        for slot in ("df", "e3"):
            assert seen[rgb(plots.COLORS[slot])] > 500, (scheme, slot)
    measuring = tmp_path / "measured.html"
    sizes = "document.documentElement.scrollWidth, innerWidth, document.querySelectorAll('.r').length"
    script = f"<script>document.title = [{sizes}]</script>"
    measuring.write_text(page.read_text("utf-8").replace("</body>", f"{script}</body>"), "utf-8")
    for width in (1280, 600):
        title = re.search(
            r"<title>(\d+),(\d+),(\d+)</title>", browse(measuring, f"--window-size={width},900", "--dump-dom")
        )
        wide, window, rounds = map(int, title.groups())
        assert wide <= window and rounds > 10
    browse(page, f"--print-to-pdf={tmp_path / 'page.pdf'}")
    assert (tmp_path / "page.pdf").read_bytes()[:5] == b"%PDF-"
