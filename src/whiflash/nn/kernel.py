"""Fast passes of few rows on CPU: our own kernel where a C compiler is at hand, else oneDNN's packed product.

The kernel (kernel.c) is built once per machine into the cache directory. `WHIFLASH_KERNEL=0` leaves it out.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from whiflash.home import home

SOURCE = Path(__file__).with_name("kernel.c")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
# How kernel.c calls the types that numbers are stored in.
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# The row count oneDNN's layout is chosen for: a verify pass rarely has more rows than this.
ONEDNN_ROWS = 16


class PanelWeight:
    """A float32 weight [out, in] for the kernel: panels of outputs, each read straight through.

    Weights that came from a 16-bit checkpoint are kept in 16 bits: the same numbers, the same results to the bit, and
    half the memory to read.
    """

    def __init__(self, weight: Tensor, library: ctypes.CDLL):
        self.library, (self.outputs, self.inputs) = library, weight.shape
        width = library.panel_width()
        padded = F.pad(narrowest(weight.detach(), library), (0, 0, 0, -self.outputs % width))
        self.panels = padded.view(-1, width, self.inputs).transpose(1, 2).contiguous()
        self.kind = KINDS[self.panels.dtype]

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], self.outputs)
        self.library.matmul(
            x.data_ptr(), self.panels.data_ptr(), self.kind, y.data_ptr(), x.numel() // self.inputs, self.inputs,
            self.outputs, torch.get_num_threads(),
        )  # fmt: skip
        return y if bias is None else y.add_(bias)

    def dense(self) -> Tensor:
        return self.panels.transpose(1, 2).reshape(-1, self.inputs)[: self.outputs].float()


def narrowest(weight: Tensor, library: ctypes.CDLL) -> Tensor:
    """`weight` in the first 16-bit type that holds every number of it exactly, or as it is."""
    for dtype in (torch.bfloat16, torch.float16) if library.has_float16() else (torch.bfloat16,):
        some = weight[:1]  # nearly always enough to say no
        if torch.equal(some.to(dtype).float(), some) and torch.equal((narrow := weight.to(dtype)).float(), weight):
            return narrow
    return weight


class OneDnnWeight:
    """A weight [out, in] in oneDNN's blocked layout."""

    def __init__(self, weight: Tensor):
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ONEDNN_ROWS)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")

    def dense(self) -> Tensor:
        return self.packed.to_dense()


PackedWeight = PanelWeight | OneDnnWeight


def pack_weight(weight: Tensor) -> PackedWeight | None:
    """The fastest layout this machine has for a CPU weight, or None where a plain product must do."""
    if weight.device.type != "cpu":
        return None
    if weight.dtype == torch.float32 and (library := load()) is not None:
        return PanelWeight(weight, library)
    return OneDnnWeight(weight) if ONEDNN and weight.dtype in (torch.float32, torch.bfloat16) else None


@functools.cache
def load() -> ctypes.CDLL | None:
    """The compiled kernel, built on first use; None where it cannot be built or is switched off."""
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or os.environ.get("WHIFLASH_KERNEL") == "0" or os.name != "posix":
        return None
    key = hashlib.sha256("\0".join([SOURCE.read_text("utf-8"), *FLAGS, compiler, _cpu()]).encode()).hexdigest()[:16]
    path = home() / "kernels" / f"kernel-{key}.so"
    try:
        if not path.exists():
            _build(compiler, path)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError):
        return None  # no OpenMP, no write access, an odd compiler: oneDNN's product is the same within rounding
    pointer, count, flag = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    library.matmul.argtypes = [pointer, pointer, flag, pointer, count, count, count, flag]
    library.scratch_size.argtypes = [pointer, count, count, flag]
    library.layer_forward.argtypes = [pointer] * 8 + [count] * 3 + [pointer, flag, pointer, flag]
    library.attend_slots.argtypes = [pointer] * 3 + [flag] + [pointer] * 2 + [count] * 5 + [pointer, flag]
    library.attend_slots.restype = library.matmul.restype = library.layer_forward.restype = None
    library.scratch_size.restype = count
    return library


def _build(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        built = Path(scratch) / path.name
        subprocess.run(
            [compiler, *FLAGS, str(SOURCE), "-o", str(built), "-lm"], check=True, capture_output=True, timeout=120
        )
        built.replace(path)


def _cpu() -> str:
    """What -march=native depends on: a home directory may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return f"{platform.machine()} {platform.processor()} {sysconfig.get_platform()}"
