"""EAGLE-3's draft head: one decoder layer over [token embedding ; fused target features].

Forward pass as in the official code and its SpecForge and speculators descendants; the flags name their differences.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from whiflash.drafters.draft import Draft, chain, top_probability, tree
from whiflash.drafters.drafter import Choose, DraftState, FeatureLog, to_target_vocab
from whiflash.errors import WhiFlashError
from whiflash.nn.cache import KVCache
from whiflash.nn.layers import MLP, Attention, Layer, LayerShape, RMSNorm, Rope
from whiflash.nn.linear import Linear
from whiflash.nn.rotary import RopeConfig, Rotary
from whiflash.nn.weights import Part, attention_parts, layer_parts, mlp_parts


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes and flags of a head. `taps` are boundary ids (tap k = residual stream after k target layers)."""

    shape: LayerShape
    layers: int
    taps: tuple[int, ...]
    target_width: int
    vocab_size: int
    draft_vocab_size: int
    rope: RopeConfig
    windows: tuple[int | None, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False
    own_embedding: bool = False


class Eagle3Layer(nn.Module):
    """The layer that reads the embedding half and the feature half."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        shape = config.shape
        self.norm_before_residual = config.norm_before_residual
        self.embedding_norm = RMSNorm(shape.width, shape.norm_eps)
        self.hidden_norm = RMSNorm(shape.width, shape.norm_eps)
        self.attention = Attention(shape)
        self.mlp_norm = RMSNorm(shape.width, shape.norm_eps)
        self.mlp = MLP(shape)
        self.fused: Any = None  # see nn.layers.Layer

    def forward(self, x: Tensor, embedded: Tensor, rope: Rope, cache: KVCache, mask: Tensor | None) -> Tensor:
        """x, embedded [1, T, width] → [1, T, width]; K/V are written to layer 0 of the cache."""
        joined, residual = self.inputs(x, embedded)
        if self.fused is not None and self.fused.takes(joined, rope, cache):
            return self.fused(joined, rope, cache, 0, mask, residual=residual)
        q, k, v = self.attention.project(joined, rope)
        k, v = cache.append(0, k, v)
        return self.finish(residual, self.attention.attend(q, k, v, mask))

    def inputs(self, x: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """x, embedded [B, T, width] → what attention reads [B, T, 2·width] and the residual it adds to."""
        normed = self.hidden_norm(x)
        joined = torch.cat([self.embedding_norm(embedded), normed], -1)
        return joined, normed if self.norm_before_residual else x

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        h = residual + attended
        return h + self.mlp(self.mlp_norm(h))


class Eagle3(nn.Module):
    """Row p joins the feature of position p with the token at p+1 and predicts the token at p+2.

    The rotary position of a row is its feature position p. A fed-back output enters as x, never through `fuse`.
    """

    extra: list[Layer]  # nn.ModuleList, which forgets what it holds
    target_ids: Tensor | None
    # tells this checkpoint from others (`nn.weights.digest`)
    identity: str = ""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.config = config
        shape, features = config.shape, len(config.taps) * config.target_width
        plain = replace(shape, width_in=shape.width)
        self.input_norm = RMSNorm(features, shape.norm_eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(RMSNorm(config.target_width, shape.norm_eps) for _ in config.taps) if config.fc_norm else None
        )
        self.fc = Linear(features, shape.width, bias=config.fc_bias)
        self.layer = Eagle3Layer(config)
        self.extra = nn.ModuleList(Layer(plain) for _ in range(config.layers - 1))  # type: ignore[assignment]
        self.norm = RMSNorm(shape.width, shape.norm_eps)
        self.lm_head = Linear(shape.width, config.draft_vocab_size, bias=False)
        self.embedding = nn.Embedding(config.vocab_size, shape.width) if config.own_embedding else None
        # target id of each draft id; None when the draft vocabulary is the target's
        self.register_buffer("target_ids", None)
        self.target_embed: Callable[[Tensor], Tensor] | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    def embed(self, tokens: Tensor) -> Tensor:
        if self.embedding is not None:
            return self.embedding(tokens)
        assert self.target_embed is not None, "a head without an embedding of its own must be bound to its target"
        return self.target_embed(tokens)

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [..., taps·target_width] → x [..., width]."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            taps = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)], -1)
        return self.fc(features)

    def rope(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        if getattr(self, "_rotary", None) is None:
            self._rotary = Rotary(self.config.rope, self.config.shape.head_dim, self.norm.weight.device)
        return self._rotary(positions, dtype)

    def forward(
        self, x: Tensor, tokens: Tensor, positions: Tensor, cache: KVCache, tree: Tensor | None = None
    ) -> Tensor:
        """x [1, T, width], tokens [1, T], positions [T] → outputs y [1, T, width]; K/V are written, not advanced."""
        rope = self.rope(positions, x.dtype)
        masks = {w: cache.mask(x.shape[1], tree, w, positions) for w in set(self.config.windows[: self.config.layers])}
        y = self.layer(x, self.embed(tokens), rope, cache, masks[self.config.windows[0]])
        for index, layer in enumerate(self.extra, 1):
            y = layer(y, rope, cache, index, masks[self.config.windows[index]])
        return y

    def write_kv(self, x: Tensor, tokens: Tensor, positions: Tensor, cache: KVCache) -> None:
        """Only the K/V of `forward`, which in a head of one layer need no attention, MLP or head of these rows."""
        joined, _ = self.layer.inputs(x, self.embed(tokens))
        cache.append(0, *self.layer.attention.project_kv(joined, self.rope(positions, x.dtype)))

    def logits(self, y: Tensor) -> Tensor:
        """Outputs [..., width] → logits over the draft vocabulary [..., draft_vocab_size]."""
        return self.lm_head(self.norm(y))

    def feedback(self, y: Tensor) -> Tensor:
        """What the next step reads as x."""
        return self.norm(y) if self.config.norm_output else y

    def new_cache(self, capacity: int) -> KVCache:
        shape, weight = self.config.shape, self.norm.weight
        return KVCache(self.config.layers, shape.kv_heads, shape.head_dim, capacity, weight.dtype, weight.device)

    def parts(self, first: str = "midlayer", plain_norm: str = "input_layernorm") -> list[Part]:
        """Checkpoint names of every parameter; `first` is the first layer's prefix in the layout at hand."""
        parts = [
            Part(self.fc, kind, [f"fc.{kind}"]) for kind in ("weight", "bias") if getattr(self.fc, kind) is not None
        ]
        parts += [Part(self.norm, "weight", ["norm.weight"]), Part(self.lm_head, "weight", ["lm_head.weight"])]
        if self.input_norm is not None:
            parts.append(Part(self.input_norm, "weight", ["input_norm.weight"]))
        for i, norm in enumerate(self.fc_norm or ()):
            parts.append(Part(norm, "weight", [f"fc_norm.{i}.weight"]))
        if self.embedding is not None:
            parts.append(Part(self.embedding, "weight", ["embed_tokens.weight"]))
        parts += [
            Part(self.layer.embedding_norm, "weight", [f"{first}.input_layernorm.weight"]),
            Part(self.layer.hidden_norm, "weight", [f"{first}.hidden_norm.weight"]),
            Part(self.layer.mlp_norm, "weight", [f"{first}.post_attention_layernorm.weight"]),
            *attention_parts(self.layer.attention, f"{first}.self_attn"),
            *mlp_parts(self.layer.mlp, f"{first}.mlp"),
        ]
        for i, layer in enumerate(self.extra, 1):
            parts += layer_parts(layer, f"layers.{i}", plain_norm)
        return parts


class Eagle3Drafter:
    """A chain of `depth` tokens, or with `top_k` > 1 the dynamic tree of EAGLE-2.

    The tree grows `depth` levels, each expanding the `top_k` best nodes of the last into `top_k` children, and keeps
    the `total_tokens` - 1 best of all candidates besides the root (left out: at most 60 tokens of a tree, all of a
    chain).
    """

    name, family = "e3", "autoregressive"

    def __init__(
        self,
        model: Eagle3,
        depth: int = 5,
        top_k: int = 1,
        total_tokens: int | None = None,
        p_min: float | None = None,
    ):
        vocab = model.config.draft_vocab_size
        if depth < 1 or not 1 <= top_k <= vocab:
            raise WhiFlashError(
                f"EAGLE-3 needs a depth of at least 1 and a top-k of 1 to {vocab} (the tokens this head can draft), "
                f"got depth {depth} and top-k {top_k}"
            )
        most = 1 + top_k + (depth - 1) * top_k**2
        total = (most if top_k == 1 else min(most, 60)) if total_tokens is None else total_tokens
        if not 2 <= total <= most:
            raise WhiFlashError(
                f"total tokens must lie between 2 and {most}, the root and all candidates of depth {depth} and top-k "
                f"{top_k}; got {total_tokens}"
            )
        self.model, self.top_k, self.total_tokens, self.rows = model, top_k, total, total
        self.p_min = p_min
        self.depth = min(depth, total - 1)  # nodes that are kept lie no deeper, and a chain ends with its total

    def catch_up(self, state: DraftState, log: FeatureLog, kv_only: bool = True) -> int:
        """K/V of all rows of the backlog but the last, which `draft` runs in full for the first guess."""
        start, end = state.cursor, log.length - 1
        if end <= start:
            return 0
        state.cache.reserve(end + 1)
        model, positions = self.model, torch.arange(start, end, device=log.tokens.device)
        x, tokens = model.fuse(log.features(model.taps, start, end)), log.tokens[None, start + 1 : end + 1]
        if kv_only and not model.extra:
            model.write_kv(x, tokens, positions, state.cache)
        else:
            model(x, tokens, positions, state.cache)
        state.cache.advance(end - start)
        return end - start

    def draft(self, state: DraftState, log: FeatureLog, choose: Choose | None) -> Draft:
        last = log.length - 1
        state.cache.reserve(log.length + self.depth * self.top_k)
        state.cache.truncate(last)  # a second draft from the same root must not see the first one's row of it
        x = self.model.fuse(log.features(self.model.taps, last, last + 1))
        root = log.tokens[None, last + 1 : last + 2]
        y = self.model(x, root, torch.tensor([last], device=root.device), state.cache)
        state.cache.advance(1)
        draft = self._chain(y, root, state, choose) if self.top_k == 1 else self._tree(y, root, state)
        state.cache.truncate(log.length)
        return draft

    def _chain(self, y: Tensor, token: Tensor, state: DraftState, choose: Choose | None) -> Draft:
        guessed, drawn_from = [token[0]], []
        # the root is certain
        confidence = [] if self.p_min is None else [torch.ones(1, device=token.device)]
        for depth in range(self.depth):
            if depth:
                position = torch.tensor([state.cursor], device=token.device)
                y = self.model(self.model.feedback(y), token, position, state.cache)
                state.cache.advance(1)
            logits = self.model.logits(y)[:, -1]
            if self.p_min is not None:
                likely = confidence[-1] * top_probability(logits)
                if likely < self.p_min:  # the one reason to wait for the device here: the next step is not run
                    break
                confidence.append(likely)
            choice, probs = (logits.argmax(-1), None) if choose is None else choose(logits)
            token = self._to_target(choice)[None]
            guessed.append(token[0])
            if probs is not None:
                drawn_from.append(probs)
        probs = to_target_vocab(torch.cat(drawn_from), self.model) if drawn_from else None
        return chain(torch.cat(guessed), probs, None if self.p_min is None else torch.cat(confidence)[1:])

    def _tree(self, y: Tensor, root: Tensor, state: DraftState) -> Draft:
        k, start, device = self.top_k, state.cursor, root.device
        scores, choice = self.model.logits(y)[0].float().log_softmax(-1).topk(k)
        all_scores, all_tokens = [scores[0]], [self._to_target(choice[0])]
        all_parents = [torch.full((k,), -1, device=device)]
        frontier_scores, tokens, x = scores[0], all_tokens[0], self.model.feedback(y).expand(1, k, -1)
        frontier, seen = torch.arange(k, device=device), torch.zeros(k, 0, dtype=torch.bool, device=device)
        own, offset = torch.eye(k, dtype=torch.bool, device=device), k
        for depth in range(self.depth - 1):
            seen = torch.cat([seen, own], 1)
            y = self.model(x, tokens[None], torch.full((k,), start + depth, device=device), state.cache, seen)
            state.cache.advance(k)
            scores, choice = self.model.logits(y)[0].float().log_softmax(-1).topk(k)
            scores = (scores + frontier_scores[:, None]).flatten()
            choice = self._to_target(choice).flatten()
            all_scores.append(scores)
            all_tokens.append(choice)
            all_parents.append(frontier.repeat_interleave(k))
            frontier_scores, best = scores.topk(k)
            row = best // k
            frontier, tokens, seen = offset + best, choice[best], seen[row]
            x, offset = self.model.feedback(y)[:, row], offset + k * k
        # stable: of equal scores the earlier generation wins, so a parent is never left out before its child
        found = torch.cat(all_scores)
        order = found.sort(descending=True, stable=True).indices[: self.total_tokens - 1].sort().values
        place = torch.zeros(offset + 1, dtype=torch.long, device=device)
        place[order] = torch.arange(1, order.shape[0] + 1, device=device)
        parents = place[torch.cat(all_parents)[order]]
        return tree(
            torch.cat([root[0], torch.cat(all_tokens)[order]]),
            torch.cat([parents.new_full((1,), -1), parents]),
            self.depth,
            None if self.p_min is None else found[order].exp(),
        ).likely(self.p_min)

    def _to_target(self, tokens: Tensor) -> Tensor:
        return tokens if self.model.target_ids is None else self.model.target_ids[tokens]
