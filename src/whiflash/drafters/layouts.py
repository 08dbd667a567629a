"""What the published checkpoint layouts say: from config keys and tensor names to `Eagle3Config` and `DFlashConfig`.

Layouts are told apart by tensor names, not by `architectures`, which published files get wrong. Where two public
loaders read the same key differently, the comment says which reading is taken.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from whiflash.drafters.dflash import DFlashConfig
from whiflash.drafters.eagle3 import Eagle3Config
from whiflash.errors import WhiFlashError
from whiflash.nn.layers import LayerShape
from whiflash.nn.rotary import RopeConfig
from whiflash.nn.weights import DRAFT_VOCABULARY, Weights
from whiflash.target.config import layer_windows

TapIds = Literal["output", "boundary"]

# config keys and tensor names of relatives that this runtime would draft wrongly with, and what they belong to
UNSUPPORTED_KEYS = {
    "projector_type": "Domino",
    "conv_kernel_size": "DFlash 2",
    "selector_rank": "DFlash 2",
    "attention_sink_bias": "a DFlash variant with attention sinks",
    "attention_value_scale": "a DFlash variant with scaled values",
    "output_multiplier": "a DFlash variant with scaled logits",
    "input_embedding_scale": "a DFlash variant with scaled embeddings",
    "final_logit_softcapping": "a DFlash variant with capped logits",
}
# a value that asks for nothing: absent, off, or a factor of one
NOTHING: dict[str, tuple[Any, ...]] = {
    "output_multiplier": (None, 1),
    "attention_value_scale": (None, 1),
    "input_embedding_scale": (None, 1),
}
UNSUPPORTED_TENSORS = {
    "mask_hidden": "P-EAGLE",
    "markov_head.": "DSpark",
    "confidence_head.": "DSpark",
    "qkv_proj": "Laguna (fused qkv)",
    ".g_proj": "Laguna (gated attention)",
    "aux_hidden_norms": "Laguna",
}


def kind(weights: Weights, config: Mapping[str, Any]) -> Literal["eagle3", "dflash"]:
    """Which family of draft model a checkpoint is, or a sentence on why it is none."""
    for key, owner in UNSUPPORTED_KEYS.items():
        for level in (config, config.get("dflash_config") or {}):
            if level.get(key) not in NOTHING.get(key, (None, False, 0, "none")):
                raise WhiFlashError(f"{weights.path} is {owner} (config key {key!r}), which is not supported")
    declared = config.get("speculators_model_type")
    if declared not in (None, "eagle3", "dflash"):
        raise WhiFlashError(f"{weights.path} is a speculators model of type {declared!r}, which is not supported")
    for name in weights:
        for fragment, owner in UNSUPPORTED_TENSORS.items():
            if fragment in name:
                raise WhiFlashError(f"{weights.path} is {owner} (tensor {name}), which is not supported")
    if "midlayer.hidden_norm.weight" in weights or "layers.0.hidden_norm.weight" in weights:
        return "eagle3"
    if "hidden_norm.weight" in weights and "layers.0.self_attn.q_norm.weight" in weights:
        return "dflash"
    raise WhiFlashError(
        f"{weights.path} is neither an EAGLE-3 head (midlayer.* or layers.0.hidden_norm) nor a DFlash model "
        f"(hidden_norm, layers.*.self_attn.q_norm); its tensors begin {', '.join(list(weights)[:4])}"
    )


def eagle3_prefix(weights: Weights) -> str:
    return "midlayer" if "midlayer.hidden_norm.weight" in weights else "layers.0"


def read_eagle3(
    raw: Mapping[str, Any],
    weights: Weights,
    target_layers: int | None = None,
    tap_ids: TapIds | None = None,
    norm_output: bool | None = None,
) -> Eagle3Config:
    """`target_layers` is needed only where the checkpoint leaves the tapped layers to the default."""
    speculators = raw.get("speculators_model_type") == "eagle3"
    inner: Mapping[str, Any] = raw.get("transformer_layer_config") or raw if speculators else raw
    nested: Mapping[str, Any] = raw.get("eagle_config") or {}

    def setting(key: str, default: Any = None) -> Any:
        return raw.get(key, nested.get(key, default))

    prefix = eagle3_prefix(weights)
    width, fused = weights.shape("fc.weight")
    ids = setting("eagle_aux_hidden_state_layer_ids")
    count = len(ids) if ids else 3
    target_width = int(raw.get("target_hidden_size") or nested.get("target_hidden_size") or 0) or fused // count
    if fused != count * target_width:
        raise WhiFlashError(
            f"fc.weight of {weights.path} reads {fused} values, not {count} tapped layers of width {target_width}"
        )
    layers = 1 + sum(f"layers.{i}.mlp.gate_proj.weight" in weights for i in range(1, 64))
    draft_vocab, _ = weights.shape("lm_head.weight")
    declared = raw.get("draft_vocab_size")
    if declared is not None and int(declared) != draft_vocab:
        raise WhiFlashError(f"lm_head.weight of {weights.path} has {draft_vocab} rows, its config says {declared}")
    return Eagle3Config(
        shape=_shape(inner, weights, prefix, width, 2 * width),
        layers=layers,
        taps=_eagle3_taps(raw, nested, ids, target_layers, speculators, tap_ids),
        target_width=target_width,
        vocab_size=int(inner.get("vocab_size") or raw.get("vocab_size") or draft_vocab),
        draft_vocab_size=draft_vocab,
        rope=RopeConfig.from_config(inner),
        windows=layer_windows(inner, layers),
        # missing means false, as in speculators' own config class (vLLM reads it as true)
        norm_before_residual=bool(setting("norm_before_residual", False)),
        norm_before_fc=_flag(weights, setting("norm_before_fc"), "norm_before_fc", "input_norm.weight"),
        fc_norm=_flag(weights, setting("fc_norm", setting("use_aux_norm")), "fc_norm", *_fc_norm_names(weights)[:1]),
        # SpecForge writes norm_output with another meaning and feeds back un-normed, so only speculators' key counts
        norm_output=norm_output if norm_output is not None else speculators and bool(raw.get("norm_output", False)),
        fc_bias="fc.bias" in weights,
        own_embedding="embed_tokens.weight" in weights,
    )


def _eagle3_taps(
    raw: Mapping[str, Any],
    nested: Mapping[str, Any],
    ids: list[int] | None,
    target_layers: int | None,
    speculators: bool,
    tap_ids: TapIds | None,
) -> tuple[int, ...]:
    """Boundary ids. A list means output ids (add 1) in SpecForge and SGLang, boundary ids in vLLM and speculators.

    A config may give both: vLLM's at the top, `ids`, and SGLang's in its `eagle_config`.
    """
    if not ids:
        if target_layers is None:
            raise WhiFlashError(
                "this head taps the default layers, which depend on its target; name the target (--target)"
            )
        return (2, target_layers // 2, target_layers - 3)
    if tap_ids is None:
        sglang = raw.get("eagle_aux_layer_semantics", nested.get("eagle_aux_layer_semantics")) == "sglang"
        both = [int(i) + 1 for i in nested.get("eagle_aux_hidden_state_layer_ids") or ()] == [int(i) for i in ids]
        tap_ids = "output" if not both and (sglang or (not speculators and ids[0] == 1)) else "boundary"
    return tuple(int(i) + (tap_ids == "output") for i in ids)


def _fc_norm_names(weights: Weights) -> list[str]:
    legacy = [f"aux_norm_{part}.weight" for part in ("low", "mid", "high")]
    return legacy if legacy[0] in weights else ["fc_norm.0.weight"]


def _flag(weights: Weights, declared: Any, key: str, name: str) -> bool:
    """Config and tensors must agree on whether a norm exists; a silent config is taken at the tensors' word."""
    present = name in weights
    if declared is not None and bool(declared) != present:
        state = "has" if present else "lacks"
        raise WhiFlashError(f"{weights.path} {state} {name}, but its config says {key} = {declared}")
    return present


