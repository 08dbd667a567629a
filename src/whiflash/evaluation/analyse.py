"""`whiflash analyse`: from a run, and a record where there is one, to figures, plots and a report."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from whiflash.errors import WhiFlashError
from whiflash.evaluation import analysis, plots, positions, report, runs, samples
from whiflash.evaluation.latency import Profile
from whiflash.evaluation.positions import Known, Record, Roots
from whiflash.evaluation.runs import Routed, Run
from whiflash.evaluation.tables import bounds_table
from whiflash.journal import write_atomic

FOLDER, FIGURES = "analysis", "analysis.json"
# a record whose rounds agree less with the run's is not of the same drafters
AGREEMENT = 0.99
# an answer in which either drafter wins at least this share of positions has use for both
BOTH = 0.1

NO_RECORD = (
    "Without a record of what both drafters would have got at every position, figures on winners and the router rest "
    "on those rounds of the run where another method happened to draft with the other slot, and oracles are left out. "
    "Run `whiflash calibrate` on the same prompts with --output FILE, and give --record FILE here."
)


@dataclass(frozen=True)
class Request:
    """Everything the command line decides. others: runs that only their switching is compared of."""

    run: Path
    others: Sequence[Path] = ()
    record: Path | None = None
    latency_profile: Path | None = None
    output: Path | None = None


def analyse(request: Request) -> Path:
    """Write analysis.json, the plots and report.html; returns the report."""
    plots.check()
    run = runs.read_run(request.run)
    methods = runs.routed(run)
    others = [runs.read_run(path) for path in request.others]
    record = None if request.record is None else positions.read_record(request.record)
    if record is not None:
        positions.check_fits(record, run)
    given = None if request.latency_profile is None else Profile.read(request.latency_profile)
    figures = measure(run, methods, record, given)
    figures["switching"] = {
        str(one.directory): {m.name: analysis.switching(one, m) for m in runs.routed(one)} for one in (run, *others)
    }
    directory = request.output or run.directory / FOLDER
    write_atomic(directory / FIGURES, json.dumps(_plain(figures), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    page = _report(run, methods, figures, directory)
    _print(figures, directory, page)
    return page


def measure(run: Run, methods: Sequence[Routed], record: Record | None, given: Profile | None) -> dict[str, Any]:
    """Everything but switching, as data. given: latencies to replay with, rather than the record's or the run's."""
    profile = given or (record and record.profile) or runs.profile(run)
    timed = "another profile" if given else "the calibration" if record and record.profile else "the rounds of this run"
    known = positions.known(run)
    figures: dict[str, Any] = {
        "run": str(run.directory),
        "record": None if record is None else str(record.path),
        "latencies": timed,
        "notes": [] if record else [NO_RECORD],
        "definitions": analysis.DEFINITIONS,
        "methods": {},
    }
    for method in methods:
        figures["methods"][method.name] = _method(run, method, record, profile, known, figures["notes"].append)
    return figures


def _method(
    run: Run, method: Routed, record: Record | None, profile: Profile, known: Known, note: Callable[[str], None]
) -> dict[str, Any]:
    roots, bounds, source, covered = _roots(run, method, record, profile, known, note)
    slots = analysis.slots_by_answer(run, method)
    lengths = {method.router: sum((analysis.run_lengths(s) for s in slots if s), analysis.Counter())}
    if source == "record":
        best = [analysis.decoded(part, analysis.best_slots(part)) for part in roots]
        lengths["best choice"] = sum((analysis.run_lengths(s) for s in best), analysis.Counter())
    answers = analysis.wins(roots) if roots else []
    return {
        "router": method.router,
        "threshold": method.threshold,
        "slots": [list(shape) for shape in method.shapes],
        "source": source if roots else None,
        "positions": sum(part.lengths.shape[1] for part in roots),
        "rounds_covered": covered,
        "wins": _wins(answers) if answers else None,
        "run_lengths": {name: {str(n): c for n, c in sorted(counts.items())} for name, counts in lengths.items()},
        "deciles": analysis.deciles(roots) if roots else [],
        "score_deciles": analysis.deciles(roots, "score") if roots and method.router != "entropy" else [],
        "judged": analysis.judge(roots, method.router == "neural") if roots else None,
        "bounds": bounds,
    }


def _roots(
    run: Run, method: Routed, record: Record | None, profile: Profile, known: Known, note: Callable[[str], None]
) -> tuple[list[Roots], dict[str, Any] | None, str, float | None]:
    """(roots, bounds, where they are from, share of the run's rounds among them)"""
    if record is not None:
        try:
            roots = positions.from_record(record, method)
            for name, nodes, p_min in method.shapes:
                timed = profile.rounds.get(name, {})
                if not timed or (p_min is None and nodes not in timed) or name not in profile.catch_up:
                    raise WhiFlashError(
                        f"the latencies time no round of {name} with {nodes} nodes; leave out --latency-profile to "
                        "take those of the run, or calibrate with this length"
                    )
            bounds = analysis.bounds(record.texts, method, profile)
            same, compared = positions.agreement(run, method, record.texts)
            if same < AGREEMENT * compared:
                note(
                    f"{method.name}: only {same} of {compared} rounds committed what the record says; it was made with "
                    "other drafters or settings than the run, so figures from it are not this run's."
                )
            return roots, bounds, "record", None
        except WhiFlashError as error:
            note(f"{method.name}: {error}. Its figures rest on the rounds of the run.")
    roots = positions.from_run(run, method, known)
    rounds = sum(len(slots) for slots in analysis.slots_by_answer(run, method))
    return roots, None, "run", sum(part.lengths.shape[1] for part in roots) / rounds if rounds else None


def _wins(answers: list[dict[str, Any]]) -> dict[str, Any]:
    positions = np.array([row["positions"] for row in answers], dtype=float)
    shares = np.array([row["shares"] for row in answers])
    return {
        "shares": (positions @ shares / positions.sum()).tolist(),
        "both": float(((shares[:, 0] >= BOTH) & (shares[:, 2] >= BOTH)).mean()),
        "answers": answers,
    }


def _report(run: Run, methods: Sequence[Routed], figures: dict[str, Any], directory: Path) -> Path:
    drawn = plots.Plots(directory)
    plots.speeds(drawn, run.summary)
    plots.phases(drawn, run.summary)
    keys = {m.name: re.sub(r"[^a-z0-9]+", "-", m.name.lower()) for m in methods}
    sections = {m.name: plots.method(drawn, keys[m.name], figures["methods"][m.name]) for m in methods}
    try:
        read, missing = samples.reader(run.target[0]), None
    except WhiFlashError as error:
        read, missing = samples.ids, f"token ids stand for the texts: {error}"
    shown = samples.samples(run, methods[0], read)
    page = report.render(run, methods, figures, drawn.svg, sections, shown, missing)
    write_atomic(directory / report.PAGE, page)
    return directory / report.PAGE


def _print(figures: dict[str, Any], directory: Path, page: Path) -> None:
    console = Console(highlight=False)
    for name, found in figures["methods"].items():
        if found["bounds"]:
            console.print(bounds_table(name, found))
    for text in figures["notes"]:
        console.print(text, markup=False, soft_wrap=True)
    console.print(f"figures and plots in {directory}", markup=False, soft_wrap=True)
    console.print(f"report in {page}", markup=False, soft_wrap=True)


def _plain(value: Any) -> Any:
    """NaN, which JSON lacks, becomes null."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and value != value else value
