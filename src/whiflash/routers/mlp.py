"""The neural router's network, shared by training and decoding."""

import torch.nn.functional as F
from torch import Tensor, nn


class RouterMLP(nn.Module):
    """Hidden states [..., hidden_size] → predicted gain in acceptance length ΔAL [...]: Linear, GELU, Linear."""

    def __init__(self, hidden_size: int, inner_size: int):
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, inner_size)
        self.fc2 = nn.Linear(inner_size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(hidden))).squeeze(-1)
