"""What a loader understands of a checkpoint, as words: for `whiflash info`."""

from typing import Any

from whiflash.drafters import layouts
from whiflash.errors import UnsupportedError, WhiFlashError
from whiflash.nn.weights import Weights, read_config, resolve
from whiflash.routers.neural import FORMAT
from whiflash.target import embedded
from whiflash.target.config import TargetConfig


def describe(name: str, target_layers: int | None = None) -> dict[str, Any]:
    """Key → value of a target, drafter or router, read without loading its weights. Raises what loading would raise."""
    path = embedded.prepare() if name == embedded.NAME else resolve(name)
    directory = path if path.is_dir() else path.parent
    weights = Weights(path)
    if path.is_file() and not (directory / "config.json").is_file():
        return {"kind": "bare tensors (a router?)", **_tensors(weights)}
    raw = read_config(directory)
    if raw.get("format") == FORMAT:
        return {"kind": "neural router", **{k: v for k, v in raw.items() if not isinstance(v, dict | list)}}
    if any(n.endswith("layers.0.self_attn.q_proj.weight") for n in weights) and "fc.weight" not in weights:
        return _target(raw, weights)
    if all(n.startswith("model.") for n in weights):
        weights.strip_prefix("model.")
    if layouts.kind(weights, raw) == "eagle3":
        layout = "speculators" if raw.get("speculators_model_type") else "official / SpecForge"
        return {"kind": f"EAGLE-3 head ({layout} layout)", **_fields(layouts.read_eagle3(raw, weights, target_layers))}
    layout = "speculators" if raw.get("speculators_model_type") else "z-lab"
    return {"kind": f"DFlash model ({layout} layout)", **_fields(layouts.read_dflash(raw, weights, target_layers))}


def _target(raw: dict[str, Any], weights: Weights) -> dict[str, Any]:
    family = raw.get("model_type")
    try:
        config = TargetConfig.from_config(raw)
    except UnsupportedError:
        return {"kind": f"target ({family}, through the transformers adapter)", **_tensors(weights)}
    return {"kind": f"target ({family}, own decoder)", **_fields(config), **_tensors(weights)}


def _fields(config: Any) -> dict[str, Any]:
    """A config's fields, shapes flattened, taps in both conventions."""
    fields = {**vars(config)}
    shape = fields.pop("shape")
    out = {**{f"shape.{k}": v for k, v in vars(shape).items()}, **fields}
    if "taps" in out:
        out["taps"] = f"{list(out['taps'])} (boundary ids) = output ids {[t - 1 for t in out['taps']]}"
    rope = out.pop("rope")
    out["rope"] = f"{rope.kind}, theta {rope.theta:g}"
    return out


def _tensors(weights: Weights) -> dict[str, Any]:
    sizes = [weights.shape(n) for n in weights]
    if not sizes:
        raise WhiFlashError(f"{weights.path} holds no tensors")
    count = 0
    for shape in sizes:
        product = 1
        for side in shape:
            product *= side
        count += product
    return {"tensors": len(sizes), "parameters": f"{count:,}"}
