"""The plots of an analysis, each drawn once and kept as PNG and SVG; the report shows the SVG in its own colours."""

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from whiflash.decoding.session import PHASES
from whiflash.errors import WhiFlashError
from whiflash.evaluation.methods import BASELINE
from whiflash.journal import write_atomic

# distinct for colour-blind readers, and against white and dark pages
COLORS = {"df": "#3b7fc4", "ddt": "#2a9d8f", "e3": "#e07b39", "target": "#8a8f98"}
PAIR_COLORS, MARKERS = {"df-e3": "#8b5fbf", "ddt-e3": "#c2557a", "df-ddt": "#b08d1f"}, "oDs^vP"
TIE, ROUTER, ORACLE = "#b9bec7", "#8b5fbf", "#3f8f4f"
PHASE_COLORS = ("#8b5fbf", "#e07b39", "#3b7fc4", "#8a8f98", "#d4a72c", "#2a9d8f")
# stands for the page's text colour, which an SVG inside a page can take over
INK = "#1c2129"
STYLE = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "grid.linewidth": 0.6, "axes.axisbelow": True,
    "legend.frameon": False, "legend.fontsize": 8, "figure.constrained_layout.use": True, "axes.titlesize": 10,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "grid.color"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
}  # fmt: skip
SIZE = (5.8, 3.1)


class Plots:
    """Plots of a directory, by name; `svg` is for a page, with its text in the page's colour."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.svg: dict[str, str] = {}

    @contextmanager
    def figure(self, name: str, alt: str, height: float = SIZE[1]) -> Iterator[Any]:
        """Axes to draw on, kept as <name>.png and <name>.svg when done. alt: what is to be seen, in words."""
        import matplotlib
        from matplotlib.figure import Figure

        with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
            figure = Figure((SIZE[0], height))
            yield figure.add_subplot()
            text = io.StringIO()
            figure.savefig(
                text, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
            )
            write_atomic(self.directory / f"{name}.svg", text.getvalue())
            try:
                figure.savefig(self.directory / f"{name}.png", dpi=160)
            except OSError as error:
                raise WhiFlashError(
                    f"{self.directory / name}.png cannot be written ({error.strerror or error})"
                ) from error
        self.svg[name] = inline(text.getvalue(), name, alt)


def check() -> None:
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise WhiFlashError(
            f"the report is drawn with matplotlib and jinja2, but {error.name} is not installed: "
            "pip install 'whiflash[analyse]'"
        ) from error


def inline(svg: str, name: str, alt: str) -> str:
    """An SVG for the middle of a page: as wide as its place, its ids its own, its text in the page's colour."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    label = alt.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1).replace(INK, "currentColor")


def speeds(plots: Plots, summary: Mapping[str, Any]) -> None:
    """Decode throughput of every method relative to plain decoding, by category, with 95 % intervals."""
    methods = {name: found["categories"] for name, found in summary["methods"].items() if name != BASELINE}
    drafters = [summary["settings"]["methods"][name]["drafters"] for name in methods]
    categories = list(dict.fromkeys(c for found in methods.values() for c in found))
    height = SIZE[1] + len(methods) // 4 / 4
    with plots.figure("speeds", "Decode throughput relative to plain decoding, by category and method", height) as axes:
        for place, (name, found) in enumerate(methods.items()):
            for index, category in enumerate(categories):
                ratio = found.get(category, {}).get("decode_ratio", {"value": None})
                if ratio["value"] is None:
                    continue
                x = index + 0.7 * ((place + 0.5) / len(methods) - 0.5)
                color = {**COLORS, **PAIR_COLORS}[drafters[place]]
                marker = MARKERS[drafters[:place].count(drafters[place]) % len(MARKERS)]
                axes.plot(x, ratio["value"], marker, color=color, ms=5, label=name)
                if ratio["low"] is not None:
                    axes.vlines(x, ratio["low"], ratio["high"], color=color, lw=1.5)
        axes.axhline(1, color=INK, lw=0.8, ls=":")
        axes.set_xticks(range(len(categories)), categories)
        axes.grid(axis="x", visible=False)
        axes.set_ylabel(f"× {BASELINE}")
        unique = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        axes.legend(unique.values(), unique.keys(), ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))


def phases(plots: Plots, summary: Mapping[str, Any]) -> None:
    """Where the time of a round goes, method by method."""
    methods = {name: list(found["categories"].values())[-1]["phases"] for name, found in summary["methods"].items()}
    with plots.figure("phases", "Share of round latency by phase and method", 1.0 + 0.32 * len(methods)) as axes:
        left = [0.0] * len(methods)
        for phase, color in zip(PHASES, PHASE_COLORS, strict=True):
            shares = [100 * (found[phase] or 0) for found in methods.values()]
            axes.barh(list(methods), shares, left=left, color=color, height=0.7, label=phase.replace("_", "-"))
            left = [a + b for a, b in zip(left, shares, strict=True)]
        axes.set_xlim(0, 100)
        axes.set_xlabel("% of round latency")
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.legend(ncols=6, loc="lower center", bbox_to_anchor=(0.4, 1), handlelength=1, columnspacing=1)


