"""Matrix products, packed on CPU for the few rows a decoding step has."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# The row count the packed layout is chosen for: a verify pass rarely has more rows than this.
ROWS = 16

PACKED = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


class Linear(nn.Linear):
    """y = x Wᵀ + b for x [..., in].

    `pack()` moves the weight into oneDNN's blocked layout, which halves the time of one row and makes the next fifteen
    nearly free on CPU. It is one way: the dense weight is released. Elsewhere, or without the operator, it is a no-op.
    """

    packed: Tensor | None = None

    def pack(self) -> None:
        weight = self.weight
        if not PACKED or weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
            return
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
        del self.weight

    def forward(self, input: Tensor) -> Tensor:
        if self.packed is None:
            return F.linear(input, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")


def pack(module: nn.Module) -> nn.Module:
    """Pack every `Linear` below `module` for inference; returns the module."""
    for child in module.modules():
        if isinstance(child, Linear):
            child.pack()
    return module.requires_grad_(False)
