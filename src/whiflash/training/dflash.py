"""DFlash training: random anchors in one text, all their masked blocks in one pass, each blind to the others.

The block of an anchor at position s sees the context vectors of positions < s and its own slots, nothing else. Slot
i ≥ 1 learns the target's distribution of the token at s+i.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from whiflash.drafters.dflash import DFlash, DFlashConfig
from whiflash.drafters.load import load_dflash
from whiflash.errors import WhiFlashError
from whiflash.nn.cache import additive
from whiflash.nn.layers import Layer
from whiflash.target.target import Target
from whiflash.training import export
from whiflash.training.evaluate import Scores, accepted_lengths, score
from whiflash.training.features import Sample, Source
from whiflash.training.loop import LoopConfig, Run, train
from whiflash.training.teacher import (
    Teacher,
    copy_matching,
    deepest_tap,
    draft_vocabulary,
    final_norm,
    rope_of,
    shape_of,
    soft_cross_entropy,
    take_over,
    target_layer,
)

EVALUATION_ANCHORS = 128
GROUP = 16


@dataclass(frozen=True)
class DFlashRecipe:
    """`anchors` blocks of `block` slots a text. `weights` is "dpace" (`alpha`) or "exponential" (scale `gamma`).

    Labels cover the `draft_vocab` most frequent tokens, from which it then drafts, at a fraction of the full head's
    cost. `labels`: "soft" or "hard". `mask_token` None takes an unused special token. `init` is a checkpoint to go on
    from, whose draft vocabulary is kept; left out, the target's last layers are where training starts.
    """

    layers: int = 3
    block: int = 8
    mask_token: int | None = None
    draft_vocab: int = 8192
    anchors: int = 64
    weights: str = "dpace"
    gamma: float = 4.0
    alpha: float = 0.5
    labels: str = "soft"
    fc_noise: float = 0.002
    init: str | None = None
    loop: LoopConfig = field(default_factory=LoopConfig)

    def __post_init__(self) -> None:
        if self.weights not in ("exponential", "dpace") or self.labels not in ("soft", "hard"):
            raise WhiFlashError("weights must be exponential or dpace, and labels soft or hard")


def new_drafter(target: Target, taps: Sequence[int], recipe: DFlashRecipe, source: Source | None = None) -> DFlash:
    """A drafter that starts from the target's last layers.

    q/k norms, which the target may lack, start at the RMS of that layer's q and k on a text of `source`.
    """
    shape = replace(shape_of(target), qk_norm=True)
    config = DFlashConfig(
        shape=shape,
        layers=recipe.layers,
        taps=tuple(taps),
        target_width=shape.width,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        block_size=recipe.block,
        mask_token_id=mask_token(target) if recipe.mask_token is None else recipe.mask_token,
        rope=rope_of(target),
        windows=(None,) * recipe.layers,
        causal=(False,) * recipe.layers,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(recipe.loop.seed)
        drafter = DFlash(config)
        deepest_tap(drafter.fc, recipe.fc_noise)
        if (norm := final_norm(target)) is not None:
            drafter.norm.weight.copy_(norm)
        for index, layer in enumerate(drafter.layers):
            number = target.layers - recipe.layers + index
            theirs = target_layer(target, number) if number >= 0 else None
            if theirs is None:
                continue
            copy_matching(layer, theirs)
            if source is not None and theirs.attention.q_norm is None:
                _set_qk_norms(layer, target, source, number)
            if number == target.layers - 2 or target.layers == 1:
                drafter.hidden_norm.weight.copy_(theirs.attention_norm.weight)
    drafter.target_embed, drafter.target_head = target.network.embed, target.network.head
    return drafter.to(target.device)


def _set_qk_norms(layer: Layer, target: Target, source: Source, number: int) -> None:
    """`layer` holds the target's weights of layer `number`: give its q/k norms the scale that q and k have there."""
    tokens = torch.tensor([source.texts[0].tokens], device=target.device)
    _, x = target.network(tokens, taps=(number,))
    assert x is not None
    attention = layer.attention
    heads = attention.qkv(layer.attention_norm(x.float().cpu())).unflatten(-1, (-1, attention.head_dim))
    q, k, _ = heads.split([attention.heads, attention.kv_heads, attention.kv_heads], 2)
    assert attention.q_norm is not None and attention.k_norm is not None
    for norm, values in ((attention.q_norm, q), (attention.k_norm, k)):
        norm.weight.copy_(values.square().mean((0, 1, 2)).sqrt())


