"""Where WhiFlash keeps what it downloads and builds."""

import os
from pathlib import Path


def home() -> Path:
    """Directory for everything WhiFlash caches: `WHIFLASH_HOME`, or `whiflash` in the user's cache directory."""
    if explicit := os.environ.get("WHIFLASH_HOME"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "whiflash"
