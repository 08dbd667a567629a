"""From a name to a `Target`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from whiflash.errors import UnsupportedError, WhiFlashError
from whiflash.nn.fused import pack
from whiflash.nn.weights import Weights, read_config, resolve
from whiflash.target import embedded
from whiflash.target.config import TargetConfig
from whiflash.target.decoder import Decoder
from whiflash.target.target import Target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_target(
    name: str | Path = embedded.NAME,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    runtime: bool = True,
    progress: Callable[[str, float], None] | None = None,
) -> Target:
    """Load a causal language model by hub id, directory, or `smollm2-135m` (the embedded one).

    dtype: float32 on CPU and bfloat16 elsewhere unless given. runtime: read the families the runtime knows with its own
    decoder; False forces the transformers adapter, which serves every other architecture.
    """
    device = _device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise WhiFlashError(f"dtype {dtype!r} is not known; expected one of {', '.join(DTYPES)}")
        dtype = DTYPES[dtype]
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    path = embedded.prepare(progress) if str(name) == embedded.NAME else resolve(name, "target")
    if not path.is_dir():
        raise WhiFlashError(f"target {name} is a file; expected a model directory or a hub id")
    raw = read_config(path, "target")
    config = _own_config(raw) if runtime else None
    tokenizer = _load_tokenizer(path)
    network: Any
    sizes: Any = config
    if config is not None:
        network = pack(Decoder.load(config, Weights(path), dtype, device))
    else:
        from whiflash.target.adapter import Adapter

        network = sizes = Adapter.load(path, dtype, device)
    return Target(
        str(name),
        path,
        network,
        tokenizer,
        layers=sizes.layers,
        width=sizes.width,
        vocab_size=sizes.vocab_size,
        max_positions=sizes.max_positions,
        dtype=dtype,
        device=device,
    )


def _own_config(raw: dict[str, Any]) -> TargetConfig | None:
    """Sizes for the own decoder, or None where the adapter has to serve."""
    try:
        return TargetConfig.from_config(raw)
    except UnsupportedError:
        return None


def _device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise WhiFlashError(
            f"device {str(name)!r} cannot be used here ({reason}); expected cpu, cuda, cuda:1, …"
        ) from error
    return device


def _load_tokenizer(path: Path):
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError … for a tokenizer that is not there
        raise WhiFlashError(f"{path} has no tokenizer that transformers can load ({error})".splitlines()[0]) from error
