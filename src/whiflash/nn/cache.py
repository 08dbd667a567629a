"""A preallocated key/value cache for one sequence, and the masks that go with it."""

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every layer, [layers, 2, 1, kv_heads, capacity, head_dim], written in place.

    Rows `0..length-1` are committed. `append` writes behind them without moving `length`, so speculative rows vanish
    by not calling `advance`.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, capacity: int, dtype: torch.dtype, device):
        self.rows = torch.zeros(layers, 2, 1, kv_heads, capacity, head_dim, dtype=dtype, device=device)
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.rows.shape[4]

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` rows, keeping the committed ones. Grows by doubling at least."""
        if capacity <= self.capacity:
            return
        shape = list(self.rows.shape)
        shape[4] = max(capacity, 2 * self.capacity)
        rows = self.rows.new_zeros(shape)
        rows[..., : self.length, :] = self.rows[..., : self.length, :]
        self.rows = rows

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v [1, kv_heads, T, head_dim] behind the committed rows; returns all rows up to and with them."""
        keys, values = self.rows[layer]
        end = self.length + k.shape[2]
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor | None:
        """q over the rows k, v that `append` returned under what `mask` returned; None: do it the usual way."""
        return None

    def advance(self, rows: int) -> None:
        self.length += rows

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise IndexError(f"cannot truncate a cache of {self.length} rows to {length}")
        self.length = length

    def keep_path(self, start: int, path: Tensor) -> None:
        """Of the rows written from `start` on, keep those at offsets `path` [m] (ascending), moved to `start` on."""
        end = start + path.shape[0]
        self.rows[..., start:end, :] = self.rows.index_select(4, path + start)
        self.length = end

    def mask(
        self, rows: int, tree: Tensor | None = None, window: int | None = None, positions: Tensor | None = None
    ) -> Tensor | None:
        """Additive mask [rows, length + rows] for `rows` new rows, or None where attention needs none.

        tree [rows, m] (bool): which of the newest m ≥ rows rows (the new ones and those just before) row i sees; it
        sees all older ones. Left out, a causal chain. `window`: only keys less than `window`
        positions back are seen; `positions` [rows] are then those of the new rows, left out if they follow the cache.
        """
        if rows == 1 and (window is None or self.length < window):
            return None
        new = torch.ones(rows, rows, dtype=torch.bool, device=self.rows.device).tril() if tree is None else tree
        seen = torch.cat([new.new_ones(rows, self.length + rows - new.shape[1]), new], 1)
        if window is not None:
            keys = torch.arange(self.length + rows, device=new.device)
            if positions is not None:
                keys[self.length :] = positions
            seen = seen & (keys[self.length :, None] - keys < window)
        return additive(seen, self.rows.dtype)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where seen, -inf elsewhere: attention on CPU would convert a bool mask again in every layer."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, float("-inf"))
