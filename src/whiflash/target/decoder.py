"""The dense decoder of the Llama, Mistral, Qwen2 and Qwen3 families: one file, one forward pass."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from whiflash.nn.cache import KVCache
from whiflash.nn.layers import Layer, RMSNorm
from whiflash.nn.linear import Linear
from whiflash.nn.rotary import Rotary
from whiflash.nn.weights import Part, Weights, layer_parts, load_parts
from whiflash.target.config import TargetConfig


class Decoder(nn.Module):
    layers: list[Layer]  # nn.ModuleList, which forgets what it holds

    def __init__(self, config: TargetConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Layer(config.shape) for _ in range(config.layers))  # type: ignore[assignment]
        self.norm = RMSNorm(config.width, config.shape.norm_eps)
        self.lm_head = Linear(config.width, config.vocab_size, bias=False)

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        tree: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """tokens [B, T] → final-normed hidden states [B, T, width] and the taps' states [B, T, len(taps)·width].

        Writes K/V behind the cache's committed rows and does not advance it; without a cache, rows see each other only.
        tree [T, T] (bool): which new rows each new row sees; left out, those up to itself. positions [B, T] or [T];
        left out, they follow the cache. Tap k < n is the residual stream after k layers (k = 0: the embedding); tap n
        the stream after the last layer; tap n+1 the same after the final norm, which is what transformers calls
        hidden_states[n].
        """
        x = self.embedding(tokens)
        past = 0 if cache is None else cache.length
        if positions is None:
            positions = torch.arange(past, past + tokens.shape[1], device=tokens.device)
        cos, sin = self.rotary(positions, x.dtype)
        rope = (cos, sin) if positions.ndim == 1 else (cos[:, None], sin[:, None])
        masks = self._masks(tokens.shape[1], cache, tree, positions)
        states = {}
        for index, layer in enumerate(self.layers):
            if index in taps:
                states[index] = x
            mask = masks[self.config.windows[index]]
            x = layer(x, rope, cache, index, mask, causal=mask is None and tokens.shape[1] > 1)
        states[len(self.layers)] = x
        hidden = states[len(self.layers) + 1] = self.norm(x)
        return hidden, torch.cat([states[t] for t in taps], -1) if taps else None

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        """Final-normed hidden states [..., width] → logits [..., vocab]."""
        return self.lm_head(hidden)

    def head_rows(self, ids: Tensor) -> Tensor:
        """The head's weight for the tokens `ids` [n] → [n, width], float32."""
        return self.lm_head.dense().detach()[ids.to(self.norm.weight.device)].float()

    def new_cache(self, capacity: int) -> KVCache:
        shape, weight = self.config.shape, self.norm.weight
        return KVCache(self.config.layers, shape.kv_heads, shape.head_dim, capacity, weight.dtype, weight.device)

    @property
    def rotary(self) -> Rotary:
        if getattr(self, "_rotary", None) is None:
            self._rotary = Rotary(self.config.rope, self.config.shape.head_dim, self.norm.weight.device)
        return self._rotary

    def _masks(
        self, rows: int, cache: KVCache | None, tree: Tensor | None, positions: Tensor
    ) -> dict[int | None, Tensor | None]:
        """One mask per kind of layer; None means causal over just these rows (or a single row that sees all)."""
        windows = set(self.config.windows)
        if cache is None:
            weight = self.norm.weight
            cache = KVCache(0, 1, 1, 0, weight.dtype, weight.device)
        if cache.length == 0 and tree is None:
            # causal over just these rows, which attention does without a mask, unless a window cuts in
            return {w: cache.mask(rows, window=w) if w is not None and w < rows else None for w in windows}
        return {w: cache.mask(rows, tree, w, positions) for w in windows}

    def parts(self) -> list[Part]:
        parts = [Part(self.embedding, "weight", ["model.embed_tokens.weight"])]
        parts.append(Part(self.norm, "weight", ["model.norm.weight"]))
        for i, layer in enumerate(self.layers):
            parts += layer_parts(layer, f"model.layers.{i}")
        return parts

    @classmethod
    def load(cls, config: TargetConfig, weights: Weights, dtype: torch.dtype, device: torch.device | str) -> "Decoder":
        """Read every tensor of the checkpoint, or fail saying which is missing, misshapen or left over."""
        with torch.device("meta"):
            decoder = cls(config)
        load_parts(decoder.parts(), weights, dtype, device)
        if config.tied:
            decoder.lm_head.weight = decoder.embedding.weight
        else:
            load_parts([Part(decoder.lm_head, "weight", ["lm_head.weight"])], weights, dtype, device)
        # some exporters also write the tied head, or the rotary buffers of old transformers
        weights.finish(ignore=("lm_head.weight", "rotary_emb.inv_freq") if config.tied else ("rotary_emb.inv_freq",))
        return decoder.eval().requires_grad_(False)
