"""WhiFlash: speculative decoding with several drafters and a router that picks one every round; exact output."""

from whiflash.errors import WhiFlashError
from whiflash.model import Drafting, Output, Piece, WhiFlash

__all__ = ["Drafting", "Output", "Piece", "WhiFlash", "WhiFlashError"]
__version__ = "0.1.0"
