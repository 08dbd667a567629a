"""What a drafter is to the session, and the log of committed tokens and features that all of them read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from whiflash.drafters.draft import Draft
from whiflash.nn.cache import KVCache

# logits [..., vocab] → tokens [...] and, when sampling, the distribution [..., vocab] they were drawn from
Choose = Callable[[Tensor], tuple[Tensor, Tensor | None]]


class DraftModel(Protocol):
    """The weights behind one or several drafters; `taps` are the boundary ids of the features it reads."""

    target_ids: Tensor | None
    identity: str

    @property
    def config(self) -> Any: ...

    @property
    def taps(self) -> tuple[int, ...]: ...

    def new_cache(self, capacity: int) -> KVCache: ...


@dataclass
class DraftState:
    """A draft model's place in one session: its cache, whose length is the cursor into the log."""

    cache: KVCache

    @property
    def cursor(self) -> int:
        return self.cache.length


def to_target_vocab(probs: Tensor | None, model: DraftModel) -> Tensor | None:
    """Distributions over the draft vocabulary [n, draft_vocab] → over the target's [n, vocab]."""
    if probs is None or model.target_ids is None:
        return probs
    wide = probs.new_zeros(probs.shape[0], model.config.vocab_size)
    return wide.index_copy(1, model.target_ids, probs)


class FeatureLog:
    """Committed tokens and the target's features, appended once and read by every draft model from its own cursor.

    With n feature rows, `tokens[:n+1]` are known: the root, at position n, has a token and no features yet. Rows that
    all cursors have passed are dropped when room is needed; tokens stay.
    """

    def __init__(self, taps: Sequence[int], width: int, dtype: torch.dtype, device: torch.device, capacity: int = 1024):
        self.taps, self.width = tuple(taps), width
        self._rows = torch.empty(capacity, len(self.taps) * width, dtype=dtype, device=device)
        self._first = 0
        self.length = 0
        self.tokens = torch.zeros(capacity, dtype=torch.long, device=device)

    @property
    def first(self) -> int:
        """Position of the oldest row still held."""
        return self._first

    def set_tokens(self, start: int, tokens: Tensor) -> None:
        end = start + tokens.shape[0]
        if end > self.tokens.shape[0]:
            self.tokens = torch.cat([self.tokens, self.tokens.new_zeros(max(end, 2 * self.tokens.shape[0]))])
        self.tokens[start:end] = tokens

    def append(self, rows: Tensor, oldest_cursor: int) -> None:
        """Add rows [m, taps·width]; rows before `oldest_cursor` may go to make room."""
        count, held = rows.shape[0], self.length - self._first
        if held + count > self._rows.shape[0]:
            kept = self._rows[oldest_cursor - self._first : held]
            held = kept.shape[0]
            size = self._rows.shape[0]
            room = self._rows.new_empty(size if held + count <= size else max(held + count, 2 * size), kept.shape[1])
            room[:held] = kept
            self._rows, self._first = room, oldest_cursor
        self._rows[held : held + count] = rows
        self.length += count

    def truncate(self, length: int) -> None:
        """Forget rows from `length` on."""
        self.length = min(self.length, length)
        self._first = min(self._first, self.length)

    def features(self, taps: tuple[int, ...], start: int, end: int) -> Tensor:
        """Rows start..end-1 of `taps`, [1, end-start, taps·width]."""
        if not self._first <= start <= end <= self.length:
            raise IndexError(f"feature rows {start}..{end} are not all held ({self._first}..{self.length})")
        rows = self._rows[start - self._first : end - self._first]
        if taps != self.taps:
            columns = [self.taps.index(t) * self.width for t in taps]
            rows = torch.cat([rows[:, c : c + self.width] for c in columns], 1)
        return rows[None]


class Drafter(Protocol):
    """A draft model with a shape of draft.

    `family` is "autoregressive" or "diffusion"; `rows` the most nodes a draft has, the root included. With a `p_min` a
    draft tells its nodes' confidence and leaves out those that have less. What is left out never depends on a token
    drawn at that node, so sampling stays exact.
    """

    name: str
    family: str
    rows: int
    p_min: float | None

    @property
    def model(self) -> DraftModel: ...

    def catch_up(self, state: DraftState, log: FeatureLog, kv_only: bool = True) -> int:
        """Consume the backlog as far as the next draft allows; returns the rows consumed.

        kv_only: write K/V and nothing else (the default, exact); False runs the full forward, for measuring.
        """
        ...

    def draft(self, state: DraftState, log: FeatureLog, choose: Choose | None) -> Draft:
        """Guess what follows the root, after `catch_up`. choose None is greedy."""
        ...
