"""Linear layers whose weight can be packed for the few rows a decoding step has."""

import torch.nn.functional as F
from torch import Tensor, nn

from whiflash.nn.kernel import PackedWeight, pack_weight


class Linear(nn.Linear):
    """y = x Wᵀ + b for x [..., in].

    `pack()` moves the weight into a layout that halves the time of one row on CPU and makes the next seven nearly free.
    It is one way: the dense weight is released. Where there is no such layout (on a GPU, say) it does nothing.
    """

    packed: PackedWeight | None = None

    def pack(self) -> None:
        self.packed = pack_weight(self.weight)
        if self.packed is not None:
            del self.weight

    def dense(self) -> Tensor:
        """The weight [out, in], packed or not."""
        return self.weight if self.packed is None else self.packed.dense()

    def forward(self, input: Tensor) -> Tensor:
        if self.packed is None:
            return F.linear(input, self.weight, self.bias)
        return self.packed(input, self.bias)
