"""Where an answer ends, and its text as it comes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from whiflash.errors import WhiFlashError

REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Stopping:
    """An answer ends after `max_new_tokens`, at a stop id (kept as last token), or when its text holds a stop string.

    With a stop string, tokens end with the one that completes it and the text ends before it.
    """

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise WhiFlashError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if any(not s for s in self.stop):
            raise WhiFlashError("a stop string is empty; leave it out or give at least one character")


class Answer:
    """Tokens in, text pieces out; says when to stop. Pieces concatenate to `text`, whatever bytes a token carries.

    byte_ids: tokens of one byte each that `decode` joins by whole runs (byte fallback). One bad byte spoils the
    characters before it, so a run's text is sure only when the run has ended.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stopping: Stopping, byte_ids: frozenset[int] = frozenset()
    ):
        self.tokens: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self._decode, self._stopping, self._byte_ids = decode, stopping, byte_ids
        self._window = 0  # first token whose text may still depend on what follows
        self._settled = ""  # decoded text before the window
        self._emitted = 0

    def take(self, tokens: Sequence[int]) -> int:
        """Add tokens up to the first that ends the answer; returns how many were taken."""
        for count, token in enumerate(tokens, 1):
            self.tokens.append(token)
            if token in self._stopping.stop_ids or (self._stopping.stop and self._hits_stop_string()):
                self.finish_reason = "stop"
            elif len(self.tokens) >= self._stopping.max_new_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                return count
        return len(tokens)

    def piece(self) -> str:
        """Text that is sure by now and was not given out yet. After the end, all the rest."""
        text = self._visible()
        if self.finish_reason is None:
            text = text[: len(text) - self._held_back(text)]
        piece = text[self._emitted :]
        self._emitted = max(self._emitted, len(text))
        self.text += piece
        return piece

    def end(self, reason: str) -> None:
        """End the answer from outside (an interrupt); the next piece is all that was held back."""
        self.finish_reason = self.finish_reason or reason

    def _full(self) -> str:
        """Decoded text of all tokens, decoding only a window of recent ones again."""
        tail = self.tokens[self._window :]
        text = self._decode(tail)
        # the window restarts four tokens back: tokenizers that glue or space words need neighbours to agree
        start = len(self.tokens) - 4
        if (
            len(tail) > 16
            and not text.endswith(REPLACEMENT)
            and not self._byte_ids.issuperset(self.tokens[start - 1 :][:2])
        ):
            head = self._decode(self.tokens[self._window : start])
            if text.startswith(head) and not head.endswith(REPLACEMENT):
                rest = self._decode(self.tokens[start:])
                if head + rest == text:
                    self._settled += head
                    self._window, text = start, rest
        return self._settled + text

    def _hits_stop_string(self) -> bool:
        return self._cut(self._full()) is not None

    def _cut(self, text: str) -> int | None:
        places = [p for p in (text.find(s) for s in self._stopping.stop) if p >= 0]
        return min(places, default=None)

    def _visible(self) -> str:
        text = self._full()
        cut = self._cut(text) if self._stopping.stop else None
        return text if cut is None else text[:cut]

    def _held_back(self, text: str) -> int:
        """Characters at the end that may yet change: an unfinished one, a run of bytes, a stop string's beginning."""
        held = len(text) - len(text.rstrip(REPLACEMENT))
        run = 0
        while run < len(self.tokens) and self.tokens[-1 - run] in self._byte_ids:
            run += 1
        if run:
            before = self._settled + self._decode(self.tokens[self._window : len(self.tokens) - run])
            held = max(held, len(text) - len(before))
        sure = text[: len(text) - held]  # a stop string may begin here and go on in what is not sure yet
        begun = (n for stop in self._stopping.stop for n in range(1, len(stop)) if sure.endswith(stop[:n]))
        return held + max(begun, default=0)
