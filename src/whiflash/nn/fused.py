"""Packing a model for inference, and whole decoder layers in one call of the CPU kernel."""

import ctypes

import torch
from torch import Tensor, nn

from whiflash.nn import kernel
from whiflash.nn.cache import KVCache
from whiflash.nn.layers import Layer, Rope
from whiflash.nn.linear import Linear

# More rows than this are a prompt, not a draft: products dominate there, and PyTorch's attention is the better one.
MOST_ROWS = 64


def pack(module: nn.Module) -> nn.Module:
    """Pack every `Linear` below `module` for inference, fuse the layers that can be; returns the module."""
    for child in module.modules():
        if isinstance(child, Linear):
            child.pack()
    for child in module.modules():
        if isinstance(child, Layer):
            child.fused = fuse(child)
    return module.requires_grad_(False)


def fuse(layer: Layer) -> "FusedLayer | None":
    """The layer's fused form, or None where the kernel is absent or its tiles do not fit the layer's sizes."""
    library, attention = kernel.load(), layer.attention
    products = (attention.qkv, attention.o, layer.mlp.gate_up, layer.mlp.down)
    if library is None or not all(isinstance(p.packed, kernel.PanelWeight) for p in products):
        return None
    if attention.head_dim % library.lanes() or layer.mlp.down.in_features % library.panel_width():
        return None
    return FusedLayer(layer, library)


class _Struct(ctypes.Structure):
    """`struct layer` of kernel.c."""

    _pointers = (
        "attention_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "o", "o_bias", "mlp_norm", "gate_up", "gate_up_bias",
        "down", "down_bias",
    )  # fmt: skip
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _pointers),
        *((name, ctypes.c_long) for name in ("width", "heads", "kv_heads", "head_dim", "inner")),
        ("eps", ctypes.c_float),
    )


class FusedLayer:
    """`Layer.forward` for up to 64 rows of one sequence, within rounding of it and about a third faster."""

    def __init__(self, layer: Layer, library: ctypes.CDLL):
        attention, mlp = layer.attention, layer.mlp
        tensors: dict[str, Tensor | None] = {
            "attention_norm": layer.attention_norm.weight,
            "mlp_norm": layer.mlp_norm.weight,
            "q_norm": None if attention.q_norm is None else attention.q_norm.weight,
            "k_norm": None if attention.k_norm is None else attention.k_norm.weight,
        }
        products = {"qkv": attention.qkv, "o": attention.o, "gate_up": mlp.gate_up, "down": mlp.down}
        for name, product in products.items():
            assert isinstance(product.packed, kernel.PanelWeight)
            tensors |= {name: product.packed.panels, f"{name}_bias": product.bias}
        self.tensors = {name: t.detach().contiguous() for name, t in tensors.items() if t is not None}
        self.library, self.width = library, layer.attention_norm.weight.shape[0]
        self.struct = _Struct(
            **{name: t.data_ptr() for name, t in self.tensors.items()},
            width=self.width,
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            inner=mlp.down.in_features,
            eps=layer.attention_norm.eps,
        )
        self.pointer = ctypes.pointer(self.struct)

    def takes(self, x: Tensor, rope: Rope, cache: KVCache | None) -> bool:
        """Whether this call is the kind the kernel is for."""
        return type(cache) is KVCache and x.shape[0] == 1 and x.shape[1] <= MOST_ROWS and rope[0].ndim == 2

    def __call__(self, x: Tensor, rope: Rope, cache: KVCache, index: int, mask: Tensor | None, causal: bool) -> Tensor:
        rows, past, threads = x.shape[1], cache.length, torch.get_num_threads()
        if past + rows > cache.capacity:
            raise IndexError(f"a cache of {cache.capacity} rows has no room for {rows} more behind {past}")
        x, (cosine, sine) = x.contiguous(), rope
        y = torch.empty_like(x)
        scratch = x.new_empty(self.library.scratch_size(self.pointer, rows, past + rows, threads))
        keys, values = cache.rows[index]
        self.library.layer_forward(
            self.pointer, x.data_ptr(), y.data_ptr(), cosine.data_ptr(), sine.data_ptr(), keys.data_ptr(),
            values.data_ptr(), cache.capacity, past, rows, None if mask is None else mask.data_ptr(), causal,
            scratch.data_ptr(), threads,
        )  # fmt: skip
        return y
