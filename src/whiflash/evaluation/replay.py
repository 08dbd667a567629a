"""Decoding replayed from a record: every threshold and every length of the drafts, without a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from whiflash.evaluation.latency import CatchUp, Profile
from whiflash.evaluation.record import P_MINS, Text

# thresholds tried: as many quantiles of the scores, and those that always take one slot
QUANTILES = 41
# a threshold means the same on the next run only if it is written with the digits it was tried with
DIGITS = 4


def drafted(text: Text, drafter: str, length: int, p_min: float | None = None) -> np.ndarray:
    """Nodes besides the root in the draft at each root: `length`, or as many as have a p_min of P_MINS."""
    if p_min is None:
        return np.full(text.roots, length)
    return np.minimum(length, np.array(text.likely[drafter])[:, P_MINS.index(p_min)])


def committed(text: Text, drafter: str, length: int, p_min: float | None = None) -> np.ndarray:
    """Tokens a round commits at each root, the bonus included, with the draft of `drafted`."""
    nodes = drafted(text, drafter, length, p_min)
    accepted = np.array([sum(node <= n for node in path) for path, n in zip(text.paths[drafter], nodes, strict=True)])
    # a round never commits more than the answer has left
    return np.minimum(accepted + 1, np.arange(text.roots, 0, -1))


@dataclass(frozen=True)
class Slot:
    """A drafter in one of several shapes: the most nodes besides the root, and the p_min they are held to."""

    name: str
    shapes: tuple[tuple[int, float | None], ...]
    profile: Profile

    @property
    def catch_up(self) -> CatchUp:
        return self.profile.catch_up[self.name]

    def tables(self, text: Text) -> tuple[np.ndarray, np.ndarray]:
        """What a round commits at each root, and its seconds without catching up: [shapes, roots] both."""
        rows = {shape: self._rows(text, *shape) for shape in set(self.shapes)}
        commits, seconds = zip(*(rows[shape] for shape in self.shapes), strict=True)
        return np.stack(commits), np.stack(seconds)

    def _rows(self, text: Text, length: int, p_min: float | None) -> tuple[np.ndarray, np.ndarray]:
        nodes = drafted(text, self.name, length, p_min)
        return committed(text, self.name, length, p_min), self.profile.seconds(self.name, length, nodes)


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
    """Two slots in every combination of their shapes; `shared`: both draft with one model, which catches up once."""

    first: Slot
    second: Slot

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        lengths: Mapping[str, Sequence[int]],
        profile: Profile,
        p_mins: Sequence[float | None] = (None,),
    ) -> "Pair":
        """Every combination of lengths; both slots are held to the same p_min."""
        shapes = list(product(lengths[names[0]], lengths[names[1]], p_mins))
        first = Slot(names[0], tuple((nodes, p_min) for nodes, _, p_min in shapes), profile)
        return cls(first, Slot(names[1], tuple((nodes, p_min) for _, nodes, p_min in shapes), profile))

    @property
    def shared(self) -> bool:
        return {self.first.name, self.second.name} == {"df", "ddt"}

    def only(self, shape: int) -> "Pair":
        return Pair(*(replace(slot, shapes=slot.shapes[shape : shape + 1]) for slot in (self.first, self.second)))

    def tables(self, text: Text) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, seconds) of a round at each root by either slot, [2, shapes, roots] both."""
        first, second = self.first.tables(text), self.second.tables(text)
        return np.stack([first[0], second[0]]), np.stack([first[1], second[1]])

    def gains(self, text: Text) -> tuple[np.ndarray, np.ndarray]:
        """What a round of the second slot has more than one of the first: (tokens, seconds) [roots], for one shape."""
        tokens, seconds = self.tables(text)
        return tokens[1, 0] - tokens[0, 0], seconds[1, 0] - seconds[0, 0]


def walk(text: Text, pair: Pair, chosen: np.ndarray) -> Walked:
    """Decode a text: at root i take slot chosen[..., i], advance by what it commits there.

    chosen [thresholds, roots] or [shapes, thresholds, roots] of bool (True: the second slot).
    """
    tokens, latency = pair.tables(text)
    chosen = np.broadcast_to(chosen, (tokens.shape[1], *chosen.shape[-2:]))
    shape, roots = chosen.shape[:2], text.roots
    at_shape, at_threshold = np.ogrid[: shape[0], : shape[1]]
    root, rounds, second = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    seconds = np.zeros(shape)
    # rows a slot's model has consumed, counted from the first root; lazy catch-up leaves the prompt for the first pick
    cursors = [np.full(shape, -text.prompt) for _ in (0, 1)]
    while (alive := root < roots).any():
        at = np.minimum(root, roots - 1)
        takes_second = chosen[at_shape, at_threshold, at]
        for place, slot in enumerate((pair.first, pair.second)):
            takes, cursor = alive & (takes_second == place), cursors[place]
            backlog = root - cursor - slot.catch_up.behind
            seconds += takes * (latency[place][at_shape, at] + slot.catch_up.seconds(backlog))
            for behind in cursors if pair.shared else (cursor,):
                np.copyto(behind, root, where=takes)
        rounds += alive
        second += takes_second & alive
        commits = np.where(takes_second, tokens[1][at_shape, at], tokens[0][at_shape, at])
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
