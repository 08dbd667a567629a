"""What a round costs on this machine: seconds per phase for every drafter and length of draft, measured or given."""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from whiflash.decoding.session import PHASES, Session
from whiflash.drafters.drafter import Drafter
from whiflash.errors import WhiFlashError
from whiflash.evaluation.benchmark import Progress
from whiflash.journal import shown
from whiflash.routers.router import Router
from whiflash.target.target import Target

ROUNDS, WARM_UP = 20, 2
# drafters that go on node by node, and so stop at the first that is not likely enough
STEPWISE = ("e3",)
# rows caught up at once, to tell what a row costs from what a catch-up costs
ROWS = 64
LENGTH = re.compile(r"[1-9][0-9]{0,5}")
# nothing here takes a day, and figures must not overflow
MOST_SECONDS, MOST_BEHIND = 86_400, 1_000_000


@dataclass(frozen=True)
class CatchUp:
    """`fixed` seconds and seconds per `row`; a drafter leaves the last `behind` rows to its draft."""

    fixed: float
    row: float
    behind: int = 0

    def seconds(self, rows: np.ndarray) -> np.ndarray:
        return np.where(rows > 0, self.fixed + self.row * rows, 0.0)


@dataclass(frozen=True)
class Profile:
    """plain: phases of a round without a drafter. rounds[drafter][nodes besides the root]: those of a drafted round.

    Seconds, medians. Catching up is told apart, since its cost depends on how long a drafter was not picked.
    """

    machine: dict[str, Any]
    plain: dict[str, float]
    rounds: dict[str, dict[int, dict[str, float]]]
    catch_up: dict[str, CatchUp]

    def seconds(self, drafter: str, length: int, kept: np.ndarray | None = None) -> np.ndarray:
        """Latency but for catching up of rounds of at most `length` nodes, of which `kept` [n] (all if left out) were
        likely enough to be verified; between the numbers of nodes that were timed, on a line."""
        nodes = np.array(length if kept is None else kept)
        drafted = np.minimum(nodes + 1, length) if drafter in STEPWISE else np.full_like(nodes, length)
        return self._phases(drafter, drafted, {"draft"}) + self._phases(drafter, nodes, set(PHASES) - {"draft"})

    def _phases(self, drafter: str, nodes: np.ndarray, phases: set[str]) -> np.ndarray:
        timed = dict(sorted(self.rounds[drafter].items()))
        if self.plain and "draft" not in phases:
            timed = {0: self.plain, **timed}
        return np.interp(nodes, list(timed), [sum(s for p, s in row.items() if p in phases) for row in timed.values()])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, path: Path) -> "Profile":
        """A profile as JSON, or the calibration that holds one."""
        try:
            found = _object(json.loads(path.read_text("utf-8")), "what it holds")
            found = _object(found.get("profile", found), "profile")
            rounds, catch_up = (_object(found.get(key), key) for key in ("rounds", "catch_up"))
            return cls(
                _object(found.get("machine", {}), "machine"),
                _phases(found.get("plain"), "plain"),
                {name: _rounds(given, f"rounds.{name}") for name, given in rounds.items()},
                {name: _caught_up(given, f"catch_up.{name}") for name, given in catch_up.items()},
            )
        except OSError as error:
            raise WhiFlashError(f"the latency profile {path} cannot be read ({error.strerror})") from error
        except (ValueError, RecursionError) as error:
            raise WhiFlashError(
                f"{path} is no latency profile ({error}); expected what `whiflash calibrate` writes: plain, rounds "
                "(drafter, length, phase) and catch_up, in seconds"
            ) from error


