"""The parts every model here is made of: norm, attention, gated MLP."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from whiflash.nn.cache import KVCache
from whiflash.nn.linear import Linear
from whiflash.nn.rotary import rotate

Rope = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one decoder layer; `width_in` is what q, k and v read (twice the width in an EAGLE-3 head)."""

    width: int
    width_in: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


class RMSNorm(nn.RMSNorm):
    def __init__(self, width: int, eps: float):
        super().__init__(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        # autocast hands over half-precision inputs, which have no fused kernel with a float32 weight
        return super().forward(x.to(self.weight.dtype))


class Attention(nn.Module):
    """Grouped-query attention with q, k, v from one product. Callers own caching: project, (append), attend."""

    def __init__(self, shape: LayerShape):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.qkv = Linear(shape.width_in, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, bias=shape.qkv_bias)
        self.o = Linear(shape.heads * shape.head_dim, shape.width, bias=shape.o_bias)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else None
        self.kv: Linear | None = None

    def project(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, width_in] → q [B, heads, T, head_dim], k and v [B, kv_heads, T, head_dim], normed and rotated."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        qk, v = heads.split([self.heads + self.kv_heads, self.kv_heads], 1)
        if self.q_norm is None or self.k_norm is None:
            q, k = rotate(qk, rope).split([self.heads, self.kv_heads], 1)
        else:
            q, k = qk.split([self.heads, self.kv_heads], 1)
            q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        return q, k, v

    def project_kv(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """The k and v of `project`, without computing q."""
        if self.kv is not None:
            heads = self.kv(x)
        else:
            skip = self.heads * self.head_dim
            bias = None if self.qkv.bias is None else self.qkv.bias[skip:]
            heads = F.linear(x, self.qkv.weight[skip:], bias)
        k, v = heads.unflatten(-1, (-1, self.head_dim)).transpose(1, 2).split(self.kv_heads, 1)
        if self.k_norm is not None:
            k = self.k_norm(k)
        return rotate(k, rope), v

    def split_kv(self) -> None:
        """Give k and v a product of their own, so that `project_kv` can run packed. Call before packing."""
        skip = self.heads * self.head_dim
        self.kv = Linear(
            self.qkv.in_features, self.qkv.out_features - skip, bias=self.qkv.bias is not None, device="meta"
        )
        self.kv.weight = nn.Parameter(self.qkv.weight[skip:].detach().contiguous(), requires_grad=False)
        if self.qkv.bias is not None:
            self.kv.bias = nn.Parameter(self.qkv.bias[skip:].detach().contiguous(), requires_grad=False)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        causal: bool = False,
        cache: KVCache | None = None,
    ) -> Tensor:
        """q over k, v, through the output product: [B, T, width]. `mask` is additive, broadcast to [B, heads, T, S].

        A `cache` that k and v came from may have a faster way to its rows.
        """
        out = None if cache is None else cache.attend(q, k, v, mask)
        if out is None and q.requires_grad and q.device.type == "cpu" and mask is not None:
            out = _explicit_attention(q, k, v, mask)
        elif out is None:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=self.heads != self.kv_heads
            )
        return self.o(out.transpose(1, 2).flatten(2))


def _explicit_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention by two products and a softmax: the fused one's backward takes two to three times as long on CPU."""
    grouped = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    scores = (grouped * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    weights = (scores.unflatten(2, (-1, q.shape[2])) + mask).softmax(-1)
    return (weights.flatten(2, 3).to(v.dtype) @ v).unflatten(2, (-1, q.shape[2])).flatten(1, 2)


class MLP(nn.Module):
    """down(silu(gate x) · up x), gate and up in one product."""

    def __init__(self, shape: LayerShape):
        super().__init__()
        self.gate_up = Linear(shape.width, 2 * shape.intermediate, bias=shape.mlp_bias)
        self.down = Linear(shape.intermediate, shape.width, bias=shape.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    """The pre-norm decoder layer that targets, DFlash models and the later layers of EAGLE-3 heads share."""

    def __init__(self, shape: LayerShape):
        super().__init__()
        self.attention_norm = RMSNorm(shape.width, shape.norm_eps)
        self.attention = Attention(shape)
        self.mlp_norm = RMSNorm(shape.width, shape.norm_eps)
        self.mlp = MLP(shape)
        self.fused: Any = None  # the whole layer in one call, where pack() found a kernel for it

    def forward(
        self, x: Tensor, rope: Rope, cache: KVCache | None, index: int, mask: Tensor | None, causal: bool = False
    ) -> Tensor:
        """x [B, T, width] through layer `index`, whose K/V go to the cache (if any) behind its committed rows.

        mask is additive; without one, `causal` hides later rows and otherwise all see all.
        """
        if self.fused is not None and self.fused.takes(x, rope, cache):
            return self.fused(x, rope, cache, index, mask, causal)
        q, k, v = self.attention.project(self.attention_norm(x), rope)
        if cache is not None:
            k, v = cache.append(index, k, v)
        x = x + self.attention.attend(q, k, v, mask, causal, cache)
        return x + self.mlp(self.mlp_norm(x))
