"""Rotary position embedding (rotate-half), its scaling rules, and both generations of config keys."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whiflash.errors import UnsupportedError, WhiFlashError

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """How positions become angles. `scaling` holds the keys of the kind (factor, beta_fast, …)."""

    theta: float = 10_000.0
    kind: str = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "RopeConfig":
        """Read `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling`; without a theta it is 10,000."""
        new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
        if new and old and _scaling(new) != _scaling(old):
            raise WhiFlashError(
                f"the config says both rope_parameters = {dict(new)} and rope_scaling = {dict(old)}; readers differ on "
                "which one counts, so remove the one that the model was not trained with"
            )
        rope = dict(new or old)
        if rope and all(isinstance(v, Mapping) for v in rope.values()):
            distinct = [dict(v) for v in rope.values()]
            if any(v != distinct[0] for v in distinct):
                raise UnsupportedError(
                    "this config gives each layer type its own rope_parameters, which the runtime does not support; "
                    "load the model with attention layers that share one rope"
                )
            rope = distinct[0]
        theta = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in KINDS:
            raise UnsupportedError(f"rope type {kind!r} is not supported; expected one of {', '.join(KINDS)}")
        if float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
            raise UnsupportedError("partial rotary embeddings (partial_rotary_factor below 1) are not supported")
        if kind != "default" and "factor" not in rope:
            raise WhiFlashError(f"rope type {kind!r} needs a 'factor', which the config does not give")
        # transformers falls back to the model's context length when a scaled rope does not name the original one
        rope.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
        return cls(float(theta), kind, {} if kind == "default" else rope)


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    """What scales a rope, by its new names; theta may stand elsewhere."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return {**{k: v for k, v in rope.items() if k not in ("type", "rope_theta")}, "rope_type": kind}


class Rotary:
    """cos and sin for any positions, computed on the fly: there is no table to run out of.

    Angles are float32 whatever the model's dtype is. Scaling rules follow transformers' `modeling_rope_utils`.
    """

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device | str = "cpu"):
        frequencies, self.scale = _frequencies(config, head_dim)
        self.frequencies = frequencies.to(device)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [...] → (cos, sin), each [..., 1, head_dim]-ready as [..., head_dim]; sin's first half is negated.

        With that sign, rotation is x·cos + roll(x, head_dim/2)·sin: three operators instead of seven.
        """
        angles = positions[..., None].to(torch.float32) * self.frequencies
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate heads x [..., T, head_dim] by (cos, sin) that broadcast to it."""
    cos, sin = rope
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _frequencies(config: RopeConfig, dim: int) -> tuple[Tensor, float]:
    base, rope = config.theta, config.scaling
    inverse = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    if config.kind == "default":
        return inverse, 1.0
    factor = float(rope["factor"])
    if config.kind == "linear":
        return inverse / factor, 1.0
    original = rope["original_max_position_embeddings"]
    if config.kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        turns = original * inverse / (2 * math.pi)
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        return inverse * (blend + (1 - blend) / factor), 1.0
    return _yarn(inverse, base, dim, factor, original, rope)


def _yarn(inverse: Tensor, base: float, dim: int, factor: float, original: int, rope: Mapping) -> tuple[Tensor, float]:
    def mscale(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    scale = rope.get("attention_factor")
    if scale is None:
        weight, weight_all = rope.get("mscale"), rope.get("mscale_all_dim")
        scale = mscale(factor, weight) / mscale(factor, weight_all) if weight and weight_all else mscale(factor)

    def dimension(turns: float) -> float:
        """The (fractional) dimension whose wave makes `turns` turns within the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return inverse / factor * ramp + inverse * (1 - ramp), float(scale)
