"""DDTree: verify a tree over DFlash's per-position distributions instead of one block."""

from functools import lru_cache

import torch
from torch import Tensor

from whiflash.drafters.dflash import DFlash, DFlashDrafter
from whiflash.drafters.draft import Draft, tree
from whiflash.drafters.drafter import Choose, DraftState, FeatureLog
from whiflash.errors import WhiFlashError


def best_prefixes(log_probs: Tensor, budget: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `budget` most probable prefixes under independent per-depth distributions, most probable first.

    log_probs [depths, vocab] → tokens, parents, log-probabilities [m] with m ≤ budget; parents index the same list, -1
    is the root.
    What DDTree finds with a heap, one depth at a time on the device: of the prefixes of depth d only the best `budget`
    can matter, and the one made of the i-th best parent and the r-th best token has at least (i+1)(r+1)-1 betters.
    """
    depths, vocab = log_probs.shape
    width = min(budget, vocab)
    ranked, ranked_tokens = log_probs.topk(width, -1)
    scores, tokens, parents = [ranked[0]], [ranked_tokens[0]], [ranked_tokens.new_full((width,), -1)]
    offset = 0
    for depth in range(1, depths):
        above = scores[-1]
        i, r = _pairs(above.shape[0], width, budget, log_probs.device)
        candidates = above[i] + ranked[depth][r]
        best = candidates.sort(descending=True, stable=True).indices[:budget]
        scores.append(candidates[best])
        tokens.append(ranked_tokens[depth][r[best]])
        parents.append(i[best] + offset)
        offset += above.shape[0]
    # stable, and shallow depths come first: of equal scores the parent precedes its child, so the set is closed
    found, order = (part[:budget] for part in torch.cat(scores).sort(descending=True, stable=True))
    all_parents = torch.cat(parents)[order]
    place = torch.full((offset + scores[-1].shape[0] + 1,), -1, dtype=torch.long, device=log_probs.device)
    place[order] = torch.arange(order.shape[0], device=log_probs.device)
    return torch.cat(tokens)[order], place[all_parents], found


@lru_cache(maxsize=64)
def _pairs(parents: int, width: int, budget: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices (i, r) with (i+1)·(r+1) ≤ budget: about budget·ln(budget) of them."""
    pairs = [(i, r) for i in range(parents) for r in range(min(width, budget // (i + 1)))]
    i, r = torch.tensor(pairs, dtype=torch.long, device=device).T
    return i.contiguous(), r.contiguous()


class DDTreeDrafter(DFlashDrafter):
    """DFlash's draft model and cache, with `tree_budget` nodes besides the root."""

    name, family = "ddt", "diffusion"

    def __init__(self, model: DFlash, tree_budget: int = 16, block_size: int | None = None, p_min: float | None = None):
        super().__init__(model, block_size, p_min=p_min)
        if tree_budget < 1:
            raise WhiFlashError(f"the tree budget must be at least 1 node besides the root, got {tree_budget}")
        self.tree_budget = tree_budget
        self.rows = max(self.block_size, tree_budget + 1)

    def draft(self, state: DraftState, log: FeatureLog, choose: Choose | None) -> Draft:
        log_probs = self.block_logits(state, log).float().log_softmax(-1)
        tokens, parents, scores = best_prefixes(log_probs, self.tree_budget)
        root = log.tokens[log.length : log.length + 1]
        return tree(
            torch.cat([root, self.to_target(tokens)]),
            torch.cat([parents.new_full((1,), -1), parents + 1]),
            self.block_size - 1,
            None if self.p_min is None else scores.exp(),
        ).likely(self.p_min)