def read_dflash(
    raw: Mapping[str, Any],
    weights: Weights,
    target_layers: int | None = None,
    tap_ids: TapIds | None = None,
) -> DFlashConfig:
    speculators = raw.get("speculators_model_type") == "dflash"
    inner: Mapping[str, Any] = raw.get("transformer_layer_config") or raw if speculators else raw
    options: Mapping[str, Any] = raw.get("dflash_config") or {}

    def setting(key: str, default: Any = None) -> Any:
        return options.get(key, raw.get(key, default))

    if setting("sample_from_anchor"):
        raise WhiFlashError(
            f"{weights.path} drafts from its anchor slot too (sample_from_anchor), which is not supported"
        )
    width, fused = weights.shape("fc.weight")
    layers = sum(f"layers.{i}.mlp.gate_proj.weight" in weights for i in range(256))
    ids = setting("target_layer_ids") if not speculators else raw.get("aux_hidden_state_layer_ids")
    target_layers = target_layers or raw.get("num_target_layers")
    taps = _dflash_taps(ids, layers, target_layers, speculators, tap_ids)
    if fused % len(taps):
        raise WhiFlashError(f"fc.weight of {weights.path} reads {fused} values, not a multiple of its {len(taps)} taps")
    mask_token_id, block_size = setting("mask_token_id"), setting("block_size")
    if mask_token_id is None or block_size is None:
        raise WhiFlashError(
            f"the config of {weights.path} gives no {'mask_token_id' if mask_token_id is None else 'block_size'}, "
            "without which a DFlash model cannot draft; no default is safe"
        )
    if int(mask_token_id) < 0:
        raise WhiFlashError(f"mask_token_id {mask_token_id} of {weights.path} is not a token id")
    own_head = "lm_head.weight" in weights
    windows, causal = _dflash_attention(inner, raw, options, layers, speculators)
    return DFlashConfig(
        shape=_shape(inner, weights, "layers.0", width, width),
        layers=layers,
        taps=taps,
        target_width=fused // len(taps),
        vocab_size=int(inner.get("vocab_size") or raw.get("vocab_size") or 0),
        draft_vocab_size=weights.shape("lm_head.weight")[0] if own_head else int(inner.get("vocab_size") or 0),
        block_size=int(block_size),
        mask_token_id=int(mask_token_id),
        rope=RopeConfig.from_config(inner),
        windows=windows,
        causal=causal,
        own_embedding="embed_tokens.weight" in weights,
        own_head=own_head,
    )


