"""Decoding replayed from a record: every threshold and every length of the drafts, without a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from whiflash.evaluation.latency import CatchUp, Profile
from whiflash.evaluation.record import Text

# thresholds tried: as many quantiles of the scores, and those that always take one slot
QUANTILES = 41
# a threshold means the same on the next run only if it is written with the digits it was tried with
DIGITS = 4


def committed(text: Text, drafter: str, length: int) -> np.ndarray:
    """Tokens a round commits at each root, the bonus included, with a draft of `length` nodes besides the root."""
    accepted = np.array([sum(node <= length for node in path) for path in text.paths[drafter]])
    # a round never commits more than the answer has left
    return np.minimum(accepted + 1, np.arange(text.roots, 0, -1))


@dataclass(frozen=True)
class Slot:
    """A drafter in one of several lengths. seconds [lengths]: of a round without its catch-up."""

    name: str
    lengths: tuple[int, ...]
    seconds: np.ndarray
    catch_up: CatchUp

    @classmethod
    def of(cls, name: str, lengths: Sequence[int], profile: Profile) -> "Slot":
        seconds = np.array([profile.seconds(name, length) for length in lengths])
        return cls(name, tuple(lengths), seconds, profile.catch_up[name])

    def take(self, chosen: Sequence[int]) -> "Slot":
        """Lengths [n] by index, repeated as `chosen` says."""
        picked = list(chosen)
        return Slot(self.name, tuple(self.lengths[i] for i in picked), self.seconds[picked], self.catch_up)


@dataclass(frozen=True)
class Walked:
    """Sums over texts, each [shapes, thresholds]: shapes are the pairs of lengths."""

    tokens: np.ndarray
    rounds: np.ndarray
    second: np.ndarray
    seconds: np.ndarray

    def __add__(self, other: "Walked") -> "Walked":
        return Walked(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def speed(self) -> np.ndarray:
        """Tokens per second of decoding."""
        return self.tokens / self.seconds

    @property
    def acceptance(self) -> np.ndarray:
        return self.tokens / self.rounds


@dataclass(frozen=True)
class Pair:
    """Two slots in every combination of their lengths; `shared`: both draft with one model, which catches up once."""

    first: Slot
    second: Slot

    @classmethod
    def of(cls, names: Sequence[str], lengths: Mapping[str, Sequence[int]], profile: Profile) -> "Pair":
        slots = [Slot.of(name, lengths[name], profile) for name in names]
        shapes = list(product(*(range(len(slot.lengths)) for slot in slots)))
        return cls(*(slot.take([shape[i] for shape in shapes]) for i, slot in enumerate(slots)))

    @property
    def shared(self) -> bool:
        return {self.first.name, self.second.name} == {"df", "ddt"}

    def only(self, shape: int) -> "Pair":
        return Pair(self.first.take([shape]), self.second.take([shape]))

    def gains(self, text: Text) -> tuple[np.ndarray, np.ndarray]:
        """Tokens committed at each root by either slot, [shapes, roots] both."""
        return _table(text, self.first), _table(text, self.second)


def _table(text: Text, slot: Slot) -> np.ndarray:
    rows = {length: committed(text, slot.name, length) for length in set(slot.lengths)}
    return np.stack([rows[length] for length in slot.lengths])


def walk(text: Text, pair: Pair, chosen: np.ndarray) -> Walked:
    """Decode a text: at root i take slot chosen[..., i], advance by what it commits there.

    chosen [thresholds, roots] or [shapes, thresholds, roots] of bool (True: the second slot).
    """
    tables = pair.gains(text)
    chosen = np.broadcast_to(chosen, (len(tables[0]), *chosen.shape[-2:]))
    shape, roots = chosen.shape[:2], text.roots
    at_shape, at_threshold = np.ogrid[: shape[0], : shape[1]]
    root, rounds, second = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    seconds = np.zeros(shape)
    # rows a slot's model has consumed, counted from the first root; lazy catch-up leaves the prompt for the first pick
    cursors = [np.full(shape, -text.prompt) for _ in (0, 1)]
    while (alive := root < roots).any():
        at = np.minimum(root, roots - 1)
        takes_second = chosen[at_shape, at_threshold, at]
        for slot, takes, cursor in zip((pair.first, pair.second), (~takes_second, takes_second), cursors, strict=True):
            takes = takes & alive
            backlog = root - cursor - slot.catch_up.behind
            seconds += takes * (slot.seconds[:, None] + slot.catch_up.seconds(backlog))
            for behind in cursors if pair.shared else (cursor,):
                np.copyto(behind, root, where=takes)
        rounds += alive
        second += takes_second & alive
        commits = np.where(takes_second, tables[1][at_shape, at], tables[0][at_shape, at])
        root = np.where(alive, root + commits, root)
    return Walked(np.full(shape, roots), rounds, second, seconds)


def above(text: Text, router: str, thresholds: Sequence[float]) -> np.ndarray:
    """What a router does: the second slot where its score exceeds the threshold, compared as it does, in float32."""
    return np.array(text.scores[router], np.float32) > np.array(thresholds, np.float32)[:, None]


def thresholds(texts: Sequence[Text], router: str) -> list[float]:
    """Worth trying: quantiles of the scores, one above them all (never the second slot) and one below (always)."""
    scores = np.concatenate([text.scores[router] for text in texts])
    ends = [0.0 if router == "entropy" else float(scores.min()) - 1, float(scores.max()) + 1]
    inner = np.quantile(scores, np.linspace(0, 1, QUANTILES + 2)[1:-1]).tolist()
    return sorted({round(max(value, 0.0) if router == "entropy" else value, DIGITS) for value in [*ends, *inner]})
