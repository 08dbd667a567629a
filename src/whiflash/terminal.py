"""How answers look in a terminal: streamed, painted by slot, and summed up in one line."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.segment import Segment, Segments
from rich.text import Text

from whiflash.decoding.stopping import Answer, Stopping
from whiflash.decoding.trace import Stats
from whiflash.model import Piece, Stream
from whiflash.target.target import Target

TARGET = "target"
STYLES = {"df": "cyan", "ddt": "bright_blue", "e3": "magenta", TARGET: "yellow"}


class Painter:
    """Splits pieces into the texts of single tokens, each with who drafted it (or `target` for the target's own)."""

    def __init__(self, target: Target, stop: Sequence[str] = ()):
        self._answer = Answer(target.decode, Stopping(2**62, stop=tuple(stop)), target.byte_ids)

    def spans(self, piece: Piece) -> Iterator[tuple[str, str]]:
        drafted = piece.round.accepted if piece.round else 0
        slot = (piece.round.slot if piece.round else None) or TARGET
        for index, token in enumerate(piece.tokens):
            if self._answer.finish_reason is None:
                self._answer.take([token])
                yield self._answer.piece(), slot if index < drafted else TARGET

    def rest(self) -> tuple[str, str]:
        self._answer.end("end")
        return self._answer.piece(), TARGET


def print_painted(console: Console, spans: Iterable[tuple[str, str]]) -> None:
    """Print spans as they are: rich's own text would expand tabs and drop carriage returns."""
    segments = Segments(Segment(text, console.get_style(STYLES[origin])) for text, origin in spans)
    console.print(segments, end="", crop=False)


def show(
    stream: Stream, target: Target, console: Console | None, color: bool = False, stop: Sequence[str] = ()
) -> bool:
    """Run an answer to its end, printing it as it comes (without a console: nothing), and a newline.

    False if Ctrl-C cut it short; what had come until then is printed all the same.
    """
    painter = Painter(target, stop) if color else None

    def put(piece: Piece) -> None:
        if console is None:
            return
        if painter is None:
            console.file.write(piece.text)
        else:
            print_painted(console, painter.spans(piece))
        console.file.flush()

    whole = True
    try:
        for piece in stream:
            put(piece)
    except KeyboardInterrupt:
        whole = False
        put(stream.interrupt())
    if console is not None:
        if painter is not None:
            print_painted(console, [painter.rest()])
        console.file.write("\n")
    return whole


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
