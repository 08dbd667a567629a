"""Positions of greedy answers where it is known what either slot would commit: recorded, or met in the run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from whiflash.errors import WhiFlashError
from whiflash.evaluation.latency import Profile
from whiflash.evaluation.methods import BASELINE
from whiflash.evaluation.record import P_MINS, Text
from whiflash.evaluation.replay import above, committed
from whiflash.evaluation.runs import Routed, Run, Shape
from whiflash.journal import json_rows, read_json

Known = dict[Shape, dict[tuple[str, int, int], int]]


@dataclass(frozen=True)
class Roots:
    """n roots of one answer. lengths [2, n]: the acceptance length of either slot there. entropy [n] in nats and score
    [n]: what the router saw and what it compared; picked [n]: whether it takes slot 1."""

    prompt: str
    category: str
    lengths: np.ndarray
    entropy: np.ndarray
    score: np.ndarray
    picked: np.ndarray

    @property
    def gain(self) -> np.ndarray:
        return self.lengths[1] - self.lengths[0]


@dataclass(frozen=True)
class Record:
    """What `whiflash calibrate` recorded, with its machine's latencies if the calibration itself was given."""

    path: Path
    texts: list[Text]
    settings: Mapping[str, Any]
    profile: Profile | None


def read_record(path: Path) -> Record:
    """A calibration (.json), which names its record, or the record (.jsonl) itself."""
    profile, file = None, path
    if path.suffix == ".json":
        profile = Profile.read(path)
        try:
            file = Path(json.loads(path.read_text("utf-8"))["made_of"]["record"])
        except (KeyError, TypeError) as error:
            raise WhiFlashError(
                f"{path} does not name a record; give a file that `whiflash calibrate` wrote, or its record-….jsonl"
            ) from error
    beside = file.with_name(f"{file.stem}.settings.json")
    again = "run `whiflash calibrate` again"
    try:
        settings = read_json(beside, again) if beside.is_file() else {}
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise WhiFlashError(f"the record {file} cannot be read ({error.strerror}); {again}") from error
    then = f"give a calibration (.json) or its record-….jsonl; if it is one, remove it and {again}"
    rows = [row for _, row in json_rows(file, lines, then, check_text)]
    texts = [Text(**row) for row in rows if "left_out" not in row]
    if not texts:
        raise WhiFlashError(f"the record {file} holds no answer; run `whiflash calibrate` with other prompts")
    return Record(file, texts, settings, profile)


def check_text(row: Mapping[str, Any]) -> None:
    """Raises for what is no row of a record."""
    if "left_out" in row:
        return
    other = row.keys() ^ {field.name for field in fields(Text)}
    if other:
        raise ValueError(f"{', '.join(sorted(other))} is missing or unknown")
    text = Text(**row)
    nested = [*text.paths.values(), *text.likely.values()]
    tables: list[Any] = [*text.scores.values(), *nested]
    if not isinstance(text.id, str) or not isinstance(text.category, str) or len(set(map(len, tables))) != 1:
        raise ValueError("its scores, paths and likely must be of the same length, its id and category texts")
    numbers = chain([text.prompt], *text.scores.values(), *chain(*nested))
    if not text.scores or not all(isinstance(n, int | float) for n in numbers):
        raise ValueError("its prompt, scores, paths and likely must be numbers")


def check_fits(record: Record, run: Run) -> None:
    """Refuse a record of other models than the run's, or a run that sampled: a record holds greedy answers."""
    (name, fingerprint), settings = run.target, run.summary["settings"]
    made, used = record.settings, {"target": fingerprint, "dtype": settings.get("dtype")}
    differing = [key for key, value in used.items() if made.get(key, value) != value]
    drafters = settings.get("drafters", {})
    differing += [f"{slot} drafter" for slot, own in made.get("drafters", {}).items() if drafters.get(slot, own) != own]
    if differing:
        raise WhiFlashError(
            f"the record {record.path} was made with another {' and another '.join(differing)} than the run; run "
            f"`whiflash calibrate --target {name}` with the models of the run and give what it writes"
        )
    if settings.get("temperature"):
        raise WhiFlashError(
            f"the run sampled at temperature {settings['temperature']:g}, but a record holds greedy answers; "
            "leave --record out, or measure greedily"
        )


def score_name(method: Routed) -> str:
    return method.router if method.router == "entropy" else f"{method.router} {method.pair}"


