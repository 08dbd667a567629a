"""One benchmark from flags to files: load, measure, summarise, print."""

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from whiflash.decoding.sampling import Sampling
from whiflash.errors import WhiFlashError
from whiflash.evaluation import benchmark, methods, tables
from whiflash.evaluation.benchmark import Protocol
from whiflash.evaluation.datasets import load_prompts
from whiflash.evaluation.machine import facts
from whiflash.evaluation.methods import BASELINE, Flags
from whiflash.evaluation.progress import eta_bar
from whiflash.evaluation.ranks import ranks
from whiflash.evaluation.results import ROUNDS, ROWS, Results, has_parquet, write_rounds, write_summary
from whiflash.evaluation.statistics import DEFINITIONS, never_drafted, summarise
from whiflash.progress import bar
from whiflash.target import embedded
from whiflash.target.load import load_target

RUNS = Path("runs")


@dataclass(frozen=True)
class Request:
    """Everything the command line decides. `lenient` leaves out methods whose neural router does not exist."""

    flags: Flags
    protocol: Protocol
    datasets: Sequence[str] = ("demo",)
    dataset_dir: Path | None = None
    max_samples: int | None = None
    target: str = embedded.NAME
    dtype: str | None = None
    device: str | None = None
    output: Path | None = None
    phase_times: bool = True
    lenient: bool = False


def measure(request: Request) -> Path:
    """Run, or go on with, a benchmark; prints tables on rank 0 and returns the directory of results."""
    Sampling(temperature=request.protocol.temperature)
    if request.protocol.max_new_tokens < 1:
        raise WhiFlashError(f"--max-new-tokens must be at least 1, got {request.protocol.max_new_tokens}")
    plan, sources = methods.plan(request.flags)
    prompts = load_prompts(request.datasets, request.dataset_dir, request.max_samples, request.protocol.seed)
    with ranks(request.device) as (place, device):
        console = Console(highlight=False, quiet=not place.first, width=None if sys.stdout.isatty() else 120)
        log = Console(stderr=True, highlight=False, quiet=not place.first)
        with bar("preparing the embedded target") as progress:
            target = load_target(request.target, dtype=request.dtype, device=device, progress=progress)
        machine = facts(target.device)
        models = methods.load(
            plan, sources, target, request.phase_times,
            (lambda m, error: log.print(f"{m.name} is left out: {error}", markup=False)) if request.lenient else None,
        )  # fmt: skip
        settings = benchmark.settings(
            request.protocol, prompts, list(models), target, vars(sources), machine, place.count
        ) | {"phase_times": request.phase_times}
        directory = request.output or RUNS / _name(settings)
        results = Results(directory, settings, place)
        try:
            _announce(log, results, directory, len(prompts) * len(models))
            with eta_bar(quiet=not place.first) as report:
                benchmark.run(prompts, models, request.protocol, results, place, report)
            rows = results.merge()
        except KeyboardInterrupt:
            log.print(f"stopped; what was measured is in {directory / ROWS}: the same command goes on from there")
            raise
        finally:
            results.close()
        if place.first:
            summary = _summarise(rows, settings, machine, request.protocol, len(prompts) * len(models), results.found)
            _write(directory, rows, summary, log)
            _print(console, summary, directory)
            _check_drafted(rows)
    return directory


def _name(settings: dict[str, Any]) -> str:
    """The same command, the same directory: so it resumes by itself."""
    return "bench-" + hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:10]


def _announce(log: Console, results: Results, directory: Path, total: int) -> None:
    if results.found == total:
        log.print(
            f"{directory} holds all {total} answers already; choose another --output to measure again", markup=False
        )
    elif results.found:
        log.print(f"resuming {directory}: {results.found} of {total} answers are there", markup=False)
    else:
        log.print(f"results go to {directory}", markup=False)


def _summarise(
    rows: list[dict[str, Any]],
    settings: dict[str, Any],
    machine: dict[str, Any],
    protocol: Protocol,
    total: int,
    found: int,
) -> dict[str, Any]:
    by_method = summarise(rows, BASELINE, protocol.greedy)
    modes = {row["method"]: row["mode"] for row in rows}
    return {
        "settings": settings,
        "machine": machine,
        "answers": len(rows),
        "complete": len(rows) == total,
        "resumed_from": found or None,
        "left_out": {row["prompt"]: row["left_out"] for row in rows if row["left_out"]},
        "definitions": DEFINITIONS,
        "methods": {name: {"mode": modes[name], "categories": figures} for name, figures in by_method.items()},
    }


def _write(directory: Path, rows: list[dict[str, Any]], summary: dict[str, Any], log: Console) -> None:
    write_summary(directory, summary)
    if has_parquet():
        write_rounds(directory, rows)
    else:
        log.print(f"{ROUNDS} is left out, since pyarrow is not installed: pip install 'whiflash[bench]'", markup=False)


def _print(console: Console, summary: dict[str, Any], directory: Path) -> None:
    for table in tables.tables(summary):
        console.print(table)
    for name, found in summary["methods"].items():
        used = {slot: s["rounds"] for f in found["categories"].values() for slot, s in f["slots"].items()}
        unused = "" if used or name == BASELINE else "; no drafter was ever used"
        console.print(f"{name} ran as: {found['mode']}{unused}", markup=False)
    differing = {
        name: sum(len(f["differing"]) for c, f in found["categories"].items() if c != "overall" and f["differing"])
        for name, found in summary["methods"].items()
        if name != BASELINE
    }
    if summary["settings"]["temperature"] == 0:
        told = ", ".join(f"{name} {count}" for name, count in differing.items() if count) or "none"
        console.print(f"prompts whose greedy output is not AR's: {told}", markup=False)
    for prompt, reason in summary["left_out"].items():
        console.print(f"{prompt}: {reason}", markup=False)
    console.print(tables.machine_line(summary["machine"]) + f", {summary['settings']['dtype']}", markup=False)
    again = f" (resumed after {summary['resumed_from']} answers)" if summary["resumed_from"] else ""
    console.print(f"results in {directory}{again}", markup=False)


def _check_drafted(rows: list[dict[str, Any]]) -> None:
    idle = never_drafted(rows, BASELINE)
    if idle:
        raise WhiFlashError(
            f"{', '.join(idle)} never drafted a token, so these figures are those of plain decoding; ask for more than "
            "one new token, and check the drafter's shape"
        )
