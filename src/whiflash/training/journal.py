"""Where the training rooms take their journal from; it is the same one that measuring uses."""

from whiflash.journal import Journal, exclusive, read_json, write_atomic

__all__ = ["Journal", "exclusive", "read_json", "write_atomic"]
