"""Which decoders the runtime reads by itself, and their sizes, from a Hugging Face `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whiflash.errors import WhiFlashError
from whiflash.nn.layers import LayerShape
from whiflash.nn.rotary import RopeConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class TargetConfig:
    """Sizes of a dense decoder; `windows[i]` is layer i's sliding window in positions, None for full attention."""

    family: str
    layers: int
    shape: LayerShape
    vocab_size: int
    max_positions: int
    rope: RopeConfig
    tied: bool
    windows: tuple[int | None, ...]

    @property
    def width(self) -> int:
        return self.shape.width

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "TargetConfig":
        family = config.get("model_type")
        if family not in FAMILIES:
            raise WhiFlashError(f"model type {family!r} is not one the runtime reads itself ({', '.join(FAMILIES)})")
        try:
            layers, width, heads = (int(config[k]) for k in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
            vocab_size, intermediate = int(config["vocab_size"]), int(config["intermediate_size"])
        except KeyError as error:
            raise WhiFlashError(f"config.json lacks {error.args[0]!r}, which a {family} model needs") from error
        act = config.get("hidden_act", "silu")
        if act not in ("silu", "swish"):
            raise WhiFlashError(f"activation {act!r} is not supported; expected silu")
        bias = bool(config.get("attention_bias", False))
        shape = LayerShape(
            width=width,
            width_in=width,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or width // heads),
            intermediate=intermediate,
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            qkv_bias=family == "qwen2" or (bias and family != "mistral"),
            o_bias=bias and family in ("llama", "qwen3"),
            mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
            qk_norm=family == "qwen3",
        )
        return cls(
            family=family,
            layers=layers,
            shape=shape,
            vocab_size=vocab_size,
            max_positions=int(config.get("max_position_embeddings") or 2048),
            rope=RopeConfig.from_config(config),
            tied=bool(config.get("tie_word_embeddings", False)),
            windows=layer_windows(config, layers),
        )


def layer_windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Per layer, the sliding window or None, from `layer_types` or the older keys of Mistral and Qwen."""
    window, types = config.get("sliding_window"), config.get("layer_types")
    if not window or (types is None and config.get("use_sliding_window") is False):
        return (None,) * layers
    if types is None:
        # Qwen slides only the layers from max_window_layers on; Mistral all of them
        first = config.get("max_window_layers", 0) if "use_sliding_window" in config else 0
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if len(types) != layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise WhiFlashError(f"layer_types {types} is not a list of {layers} full_attention / sliding_attention entries")
    return tuple(int(window) if t == "sliding_attention" else None for t in types)
