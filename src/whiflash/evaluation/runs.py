"""A finished benchmark read back: its rows, the pairs that were routed in it, and what its rounds took."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from whiflash.decoding.session import PHASES
from whiflash.errors import WhiFlashError
from whiflash.evaluation.latency import CatchUp, Profile
from whiflash.evaluation.results import ROWS, SUMMARY, Row, check
from whiflash.journal import json_rows


class Shape(NamedTuple):
    """A drafter, the most nodes besides the root that it drafts, and its `p_min`: acceptance lengths are of a shape."""

    drafter: str
    nodes: int
    p_min: float | None = None

    def __str__(self) -> str:
        return f"{self.drafter} ({self.nodes} drafted{'' if self.p_min is None else f', p ≥ {self.p_min:g}'})"


EAGER = "eager"
# what `methods.mode` writes
DRAFTER, ROUTER = re.compile(r"(\w+) \(≤ (\d+) drafted(?:, p ≥ (\S+))?\)"), re.compile(r"(\w+) router at ([^\s,]+)")
CATCHING = re.compile(r"(\w+) catch-up( by full passes)?")


@dataclass(frozen=True)
class Routed:
    """A method that picked one of two shapes (slot 0, slot 1) every round: slot 1 where its score exceeds threshold.

    tree: EAGLE-3 drafted trees, whose first nodes are no shorter draft.
    """

    name: str
    router: str
    threshold: float
    shapes: tuple[Shape, Shape]
    mode: str
    tree: bool = False

    @property
    def pair(self) -> str:
        return "-".join(shape.drafter for shape in self.shapes)

    @property
    def catching(self) -> str:
        """lazy or eager, and whether by full passes of the draft model."""
        found = CATCHING.search(self.mode)
        return f"{found[1]}, {'full passes' if found[2] else 'KV only'}" if found else "?"

    @property
    def label(self) -> str:
        return ", ".join(map(str, self.shapes))


@dataclass(frozen=True)
class Run:
    """rows: method → prompt → its row of results.jsonl, those without an answer left out."""

    directory: Path
    rows: dict[str, dict[str, Row]]
    summary: dict[str, Any]

    @property
    def greedy(self) -> bool:
        return self.summary["settings"]["temperature"] == 0

    @property
    def target(self) -> tuple[str, str]:
        """(name, fingerprint)"""
        name, _, fingerprint = self.summary["settings"]["target"].rpartition(" ")
        return name, fingerprint.strip("()")

    def mode(self, method: str) -> str:
        return next(iter(self.rows[method].values()))["mode"]

    def shapes(self, method: str) -> dict[str, Shape]:
        found = DRAFTER.findall(self.mode(method))
        return {name: Shape(name, int(nodes), float(p_min) if p_min else None) for name, nodes, p_min in found}

    def turns(self, method: str) -> Iterator[tuple[Row, int, Mapping[str, Any]]]:
        """(row, number of the turn, turn)"""
        for row in self.rows[method].values():
            for number, turn in enumerate(row["turns"]):
                yield row, number, turn

    def routed(self) -> list[Routed]:
        found = []
        for method in self.rows:
            mode, shapes = self.mode(method), tuple(self.shapes(method).values())
            router = ROUTER.search(mode)
            if router and len(shapes) == 2:
                drafting = self.summary["settings"]["methods"][method]["drafting"]
                tree = any(shape.drafter == "e3" for shape in shapes) and drafting["eagle3_top_k"] > 1
                found.append(Routed(method, router[1], float(router[2]), shapes, mode, tree))
        return found


def read_run(directory: Path) -> Run:
    """The directory of results of `whiflash bench` or `sweep`; raises where it is none, or its run is not complete."""
    file = directory / ROWS
    if not file.is_file():
        what = f"{directory} holds no {ROWS}" if directory.is_dir() else f"{directory} is no directory"
        raise WhiFlashError(f"{what}; give a directory of results of `whiflash bench` or `whiflash sweep`")
    try:
        summary = json.loads((directory / SUMMARY).read_text("utf-8"))
        complete, known = summary["complete"], summary["settings"].keys() & {"temperature", "target", "methods"}
    except OSError:
        complete, known = False, set()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WhiFlashError(
            f"{directory / SUMMARY} is damaged ({type(error).__name__}: {error}); remove it and run the same benchmark "
            "again, which writes it anew"
        ) from error
    if not complete or len(known) < 3:
        raise WhiFlashError(
            f"the run in {directory} is not complete; run the same command again, which goes on where it stopped"
        )
    rows: dict[str, dict[str, Row]] = {name: {} for name in summary["settings"]["methods"]}
    then = "remove that line and run the same benchmark again"
    for _, row in json_rows(file, file.read_bytes().split(b"\n"), then, check):
        if row["turns"]:
            rows.setdefault(row["method"], {})[row["prompt"]] = row
    run = Run(directory, {name: found for name, found in rows.items() if found}, summary)
    if not any(turn["rounds"]["slot"] for method in run.rows for _, _, turn in run.turns(method)):
        raise WhiFlashError(f"no answer in {directory} took a round; measure with more --max-new-tokens")
    return run


def routed(run: Run) -> list[Routed]:
    found = run.routed()
    if not found:
        raise WhiFlashError(
            f"the run in {run.directory} has no router to analyse: it measured {', '.join(run.rows)}; measure a pair "
            "with --speculative-algorithm WHIFLASH, and EAGLE3,DFLASH beside it to compare with"
        )
    return found


def profile(run: Run) -> Profile:
    """Latencies as this run's own rounds had them: medians, and catching up as a line through its rows and seconds."""
    plain: list[dict[str, float]] = []
    rounds: dict[tuple[str, int], list[dict[str, float]]] = {}
    caught: dict[str, list[tuple[int, float]]] = {}
    behind: dict[str, int] = {}
    for method in run.rows:
        shapes, eager = run.shapes(method), EAGER in run.mode(method)
        for _, _, turn in run.turns(method):
            table = turn["rounds"]
            times = [dict(zip(PHASES, row, strict=True)) for row in zip(*(table[p] for p in PHASES), strict=True)]
            columns = (table[name] for name in ("slot", "position", "caught_up", "drafted"))
            for slot, at, rows, drafted, phases in zip(*columns, times, strict=True):
                if slot is None:
                    plain.append(phases)
                    continue
                nodes = shapes[slot].nodes if shapes[slot].p_min is None else drafted
                if nodes:
                    rounds.setdefault((slot, nodes), []).append(phases)
                # an eager round's rows are those of both models
                if rows and not eager:
                    caught.setdefault(slot, []).append((rows, phases["catch_up"]))
                    behind[slot] = min(behind.get(slot, at), at - rows)
    found: dict[str, dict[int, dict[str, float]]] = {}
    for (name, nodes), seen in rounds.items():
        found.setdefault(name, {})[nodes] = {p: s for p, s in _medians(seen).items() if p != "catch_up"}
    catch_up = {name: _line(caught.get(name, ()), max(behind.get(name, 0), 0)) for name in found}
    return Profile(run.summary["machine"], _medians(plain), found, catch_up)


def _medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {p: median(r[p] for r in rounds) for p in PHASES} if rounds else {}


def _line(points: Sequence[tuple[int, float]], behind: int) -> CatchUp:
    if not points:
        return CatchUp(0.0, 0.0, behind)
    rows, seconds = np.array(points, dtype=float).T
    row, fixed = np.polyfit(rows, seconds, 1) if len(set(rows)) > 1 else (0.0, seconds.mean())
    if row < 0:
        row, fixed = 0.0, seconds.mean()
    elif fixed < 0:
        row, fixed = seconds.sum() / rows.sum(), 0.0
    return CatchUp(float(fixed), float(row), behind)
