"""A benchmark's summary for a terminal: the table of all categories, and the figures behind it."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from whiflash.evaluation.statistics import OVERALL

Figures = Mapping[str, Any]


def tables(summary: Figures) -> Iterator[Table]:
    """The overview if there are several categories, then per category speed, acceptance and where time went."""
    methods = summary["methods"]
    categories = list(dict.fromkeys(c for found in methods.values() for c in found["categories"] if c != OVERALL))
    if len(categories) > 1:
        categories.append(OVERALL)
        yield overview(methods, categories)
    for category in categories:
        yield details(methods, category)
    yield phases(methods, categories[-1] if categories else OVERALL)


def overview(methods: Figures, categories: list[str]) -> Table:
    table = Table("method", title="decode throughput relative to AR, and acceptance length (AL, bonus included)")
    for category in categories:
        table.add_column(f"{category}\nratio", justify="right")
        table.add_column("\nAL", justify="right")
    for name, found in methods.items():
        cells = []
        for category in categories:
            figures = found["categories"].get(category)
            cells += [
                f"{number(figures['decode_ratio']['value'])}×" if figures else "–",
                number(figures["acceptance_length_with_bonus"]) if figures else "–",
            ]
        table.add_row(name, *cells)
    return table


def details(methods: Figures, category: str) -> Table:
    prompts = max(
        (f["categories"][category]["prompts"] for f in methods.values() if category in f["categories"]), default=0
    )
    table = Table("method", title=f"{category}, {prompts} prompts")
    for heading in (
        "decode\ntok/s", "ratio to AR\n(95 %)", "end to end\ntok/s", "TTFT\nms", "AL with\nbonus",
        "accepted\nwithout bonus", "rounds (share of tokens)\nby slot", "switches per\n100 rounds", "peak\nMB",
        "outputs\nunlike AR",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for name, found in methods.items():
        f = found["categories"].get(category)
        if f:
            table.add_row(name, *_cells(f))
    return table


def _cells(f: Figures) -> list[str]:
    slots = "\n".join(f"{slot} {s['rounds']} ({100 * s['tokens']:.0f} %)" for slot, s in f["slots"].items())
    memory = f["peak_memory_bytes"]
    return [
        number(f["decode_tokens_per_second"], 1),
        interval(f["decode_ratio"]),
        number(f["end_to_end_tokens_per_second"], 1),
        number(1000 * f["ttft_seconds"], 0),
        number(f["acceptance_length_with_bonus"]),
        number(f["accepted_without_bonus"]),
        slots or "–",
        number(f["switches_per_100_rounds"], 1),
        "–" if memory is None else f"{memory / 1e6:.0f}",
        "–" if f["differing"] is None else f"{len(f['differing'])} of {f['prompts']}",
    ]


def phases(methods: Figures, category: str) -> Table:
    table = Table("method", title=f"share of round latency by phase, {category}")
    found = {name: m["categories"][category]["phases"] for name, m in methods.items() if category in m["categories"]}
    names = list(next(iter(found.values()), {}))
    for phase in names:
        table.add_column(phase.replace("_", "-"), justify="right")
    for name, shares in found.items():
        table.add_row(name, *(f"{number(100 * shares[p], 1)} %" for p in names))
    return table


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None or value != value else f"{value:.{digits}f}"


def interval(ratio: Figures) -> str:
    value = f"{number(ratio['value'])}×"
    low, high = number(ratio["low"]), number(ratio["high"])
    return value if "–" in (low, high) else f"{value} ({low}–{high})"


def machine_line(machine: Figures) -> str:
    parts = [machine.get("gpu") or machine["cpu"], f"{machine['threads']} threads", f"torch {machine['torch']}"]
    parts += [f"whiflash {machine['whiflash']}" + (f" at {machine['commit']}" if machine["commit"] else "")]
    return ", ".join(parts)
