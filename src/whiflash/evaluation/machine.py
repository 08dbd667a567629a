"""The machine a benchmark ran on: facts for the record, and peak memory."""

import contextlib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).parents[1]
CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def facts(device: torch.device) -> dict[str, Any]:
    """What figures depend on: processor, threads, load (runnable tasks), versions, and the commit if there is one."""
    found: dict[str, Any] = {
        "device": device.type,
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory": "device memory allocated" if device.type == "cuda" else "resident set of the process",
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "os": platform.platform(terse=True),
        "python": platform.python_version(),
        "whiflash": _version("whiflash"),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "commit": commit(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return found


def commit() -> str | None:
    """The git commit of the package's own sources, with a + if they were changed since; None outside a checkout."""
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head = _git("rev-parse", "--short=12", "HEAD")
    return head and head + ("+" if _git("status", "--porcelain", "--untracked-files=no", ".") else "")


def _git(*command: str) -> str | None:
    try:
        done = subprocess.run(["git", *command], cwd=PACKAGE, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


class PeakMemory:
    """Most memory since `reset`, in bytes: allocated on a GPU, else the resident set, where the kernel tells it."""

    def __init__(self, device: torch.device):
        self.device = device

    def reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            # where this is not allowed, the peak since the start of the process is reported
            with contextlib.suppress(OSError):
                CLEAR_REFS.write_text("5")

    def read(self) -> int | None:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        try:
            lines = STATUS.read_text().splitlines()
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
        except (OSError, StopIteration):
            return None
