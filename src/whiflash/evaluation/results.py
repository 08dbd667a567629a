"""The results directory of a benchmark: rows as they happen, and what is derived from them at the end.

results.jsonl holds one line a prompt and method with everything measured; rounds.parquet (one row a round) and
summary.json are made from it and can be made again at any time.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

from whiflash.decoding.session import PHASES, Round
from whiflash.errors import WhiFlashError
from whiflash.evaluation.ranks import Ranks
from whiflash.journal import Journal, exclusive, write_atomic

Row = dict[str, Any]
ROWS, ROUNDS, SUMMARY = "results.jsonl", "rounds.parquet", "summary.json"
ROWS_A_GROUP = 64
FIELDS = ("slot", "position", "acceptance_length", "accepted", "drafted", "caught_up", "entropy", "score")


def columns(rounds: Sequence[Round]) -> dict[str, list[Any]]:
    """Rounds as one list a field, for JSON: what does not exist (no router) is null, times are seconds."""
    values: dict[str, list[Any]] = {name: [] for name in (*FIELDS, *PHASES)}
    for r in rounds:
        for name in FIELDS:
            value = len(r.tokens) if name == "acceptance_length" else getattr(r, name)
            values[name].append(_json(value))
        for phase in PHASES:
            values[phase].append(round(r.times[phase], 7))
    return values


def check(row: Mapping[str, Any]) -> None:
    """Raises for what is no row of a benchmark."""
    texts = ("prompt", "dataset", "category", "method", "mode")
    if not all(isinstance(row[name], str) for name in texts) or "left_out" not in row:
        raise ValueError(f"{', '.join(texts)} must be texts, and left_out be there")
    for turn in row["turns"]:
        numbers = [turn["prompt_tokens"], turn["prefill_seconds"], turn["decode_seconds"], *turn["tokens"]]
        table = [turn["rounds"][name] for name in (*FIELDS, *PHASES)]
        numbers += chain.from_iterable(turn["rounds"][name] for name in ("position", "acceptance_length", *PHASES))
        if len(set(map(len, table))) > 1 or not all(isinstance(n, int | float) for n in numbers):
            raise ValueError("its rounds do not fit together")


class Results:
    """Rows of this run on disk: those found there, and those added. Rank r > 0 writes a file of its own until `merge`.

    Opening refuses a directory that holds a run with other settings, or that another run is writing to.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any], ranks: Ranks):
        self.directory, self.ranks = directory, ranks
        self._stack = ExitStack()
        problem = None
        if ranks.first:
            try:
                self._stack.enter_context(exclusive(directory / ".lock"))
                self._main = Journal(directory / ROWS, settings, check)
                for left in sorted(directory.glob("results.rank*.jsonl")):
                    self._fold(Journal(left, settings, check).rows)
                    _remove(left)
            except WhiFlashError as error:
                self._stack.close()
                problem = error
        ranks.agree(problem)
        if not ranks.first:
            self._main = Journal(directory / f"results.rank{ranks.rank}.jsonl", settings, check)
        whole = self._main.rows if ranks.first else _peek(directory / ROWS)
        self._known = {_key(row): row for row in [*whole, *self._main.rows]}
        self.found = len(self._known)
        ranks.wait()  # nobody writes before everybody has read

    def __enter__(self) -> "Results":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def get(self, prompt: str, method: str) -> Row | None:
        return self._known.get((prompt, method))

    def add(self, row: Row) -> None:
        self._main.append(row)
        self._known[_key(row)] = row

    def merge(self) -> list[Row]:
        """Bring the rows of all ranks into results.jsonl; returns them on rank 0, and nothing elsewhere."""
        mine: list[Row] = [] if self.ranks.first else self._main.rows
        for rows in self.ranks.gather(mine):
            self._fold(rows)
        self.ranks.wait()
        if not self.ranks.first:
            _remove(self._main.path)
            return []
        return self._main.rows

    def _fold(self, rows: Sequence[Row]) -> None:
        have = {_key(row) for row in self._main.rows}
        for row in rows:
            if _key(row) not in have:
                self._main.append(row)


def _key(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["prompt"], row["method"]


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.with_name(f"{path.stem}.settings.json").unlink(missing_ok=True)


def _peek(path: Path) -> list[Row]:
    """The whole lines of rank 0's file, if this machine sees it."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.is_file() else []


def write_summary(directory: Path, summary: Mapping[str, Any]) -> Path:
    path = directory / SUMMARY
    write_atomic(path, json.dumps(_json(summary), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return path


def _json(value: Any) -> Any:
    """NaN and infinity, which JSON lacks, become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _json(v) for k, v in value.items()}
    return [_json(v) for v in value] if isinstance(value, list | tuple) else value


def has_parquet() -> bool:
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        return False
    return True


def write_rounds(directory: Path, rows: Sequence[Row]) -> Path:
    """One row a round: prompt, dataset, category, method, turn, round, then the round's fields and seconds a phase."""
    import pyarrow as pa
    from pyarrow import parquet

    text, whole, real = pa.string(), pa.int32(), pa.float64()
    kinds = dict(zip(FIELDS, (text, whole, whole, whole, whole, whole, real, real), strict=True))
    schema = pa.schema(
        [(n, text) for n in ("prompt", "dataset", "category", "method")]
        + [("turn", whole), ("round", whole)]
        + [*kinds.items(), *((phase, real) for phase in PHASES)]
    )
    path = directory / ROUNDS
    partial = directory / f".{ROUNDS}.{os.getpid()}.tmp"
    try:
        with parquet.ParquetWriter(partial, schema) as writer:
            for start in range(0, len(rows), ROWS_A_GROUP):
                parts = [
                    pa.Table.from_pydict(part, schema)
                    for row in rows[start : start + ROWS_A_GROUP]
                    for part in _rounds(row)
                ]
                writer.write_table(pa.concat_tables([schema.empty_table(), *parts]))
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise WhiFlashError(
            f"{path} cannot be written ({error.strerror or error}); {ROWS} beside it holds all that was measured: "
            "free some space and run the same command again"
        ) from error
    return path


def _rounds(row: Row) -> Iterator[dict[str, list[Any]]]:
    for number, turn in enumerate(row["turns"]):
        count = len(turn["rounds"]["slot"])
        yield {
            **{name: [row[name]] * count for name in ("prompt", "dataset", "category", "method")},
            "turn": [number] * count,
            "round": list(range(count)),
            **turn["rounds"],
        }
