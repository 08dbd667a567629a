"""Checkpoints: from a name to a directory, from a directory to tensors, and no tensor left behind."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from whiflash.errors import WhiFlashError
from whiflash.nn.layers import MLP, Attention, Layer

CHECKPOINT_FILES = (
    "*.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.pt",
    "*.txt",
    "*.model",
    "*.jinja",
)
# What some drafters keep beside their weights: a list of the token ids that they draft, where that is not the whole
# vocabulary (no tensor file, since other engines load every one they find), and the mask token's embedding.
DRAFT_VOCABULARY, MASK_EMBEDDING = "draft_vocabulary.json", "mask_embedding.pt"
# config keys that say who wrote it, not what it is
WRITERS = ("transformers_version", "_name_or_path")
# rows read of every tensor to tell one checkpoint from another
PROBES = 4
# the same weights once more: other formats in folders of their own, Mistral's original file
DUPLICATES = ("*/*", "consolidated*")


def resolve(name: str | Path, what: str = "checkpoint") -> Path:
    """A directory or file as it is; anything else is a hub id, fetched (or found in `HF_HOME` when offline)."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    name = str(name)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise WhiFlashError(f"{what} {name!r} is neither a path that exists nor a hub id such as 'org/model'")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, allow_patterns=list(CHECKPOINT_FILES), ignore_patterns=list(DUPLICATES)))
    except RepositoryNotFoundError as error:
        raise WhiFlashError(
            f"{what} {name!r} is not on the hub (or is private: run `hf auth login`), and no such path exists here"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise WhiFlashError(
            f"{what} {name!r} is not a path here, not in the local hub cache, and the hub cannot be reached; "
            "check the name, or download it first where there is a network"
        ) from error


def read_config(directory: Path, what: str = "checkpoint") -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        raise WhiFlashError(f"{what} directory {directory} has no config.json; expected a Hugging Face model directory")
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise WhiFlashError(f"{path} is not valid JSON ({error}); fetch the checkpoint again") from error
    if not isinstance(config, dict):
        raise WhiFlashError(f"{path} holds {type(config).__name__}, expected a JSON object")
    return config


class Weights:
    """The tensors of a checkpoint, each to be taken once; `finish` fails if one was left.

    Reads `model.safetensors` (single or sharded by its index), any other lone `.safetensors`, or a `.bin` holding
    tensors only (`weights_only=True`). Tensors stay on disk until taken.
    """

    def __init__(self, path: Path):
        self.path = path
        self._files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        self._taken: set[str] = set()
        self._prefix = ""
        self._loaded: dict[str, Tensor] = {}
        for file in _weight_files(path):
            if file.suffix == ".safetensors":
                try:
                    self._open[file] = safe_open(file, framework="pt")
                except (SafetensorError, OSError) as error:
                    raise WhiFlashError(f"{file} is truncated or damaged ({error}); fetch it again") from error
                self._files.update(dict.fromkeys(self._open[file].keys(), file))
            else:
                self._loaded.update(_read_bin(file))
                self._files.update(dict.fromkeys(self._loaded, file))

    def strip_prefix(self, prefix: str) -> None:
        """Call every tensor by its name without `prefix`."""
        self._prefix = prefix
        self._files = {name.removeprefix(prefix): file for name, file in self._files.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        self._require(name)
        stored = self._prefix + name
        if stored in self._loaded:
            return tuple(self._loaded[stored].shape)
        return tuple(self._open[self._files[name]].get_slice(stored).get_shape())

    def take(self, name: str, shape: Iterable[int] | None = None) -> Tensor:
        """The tensor `name`, which must have `shape` if given."""
        if shape is not None and self.shape(name) != tuple(shape):
            raise WhiFlashError(
                f"tensor {name} in {self._files[name]} has shape {list(self.shape(name))}, expected {list(shape)}; "
                "the config and the weights do not belong together"
            )
        self._require(name)
        self._taken.add(name)
        stored = self._prefix + name
        return self._loaded[stored] if stored in self._loaded else self._open[self._files[name]].get_tensor(stored)

    def digest(self, settings: str | None = None) -> str:
        """Sixteen hex digits that tell one checkpoint (a directory or file) from another, whatever loads it.

        Of every tensor's name, type, shape and a few of its rows (training moves all of them; reading all of a large
        model would take longer than loading it), the files beside them, and the config, for which `settings` may stand.
        """
        directory = self.path if self.path.is_dir() else self.path.parent
        if settings is None:
            config = read_config(directory) if (directory / "config.json").is_file() else {}
            settings = json.dumps({k: v for k, v in config.items() if k not in WRITERS}, sort_keys=True)
        found = hashlib.sha256(settings.encode())
        for name in sorted(self):
            found.update(f"{self._prefix}{name}{list(self.shape(name))}".encode())
            for rows in self._probe(name):
                found.update(f"{rows.dtype}".encode() + rows.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for file in (directory / DRAFT_VOCABULARY, directory / MASK_EMBEDDING):
            if file.is_file():
                found.update(file.read_bytes())
        return found.hexdigest()[:16]

    def finish(self, ignore: Iterable[str] = ()) -> None:
        """Fail if any tensor was not taken, but for names that end with one of `ignore`."""
        left = [n for n in self._files if n not in self._taken and not n.endswith(tuple(ignore) or ("\0",))]
        if left:
            raise WhiFlashError(
                f"{self._files[left[0]]} holds {len(left)} tensor(s) this architecture does not use "
                f"({', '.join(left[:4])}{', …' if len(left) > 4 else ''}); it is not the layout its config declares"
            )

    def _probe(self, name: str) -> list[Tensor]:
        """A few rows of the tensor `name`, evenly spread."""
        shape, stored = self.shape(name), self._prefix + name
        loaded = stored in self._loaded
        if not shape:
            return [self._loaded[stored] if loaded else self._open[self._files[name]].get_tensor(stored)]
        rows = self._loaded[stored] if loaded else self._open[self._files[name]].get_slice(stored)
        if len(shape) == 1:
            return [rows[:]]
        return [rows[i : i + 1] for i in sorted({shape[0] * k // PROBES for k in range(PROBES)})]

    def _require(self, name: str) -> None:
        if name not in self._files:
            raise WhiFlashError(f"{self.path} has no tensor {name}, which its config calls for")


def digest(path: Path, settings: str | None = None) -> str:
    """`Weights.digest` of a checkpoint that nobody has open."""
    return Weights(path).digest(settings)


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = sorted({path / name for name in json.loads(index.read_text("utf-8"))["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WhiFlashError(f"{index} is no index of weight files; fetch it again") from error
        missing = [f.name for f in files if not f.is_file()]
        if missing:
            raise WhiFlashError(f"{path} lacks {', '.join(missing)}, which {index.name} names; fetch it again")
        return files
    for pattern in ("model.safetensors", "pytorch_model.bin", "*.safetensors", "*.bin"):
        files = sorted(path.glob(pattern))
        if len(files) == 1:
            return files
    raise WhiFlashError(f"{path} has no model.safetensors (single or sharded) and no pytorch_model.bin")


def read_torch(file: Path) -> Any:
    """A file of `torch.save` that holds tensors and plain containers; anything else could run code."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds here, all of which mean the same to the reader
        raise WhiFlashError(
            f"{file} is damaged, or holds more than plain tensors, which is unsafe to load; use safetensors instead"
        ) from error


def _read_bin(file: Path) -> dict[str, Tensor]:
    state = read_torch(file)
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise WhiFlashError(f"{file} holds something other than named tensors")
    return state


class Part(NamedTuple):
    """Where one parameter lives in a checkpoint: the names whose rows it joins, in order."""

    module: nn.Module
    attribute: str
    names: list[str]
    rows: list[int] | None = None


def attention_parts(attention: Attention, prefix: str) -> list[Part]:
    q, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    parts = []
    for kind in ("weight", "bias"):
        if getattr(attention.qkv, kind) is not None:
            parts.append(Part(attention.qkv, kind, [f"{prefix}.{n}_proj.{kind}" for n in "qkv"], [q, kv, kv]))
        if getattr(attention.o, kind) is not None:
            parts.append(Part(attention.o, kind, [f"{prefix}.o_proj.{kind}"]))
    if attention.q_norm is not None and attention.k_norm is not None:
        parts.append(Part(attention.q_norm, "weight", [f"{prefix}.q_norm.weight"]))
        parts.append(Part(attention.k_norm, "weight", [f"{prefix}.k_norm.weight"]))
    return parts


def mlp_parts(mlp: MLP, prefix: str) -> list[Part]:
    half = mlp.gate_up.out_features // 2
    parts = []
    for kind in ("weight", "bias"):
        if getattr(mlp.down, kind) is not None:
            parts.append(
                Part(mlp.gate_up, kind, [f"{prefix}.gate_proj.{kind}", f"{prefix}.up_proj.{kind}"], [half, half])
            )
            parts.append(Part(mlp.down, kind, [f"{prefix}.down_proj.{kind}"]))
    return parts


def layer_parts(layer: Layer, prefix: str, attention_norm: str = "input_layernorm") -> list[Part]:
    return [
        Part(layer.attention_norm, "weight", [f"{prefix}.{attention_norm}.weight"]),
        Part(layer.mlp_norm, "weight", [f"{prefix}.post_attention_layernorm.weight"]),
        *attention_parts(layer.attention, f"{prefix}.self_attn"),
        *mlp_parts(layer.mlp, f"{prefix}.mlp"),
    ]


def load_parts(parts: Iterable[Part], weights: Weights, dtype: torch.dtype, device: torch.device | str) -> None:
    """Fill (meta) parameters from a checkpoint, checking every shape."""
    for module, attribute, names, rows in parts:
        parameter = getattr(module, attribute)
        rest = parameter.shape[1:]
        pieces = [
            weights.take(name, (count, *rest)) for name, count in zip(names, rows or [parameter.shape[0]], strict=True)
        ]
        tensor = (torch.cat(pieces) if len(pieces) > 1 else pieces[0]).to(device=device, dtype=dtype).contiguous()
        setattr(module, attribute, nn.Parameter(tensor))


def export_parts(parts: Iterable[Part], dtype: torch.dtype) -> dict[str, Tensor]:
    """The inverse of `load_parts`: checkpoint names → tensors."""
    tensors = {}
    for module, attribute, names, rows in parts:
        parameter = getattr(module, attribute).detach()
        pieces = parameter.split(rows) if rows else [parameter]
        tensors.update({n: p.to(dtype).cpu().contiguous().clone() for n, p in zip(names, pieces, strict=True)})
    return tensors
