"""Packing a model for inference, and whole decoder layers in one call of the CPU kernel."""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from whiflash.nn import kernel
from whiflash.nn.cache import KVCache
from whiflash.nn.layers import MLP, Attention, RMSNorm, Rope
from whiflash.nn.linear import Linear

# More rows than this are a prompt, not a draft: products dominate there, and PyTorch's attention is the better one.
MOST_ROWS = 64


def pack(module: nn.Module) -> nn.Module:
    """Pack every `Linear` below `module` for inference, fuse the layers that can be; returns the module."""
    for child in module.modules():
        if isinstance(child, Linear):
            child.pack()
    layers: list[Any] = [child for child in module.modules() if hasattr(child, "fused")]
    for layer in layers:
        layer.fused = fuse(layer.attention, layer.mlp, layer.mlp_norm, getattr(layer, "attention_norm", None))
    return module.requires_grad_(False)


def fuse(attention: Attention, mlp: MLP, mlp_norm: RMSNorm, attention_norm: RMSNorm | None) -> "FusedLayer | None":
    """The layer of these parts in one piece, or None where the kernel is absent or its tiles do not fit their sizes.

    Without an attention_norm the layer's input comes normed, as an EAGLE-3 head joins it from two halves.
    """
    library, products = kernel.load(), (attention.qkv, attention.o, mlp.gate_up, mlp.down)
    if library is None or not all(isinstance(p.packed, kernel.PanelWeight) for p in products):
        return None
    if attention.head_dim % library.lanes() or mlp.down.in_features % library.panel_width():
        return None
    return FusedLayer(attention, mlp, mlp_norm, attention_norm, library)


class _Panels(ctypes.Structure):
    """`struct panels` of kernel.c."""

    _fields_ = (("data", ctypes.c_void_p), ("kind", ctypes.c_long))


class _Struct(ctypes.Structure):
    """`struct layer` of kernel.c."""

    _pointers = (
        "attention_norm", "qkv_bias", "q_norm", "k_norm", "o_bias", "mlp_norm", "gate_up_bias", "down_bias",
    )  # fmt: skip
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _pointers),
        *((name, _Panels) for name in ("qkv", "o", "gate_up", "down")),
        *((name, ctypes.c_long) for name in ("width", "width_in", "heads", "kv_heads", "head_dim", "inner")),
        ("eps", ctypes.c_float),
    )


class FusedLayer:
    """A decoder layer for up to 64 rows of one sequence, within rounding of `Layer.forward`."""

    def __init__(
        self,
        attention: Attention,
        mlp: MLP,
        mlp_norm: RMSNorm,
        attention_norm: RMSNorm | None,
        library: ctypes.CDLL,
    ):
        norms = {"attention_norm": attention_norm, "mlp_norm": mlp_norm, "q_norm": attention.q_norm}
        norms["k_norm"] = attention.k_norm
        products = {"qkv": attention.qkv, "o": attention.o, "gate_up": mlp.gate_up, "down": mlp.down}
        given: dict[str, Tensor | None] = {name: norm.weight for name, norm in norms.items() if norm is not None}
        given |= {f"{name}_bias": product.bias for name, product in products.items()}
        self.tensors = {name: t.detach().contiguous() for name, t in given.items() if t is not None}
        panels = {name: product.packed for name, product in products.items()}
        self.panels = {name: p for name, p in panels.items() if isinstance(p, kernel.PanelWeight)}
        self.library = library
        self.struct = _Struct(
            **{name: t.data_ptr() for name, t in self.tensors.items()},
            **{name: _Panels(p.panels.data_ptr(), p.kind) for name, p in self.panels.items()},
            width=mlp.down.out_features,
            width_in=attention.qkv.in_features,
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            inner=mlp.down.in_features,
            eps=mlp_norm.eps,
        )
        self.pointer = ctypes.pointer(self.struct)

    def takes(self, x: Tensor, rope: Rope, cache: KVCache | None) -> bool:
        """Whether this call is the kind the kernel is for."""
        return type(cache) is KVCache and x.shape[0] == 1 and x.shape[1] <= MOST_ROWS and rope[0].ndim == 2

    def __call__(
        self,
        x: Tensor,
        rope: Rope,
        cache: KVCache,
        index: int,
        mask: Tensor | None,
        causal: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        """As `Layer.forward`; `residual` [1, T, width], x if left out, is what attention's output is added to."""
        rows, past, threads = x.shape[1], cache.length, torch.get_num_threads()
        if past + rows > cache.capacity:
            raise IndexError(f"a cache of {cache.capacity} rows has no room for {rows} more behind {past}")
        x, (cosine, sine) = x.contiguous(), rope
        residual = x if residual is None else residual.contiguous()
        y = torch.empty_like(residual)
        scratch = x.new_empty(self.library.scratch_size(self.pointer, rows, past + rows, threads))
        keys, values = cache.rows[index]
        self.library.layer_forward(
            self.pointer, x.data_ptr(), residual.data_ptr(), y.data_ptr(), cosine.data_ptr(), sine.data_ptr(),
            keys.data_ptr(), values.data_ptr(), cache.capacity, past, rows, None if mask is None else mask.data_ptr(),
            causal, scratch.data_ptr(), threads,
        )  # fmt: skip
        return y
