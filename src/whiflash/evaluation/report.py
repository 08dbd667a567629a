"""The report: one HTML page with tables, plots and painted answers, that needs nothing beside it."""

from collections.abc import Mapping, Sequence
from typing import Any

from whiflash.evaluation import tables
from whiflash.evaluation.methods import BASELINE
from whiflash.evaluation.plots import COLORS
from whiflash.evaluation.runs import Routed, Run
from whiflash.evaluation.statistics import OVERALL

PAGE, TEMPLATE = "report.html", "report.html.j2"


def render(
    run: Run,
    methods: Sequence[Routed],
    figures: Mapping[str, Any],
    plots: Mapping[str, str],
    sections: Mapping[str, Sequence[str]],
    samples: Sequence[Mapping[str, Any]],
    missing: str | None,
) -> str:
    """plots: name → SVG. sections: method → names of its plots. missing: why samples show ids in place of text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    pages = Environment(
        loader=PackageLoader("whiflash", "assets/report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    pages.filters |= {"number": tables.number, "percent": percent, "ratio": tables.interval, "ms": milliseconds}
    summary = run.summary
    found = {name: f["categories"] for name, f in summary["methods"].items()}
    categories = list(dict.fromkeys(c for f in found.values() for c in f if c != OVERALL))
    categories += [OVERALL] if any(OVERALL in f for f in found.values()) else []
    return pages.get_template(TEMPLATE).render(
        target=run.target[0],
        summary=summary,
        machine=tables.machine_line(summary["machine"]),
        methods=found,
        modes={name: f["mode"] for name, f in summary["methods"].items()},
        baseline=BASELINE,
        categories=categories,
        figures=figures,
        routed=methods,
        plots={name: Markup(svg) for name, svg in plots.items()},
        sections=sections,
        samples=samples,
        missing=missing,
        colors=COLORS,
    )


def percent(value: float | None, digits: int = 0) -> str:
    return "–" if value is None or value != value else f"{100 * value:.{digits}f} %"


def milliseconds(value: float | None) -> str:
    return "–" if value is None or value != value else f"{1000 * value:.2f}"
