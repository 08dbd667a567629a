"""Always the same slot: a single drafter, or one of a pair for comparison."""

import torch
from torch import Tensor

from whiflash.errors import WhiFlashError
from whiflash.routers.router import Signal


class FixedRouter:
    name = "fixed"

    def __init__(self, slot: int = 0, slots: int = 1):
        if not 0 <= slot < slots:
            raise WhiFlashError(f"slot {slot} does not exist; there are {slots}, counted from 0")
        self.slot = slot

    def __call__(self, signal: Signal) -> tuple[Tensor, Tensor]:
        device = signal.hidden.device
        return torch.tensor(self.slot, device=device), torch.tensor(float("nan"), device=device)
