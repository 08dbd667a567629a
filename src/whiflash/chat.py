"""The multi-turn terminal chat: one session, so that each turn computes only what is new."""

from typing import Any

from rich.console import Console

from whiflash.errors import WhiFlashError
from whiflash.model import WhiFlash
from whiflash.terminal import show, summary


def converse(model: WhiFlash, system: str | None = None, color: bool = False, **options: Any) -> None:
    """Read turns from standard input until it ends or /exit."""
    console = Console(highlight=False, force_terminal=True if color else None)
    session, messages = model.session(), _opening(system)
    while True:
        try:
            text = console.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        except UnicodeDecodeError as error:
            raise WhiFlashError(f"standard input is not text ({error})") from error
        if text in ("/exit", "/quit"):
            return
        if text == "/reset":
            session, messages = model.session(), _opening(system)
            continue
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        try:
            stream = model.stream(messages, session=session, **options)
        except WhiFlashError as error:
            # most likely the context is full; the conversation so far stays usable after /reset
            messages.pop()
            console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
            continue
        show(stream, model.target, console, color)
        out = stream.output()
        console.print(summary(out.stats), style="dim", soft_wrap=True)
        messages.append({"role": "assistant", "content": out.text})


def _opening(system: str | None) -> list[dict[str, str]]:
    return [] if system is None else [{"role": "system", "content": system}]
