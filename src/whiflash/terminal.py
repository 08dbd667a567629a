"""How answers look in a terminal: streamed, painted by slot, and summed up in one line."""

from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.text import Text

from whiflash.decoding.stopping import Answer, Stopping
from whiflash.decoding.trace import Stats
from whiflash.model import Piece

TARGET = "target"
STYLES = {"df": "cyan", "ddt": "bright_blue", "e3": "magenta", TARGET: "yellow"}


class Painter:
    """Splits pieces into the texts of single tokens, each with who drafted it (or `target` for the target's own)."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()):
        self._answer = Answer(decode, Stopping(2**62, stop=tuple(stop)))

    def spans(self, piece: Piece) -> Iterator[tuple[str, str]]:
        drafted = piece.round.accepted if piece.round else 0
        slot = (piece.round.slot if piece.round else None) or TARGET
        for index, token in enumerate(piece.tokens):
            if self._answer.finish_reason is None:
                self._answer.take([token])
                yield self._answer.piece(), slot if index < drafted else TARGET

    def rest(self) -> tuple[str, str]:
        return self._answer.close("end"), TARGET


def print_painted(console: Console, spans: Iterator[tuple[str, str]]) -> None:
    line = Text()
    for text, origin in spans:
        line.append(text, STYLES[origin])
    console.print(line, end="", soft_wrap=True, highlight=False)


def legend(slots: Sequence[str]) -> Text:
    line = Text("drafted by ")
    for slot in slots:
        line.append(f"{slot} ", STYLES[slot])
    return line.append("· target's own", STYLES[TARGET])


def summary(stats: Stats) -> str:
    """tokens, tok/s, mean AL, rounds per slot, switches, share of time spent catching up."""
    parts = [f"{stats.tokens} tokens", f"{stats.tokens_per_second:.1f} tok/s"]
    if stats.rounds:
        rounds = ", ".join(f"{slot} {count}" for slot, count in stats.rounds.items())
        parts += [f"AL {stats.acceptance_length:.2f}", f"rounds {rounds}"]
        parts += [f"{stats.switches} switches", f"catch-up {100 * stats.catch_up_share:.1f} %"]
    return " · ".join(parts)
