"""Which of the drafted tokens the target keeps, and what it adds."""

from typing import NamedTuple

import torch
from torch import Tensor

from whiflash.decoding.sampling import Sampler
from whiflash.drafters.draft import Draft


class Accepted(NamedTuple):
    """On the device still: path [n] (bool) marks the kept nodes, root included; `bonus` follows the deepest, `node`."""

    path: Tensor
    node: Tensor
    bonus: Tensor


def accept(draft: Draft, logits: Tensor, sampler: Sampler | None) -> Accepted:
    """logits [n, vocab] of the target at every node; sampler None is greedy.

    Greedy, and for any draft the target's own draws decide about: draw a token at every node and walk from the root
    while a child has it. Only target draws are ever emitted, so the output's distribution is the target's. A sampled
    chain uses its own distribution q instead (Leviathan et al. 2023): keep x with probability min(1, p(x)/q(x)), and
    after the first refusal draw from max(p - q, 0).
    """
    if sampler is None:
        return walk(draft, logits.argmax(-1))
    probs = sampler.probabilities(logits)
    if draft.probs is None:
        return walk(draft, sampler.draw(probs))
    return _reject(draft, probs, draft.probs, sampler)


def walk(draft: Draft, drawn: Tensor) -> Accepted:
    """drawn [n]: the target's token after every node."""
    agrees = draft.tokens == drawn[draft.parents.clamp_min(0)]
    agrees[0] = True
    if draft.ancestors is None:
        path = agrees.long().cumprod(0).bool()
        node = path.sum() - 1
    else:
        reached = (agrees | ~draft.ancestors).all(1)
        # among siblings at most one token can agree, so the deepest reached node is unique
        node = torch.where(reached, draft.depths, -1).argmax()
        path = draft.ancestors.index_select(0, node[None])[0]
    return Accepted(path, node, drawn.index_select(0, node[None])[0])


def _reject(draft: Draft, p: Tensor, q: Tensor, sampler: Sampler) -> Accepted:
    count = len(draft)
    drafted = draft.tokens[1:, None]
    p_drafted, q_drafted = p[:-1].gather(1, drafted)[:, 0], q.gather(1, drafted)[:, 0]
    kept = sampler.uniform(count - 1, p.device) * q_drafted < p_drafted
    path = torch.cat([kept.new_ones(1), kept]).long().cumprod(0).bool()
    node = path.sum() - 1
    # behind the last node nothing was drafted, so its residual is p itself
    q = torch.cat([q, q.new_zeros(1, q.shape[1])])
    at = node[None]
    residual = (p.index_select(0, at) - q.index_select(0, at)).clamp_min(0)
    # p = q exactly leaves no residual, but then nothing is refused; rounding can still bring us here
    residual = torch.where(residual.sum() > 0, residual, p.index_select(0, at))
    return Accepted(path, node, sampler.draw(residual)[0])