def mask_token(target: Target) -> int:
    """A special token that texts do not contain: the tokenizer's mask or pad token, else its last special one."""
    tokenizer = target.tokenizer
    for candidate in (tokenizer.mask_token_id, tokenizer.pad_token_id):
        if candidate is not None and candidate not in target.stop_ids:
            return int(candidate)
    special = [i for i in tokenizer.all_special_ids if i not in target.stop_ids]
    return int(special[-1]) if special else target.vocab_size - 1


def block_mask(anchors: Tensor, context: int, block: int) -> Tensor:
    """anchors [K] → seen [K·block, context + K·block] (bool): context before the anchor, and the block itself."""
    owner = torch.arange(len(anchors), device=anchors.device).repeat_interleave(block)
    past = torch.arange(context, device=anchors.device) < anchors[owner, None]
    return torch.cat([past, owner[:, None] == owner], 1)


def blocks(drafter: DFlash, features: Tensor, tokens: Tensor, anchors: Tensor, block: int) -> Tensor:
    """Final-normed hidden states [K, block, width] of the blocks at `anchors` [K] of one text.

    features [m, taps·width] must reach the last anchor: m ≥ max(anchors).
    """
    context = drafter.fuse(features[None])
    slots = torch.full((len(anchors), block), drafter.config.mask_token_id, device=tokens.device)
    slots[:, 0] = tokens[anchors]
    positions = (anchors[:, None] + torch.arange(block, device=tokens.device)).flatten()
    x = drafter.embed(slots.flatten())[None].to(features.dtype)
    # a group's blocks share one attention call: all blocks at once would mostly compute what the mask throws away
    groups = [
        (
            slice(i * block, (i + GROUP) * block),
            additive(block_mask(anchors[i : i + GROUP], len(features), block), x.dtype),
        )
        for i in range(0, len(anchors), GROUP)
    ]
    rope = drafter.rope(positions, x.dtype)
    past = drafter.rope(torch.arange(len(features), device=tokens.device), x.dtype)
    for layer in drafter.layers:
        attention = layer.attention
        k0, v0 = attention.project_kv(context, past)
        q, k, v = attention.project(layer.attention_norm(x), rope)
        attended = [
            attention.attend(q[:, :, g], torch.cat([k0, k[:, :, g]], 2), torch.cat([v0, v[:, :, g]], 2), mask)
            for g, mask in groups
        ]
        x = x + torch.cat(attended, 1)
        x = x + layer.mlp(layer.mlp_norm(x))
    return drafter.norm(x)[0].unflatten(0, (-1, block))


