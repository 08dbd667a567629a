"""What a drafter takes from its target: the draft vocabulary, soft labels over it, and weights to start from."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whiflash.errors import UnsupportedError, WhiFlashError
from whiflash.nn.layers import Layer, LayerShape
from whiflash.nn.rotary import RopeConfig
from whiflash.nn.weights import Weights, layer_parts, load_parts, read_config
from whiflash.target.config import TargetConfig
from whiflash.target.target import Target
from whiflash.training.features import Text


def draft_vocabulary(texts: Sequence[Text], vocab_size: int, size: int, keep: Sequence[int] = ()) -> Tensor:
    """The `size` ids most frequent in the answers, ascending; `keep` first, low ids where texts run out."""
    if not 0 < size <= vocab_size:
        raise WhiFlashError(f"draft_vocab must lie in 1..{vocab_size}, the target's vocabulary, not {size}")
    answers, prompts = Counter[int](), Counter[int]()
    for text in texts:
        answers.update(text.answer)
        prompts.update(text.tokens[: text.start])
    kept = set(keep)
    order = sorted(range(vocab_size), key=lambda i: (i not in kept, -answers[i], -prompts[i], i))
    return torch.tensor(sorted(order[:size]))


@torch.no_grad()
def take_over(fresh: Any, found: Any, name: str) -> None:
    """Give the drafter `fresh` the parameters of `found`, loaded from `name`; refuses one of another make."""
    for setting in (f.name for f in fields(fresh.config) if f.name != "draft_vocab_size"):
        wanted, has = getattr(fresh.config, setting), getattr(found.config, setting)
        if wanted != has:
            raise WhiFlashError(
                f"training cannot go on from {name}: it has {setting} = {has}, but the recipe and the target make "
                f"drafters with {setting} = {wanted}; change the recipe, or train from the target's own weights"
            )
    for mine, theirs in zip(fresh.parts(), found.parts(), strict=True):
        getattr(mine.module, mine.attribute).copy_(getattr(theirs.module, theirs.attribute))


class Teacher(nn.Module):
    """The target's head, cut to the draft vocabulary: rows [draft vocab, width], frozen."""

    rows: Tensor
    ids: Tensor
    known: Tensor

    def __init__(self, target: Target, ids: Tensor):
        super().__init__()
        self.register_buffer("rows", target.network.head_rows(ids), persistent=False)
        self.register_buffer("ids", ids.to(target.device), persistent=False)
        known = torch.zeros(target.vocab_size, dtype=torch.bool, device=target.device)
        known[self.ids] = True
        self.register_buffer("known", known, persistent=False)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final-normed hidden states [..., width] → logits over the draft vocabulary."""
        return F.linear(hidden, self.rows)

    @torch.no_grad()
    def probabilities(self, hidden: Tensor) -> Tensor:
        """The target's next-token distribution over the draft vocabulary, in float32 whatever autocast says."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.logits(hidden.float()).softmax(-1)


class _SoftCrossEntropy(torch.autograd.Function):
    """Loss and gradient in one sweep over rows that stay in cache: composed operators would be bound by memory."""

    ROWS = 64

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, index: Tensor) -> Tensor:
        losses = torch.empty(len(logits), device=logits.device)
        gradient = torch.empty_like(logits)
        for begin in range(0, len(logits), _SoftCrossEntropy.ROWS):
            rows = slice(begin, begin + _SoftCrossEntropy.ROWS)
            z, p = logits[rows].float(), labels[index[rows]]
            shift = z.amax(-1, keepdim=True)
            z -= shift
            losses[rows] = -torch.linalg.vecdot(p, z)
            total = z.exp_().sum(-1, keepdim=True)
            losses[rows] += total.log()[:, 0]
            gradient[rows] = z.div_(total).sub_(p)
        ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0][:, None].to(gradient.dtype), None, None


def soft_cross_entropy(logits: Tensor, labels: Tensor, index: Tensor) -> Tensor:
    """Cross-entropy [N] of logits [N, V] against the distributions labels[index], labels [R, V], index [N]."""
    return _SoftCrossEntropy.apply(logits, labels, index)


def rope_of(target: Target) -> RopeConfig:
    return RopeConfig.from_config(read_config(target.path, "target"))


def shape_of(target: Target) -> LayerShape:
    """The target's layer sizes, without biases or q/k norms; families the runtime does not read give their config's."""
    config = TargetConfig.from_config(
        {**read_config(target.path, "target"), "model_type": "llama", "hidden_act": "silu"}
    )
    shape = config.shape
    return LayerShape(
        shape.width, shape.width, shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate, shape.norm_eps
    )


def target_layer(target: Target, index: int) -> Layer | None:
    """Layer `index` of the target with dense float32 weights, or None where the family is not one the runtime reads."""
    raw = read_config(target.path, "target")
    try:
        shape = TargetConfig.from_config(raw).shape
    except UnsupportedError:
        return None
    with torch.device("meta"):
        layer = Layer(shape)
    load_parts(layer_parts(layer, f"model.layers.{index}"), Weights(target.path), torch.float32, "cpu")
    return layer


def final_norm(target: Target) -> Tensor | None:
    weights = Weights(target.path)
    return weights.take("model.norm.weight").float() if "model.norm.weight" in weights else None


@torch.no_grad()
def copy_matching(destination: nn.Module, source: nn.Module) -> None:
    """Copy every parameter of `source` that `destination` has by the same name and shape."""
    theirs = dict(source.named_parameters())
    for name, parameter in destination.named_parameters():
        if name in theirs and theirs[name].shape == parameter.shape:
            parameter.copy_(theirs[name])


@torch.no_grad()
def deepest_tap(fc: nn.Linear, noise: float) -> None:
    """Let `fc` start as the deepest tap itself plus a little of everything, where widths allow."""
    nn.init.normal_(fc.weight, std=noise)
    width = fc.out_features
    if fc.in_features % width == 0:
        fc.weight[:, -width:] += torch.eye(width, device=fc.weight.device)
