"""A benchmark's summary for a terminal: the table of all categories, and the figures behind it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from whiflash.decoding.session import PHASES
from whiflash.evaluation.statistics import OVERALL

Figures = Mapping[str, Any]


def tables(summary: Figures) -> Iterator[Table]:
    """The overview if there are several categories, then speed and drafting by category, then where time went."""
    methods = summary["methods"]
    categories = list(dict.fromkeys(c for found in methods.values() for c in found["categories"] if c != OVERALL))
    if len(categories) > 1:
        categories.append(OVERALL)
        yield overview(methods, categories)
    if any(f["against"] for found in methods.values() for f in found["categories"].values()):
        yield against(methods, categories)
    yield speed(methods, categories)
    yield drafting(methods, categories)
    yield phases(methods, categories[-1:])


def overview(methods: Figures, categories: Sequence[str]) -> Table:
    table = _table("decode throughput relative to AR (×), then acceptance length (bonus included)", *categories)
    for name, found in methods.items():
        cells = []
        for category in categories:
            f = found["categories"].get(category)
            length = f and number(f["acceptance_length_with_bonus"])
            cells.append(f"{number(f['decode_ratio']['value'])}× {length:>4}" if f else "–")
        table.add_row(name, *cells)
    return table


def against(methods: Figures, categories: Sequence[str]) -> Table:
    table = _table("decode throughput of pairs relative to their drafters alone (95 % interval)", *categories)
    for name, found in methods.items():
        rivals = dict.fromkeys(r for f in found["categories"].values() for r in f["against"])
        for rival in rivals:
            cells = [
                interval(found["categories"][c]["against"][rival]) if c in found["categories"] else "–"
                for c in categories
            ]
            table.add_row(f"{name} / {rival}", *cells)
    return table


def speed(methods: Figures, categories: Sequence[str]) -> Table:
    table = _table(
        "speed", "prompts", "decode\ntok/s", "ratio to AR\n(95 % interval)", "end to end\ntok/s", "TTFT\nms", "peak\nMB"
    )
    for name, f in _sections(table, methods, categories):
        memory = f["peak_memory_bytes"]
        table.add_row(
            name,
            str(f["prompts"]),
            number(f["decode_tokens_per_second"], 1),
            interval(f["decode_ratio"]),
            number(f["end_to_end_tokens_per_second"], 1),
            number(f["ttft_seconds"] and 1000 * f["ttft_seconds"], 0),
            "–" if memory is None else f"{memory / 1e6:.0f}",
        )
    return table


def drafting(methods: Figures, categories: Sequence[str]) -> Table:
    table = _table(
        "drafting", "AL with\nbonus", "accepted\nw/o bonus", "rounds by slot\n(of all tokens)", "switches\nper 100",
        "outputs\nunlike AR",
    )  # fmt: skip
    for name, f in _sections(table, methods, categories):
        slots = sorted(f["slots"].items())
        table.add_row(
            name,
            number(f["acceptance_length_with_bonus"]),
            number(f["accepted_without_bonus"]),
            "\n".join(f"{slot} {s['rounds']} ({100 * s['tokens']:3.0f} %)" for slot, s in slots) or "–",
            number(f["switches_per_100_rounds"], 1),
            "–" if f["differing"] is None else f"{len(f['differing'])} of {f['prompts']}",
        )
    return table


def phases(methods: Figures, categories: Sequence[str]) -> Table:
    names = [p.replace("_", "-") for p in PHASES]
    table = _table(f"share of round latency, {' '.join(categories)}", *names)
    for name, f in _sections(table, methods, categories):
        table.add_row(name, *(f"{number(100 * share, 1)} %" for share in f["phases"].values()))
    return table


def _table(title: str, *headings: str) -> Table:
    table = Table("method", title=title, box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def calibration_table(found: Figures) -> Table:
    """One line a router and category: what was chosen, what it brings, and how close the closed form comes."""
    first, second = found["pair"].split("-")
    table = _table(
        f"{found['pair']}, replayed: AR {found['plain_tokens_per_second']:.1f} tok/s", "threshold",
        f"nodes of\n{first}, {second}", "p ≥", "tok/s", "AL", f"{second}\ndrafts", f"{first} alone\ntok/s",
        f"{second} alone\ntok/s", "closed\nform", "knowing\nall, tok/s",
    )  # fmt: skip
    table.caption = (
        f"{found['texts']} texts; nodes: at most, if as likely as p; closed form: its share of the best found"
    )
    for router, routed in found["routers"].items():
        table.add_section()
        table.add_row(f"[bold]{router}[/]")
        if routed["held_out"] is not None:
            table.caption += f"; {router} chosen on one half of them gets {routed['held_out']:.1%} on the other"
        for category, f in routed["categories"].items():
            table.add_row(
                category,
                f"{f['threshold']:g}",
                ", ".join(str(f["lengths"][slot]) for slot in (first, second)),
                "–" if f["p_min"] is None else f"{f['p_min']:g}",
                number(f["tokens_per_second"], 1),
                number(f["acceptance_length"]),
                f"{f['second_share']:.0%}",
                *(number(f["alone"][slot]["tokens_per_second"], 1) for slot in (first, second)),
                f"{f['closed_form']['tokens_per_second'] / f['tokens_per_second']:.1%}",
                number(f["oracle_tokens_per_second"], 1),
            )
    return table


def _sections(table: Table, methods: Figures, categories: Sequence[str]) -> Iterator[tuple[str, Figures]]:
    """(name, figures) of every method, category after category; a line of its own names the category if several."""
    for category in categories:
        if len(categories) > 1:
            table.add_section()
            table.add_row(f"[bold]{category}[/]")
        for name, found in methods.items():
            if category in found["categories"]:
                yield name, found["categories"][category]


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


def bounds_table(method: str, found: Figures) -> Table:
    """Recorded answers replayed: either drafter, the router, the oracles, and what is possible at all."""
    second = found["slots"][1][0]
    table = _table(f"{method}: recorded answers, replayed", "AL", "tok/s", "of bound", f"{second}\ndrafts")
    best = found["bounds"]["bound"]["tokens_per_second"]
    for name, f in found["bounds"].items():
        share = "–" if f["second_share"] is None else f"{f['second_share']:.0%}"
        speed = f["tokens_per_second"]
        table.add_row(name, number(f["acceptance_length"]), number(speed, 1), f"{speed / best:.0%}", share)
    return table
