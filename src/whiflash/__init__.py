"""WhiFlash: speculative decoding with several drafters and a router that picks one every round; exact output."""

from typing import TYPE_CHECKING, Any

from whiflash.errors import WhiFlashError

if TYPE_CHECKING:
    from whiflash.model import Drafting, Output, Piece, WhiFlash

__all__ = ["Drafting", "Output", "Piece", "WhiFlash", "WhiFlashError"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The model's names on first use: torch takes seconds to import, and `whiflash --help` needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from whiflash import model

    return getattr(model, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