class DFlashTrainee:
    def __init__(self, drafter: DFlash, target: Target, recipe: DFlashRecipe, ids: Tensor, held: Sequence[Sample] = ()):
        self.module, self.target, self.recipe, self.held = drafter, target, recipe, held
        self.teacher = Teacher(target, ids)

    def loss(self, sample: Sample, generator: torch.Generator) -> Tensor:
        """Weighted mean over slots of the cross-entropy; slots past the text's end or outside the vocabulary are 0."""
        tokens, start, last = sample.tokens, sample.start, len(sample.tokens) - 1
        order = torch.randperm(last - start, generator=generator, device=tokens.device)
        anchors = order[: self.recipe.anchors].sort().values + start
        hidden = blocks(self.module, sample.features[:last], tokens, anchors, self.recipe.block)[:, 1:]
        wanted = anchors[:, None] + torch.arange(1, self.recipe.block, device=tokens.device)
        valid = wanted <= last
        labels = tokens[wanted.clamp(max=last)]
        valid &= self.teacher.known[labels]
        # only what counts goes through the head, by far the largest product
        wanted, slot = wanted[valid], valid.nonzero()[:, 1]
        logits = self.teacher.logits(hidden[valid])
        place = torch.searchsorted(self.teacher.ids, labels[valid])
        if self.recipe.labels == "soft":
            # hidden state q predicts token q+1
            soft = self.teacher.probabilities(sample.hidden[start:last])
            losses = soft_cross_entropy(logits, soft, wanted - 1 - start)
        else:
            losses = F.cross_entropy(logits.float(), place, reduction="none")
        if self.recipe.weights == "exponential":
            weights = torch.exp(-slot / self.recipe.gamma)
        else:
            weights = self._dpace(logits.detach().float(), place, valid)
        return (weights * losses).sum() / weights.sum()

    def _dpace(self, logits: Tensor, place: Tensor, valid: Tensor) -> Tensor:
        """D-PACE: a slot weighs what the rest of the block can still gain from it, by smoothed acceptance chances."""
        chance = torch.zeros(valid.shape, device=valid.device)
        chance[valid] = (logits.gather(1, place[:, None])[:, 0] - logits.logsumexp(-1)).exp()
        smooth = torch.where(valid, (1 - self.recipe.alpha) * chance + self.recipe.alpha, 0.0)
        return smooth.cumprod(1).flip(1).cumsum(1).flip(1)[valid]

    def evaluate(self) -> Scores:
        """With the draft vocabulary's rows of the head, which decides as the full head does in all but rare cases."""

        def accept(sample: Sample) -> list[int]:
            return accepted(self.module, sample, self.recipe.block, self.teacher.logits, self.teacher.ids)

        return score(self.held, accept, self.target.device)

    def hidden_matrices(self) -> Sequence[Tensor]:
        return [p for p in self.module.parameters() if p.ndim == 2]

    def export(self, directory: Path, report: dict[str, Any]) -> None:
        export.dflash(self.module, self.target, directory, {**report, "recipe": asdict(self.recipe)}, self.teacher.ids)


def accepted(drafter: DFlash, sample: Sample, block: int, head=None, ids: Tensor | None = None) -> list[int]:
    """Accepted length of the block drafted at each root of the answer but its last token.

    `head` maps hidden states to logits over `ids` (target ids); left out, the drafter's own.
    """
    ids = drafter.target_ids if head is None else ids
    tokens, start, last = sample.tokens, sample.start, len(sample.tokens) - 1
    lengths: list[int] = []
    for anchors in torch.arange(start, last, device=tokens.device).split(EVALUATION_ANCHORS):
        hidden = blocks(drafter, sample.features[: int(anchors[-1])], tokens, anchors, block)[:, 1:]
        drafted = (head or drafter.logits)(hidden).argmax(-1)
        drafted = drafted if ids is None else ids[drafted]
        wanted = anchors[:, None] + torch.arange(1, block, device=tokens.device)
        lengths += accepted_lengths((drafted == tokens[wanted.clamp(max=last)]) & (wanted <= last))
    return lengths


def train_dflash(
    recipe: DFlashRecipe, target: Target, source: Source, held: Sequence[Sample], out: str | Path, log=print
) -> Run:
    """Train a drafter on `source` into `out` (`best/` and `last/` are checkpoints); resumes what `out` holds."""
    drafter, ids = new_drafter(target, source.taps, recipe, source), None
    settings = {k: v for k, v in asdict(recipe).items() if k not in ("loop", "init")}
    identity: dict[str, Any] = {"dflash": settings, "init": None}
    if recipe.init is not None:
        found = load_dflash(recipe.init, target, packed=False)
        take_over(drafter, found, recipe.init)
        ids, identity["init"] = found.target_ids, found.identity
    if ids is None:
        ids = draft_vocabulary(source.texts, target.vocab_size, recipe.draft_vocab, sorted(target.stop_ids))
    trainee = DFlashTrainee(drafter, target, recipe, ids, held)
    return train(trainee, source, recipe.loop, out, identity, log)
