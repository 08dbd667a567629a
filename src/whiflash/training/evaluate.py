"""Acceptance length on held-out texts, counted exactly and without a target pass: the greedy continuation is known.

A drafter whose draft is right up to a place reads the true tokens there, so feeding it the true tokens gives the very
drafts that decoding would see, for every root position at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from whiflash.training.features import Sample


def rounds(accepted: Sequence[int]) -> list[int]:
    """accepted[i]: drafted tokens that hold with the answer's i-th token as root → tokens committed in each round.

    Decoding starts with the answer's first token as root (the prompt's own pass produced it) and every round commits
    its accepted tokens and one more. `accepted` ends where the text does, so the last round may be cut short.
    """
    lengths, root = [], 0
    while root < len(accepted):
        lengths.append(min(accepted[root] + 1, len(accepted) - root))
        root += lengths[-1]
    return lengths


def accepted_lengths(right: Tensor) -> list[int]:
    """right [roots, depth] (bool: is the draft at that depth the true token) → how many hold before the first miss."""
    return right.long().cumprod(1).sum(1).tolist()


@dataclass
class Scores:
    """Counts per category: rounds walked, tokens they committed, and accepted lengths at every position."""

    rounds: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)

    def add(self, category: str, accepted: Sequence[int]) -> None:
        walked = rounds(accepted)
        for counter, value in (
            (self.rounds, len(walked)),
            (self.tokens, sum(walked)),
            (self.positions, len(accepted)),
            (self.lengths, sum(min(a + 1, len(accepted) - i) for i, a in enumerate(accepted))),
            (self.first, sum(a > 0 for a in accepted)),
        ):
            counter[category] = counter.get(category, 0) + value

    @property
    def acceptance(self) -> float:
        """Tokens per round over all texts."""
        return sum(self.tokens.values()) / max(sum(self.rounds.values()), 1)

    def table(self) -> dict[str, dict[str, float]]:
        """Per category and overall: AL in rounds, AL over positions, accuracy of the first drafted token."""
        rows = {c: [d[c] for d in self._counters()] for c in sorted(self.rounds)}
        rows["overall"] = [sum(d.values()) for d in self._counters()]
        return {
            c: {"rounds": round(t / r, 4), "positions": round(n / p, 4), "first": round(f / p, 4)}
            for c, (r, t, p, n, f) in rows.items()
            if r
        }

    def _counters(self) -> tuple[dict[str, int], ...]:
        return self.rounds, self.tokens, self.positions, self.lengths, self.first


@torch.inference_mode()
def score(samples: Sequence[Sample], accepted: Callable[[Sample], list[int]], device: torch.device | str) -> Scores:
    """Walk every sample; `accepted` gives, per root of the answer but its last token, the accepted draft length."""
    scores = Scores()
    for sample in samples:
        scores.add(sample.category, accepted(sample.to(device)))
    return scores