def from_record(record: Record, method: Routed) -> list[Roots]:
    """Every root of the recorded answers; raises where the record lacks a drafter, its shape, or the router."""
    first, second = method.shapes
    texts, score = record.texts, score_name(method)
    longest = record.settings.get("longest", {})
    lacking = [s.drafter for s in method.shapes if any(s.drafter not in text.paths for text in texts)]
    lacking += [f"{score} router" for _ in "." if any(score not in text.scores for text in texts)]
    lacking += [f"{s.drafter} with {s.nodes} nodes" for s in method.shapes if s.nodes > longest.get(s.drafter, s.nodes)]
    lacking += [f"p_min of {s.p_min:g}" for s in method.shapes[:1] if s.p_min not in (None, *P_MINS)]
    lacking += ["EAGLE-3 trees" for _ in "." if method.tree]
    if lacking:
        raise WhiFlashError(
            f"the record has no {' and no '.join(lacking)}; run `whiflash calibrate --drafters {method.pair}` with the "
            "models of the run"
        )
    return [
        Roots(
            text.id,
            text.category,
            np.stack([committed(text, *first), committed(text, *second)]),
            np.array(text.scores["entropy"]),
            np.array(text.scores[score]),
            above(text, score, [method.threshold])[0],
        )
        for text in texts
    ]


def known(run: Run) -> Known:
    """Acceptance lengths of every shape at every (prompt, turn, position) a method of the run drafted from.

    Only where the answer is the baseline's up to the end of the round, so that all methods speak of one text.
    """
    found: Known = {}
    for method in run.rows:
        shapes = run.shapes(method)
        for row, number, turn in run.turns(method):
            shared = _shared(run, row, number, turn)
            table = turn["rounds"]
            for slot, at, length in zip(table["slot"], table["position"], table["acceptance_length"], strict=True):
                if slot is not None and at - turn["prompt_tokens"] + length < shared:
                    found.setdefault(shapes[slot], {})[row["prompt"], number, at] = length
    return found


def _shared(run: Run, row: Mapping[str, Any], number: int, turn: Mapping[str, Any]) -> int:
    """How many tokens of the answer are the baseline's."""
    base = run.rows.get(BASELINE, {}).get(row["prompt"])
    theirs = base["turns"][number]["tokens"] if base and number < len(base["turns"]) else ()
    count = 0
    for mine, other in zip(turn["tokens"], theirs, strict=False):
        if mine != other:
            break
        count += 1
    return count


def from_run(run: Run, method: Routed, known: Known) -> list[Roots]:
    """The roots of the method's own rounds where another method drafted with the other slot."""
    first, second = (known.get(shape, {}) for shape in method.shapes)
    found = []
    for row, number, turn in run.turns(method.name) if run.greedy else ():
        table = turn["rounds"]
        rows = []
        for slot, at, entropy, score in zip(
            table["slot"], table["position"], table["entropy"], table["score"], strict=True
        ):
            key = (row["prompt"], number, at)
            if key in first and key in second:
                rows.append((first[key], second[key], entropy, score, slot == method.shapes[1].drafter))
        if rows:
            zero, one, entropy, score, picked = (np.array(values) for values in zip(*rows, strict=True))
            found.append(
                Roots(row["prompt"], row["category"], np.stack([zero, one]), entropy.astype(float), score, picked)
            )
    return found


def agreement(run: Run, method: Routed, texts: Sequence[Text]) -> tuple[int, int]:
    """(rounds that committed what the record says, rounds compared): those of the method on recorded prompts.

    The ends of either text are left out, since they cut a round short.
    """
    same = compared = 0
    by_id = {text.id: text for text in texts}
    lengths = {
        (text.id, shape.drafter): committed(text, *shape)
        for text in texts
        for shape in method.shapes
        if shape.drafter in text.paths
    }
    for row, number, turn in run.turns(method.name) if run.greedy else ():
        text = by_id.get(row["prompt"])
        if number or text is None or turn["prompt_tokens"] != text.prompt:
            continue
        end = min(text.prompt + text.roots, turn["prompt_tokens"] + len(turn["tokens"]) - 1)
        table = turn["rounds"]
        for slot, at, length in zip(table["slot"], table["position"], table["acceptance_length"], strict=True):
            recorded = lengths.get((text.id, slot))
            if recorded is not None and at < end and at + max(length, recorded[at - text.prompt]) < end:
                compared += 1
                same += int(recorded[at - text.prompt] == length)
    return same, compared
