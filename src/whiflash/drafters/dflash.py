"""DFlash's draft model: a small bidirectional decoder that fills a block of masks in one pass.

Its context is the target's features, not tokens: every layer's context K/V are projections of one fused vector a
position, so catching up writes K/V and computes nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from whiflash.drafters.draft import Draft, chain, top_probability
from whiflash.drafters.drafter import Choose, DraftState, FeatureLog, to_target_vocab
from whiflash.errors import WhiFlashError
from whiflash.nn.cache import KVCache
from whiflash.nn.layers import Layer, LayerShape, RMSNorm, Rope
from whiflash.nn.linear import Linear
from whiflash.nn.rotary import RopeConfig, Rotary
from whiflash.nn.weights import Part, layer_parts


@dataclass(frozen=True)
class DFlashConfig:
    """Sizes of a DFlash model. `taps` are boundary ids; `windows` and `causal` hold one entry a layer."""

    shape: LayerShape
    layers: int
    taps: tuple[int, ...]
    target_width: int
    vocab_size: int
    draft_vocab_size: int
    block_size: int
    mask_token_id: int
    rope: RopeConfig
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    own_embedding: bool = False
    own_head: bool = False


class DFlash(nn.Module):
    """With the anchor at position s: context is 0..s-1, the block sits at s..s+B-1, slot i ≥ 1 predicts s+i."""

    layers: list[Layer]  # nn.ModuleList, which forgets what it holds
    target_ids: Tensor | None
    # tells this checkpoint from others (`nn.weights.digest`)
    identity: str = ""
    mask_embedding: Tensor | None

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.config = config
        shape = config.shape
        self.fc = Linear(len(config.taps) * config.target_width, shape.width, bias=False)
        self.hidden_norm = RMSNorm(shape.width, shape.norm_eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(config.layers))  # type: ignore[assignment]
        self.norm = RMSNorm(shape.width, shape.norm_eps)
        self.embedding = nn.Embedding(config.vocab_size, shape.width) if config.own_embedding else None
        self.lm_head = Linear(shape.width, config.draft_vocab_size, bias=False) if config.own_head else None
        self.register_buffer("target_ids", None)
        # replaces the mask token's row where the id lies outside the target's table (a side file of some checkpoints)
        self.register_buffer("mask_embedding", None)
        self.target_embed: Callable[[Tensor], Tensor] | None = None
        self.target_head: Callable[[Tensor], Tensor] | None = None
        self.draft_head: Linear | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [...] → [..., width]; the target's table unless the checkpoint ships its own."""
        table = self.embedding or self.target_embed
        assert table is not None, "a DFlash model without an embedding of its own must be bound to its target"
        if self.mask_embedding is None:
            return table(tokens)
        masked = tokens == self.config.mask_token_id
        return torch.where(masked[..., None], self.mask_embedding, table(tokens.masked_fill(masked, 0)))

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [..., taps·target_width] → the context vector [..., width] that every layer reads."""
        return self.hidden_norm(self.fc(features))

    def rope(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        if getattr(self, "_rotary", None) is None:
            self._rotary = Rotary(self.config.rope, self.config.shape.head_dim, self.norm.weight.device)
        return self._rotary(positions, dtype)

    def write_context(self, features: Tensor, positions: Tensor, cache: KVCache) -> None:
        """Append the context K/V of features [1, T, taps·target_width] at positions [T]; not advanced."""
        context, rope = self.fuse(features), self.rope(positions, features.dtype)
        for index, layer in enumerate(self.layers):
            cache.append(index, *layer.attention.project_kv(context, rope))

    def forward(self, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """Block tokens [1, B] (anchor, then masks) at positions [B] → final-normed hidden states [1, B, width].

        The block's own K/V are written behind the context and not advanced, so they vanish by themselves.
        """
        x = self.embed(tokens)
        rope = self.rope(positions, x.dtype)
        masks = {kind: self._mask(cache, tokens.shape[1], *kind) for kind in set(self._kinds())}
        for index, (layer, kind) in enumerate(zip(self.layers, self._kinds(), strict=True)):
            x = layer(x, rope, cache, index, masks[kind])
        return self.norm(x)

    def _kinds(self) -> list[tuple[int | None, bool]]:
        return list(zip(self.config.windows, self.config.causal, strict=True))

    @staticmethod
    def _mask(cache: KVCache, rows: int, window: int | None, causal: bool) -> Tensor | None:
        if causal:
            return cache.mask(rows, window=window)
        if window is None:
            return None
        return cache.mask(rows, torch.ones(rows, rows, dtype=torch.bool, device=cache.rows.device), window)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final-normed hidden states → logits, over the draft vocabulary if there is one."""
        head = self.lm_head or self.draft_head or self.target_head
        assert head is not None, "a DFlash model without a head of its own must be bound to its target"
        return head(hidden)

    def draft_from(self, ids: Tensor, rows: Tensor) -> None:
        """Choose among the tokens `ids` [n] only, with these rows [n, width] of the target's head.

        Drafting reads the whole head for a few rows, which costs more than the model itself; the tokens that a target
        uses most make up nearly all it says (frequency-ranked drafting, FR-Spec, arXiv 2502.14856).
        """
        with torch.device("meta"):
            self.draft_head = Linear(rows.shape[1], rows.shape[0], bias=False)
        self.draft_head.weight = nn.Parameter(rows, requires_grad=False)
        self.target_ids = ids
        self.config = replace(self.config, draft_vocab_size=len(ids))

    def new_cache(self, capacity: int) -> KVCache:
        shape, weight = self.config.shape, self.norm.weight
        return KVCache(self.config.layers, shape.kv_heads, shape.head_dim, capacity, weight.dtype, weight.device)

    def parts(self) -> list[Part]:
        """Checkpoint names of every parameter; z-lab's and speculators' layouts share them."""
        parts = [Part(getattr(self, name), "weight", [f"{name}.weight"]) for name in ("fc", "hidden_norm", "norm")]
        if self.embedding is not None:
            parts.append(Part(self.embedding, "weight", ["embed_tokens.weight"]))
        if self.lm_head is not None:
            parts.append(Part(self.lm_head, "weight", ["lm_head.weight"]))
        for i, layer in enumerate(self.layers):
            parts += layer_parts(layer, f"layers.{i}")
        return parts


