"""WhiFlash-Entropy: an unsure target (high next-token entropy) is a case for the second slot of the pair."""

from torch import Tensor

from whiflash.routers.router import Signal, check_threshold


class EntropyRouter:
    """Slot 1 (autoregressive in df-e3 and ddt-e3) where entropy in nats exceeds the threshold, else slot 0."""

    name = "entropy"

    def __init__(self, threshold: float = 0.2):
        self.threshold = check_threshold(threshold, least=0.0)

    def __call__(self, signal: Signal) -> tuple[Tensor, Tensor]:
        entropy = signal.entropy()
        return (entropy > self.threshold).long(), entropy
