"""One benchmark from flags to files: load, measure, summarise, print."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
from whiflash.evaluation.statistics import DEFINITIONS, OVERALL, never_drafted, summarise
from whiflash.journal import fingerprint
from whiflash.progress import bar
from whiflash.routers.neural import NeuralRouter
from whiflash.target import embedded
from whiflash.target.load import load_target

RUNS = Path("runs")
Say = Callable[[str], None]


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
    Sampling(temperature=request.protocol.temperature, seed=request.protocol.seed)
    if request.protocol.max_new_tokens < 1:
        raise WhiFlashError(f"--max-new-tokens must be at least 1, got {request.protocol.max_new_tokens}")
    plan, sources = methods.plan(request.flags)
    prompts = load_prompts(request.datasets, request.dataset_dir, request.max_samples, request.protocol.seed)
    with ranks(request.device) as (place, device):
        console = Console(highlight=False, quiet=not place.first, width=None if sys.stdout.isatty() else 120)
        log = Console(stderr=True, highlight=False, quiet=not place.first)
        say: Say = partial(log.print, markup=False, soft_wrap=True)
        with bar("preparing the embedded target") as progress:
            target = load_target(request.target, dtype=request.dtype, device=device, progress=progress)
        machine = facts(target.device)
        models, missing = methods.load(plan, sources, target, request.phase_times, request.lenient)
        for name, reason in missing.items():
            say(f"{name} is left out: {reason}")
        settings = benchmark.settings(
            request.protocol, prompts, models, target, vars(sources), machine, place.count
        ) | {"phase_times": request.phase_times}
        # what the flags leave to a calibration, which may be made anew before a run goes on, or to a router's config
        settings |= {
            f"{m.name} ran as": methods.mode(model)
            for m, model in models.items()
            if isinstance(m.threshold, str) or isinstance(model.router, NeuralRouter)
        }
        directory, total = request.output or RUNS / _name(settings), len(prompts) * len(models)
        with Results(directory, settings, place) as results:
            _announce(say, results, directory, total)
            try:
                with eta_bar(quiet=not place.first) as report:
                    benchmark.run(prompts, models, request.protocol, results, place, report)
            except KeyboardInterrupt:
                say(f"stopped; what was measured is in {directory / ROWS}: the same command goes on from there")
                raise
            rows = results.merge()
            if place.first:
                summary = {
                    "settings": settings,
                    "machine": machine,
                    "answers": len(rows),
                    "complete": len(rows) == total,
                    "resumed_from": results.found or None,
                    "methods_left_out": missing,
                    "prompts_left_out": {row["prompt"]: row["left_out"] for row in rows if row["left_out"]},
                    "definitions": DEFINITIONS,
                    "methods": _by_method(rows, request.protocol, methods.standalone(list(models))),
                }
                _write(directory, rows, summary, say)
                _print(console, summary, directory)
                _check_drafted(rows)
    return directory


def _name(settings: dict[str, Any]) -> str:
    """The same command, the same directory: so it resumes by itself."""
    return "bench-" + fingerprint(settings)[:10]


def _announce(say: Say, results: Results, directory: Path, total: int) -> None:
    if results.found == total:
        say(f"{directory} holds all {total} answers already; choose another --output to measure again")
    elif results.found:
        say(f"resuming {directory}: {results.found} of {total} answers are there")
    else:
        say(f"results go to {directory}")


def _by_method(
    rows: list[dict[str, Any]], protocol: Protocol, rivals: dict[str, list[str]]
) -> dict[str, dict[str, Any]]:
    modes = {row["method"]: row["mode"] for row in rows}
    figures = summarise(rows, BASELINE, protocol.greedy, rivals)
    return {name: {"mode": modes[name], "categories": categories} for name, categories in figures.items()}


def _write(directory: Path, rows: list[dict[str, Any]], summary: dict[str, Any], say: Say) -> None:
    write_summary(directory, summary)
    if has_parquet():
        write_rounds(directory, rows)
    else:
        say(f"{ROUNDS} is left out, since pyarrow is not installed: pip install 'whiflash[bench]'")


def _print(console: Console, summary: dict[str, Any], directory: Path) -> None:
    told = partial(console.print, markup=False, soft_wrap=True)
    for table in tables.tables(summary):
        console.print(table)
    for name, found in summary["methods"].items():
        told(f"{name} ran as: {found['mode']}{_unused(summary['settings']['methods'][name]['drafters'], found)}")
    differing = {
        name: sum(len(f["differing"]) for c, f in found["categories"].items() if c != OVERALL and f["differing"])
        for name, found in summary["methods"].items()
        if name != BASELINE
    }
    if summary["settings"]["temperature"] == 0:
        counts = ", ".join(f"{name} {count}" for name, count in differing.items() if count) or "none"
        told(f"prompts whose greedy output is not AR's: {counts}")
    for prompt, reason in summary["prompts_left_out"].items():
        told(f"{prompt}: {reason}")
    told(f"{tables.machine_line(summary['machine'])}, {summary['settings']['dtype']}")
    again = f" (resumed after {summary['resumed_from']} answers)" if summary["resumed_from"] else ""
    told(f"results in {directory}{again}")


def _unused(drafters: str, found: dict[str, Any]) -> str:
    """A pair of which one was never picked is told: its figures are those of the other one."""
    used = {slot for f in found["categories"].values() for slot in f["slots"]}
    idle = [name for name in drafters.split("-") if name not in used] if drafters != "none" else []
    return f"; {' and '.join(idle)} was never picked" if idle else ""


def _check_drafted(rows: list[dict[str, Any]]) -> None:
    if not any(row["turns"] for row in rows):
        raise WhiFlashError(
            f"nothing was measured: {rows[0]['left_out']}; ask for fewer new tokens, or choose other prompts"
        )
    idle = never_drafted(rows, BASELINE)
    if idle:
        raise WhiFlashError(
            f"{', '.join(idle)} never drafted a token, so these figures are those of plain decoding; ask for more than "
            "one new token, and check the drafter's shape and --draft-p-min"
        )