class DFlashDrafter:
    """The block as a chain: slot i's own choice at depth i.

    `block_rows` of the block are verified, anchor included (all if left out): the rest only shape what is drafted.
    """

    name, family = "df", "diffusion"

    def __init__(
        self, model: DFlash, block_size: int | None = None, block_rows: int | None = None, p_min: float | None = None
    ):
        self.model, self.p_min = model, p_min
        self.block_size = model.config.block_size if block_size is None else block_size
        if self.block_size < 2:
            raise WhiFlashError(f"the block size must be at least 2 (the anchor and one guess), got {self.block_size}")
        self.rows = self.block_size if block_rows is None else block_rows
        if not 2 <= self.rows <= self.block_size:
            raise WhiFlashError(
                f"of a block of {self.block_size} rows 2 to {self.block_size} can be verified, not {block_rows}"
            )

    def catch_up(self, state: DraftState, log: FeatureLog, kv_only: bool = True) -> int:
        """Context K/V for every row of the backlog. There is no fuller forward than this, whatever `kv_only` says."""
        start, end = state.cursor, log.length
        if end > start:
            state.cache.reserve(end + self.block_size)
            positions = torch.arange(start, end, device=log.tokens.device)
            self.model.write_context(log.features(self.model.taps, start, end), positions, state.cache)
            state.cache.advance(end - start)
        return end - start

    def block_logits(self, state: DraftState, log: FeatureLog, rows: int | None = None) -> Tensor:
        """Logits of slots 1..rows-1 (all B-1 if left out), [rows-1, draft vocab]."""
        state.cache.reserve(log.length + self.block_size)
        block = log.tokens.new_full((1, self.block_size), self.model.config.mask_token_id)
        block[:, 0] = log.tokens[log.length]
        positions = torch.arange(log.length, log.length + self.block_size, device=block.device)
        return self.model.logits(self.model(block, positions, state.cache)[0, 1:rows])

    def draft(self, state: DraftState, log: FeatureLog, choose: Choose | None) -> Draft:
        logits = self.block_logits(state, log, self.rows)
        tokens, probs = (logits.argmax(-1), None) if choose is None else choose(logits)
        root = log.tokens[log.length : log.length + 1]
        tokens, probs = torch.cat([root, self.to_target(tokens)]), to_target_vocab(probs, self.model)
        confidence = None if self.p_min is None else top_probability(logits).cumprod(0)
        return chain(tokens, probs, confidence).likely(self.p_min)

    def to_target(self, tokens: Tensor) -> Tensor:
        return tokens if self.model.target_ids is None else self.model.target_ids[tokens]
