"""The router's interface: a signal from the target in, a slot out."""

import math
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Protocol

from torch import Tensor

from whiflash.errors import WhiFlashError


@dataclass(frozen=True)
class Signal:
    """What the target said at the node that produced the root: hidden [width] (final-normed) and logits [vocab]."""

    hidden: Tensor
    logits: Tensor

    def entropy(self) -> Tensor:
        """Entropy of the next-token distribution at temperature 1, in nats."""
        return self._entropy

    @cached_property
    def _entropy(self) -> Tensor:
        # every round pays for this: one pass over exponents, none over logarithms; the bound keeps 0 · -inf out
        logits = self.logits.float()
        below = (logits - logits.amax()).clamp_min(-1e4)
        weights = below.exp()
        total = weights.sum()
        return total.log() - (weights * below).sum() / total


class Router(Protocol):
    """Picks a slot every round, on the device: the session reads slot and score together with the accepted path.

    `score` is what was compared with the threshold, for logs. A router for more slots returns more than 0 and 1.
    """

    name: str

    def __call__(self, signal: Signal) -> tuple[Tensor, Tensor]:
        """signal → (slot, int64 scalar), (score, float scalar)."""
        ...


def check_threshold(threshold: float, least: float | None = None) -> float:
    if not isinstance(threshold, Real) or not math.isfinite(threshold) or (least is not None and threshold < least):
        bound = "" if least is None else f" of at least {least:g}"
        raise WhiFlashError(f"the router's threshold must be a finite number{bound}, got {threshold}")
    return float(threshold)