def method(plots: Plots, key: str, found: Mapping[str, Any]) -> list[str]:
    """Draw what is known about a routed method; returns the names of its plots."""
    drawn: list[tuple[str, Callable[..., None], Any]] = [
        ("bounds", _bounds, found["bounds"]),
        ("wins", _wins, found["wins"]),
        ("deciles", _deciles, found["deciles"]),
        ("router", _router, found["score_deciles"]),
        ("runs", _runs, found["run_lengths"]),
    ]
    names = []
    for name, draw, data in drawn:
        if data:
            names.append(f"{key}-{name}")
            draw(plots, names[-1], found, data)
    return names


def _bounds(plots: Plots, name: str, found: Mapping[str, Any], bounds: Mapping[str, Any]) -> None:
    colors = [*(COLORS[slot] for slot, *_ in found["slots"]), ROUTER, ORACLE, ORACLE, TIE]
    speed = [f["tokens_per_second"] for f in bounds.values()]
    with plots.figure(name, "Tokens a second, replayed: either drafter, router, oracles and bound", 2.6) as axes:
        bars = axes.barh(list(bounds), speed, color=colors, height=0.65)
        told = [f"{f['tokens_per_second']:.1f}  (AL {f['acceptance_length']:.2f})" for f in bounds.values()]
        axes.bar_label(bars, told, padding=3, fontsize=8)
        axes.set_xlim(0, 1.35 * max(speed))
        axes.set_xlabel("tokens a second, replayed")
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)


def _wins(plots: Plots, name: str, found: Mapping[str, Any], wins: Mapping[str, Any]) -> None:
    rows = sorted((row["shares"] for row in wins["answers"]), key=lambda shares: (shares[2] - shares[0], shares))
    first, second = (slot for slot, *_ in found["slots"])
    with plots.figure(name, f"Share of each answer's positions won by {first}, tied, and won by {second}") as axes:
        bottom = [0.0] * len(rows)
        for part, (label, color) in enumerate(((first, COLORS[first]), ("tie", TIE), (second, COLORS[second]))):
            shares = [100 * row[part] for row in rows]
            axes.bar(range(len(rows)), shares, 1.0 if len(rows) > 40 else 0.85, bottom, color=color, label=label)
            bottom = [a + b for a, b in zip(bottom, shares, strict=True)]
        axes.set_ylim(0, 100)
        axes.set_xticks([])
        axes.set_xlabel(f"{len(rows)} answers, ordered")
        axes.set_ylabel("% of positions won")
        axes.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))


def _deciles(plots: Plots, name: str, found: Mapping[str, Any], deciles: Sequence[Mapping[str, Any]]) -> None:
    with plots.figure(name, "Mean acceptance length of either drafter by decile of the target's entropy") as axes:
        _lines(axes, found, deciles)
        axes.set_xlabel("decile of entropy (nats)")
        if found["router"] == "entropy":
            _threshold(axes, found, deciles)


def _router(plots: Plots, name: str, found: Mapping[str, Any], deciles: Sequence[Mapping[str, Any]]) -> None:
    with plots.figure(name, "Mean acceptance length of either drafter by decile of the router's score") as axes:
        _lines(axes, found, deciles)
        axes.set_xlabel(f"decile of what the {found['router']} router compares")
        _threshold(axes, found, deciles)


def _lines(axes: Any, found: Mapping[str, Any], deciles: Sequence[Mapping[str, Any]]) -> None:
    places = [d["decile"] for d in deciles]
    for index, (slot, *_) in enumerate(found["slots"]):
        lengths = [d["acceptance_length"][index] for d in deciles]
        axes.plot(places, lengths, marker="os"[index], ms=4, color=COLORS[slot], label=slot)
    axes.set_xticks(places, [f"≤ {d['high']:.2g}" for d in deciles], fontsize=7)
    axes.set_ylim(bottom=1)
    axes.set_ylabel("mean AL")
    axes.legend()


def _threshold(axes: Any, found: Mapping[str, Any], deciles: Sequence[Mapping[str, Any]]) -> None:
    """A line where the router changes from slot 0 to slot 1, between the deciles or within one."""
    at = deciles[0]["decile"] - 0.5
    for d in deciles:
        if d["low"] < found["threshold"]:
            width = d["high"] - d["low"]
            at = d["decile"] - 0.5 + (min((found["threshold"] - d["low"]) / width, 1) if width else 1)
    axes.axvline(at, color=ROUTER, lw=1, ls="--")
    axes.annotate(
        f"threshold {found['threshold']:g}", (at, 1), xycoords=("data", "axes fraction"), textcoords="offset points",
        xytext=(4, -2), va="top", color=ROUTER, fontsize=8,
    )  # fmt: skip


def _runs(plots: Plots, name: str, found: Mapping[str, Any], runs: Mapping[str, Mapping[str, int]]) -> None:
    with plots.figure(name, "How long one drafter stays: share of runs of at least so many rounds") as axes:
        for (label, counts), color, style in zip(runs.items(), (ROUTER, ORACLE), ("-", "--"), strict=False):
            lengths = {int(n): count for n, count in counts.items()}
            total, ends = sum(lengths.values()), range(1, max(lengths) + 1)
            left = [100 * sum(c for n, c in lengths.items() if n >= end) / total for end in ends]
            axes.plot(list(ends), left, style, color=color, label=label, drawstyle="steps-post", marker=".", ms=4)
        axes.set_ylim(0, 105)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("rounds without a switch")
        axes.set_ylabel("% of runs at least so long")
        axes.legend()
