"""How a token is chosen from logits, for the target and for sampled drafts alike."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from whiflash.errors import WhiFlashError


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy. Filters apply in transformers' order: temperature, top-k, top-p, min-p.

    top_k 0 and top_p 1 and min_p 0 are off. `seed` None draws a fresh seed for every request.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise WhiFlashError(f"temperature must be a number of at least 0 (0 is greedy), got {self.temperature}")
        if self.top_k < 0:
            raise WhiFlashError(f"top-k must be at least 0 (0 is off), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise WhiFlashError(f"top-p must lie above 0 and up to 1 (1 is off), got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise WhiFlashError(f"min-p must lie between 0 and 1 (0 is off), got {self.min_p}")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise WhiFlashError(f"a seed must be a whole number from 0 to 2**64 - 1, got {self.seed}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


class Sampler:
    """Draws for one request, with a generator of its own: a seed means the same whatever ran before."""

    def __init__(self, sampling: Sampling, device: torch.device):
        self.sampling = sampling
        self.generator = torch.Generator(device)
        if sampling.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(sampling.seed)

    def probabilities(self, logits: Tensor) -> Tensor:
        """logits [..., vocab] → the distribution sampled from, float32."""
        s = self.sampling
        # the maximum goes first, so that a small temperature cannot overflow; float32 knows no smaller one than this
        logits = logits.float()
        logits = (logits - logits.amax(-1, keepdim=True)) / max(s.temperature, 1e-30)
        if s.top_k:
            kth = logits.topk(min(s.top_k, logits.shape[-1]), -1).values[..., -1:]
            logits = logits.masked_fill(logits < kth, -torch.inf)
        probs = logits.softmax(-1)
        if s.top_p < 1:
            ordered, index = probs.sort(dim=-1, descending=True, stable=True)
            outside = ordered.cumsum(-1) - ordered >= s.top_p
            probs = torch.zeros_like(probs).scatter(-1, index, ordered.masked_fill(outside, 0.0))
        if s.min_p:
            probs = probs.masked_fill(probs < s.min_p * probs.amax(-1, keepdim=True), 0.0)
        return probs / probs.sum(-1, keepdim=True)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits [n, vocab] → a drawn token a row [n] and the distributions [n, vocab]."""
        probs = self.probabilities(logits)
        return self.draw(probs), probs

    def draw(self, probs: Tensor) -> Tensor:
        """One token a row of probs [n, vocab], which need not be normalised: no host sync, one random number a row.

        Inverts the cumulative distribution in float64, where the long tail of a large vocabulary keeps its mass.
        """
        heights = probs.cumsum(-1, dtype=torch.float64)
        # below 1, and the first height above it is taken: never a token of probability 0
        at = torch.rand(len(probs), 1, generator=self.generator, dtype=torch.float64, device=probs.device)
        return torch.searchsorted(heights, at * heights[:, -1:], right=True)[:, 0]

    def uniform(self, count: int, device: torch.device) -> Tensor:
        return torch.rand(count, generator=self.generator, device=device)
