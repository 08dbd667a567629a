"""What each drafter gets accepted at every position of known texts: exact, and without decoding.

With the root at position s the router sees the target's final hidden state at s-1, the node that produced the root.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from whiflash.drafters.dflash import DFlash
from whiflash.drafters.eagle3 import Eagle3
from whiflash.drafters.load import load_dflash, load_eagle3
from whiflash.errors import WhiFlashError
from whiflash.journal import Journal, fingerprint
from whiflash.target.target import Target
from whiflash.training import dflash, eagle3
from whiflash.training.evaluate import accepted_lengths
from whiflash.training.features import Sample, Source

# blocks whose full logits are held at a time
ANCHORS = 32


@dataclass
class Drafters:
    """The two draft models a router may choose between, in float32, with the identity of their checkpoints."""

    target: Target
    dflash: DFlash
    eagle3: Eagle3 | None
    identity: dict[str, str]

    @classmethod
    def load(cls, target: Target, dflash_path: str | Path, eagle3_path: str | Path | None) -> "Drafters":
        model = load_dflash(dflash_path, target, packed=False).float()
        if any(model.config.causal) or any(model.config.windows):
            raise WhiFlashError(f"{dflash_path} has causal or sliding layers, for which routers cannot be trained yet")
        head = None if eagle3_path is None else load_eagle3(eagle3_path, target, packed=False).float()
        identity = {"df": model.identity} | ({} if head is None else {"e3": head.identity})
        return cls(target, model, head, identity)

    @torch.inference_mode()
    def autoregressive(self, sample: Sample, chain: int) -> dict[str, list[int]]:
        """Accepted draft length of an EAGLE-3 chain at every root of the answer but its last token."""
        assert self.eagle3 is not None
        return {"e3": eagle3.accepted(self.eagle3, sample, chain)}

    @torch.inference_mode()
    def diffusion(self, sample: Sample, budget: int) -> dict[str, list[int]]:
        """Accepted draft length of DFlash's block, and of DDTree's tree of `budget` nodes, at the same roots."""
        tokens, start, last = sample.tokens, sample.start, len(sample.tokens) - 1
        block, chains, trees = self.dflash.config.block_size, [], []
        ids = self.dflash.target_ids
        borrowed = self.dflash.lm_head is None and self.dflash.draft_head is None
        dtype = self.target.dtype if borrowed else torch.float32
        for anchors in torch.arange(start, last, device=tokens.device).split(ANCHORS):
            hidden = dflash.blocks(self.dflash, sample.features[: int(anchors[-1])], tokens, anchors, block)[:, 1:]
            # in one matrix: a product of three dimensions runs block by block
            logits = self.dflash.logits(hidden.flatten(0, 1).to(dtype)).float().unflatten(0, hidden.shape[:2])
            at = anchors[:, None] + torch.arange(1, block, device=tokens.device)
            wanted = tokens[at.clamp(max=last)]
            if ids is not None:
                wanted = to_draft(wanted, ids)
            wanted = wanted.masked_fill(at > last, -1)
            chains += accepted_lengths(logits.argmax(-1) == wanted)
            trees += tree_lengths(logits.log_softmax(-1), wanted, budget)
        return {"df": chains, "ddt": trees}


def to_draft(tokens: Tensor, target_ids: Tensor) -> Tensor:
    """Target ids → draft ids, -1 where the draft vocabulary lacks the token. target_ids ascend."""
    place = torch.searchsorted(target_ids, tokens).clamp(max=len(target_ids) - 1)
    return torch.where(target_ids[place] == tokens, place, -1)


def tree_lengths(log_probs: Tensor, wanted: Tensor, budget: int) -> list[int]:
    """How deep the known continuation runs inside DDTree's tree, for many roots at once.

    log_probs [roots, depths, vocab], wanted [roots, depths] (-1: past the end of the text). The tree holds the `budget`
    most probable prefixes, as `drafters.ddtree.best_prefixes` builds it for one root, ties included.
    """
    width = min(budget, log_probs.shape[-1])
    ranked, tokens = log_probs.topk(width, -1)
    right = tokens == wanted[..., None]
    scores, known = [ranked[:, 0]], [right[:, 0]]
    for depth in range(1, log_probs.shape[1]):
        candidates = (scores[-1][:, :, None] + ranked[:, depth, None]).flatten(1)
        continued = (known[-1][:, :, None] & right[:, depth, None]).flatten(1)
        best = candidates.sort(dim=-1, descending=True, stable=True).indices[:, :budget]
        scores.append(candidates.gather(1, best))
        known.append(continued.gather(1, best))
    order = torch.cat(scores, 1).sort(dim=-1, descending=True, stable=True).indices[:, :budget]
    # a prefix is never in the tree without its parent, so as many are in it as it is deep
    return torch.cat(known, 1).gather(1, order).sum(1).tolist()


@dataclass
class Measured:
    """One text: the signal at each root [m, width] and the acceptance length [m] of each drafter, bonus included."""

    category: str
    prompt: str
    signal: Tensor
    lengths: dict[str, Tensor]


def measure(
    samples: Sequence[Sample] | Source,
    texts: str,
    drafters: Drafters,
    directory: str | Path,
    chain: int = 5,
    tree_budget: int = 16,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[Measured]:
    """Acceptance lengths on every text, kept in `directory`: a killed run does not start over, nor a model of a pair
    because the other one changed.

    texts: fingerprint of the samples. chain: depth of the EAGLE-3 chain. tree_budget: DDTree nodes besides the root.
    """
    passes: dict[str, tuple[Callable[[Sample], dict[str, list[int]]], dict[str, int]]] = {
        "df": (lambda sample: drafters.diffusion(sample, tree_budget), {"tree_budget": tree_budget}),
        "e3": (lambda sample: drafters.autoregressive(sample, chain), {"chain": chain}),
    }
    journals = {}
    for model, identity in drafters.identity.items():
        settings = {"kind": "acceptance", "texts": texts, "drafter": identity, **passes[model][1]}
        file = Path(directory) / f"acceptance-{model}-{fingerprint(settings)}.jsonl"
        # rows belong to texts by their number
        journals[model] = Journal(file, settings, then="remove that line and all after it, and run again")
    measured = []
    for index in range(len(samples)):
        report(index, len(samples))
        sample = samples[index]
        lengths = {}
        for model, journal in journals.items():
            if index == len(journal.rows):
                journal.append(passes[model][0](sample.to(drafters.target.device)))
            for name, accepted in journal.rows[index].items():
                # a round never commits more than the text has left
                left = torch.arange(len(accepted), 0, -1)
                lengths[name] = torch.minimum(torch.tensor(accepted) + 1, left)
        signal = sample.hidden[sample.start - 1 : len(sample.tokens) - 2].float().cpu().clone()
        prompt = sha256(repr(sample.tokens[: sample.start].tolist()).encode()).hexdigest()
        measured.append(Measured(sample.category, prompt, signal, lengths))
    report(len(samples), len(samples))
    return measured