def _object(given: Any, key: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ValueError(f"{key} must be an object, {_got(given)}")
    return given


def _seconds(given: Any, key: str) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= MOST_SECONDS:
        raise ValueError(f"{key} must be a number of at least 0 seconds, {_got(given)}")
    return given


def _got(given: Any) -> str:
    return "but is missing" if given is None else f"got {shown(given)}"


def _phases(given: Any, key: str) -> dict[str, float]:
    phases = {name: _seconds(value, f"{key}.{name}") for name, value in _object(given, key).items()}
    unknown = [name for name in phases if name not in PHASES]
    if unknown:
        raise ValueError(f"{key}.{unknown[0]} is no phase of {', '.join(PHASES)}")
    if not sum(phases.values()) > 0:
        raise ValueError(f"{key} must take more than 0 seconds")
    return phases


def _rounds(given: Any, key: str) -> dict[int, dict[str, float]]:
    rounds = {}
    for length, phases in _object(given, key).items():
        if not LENGTH.fullmatch(length):
            raise ValueError(f"{key}.{length} must be a length of a draft, a whole number of at least 1")
        rounds[int(length)] = _phases(phases, f"{key}.{length}")
    if not rounds:
        raise ValueError(f"{key} must have a round")
    return rounds


def _caught_up(given: Any, key: str) -> CatchUp:
    rest = dict(_object(given, key))
    fixed, row = (_seconds(rest.pop(name, None), f"{key}.{name}") for name in ("fixed", "row"))
    behind = rest.pop("behind", 0)
    if isinstance(behind, bool) or not isinstance(behind, int) or not 0 <= behind <= MOST_BEHIND:
        raise ValueError(f"{key}.behind must be a whole number of at least 0 rows, {_got(behind)}")
    if rest:
        raise ValueError(f"{key}.{next(iter(rest))} is none of fixed, row and behind")
    return CatchUp(fixed, row, behind)


def measure(
    target: Target,
    build: Mapping[str, Callable[[int], Drafter]],
    lengths: Mapping[str, Sequence[int]],
    router: Router,
    prompt: Sequence[int],
    machine: Mapping[str, Any],
    progress: Progress,
) -> Profile:
    """Real rounds of every drafter in every length, in turn, so that a slow moment of the machine hits them alike.

    router is only run for its cost: there is one drafter to pick. It must pick slot 0.
    """
    shapes: list[tuple[str, int]] = [("", 0), *((name, n) for name in build for n in lengths[name])]
    sessions = []
    for name, length in shapes:
        drafters = [build[name](length)] if name else []
        room = len(prompt) + (ROUNDS + WARM_UP + 1) * (length + 1)
        session = Session(target, drafters, router if drafters else None, timed=True, capacity=room)
        session.prefill(prompt)
        sessions.append(session)
    catch_up = {}
    for (name, _), session in zip(shapes, sessions, strict=True):
        if name and name not in catch_up:
            catch_up[name] = _catch_up(session)
    times: list[list[dict[str, float]]] = [[] for _ in shapes]
    for turn in range(WARM_UP + ROUNDS):
        progress(turn, WARM_UP + ROUNDS, "timing rounds")
        for (_, length), session, found in zip(shapes, sessions, times, strict=True):
            if session.cache.length + length + 1 <= target.max_positions:
                found.append(session.round().times)
    progress(WARM_UP + ROUNDS, WARM_UP + ROUNDS, "timed")
    if min(map(len, times)) <= WARM_UP:
        raise WhiFlashError(f"{target.name} reads only {target.max_positions} tokens, too few to time a round")
    middle = [{p: median(t[p] for t in found[WARM_UP:]) for p in PHASES} for found in times]
    rounds: dict[str, dict[int, dict[str, float]]] = {name: {} for name in build}
    for (name, length), phases in zip(shapes[1:], middle[1:], strict=True):
        rounds[name][length] = {p: s for p, s in phases.items() if p != "catch_up"}
    return Profile(dict(machine), middle[0], rounds, catch_up)


@torch.inference_mode()
def _catch_up(session: Session) -> CatchUp:
    (drafter,), (state,) = session.drafters, session.states.values()
    drafter.catch_up(state, session.log)
    end = state.cursor

    def seconds(rows: int) -> float:
        found = []
        for _ in range(5):
            state.cache.truncate(end - rows)
            started = time.perf_counter()
            drafter.catch_up(state, session.log)
            if session.timed:
                torch.accelerator.synchronize()
            found.append(time.perf_counter() - started)
        return median(found)

    many, behind = min(ROWS, end), session.log.length - end
    if many < 2:
        return CatchUp(seconds(1) if end else 0.0, 0.0, behind)
    one, all_of_them = seconds(1), seconds(many)
    row = max(all_of_them - one, 0.0) / (many - 1)
    return CatchUp(max(one - row, 0.0), row, behind)
