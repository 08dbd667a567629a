"""EAGLE-3 training by training-time test: the head reads its own outputs while it learns, as it will when drafting.

Row p joins feature p with token p+1. Step i of the test moves every row one token on: it reads token p+1+i and its own
output of step i-1, sits at rotary position p+i, and sees the step-0 rows up to p and its own rows of steps 1..i.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whiflash.drafters.eagle3 import Eagle3, Eagle3Config
from whiflash.drafters.load import load_eagle3
from whiflash.errors import WhiFlashError
from whiflash.nn.cache import additive
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


@dataclass(frozen=True)
class Eagle3Recipe:
    """`test_steps` drafting steps are trained, step i weighing decay^i; `chain` is the depth that evaluation drafts.

    At most `rows` rows of a text are trained at a time, in a random stretch of its answer (0: all): early on, steps
    count more than rows a step. `init` is a checkpoint to go on from, whose draft vocabulary is kept; left out, the
    target's last layer is where training starts.
    """

    draft_vocab: int = 8192
    test_steps: int = 4
    rows: int = 0
    decay: float = 0.8
    chain: int = 5
    fc_noise: float = 0.002
    embedding_noise: float = 0.01
    init: str | None = None
    loop: LoopConfig = field(default_factory=LoopConfig)


def new_head(target: Target, taps: Sequence[int], ids: Tensor, recipe: Eagle3Recipe) -> Eagle3:
    """A head that starts from the target's last layer, norm and head; the embedding half of q, k, v from noise."""
    shape = shape_of(target)
    width = shape.width
    config = Eagle3Config(
        shape=replace(shape, width_in=2 * width),
        layers=1,
        taps=tuple(taps),
        target_width=width,
        vocab_size=target.vocab_size,
        draft_vocab_size=len(ids),
        rope=rope_of(target),
        windows=(None,),
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(recipe.loop.seed)
        head = Eagle3(config)
        deepest_tap(head.fc, recipe.fc_noise)
        head.lm_head.weight.copy_(Teacher(target, ids).rows)
        if (norm := final_norm(target)) is not None:
            head.norm.weight.copy_(norm)
        if (last := target_layer(target, target.layers - 1)) is not None:
            copy_matching(head.layer, last)
            head.layer.hidden_norm.weight.copy_(last.attention_norm.weight)
            qkv = head.layer.attention.qkv.weight
            torch.nn.init.normal_(qkv, std=recipe.embedding_noise)
            if last.attention.qkv.weight.shape[0] == qkv.shape[0]:
                qkv[:, width:] = last.attention.qkv.weight
    head.register_buffer("target_ids", ids)
    head.target_embed = target.network.embed
    return head.to(target.device)


def unroll(head: Eagle3, features: Tensor, tokens: Tensor, start: int, steps: int) -> list[Tensor]:
    """Outputs of each step, [rows - i, width], for the rows that decoding can draft from: start-1 .. n-3.

    features [n, taps·width] and tokens [n] of one text whose answer begins at `start`. Row r of step i predicts token
    start+1+r+i.
    """
    first, end = start - 1, len(tokens) - 2
    if len(head.extra) or head.config.windows[0] is not None:
        raise WhiFlashError("training knows EAGLE-3 heads of one layer with full attention")
    layer, attention = head.layer, head.layer.attention
    embedded = head.embed(tokens).to(features.dtype)
    at = torch.arange(end, device=tokens.device)
    joined, _ = layer.inputs(head.fuse(features[None, :first]), embedded[None, 1:start])
    keys, values = ([t] for t in attention.project_kv(joined, head.rope(at[:first], features.dtype)))
    seen = [at[first:, None] >= at]
    x = head.fuse(features[None, first:end])
    outputs: list[Tensor] = []
    for step in range(min(steps, end - first)):
        rows = end - first - step
        joined, residual = layer.inputs(x, embedded[None, start + step : start + step + rows])
        q, k, v = attention.project(joined, head.rope(at[first : end - step] + step, features.dtype))
        keys.append(k)
        values.append(v)
        if step:
            seen.append(torch.eye(rows, rows, dtype=torch.bool, device=at.device))
        mask = additive(torch.cat([s[:rows] for s in seen], 1), q.dtype)
        y = layer.finish(residual, attention.attend(q, torch.cat(keys, 2), torch.cat(values, 2), mask))
        outputs.append(y[0])
        x = head.feedback(y)[:, :-1]
    return outputs


def stretch(sample: Sample, rows: int, steps: int, generator: torch.Generator) -> Sample:
    """A random stretch of the answer that trains `rows` rows of step 0; what lies before it becomes prompt."""
    spare = len(sample.tokens) - 1 - sample.start - rows - steps
    if not rows or spare <= 0:
        return sample
    start = sample.start + int(torch.randint(spare + 1, (1,), generator=generator, device=generator.device))
    end = start + rows + steps + 1
    return replace(
        sample, start=start, tokens=sample.tokens[:end], features=sample.features[:end], hidden=sample.hidden[:end]
    )


class Eagle3Trainee:
    def __init__(self, head: Eagle3, target: Target, recipe: Eagle3Recipe, held: Sequence[Sample] = ()):
        assert head.target_ids is not None
        self.module, self.target, self.recipe, self.held = head, target, recipe, held
        self.teacher = Teacher(target, head.target_ids)

    def loss(self, sample: Sample, generator: torch.Generator) -> Tensor:
        """Σ_i decay^i · (mean over all rows of the soft cross-entropy, rows with a label outside the vocabulary 0)."""
        sample = stretch(sample, self.recipe.rows, self.recipe.test_steps, generator)
        start, end = sample.start, len(sample.tokens) - 1
        outputs = unroll(self.module, sample.features, sample.tokens, start, self.recipe.test_steps)
        # hidden state q predicts token q+1, so rows of step 0 learn from start.., of step i from start+i..
        labels = self.teacher.probabilities(sample.hidden[start:end])
        known = self.teacher.known[sample.tokens[start + 1 :]].float()
        logits = self.module.logits(torch.cat(outputs))
        row = torch.arange(len(labels), device=labels.device)
        losses = soft_cross_entropy(logits, labels, torch.cat([row[i:] for i in range(len(outputs))]))
        pieces = losses.split([len(y) for y in outputs])
        return sum(self.recipe.decay**i * (piece * known[i:]).mean() for i, piece in enumerate(pieces))

    def accepted(self, sample: Sample) -> list[int]:
        return accepted(self.module, sample, self.recipe.chain)

    def evaluate(self) -> Scores:
        return score(self.held, self.accepted, self.target.device)

    def hidden_matrices(self) -> Sequence[Tensor]:
        layer = self.module.layer
        return [self.module.fc.weight, *(p for p in layer.parameters() if p.ndim == 2)]

    def export(self, directory: Path, report: dict[str, Any]) -> None:
        export.eagle3(self.module, self.target, directory, {**report, "recipe": asdict(self.recipe)})


def accepted(head: Eagle3, sample: Sample, chain: int) -> list[int]:
    """Accepted length of a greedy chain drafted at each root of the answer but its last token."""
    start, tokens = sample.start, sample.tokens
    outputs = unroll(head, sample.features, tokens, start, chain)
    right = torch.zeros(len(tokens) - 1 - start, chain, dtype=torch.bool, device=tokens.device)
    for step, y in enumerate(outputs):
        drafted = head.logits(y).argmax(-1)
        drafted = drafted if head.target_ids is None else head.target_ids[drafted]
        right[: len(y), step] = drafted == tokens[start + 1 + step :]
    return accepted_lengths(right)


def train_eagle3(
    recipe: Eagle3Recipe, target: Target, source: Source, held: Sequence[Sample], out: str | Path, log=print
) -> Run:
    """Train a head on `source` into `out` (`best/` and `last/` are checkpoints); resumes what `out` holds."""
    settings = {k: v for k, v in asdict(recipe).items() if k not in ("loop", "init")}
    identity: dict[str, Any] = {"eagle3": settings, "init": None}
    if recipe.init is None:
        ids = draft_vocabulary(source.texts, target.vocab_size, recipe.draft_vocab, sorted(target.stop_ids))
        head = new_head(target, source.taps, ids, recipe)
    else:
        found = load_eagle3(recipe.init, target, packed=False)
        ids = torch.arange(target.vocab_size) if found.target_ids is None else found.target_ids
        head = new_head(target, source.taps, ids, recipe)
        take_over(head, found, recipe.init)
        identity["init"] = found.identity
    trainee = Eagle3Trainee(head, target, recipe, held)
    return train(trainee, source, recipe.loop, out, identity, log)
