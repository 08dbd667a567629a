"""How far a long measurement is, and how long it will still take."""

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
    started, told = 0.0, 0.0
    columns = (
        BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(True),
        TextColumn("{task.description}"),
    )  # fmt: skip
    bar = Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, speed_estimate_period=600
    )
    task = bar.add_task("", total=None)

    def report(done: int, total: int, text: str) -> None:
        nonlocal started, told
        now = time.monotonic()
        started = started if done else now
        if console.is_terminal:
            bar.start()
            bar.update(task, completed=done, total=total, description=text)
        elif now - told > EVERY or done == total:
            told = now
            left = f", {duration((now - started) / done * (total - done))} left" if 0 < done < total else ""
            console.print(f"{done} of {total}{left}: {text}", markup=False, soft_wrap=True)

    try:
        yield report
    finally:
        bar.stop()


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
