"""A CUDA device that needs no GPU: every tensor is fake, and mixing devices fails as it would on a real one.

PyTorch without CUDA cannot run some methods of fake CUDA tensors by Python's names for them (the binding switches the
current device first), so those names are bound to the operators behind them.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

CUDA = torch.device("cuda", 0)


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Inside, tensors are fake, and on CUDA only where the code says so."""
    bindings = {
        "__getitem__": _get,
        "__setitem__": _set,
        "__invert__": lambda x: torch.ops.aten.bitwise_not.default(x),
        "copy_": lambda x, source, non_blocking=False: torch.ops.aten.copy_.default(x, source, non_blocking),
        "contiguous": lambda x: x if x.is_contiguous() else torch.ops.aten.clone.default(x),
    }
    with ExitStack() as stack:
        for name, operator in bindings.items():
            stack.enter_context(mock.patch.object(Tensor, name, operator))
        stack.enter_context(FakeTensorMode())
        yield


def on_cuda(make: Callable[[], nn.Module]) -> Any:
    """The module `make` builds, with fake CUDA parameters; drawing random initial values would need a real device."""
    with torch.device("meta"):
        module = make()
    for child in module.modules():
        for name, tensor in child._parameters.items():
            if tensor is not None:
                child._parameters[name] = nn.Parameter(_empty(tensor), requires_grad=False)
        for name, tensor in child._buffers.items():
            if tensor is not None:
                child._buffers[name] = _empty(tensor)
    return module.eval()


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA)


def _get(x: Tensor, index: Any) -> Tensor:
    view, indices = _basic(x, index)
    return torch.ops.aten.index.Tensor(view, indices) if indices else view


def _set(x: Tensor, index: Any, value: Any) -> None:
    view, indices = _basic(x, index)
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=view.dtype, device=view.device)
    _same_device(view, value)
    if indices:
        torch.ops.aten.index_put_.default(view, indices, value)
    else:
        torch.ops.aten.copy_.default(view, value)


def _same_device(x: Tensor, other: Tensor) -> None:
    """PyTorch would copy the other one across, and wait for it."""
    if other.device != x.device:
        raise RuntimeError(f"a tensor on device {other.device} indexes or is written into one on device {x.device}")


def _basic(x: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """The view that integers, slices and None make of x, and what is left of the index for each of its dimensions."""
    index = list(index) if isinstance(index, tuple) else [index]
    named = sum(item is not None and item is not ... for item in index)
    at = next((i for i, item in enumerate(index) if item is ...), None)
    if at is not None:
        index[at : at + 1] = [slice(None)] * (x.ndim - named)
    indices: list[Tensor | None] = []
    for item in index:
        dim = len(indices)
        if item is None:
            x = x.unsqueeze(dim)
        elif isinstance(item, slice):
            x = torch.ops.aten.slice.Tensor(x, dim, item.start, item.stop, item.step or 1)
        elif isinstance(item, Tensor | list):
            indices.append(item if isinstance(item, Tensor) else torch.tensor(item, device=x.device))
            _same_device(x, indices[dim])
            continue
        else:
            x = x.select(dim, item)
            continue
        indices.append(None)
    return x, indices if any(i is not None for i in indices) else []
