"""Which decoders the runtime reads by itself, and their sizes, from a Hugging Face `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whiflash.errors import UnsupportedError, WhiFlashError
from whiflash.nn.layers import LayerShape
from whiflash.nn.rotary import RopeConfig

QWEN = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
# what transformers takes a key to be that a config leaves out, where it is not what all families share
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    "qwen2": QWEN,
    "qwen3": QWEN | {"head_dim": 128},
}
FAMILIES = tuple(DEFAULTS)


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
            raise UnsupportedError(f"model type {family!r} is not one the runtime reads itself ({', '.join(FAMILIES)})")
        if "quantization_config" in config:
            raise UnsupportedError("quantized weights are not ones the runtime reads itself")
        config = DEFAULTS[family] | dict(config)
        try:
            layers, width, heads = (int(config[k]) for k in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
            vocab_size, intermediate = int(config["vocab_size"]), int(config["intermediate_size"])
        except KeyError as error:
            raise WhiFlashError(f"config.json lacks {error.args[0]!r}, which a {family} model needs") from error
        act = config.get("hidden_act", "silu")
        if act not in ("silu", "swish"):
            raise UnsupportedError(f"activation {act!r} is not supported; expected silu")
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
    if types is None:
        # without layer types Mistral slides every layer, Qwen those from max_window_layers on, others none
        first = 0 if config.get("model_type") == "mistral" else layers
        if config.get("use_sliding_window"):
            first = config.get("max_window_layers", QWEN["max_window_layers"])
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if len(types) != layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise WhiFlashError(f"layer_types {types} is not a list of {layers} full_attention / sliding_attention entries")
    return tuple(int(window) if window and t == "sliding_attention" else None for t in types)
