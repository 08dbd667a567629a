"""How far a long measurement is, and how long it will still take."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from whiflash.evaluation.benchmark import Progress as Report

EVERY = 30.0


@contextmanager
def eta_bar(quiet: bool = False) -> Iterator[Report]:
    """Yield `(done, total, text)`: a bar with the time left on a terminal, elsewhere a line every half minute."""
    console = Console(stderr=True, highlight=False, quiet=quiet)
    started, told, first = 0.0, 0.0, math.inf
    columns = (
        BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(True),
        TextColumn("{task.description}"),
    )  # fmt: skip
    bar = Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, speed_estimate_period=600
    )
    task = bar.add_task("", total=None)

    def report(done: int, total: int, text: str) -> None:
        nonlocal started, told, first
        now = time.monotonic()
        if done <= first:  # a stage begins, perhaps where an earlier process stopped
            started, first = now, done
        if console.is_terminal:
            bar.start()
            bar.update(task, completed=done, total=total, description=text)
        elif now - told > EVERY or done == total:
            told = now
            pace = (now - started) / (done - first) if done > first else None
            left = f", {duration(pace * (total - done))} left" if pace is not None and done < total else ""
            console.print(f"{done} of {total}{left}: {text}", markup=False, soft_wrap=True)

    try:
        yield report
    finally:
        bar.stop()


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
