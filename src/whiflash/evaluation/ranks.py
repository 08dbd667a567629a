"""Several processes under torchrun: each takes a share of the prompts, rank 0 gathers what they found."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

T = TypeVar("T")
# A rank that is done waits for the slowest one, however long that takes.
PATIENCE = timedelta(days=30)


@dataclass(frozen=True)
class Ranks:
    """This process among `count`."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        return items[self.rank :: self.count]

    def wait(self) -> None:
        if self.count > 1:
            distributed.barrier()

    def agree(self, error: Exception | None) -> None:
        """Raise rank 0's `error` there, and end the other processes without a word; nothing where there is none."""
        if self.count > 1:
            told = [error is not None]
            distributed.broadcast_object_list(told, src=0)
            if told[0] and not self.first:
                raise SystemExit(2)
        if error is not None:
            raise error

    def gather(self, item: T) -> list[T]:
        """On rank 0 everyone's items by rank; an empty list elsewhere."""
        if self.count == 1:
            return [item]
        found: list[Any] | None = [None] * self.count if self.first else None
        distributed.gather_object(item, found, dst=0)
        return found or []


@contextmanager
def ranks(device: str | None) -> Iterator[tuple[Ranks, str | None]]:
    """This process's place and its device: what torchrun's environment says, else one process on `device`."""
    count = int(os.environ.get("WORLD_SIZE", 1))
    if count == 1:
        yield Ranks(), device
        return
    cuda = torch.cuda.is_available() and (device is None or device.startswith("cuda"))
    if cuda:
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if cuda else "gloo", timeout=PATIENCE)
    try:
        yield Ranks(distributed.get_rank(), count), device
    finally:
        distributed.destroy_process_group()