def _dflash_taps(
    ids: list[int] | None, layers: int, target_layers: int | None, speculators: bool, tap_ids: TapIds | None
) -> tuple[int, ...]:
    """z-lab's ids are output ids of transformers' hidden_states, so id n-1 means the *normed* last state (our n+1)."""
    if not ids:
        if target_layers is None:
            raise WhiFlashError(
                "this model taps the default layers, which depend on its target; name the target (--target)"
            )
        n = target_layers
        if speculators:
            return (2, n // 2, n - 3)
        ids = [n // 2] if layers == 1 else [round(1 + i * (n - 4) / (layers - 1)) for i in range(layers)]
        tap_ids = "output"
    boundary = (tap_ids or ("boundary" if speculators else "output")) == "boundary"
    if boundary:
        return tuple(int(i) for i in ids)
    return tuple(int(i) + (2 if i + 1 == target_layers else 1) for i in ids)


def _dflash_attention(
    inner: Mapping[str, Any], raw: Mapping[str, Any], options: Mapping[str, Any], layers: int, speculators: bool
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Windows and in-block causality per layer: sliding layers are causal (SpecForge, SGLang) unless told otherwise."""
    if options.get("use_swa", raw.get("use_swa")):
        window = options.get("swa_window_size", raw.get("swa_window_size"))
        if not window:
            raise WhiFlashError("this config sets use_swa without a swa_window_size")
        return (int(window),) * layers, (False,) * layers
    windows = layer_windows(inner, layers)
    for level, key in ((options, "causal"), (raw, "causal"), (options, "is_causal"), (raw, "is_causal")):
        if level.get(key) is not None:
            return windows, (bool(level[key]),) * layers
    non_causal = bool(raw.get("sliding_window_non_causal", False)) if speculators else False
    return windows, tuple(w is not None and not non_causal for w in windows)


def _shape(config: Mapping[str, Any], weights: Weights, prefix: str, width: int, width_in: int) -> LayerShape:
    """Sizes from the tensors, which cannot lie; only the head count needs the config."""
    act = config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise WhiFlashError(f"{weights.path} uses the activation {act!r}, which is not supported; expected silu")
    heads = config.get("num_attention_heads")
    if not heads:
        raise WhiFlashError(f"the config of {weights.path} gives no num_attention_heads")
    q_rows, _ = weights.shape(f"{prefix}.self_attn.q_proj.weight")
    k_rows, _ = weights.shape(f"{prefix}.self_attn.k_proj.weight")
    head_dim = q_rows // int(heads)
    if head_dim * int(heads) != q_rows or k_rows % head_dim or head_dim % 2:
        raise WhiFlashError(
            f"{prefix}.self_attn of {weights.path} has {q_rows} q and {k_rows} k rows, not {heads} even heads"
        )
    return LayerShape(
        width=width,
        width_in=width_in,
        heads=int(heads),
        kv_heads=k_rows // head_dim,
        head_dim=head_dim,
        intermediate=weights.shape(f"{prefix}.mlp.gate_proj.weight")[0],
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        qkv_bias=f"{prefix}.self_attn.q_proj.bias" in weights,
        o_bias=f"{prefix}.self_attn.o_proj.bias" in weights,
        mlp_bias=f"{prefix}.mlp.gate_proj.bias" in weights,
        qk_norm=f"{prefix}.self_attn.q_norm.weight" in weights,
    )


def read_target_ids(weights: Weights, vocab_size: int, draft_vocab_size: int) -> Tensor | None:
    """Target id of each draft id from `d2t` (offsets) checked against `t2d` (a keep-mask); None is the identity."""
    offsets = weights.take("d2t", (draft_vocab_size,)).long() if "d2t" in weights else None
    kept = weights.take("t2d").bool() if "t2d" in weights else None
    if offsets is None:
        if draft_vocab_size != vocab_size:
            raise WhiFlashError(
                f"{weights.path} drafts {draft_vocab_size} of {vocab_size} tokens but has no d2t tensor to say which"
            )
        return None
    ids = torch.arange(draft_vocab_size) + offsets
    if not (int(ids[0]) >= 0 and int(ids[-1]) < vocab_size and bool((ids.diff() > 0).all())):
        raise WhiFlashError(
            f"d2t of {weights.path} does not map draft ids to rising target ids below {vocab_size}; it holds offsets "
            "(target id = draft id + d2t) in a sound checkpoint"
        )
    if kept is not None and not torch.equal(kept.nonzero().flatten(), ids):
        raise WhiFlashError(f"d2t and t2d of {weights.path} name different tokens; the vocabulary map is stale")
    return None if draft_vocab_size == vocab_size else ids


def read_draft_vocabulary(path: Path, vocab_size: int) -> Tensor | None:
    """Rising ids [n] from the file beside a DFlash checkpoint that says which tokens it drafts; None without one."""
    file = (path if path.is_dir() else path.parent) / DRAFT_VOCABULARY
    if not file.is_file():
        return None
    try:
        ids = json.loads(file.read_text("utf-8"))
        if not ids or ids != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] < vocab_size:
            raise ValueError("they do not rise, or leave the vocabulary")
        return torch.tensor(ids, dtype=torch.long)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise WhiFlashError(
            f"{file} is not a list of rising token ids below {vocab_size} ({error}); delete it to draft from the whole "
            "vocabulary"
        ) from error
