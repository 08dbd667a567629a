"""A progress bar for whoever faces the user; the rooms below only take the callback it hands out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def bar(title: str) -> Iterator[Callable[[str, float], None]]:
    """Yield a callback `(stage, fraction in [0, 1])` that draws on stderr and leaves nothing behind.

    Nothing appears before the first call, so work that turns out to be done already stays silent. Where stderr is no
    terminal each new stage is one line instead.
    """
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = progress.add_task(title, total=1.0)
    seen: set[str] = set()

    def report(stage: str, fraction: float) -> None:
        if not seen:
            progress.start()
        if stage not in seen and not console.is_terminal:
            console.print(f"{title}: {stage}", markup=False, highlight=False)
        seen.add(stage)
        progress.update(task, completed=fraction, description=f"{title}: {stage}")

    try:
        yield report
    finally:
        progress.stop()
