"""Figures of a benchmark from its rows, one row a prompt and method."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from whiflash.decoding.session import PHASES

Row = Mapping[str, Any]
RESAMPLES = 2000
OVERALL = "overall"

DEFINITIONS = {
    "decode_tokens_per_second": "tokens of all rounds / time of all rounds (prompt pass and its token left out)",
    "decode_ratio": "decode_tokens_per_second / AR's on the same prompts, with a 95 % bootstrap interval over prompts",
    "against": "as decode_ratio, but relative to each drafter of a pair on its own",
    "end_to_end_tokens_per_second": "all tokens / (prompt pass + all rounds)",
    "ttft_seconds": "time to first token: prompt pass, mean over turns",
    "acceptance_length_with_bonus": "tokens committed a round, the target's own bonus token included",
    "accepted_without_bonus": "drafted tokens accepted a round, the bonus token left out",
    "histogram": "rounds by acceptance length (bonus included)",
    "slots": "rounds drafted by each slot; tokens is the share of all rounds' tokens committed in them",
    "switches_per_100_rounds": "changes of slot from one round to the next, within an answer",
    "phases": "share of round latency",
    "peak_memory_bytes": "most memory while the method answered; see machine.memory for what is counted",
    "differing": "prompts whose greedy tokens are not AR's (null when sampling)",
}


def bootstrap(
    numerator: Sequence[float],
    denominator: Sequence[float],
    base_numerator: Sequence[float],
    base_denominator: Sequence[float],
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float, float]:
    """Ratio of two rates, (Σn / Σd) / (Σn' / Σd'), and its 95 % percentile interval.

    The four sequences belong to the same prompts, which are drawn together with replacement (a paired bootstrap; Efron
    & Tibshirani 1993, chapter 13). One prompt has no spread: its interval is NaN.
    """
    values = np.asarray([numerator, denominator, base_numerator, base_denominator], dtype=float)
    count = values.shape[1]
    if count == 0:
        return float("nan"), float("nan"), float("nan")
    ratio = _ratio(values.sum(1))
    if count == 1:
        return float(ratio), float("nan"), float("nan")
    drawn = np.random.default_rng(seed).integers(count, size=(resamples, count))
    low, high = np.percentile(_ratio(values[:, drawn].sum(2)), [2.5, 97.5])
    return float(ratio), float(low), float(high)


def _ratio(sums: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return (sums[0] / sums[1]) / (sums[2] / sums[3])


def summarise(
    rows: Sequence[Row], baseline: str, greedy: bool, rivals: Mapping[str, Sequence[str]] | None = None
) -> dict[str, dict[str, dict[str, Any]]]:
    """method → category (and "overall") → figures, as DEFINITIONS names them; NaN where nothing was measured.

    rivals: method → other methods that it is to be compared with.
    """
    by_method: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_method.setdefault(row["method"], {})[row["prompt"]] = row
    base = by_method.get(baseline, {})
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for method in by_method:
        others = {name: by_method[name] for name in (rivals or {}).get(method, ()) if name in by_method}
        mine = [row for row in by_method[method].values() if row["turns"]]
        categories = dict.fromkeys(row["category"] for row in mine)
        parts = {c: [row for row in mine if row["category"] == c] for c in categories}
        if len(categories) > 1:
            parts[OVERALL] = mine
        found[method] = {c: figures(part, base, greedy, others) for c, part in parts.items()}
    return found


def figures(
    rows: Sequence[Row],
    base: Mapping[str, Row],
    greedy: bool,
    others: Mapping[str, Mapping[str, Row]] | None = None,
) -> dict[str, Any]:
    """Figures of one method's rows against the baseline's, and other methods', rows of the same prompts (by id)."""
    turns = [turn for row in rows for turn in row["turns"]]
    rounds = {key: list(_column(turns, key)) for key in ("acceptance_length", "accepted", "slot", *PHASES)}
    lengths, slots = rounds["acceptance_length"], rounds["slot"]
    count, total = len(lengths), sum(lengths)
    paired = _paired(rows, base)
    latency = sum(sum(rounds[p]) for p in PHASES)
    switches = sum(a != b for turn in turns for a, b in pairwise(turn["rounds"]["slot"]))
    memory = [row["peak_memory"] for row in rows if row.get("peak_memory")]
    differing = [row["prompt"] for row in paired if tokens(row) != tokens(base[row["prompt"]])] if greedy else None
    by_slot = Counter(slots)
    tokens_by_slot: Counter[str | None] = Counter()
    for slot, length in zip(slots, lengths, strict=True):
        tokens_by_slot[slot] += length
    return {
        "prompts": len(rows),
        "tokens": sum(len(turn["tokens"]) for turn in turns),
        "rounds": count,
        "decode_tokens_per_second": _rate(_sums(rows, _decode)),
        "decode_ratio": _against(rows, base),
        "against": {name: _against(rows, other) for name, other in (others or {}).items()},
        "end_to_end_tokens_per_second": _rate(_sums(rows, _end_to_end)),
        "ttft_seconds": _mean([turn["prefill_seconds"] for turn in turns]),
        "acceptance_length_with_bonus": _mean(lengths),
        "accepted_without_bonus": _mean(rounds["accepted"]),
        "histogram": {str(length): n for length, n in sorted(Counter(lengths).items())},
        "slots": {
            slot: {"rounds": n, "tokens": tokens_by_slot[slot] / total}
            for slot, n in by_slot.items()
            if slot is not None
        },
        "switches_per_100_rounds": 100 * switches / count if count else float("nan"),
        "phases": {p: sum(rounds[p]) / latency if latency else float("nan") for p in PHASES},
        "peak_memory_bytes": max(memory, default=None),
        "differing": differing,
    }


def _paired(rows: Sequence[Row], other: Mapping[str, Row]) -> list[Row]:
    return [row for row in rows if row["prompt"] in other and other[row["prompt"]]["turns"]]


def _against(rows: Sequence[Row], other: Mapping[str, Row]) -> dict[str, Any]:
    mine = _paired(rows, other)
    value, low, high = bootstrap(*_sums(mine, _decode), *_sums([other[row["prompt"]] for row in mine], _decode))
    return {"value": value, "low": low, "high": high, "prompts": len(mine)}


def tokens(row: Row) -> list[list[int]]:
    return [turn["tokens"] for turn in row["turns"]]


def never_drafted(rows: Iterable[Row], baseline: str) -> list[str]:
    """Methods that are meant to draft and drafted nothing in the whole run."""
    drafted: Counter[str] = Counter()
    for row in rows:
        if row["turns"]:
            drafted[row["method"]] += sum(_column(row["turns"], "drafted"))
    return [method for method, count in drafted.items() if method != baseline and not count]


def _column(turns: Sequence[Row], key: str) -> Iterator[Any]:
    for turn in turns:
        yield from turn["rounds"][key]


def _decode(turn: Row) -> tuple[float, float]:
    return len(turn["tokens"]) - 1, turn["decode_seconds"]


def _end_to_end(turn: Row) -> tuple[float, float]:
    return len(turn["tokens"]), turn["prefill_seconds"] + turn["decode_seconds"]


def _sums(rows: Sequence[Row], measure) -> tuple[list[float], list[float]]:
    """Per row: tokens and seconds, summed over its turns."""
    pairs = [[measure(turn) for turn in row["turns"]] for row in rows]
    return [sum(n for n, _ in row) for row in pairs], [sum(s for _, s in row) for row in pairs]


def _rate(sums: tuple[list[float], list[float]]) -> float:
    seconds = sum(sums[1])
    return sum(sums[0]) / seconds if seconds else float("nan")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
