"""A draft: a tree of guessed tokens under the root. A chain or a block is a tree of width 1."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Draft:
    """Nodes in an order that puts parents first; node 0 is the root (the newest committed token).

    tokens, parents, depths: [n], parents[0] = -1. ancestors [n, n] (bool): which nodes lie on the path from the root to
    a node, itself included; None for a chain, whose masks are causal. probs [n-1, vocab]: the distributions that the
    drafted tokens of a *sampled chain* were drawn from; None where the target's own draws decide. confidence [n-1]: how
    likely the drafter holds the path to each drafted node to be, falling from parent to child (of a sampled chain: the
    path of likeliest tokens); None where nobody asked.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor | None = None
    probs: Tensor | None = None
    confidence: Tensor | None = None

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def cut(self, depth: int) -> "Draft":
        """Without the nodes deeper than `depth`, which is at least 0."""
        return self._keep(self.depths <= depth)

    def likely(self, p_min: float | None) -> "Draft":
        """Without the nodes of less confidence than `p_min`; as it is if that is None."""
        if p_min is None:
            return self
        assert self.confidence is not None
        return self._keep(F.pad(self.confidence >= p_min, (1, 0), value=True))

    def _keep(self, kept: Tensor) -> "Draft":
        """The nodes where kept [n]; of each its parent must be among them."""
        nodes, place = kept.nonzero()[:, 0], kept.cumsum(0) - 1
        return Draft(
            self.tokens[nodes],
            torch.where(nodes > 0, place[self.parents[nodes].clamp_min(0)], -1),
            self.depths[nodes],
            None if self.ancestors is None else self.ancestors[nodes][:, nodes],
            None if self.probs is None else self.probs[: len(nodes) - 1],
            None if self.confidence is None else self.confidence[nodes[1:] - 1],
        )


def chain(tokens: Tensor, probs: Tensor | None = None, confidence: Tensor | None = None) -> Draft:
    """tokens [n], the root first."""
    depths = torch.arange(tokens.shape[0], device=tokens.device)
    return Draft(tokens, depths - 1, depths, None, probs, confidence)


def tree(tokens: Tensor, parents: Tensor, depth: int, confidence: Tensor | None = None) -> Draft:
    """tokens, parents [n] with the root first; `depth` bounds how deep the tree is."""
    own = torch.eye(tokens.shape[0], dtype=torch.bool, device=tokens.device)
    above, ancestors = parents.clamp_min(0), own
    for _ in range(depth):
        ancestors = ancestors[above] | own
    return Draft(tokens, parents, ancestors.sum(1) - 1, ancestors, confidence=confidence)


def top_probability(logits: Tensor) -> Tensor:
    """Probability of the likeliest token: [..., vocab] → [...]."""
    logits = logits.float()
    return (logits.amax(-1) - logits.logsumexp(-1)).exp()
