"""Trained drafters as checkpoints that the public engines read: SpecForge's layout of EAGLE-3, z-lab's of DFlash."""

import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from whiflash.drafters.dflash import DFlash
from whiflash.drafters.eagle3 import Eagle3
from whiflash.errors import WhiFlashError
from whiflash.journal import write_atomic
from whiflash.nn.layers import LayerShape
from whiflash.nn.rotary import RopeConfig
from whiflash.nn.weights import DRAFT_VOCABULARY, Part, export_parts, read_config, resolve
from whiflash.target.target import Target


def eagle3(head: Eagle3, target: Target, directory: Path, report: Mapping[str, Any]) -> None:
    config = head.config
    assert head.target_ids is not None
    ids = head.target_ids.cpu()
    kept = torch.zeros(config.vocab_size, dtype=torch.bool)
    kept[ids] = True
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **_shape(config.shape),
        **_rope(config.rope),
        **_text(target),
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "torch_dtype": "float16",
        # vLLM reads the top and counts a layer by its input; SpecForge and SGLang read `eagle_config` and count it by
        # its output. So each finds its own count, and nobody has to guess which is meant.
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in config.taps],
            "use_aux_hidden_state": True,
        },
    }
    extra = {"d2t": ids - torch.arange(len(ids)), "t2d": kept}
    _write(directory, settings, head.parts(), extra, _card("EAGLE-3", target, settings, report))


def dflash(drafter: DFlash, target: Target, directory: Path, report: Mapping[str, Any], ids: Tensor) -> None:
    """z-lab's layout, and beside it the tokens `ids` that it learned to draft, which other engines do not read."""
    config = drafter.config
    settings = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **_shape(config.shape),
        **_rope(config.rope),
        **_text(target),
        "num_hidden_layers": config.layers,
        "num_target_layers": target.layers,
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": [tap - 1 for tap in config.taps],
        },
        "layer_types": ["full_attention"] * config.layers,
        "vocab_size": config.vocab_size,
        "dtype": "float16",
    }
    _write(directory, settings, drafter.parts(), {}, _card("DFlash", target, settings, report))
    write_atomic(directory / DRAFT_VOCABULARY, json.dumps(ids.tolist()) + "\n")


def _shape(shape: LayerShape) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.width,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.norm_eps,
    }


def _rope(rope: RopeConfig) -> dict[str, Any]:
    if rope.kind == "default":
        return {"rope_theta": rope.theta}
    return {"rope_theta": rope.theta, "rope_scaling": {**rope.scaling, "rope_type": rope.kind}}


def _text(target: Target) -> dict[str, Any]:
    raw = read_config(target.path, "target")
    ids = {k: raw[k] for k in ("bos_token_id", "eos_token_id") if raw.get(k) is not None}
    return {**ids, "max_position_embeddings": target.max_positions, "tie_word_embeddings": False}


def _write(directory: Path, settings: dict[str, Any], parts: list[Part], extra: dict[str, Tensor], card: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    weights, temporary = directory / "model.safetensors", directory / "model.safetensors.tmp"
    tensors = {**export_parts(parts, torch.float16), **extra}
    broken = [name for name, t in tensors.items() if t.is_floating_point() and not t.isfinite().all()]
    if broken:
        raise WhiFlashError(f"{broken[0]} is not finite in float16; train with a lower lr, or clip harder")
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
        os.replace(temporary, weights)
        for name, text in (("config.json", json.dumps(settings, indent=1) + "\n"), ("README.md", card)):
            (directory / f"{name}.tmp").write_text(text, "utf-8")
            os.replace(directory / f"{name}.tmp", directory / name)
    except Exception as error:  # safetensors has its own error for a full disk
        temporary.unlink(missing_ok=True)
        raise WhiFlashError(f"the checkpoint could not be written to {directory} ({error})") from error


def _card(kind: str, target: Target, settings: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """The model card: what it drafts for, how it was trained, what it accepts on held-out texts."""
    history = [row for row in report.get("history", []) if row["acceptance"]]
    lines = [f"# {kind} drafter for {target.name}", ""]
    lines += ["Trained by WhiFlash (`whiflash train`) on the target's own answers; weights in float16.", ""]
    if history:
        last = history[-1]
        lines += [
            f"Held-out acceptance length (bonus token included) after {last['step']} steps, {last['hours']:.2f} h:",
            "",
        ]
        lines += ["| category | in rounds | over positions | first token right |", "|---|---|---|---|"]
        for name, row in last["acceptance"].items():
            lines.append(f"| {name} | {row['rounds']:.3f} | {row['positions']:.3f} | {row['first']:.3f} |")
        lines += [
            "",
            "Curve (rounds, overall): "
            + ", ".join(f"{h['step']}: {h['acceptance']['overall']['rounds']:.3f}" for h in history),
            "",
        ]
    facts = {key: report[key] for key in ("data", "compute", "recipe") if key in report}
    lines += ["```json", json.dumps(facts, indent=1), "```", ""]
    if init := report.get("recipe", {}).get("init"):
        lines += [f"Training went on from {init}, of which its own card says:", "", *_quoted(init), ""]
    return "\n".join(lines)


@cache  # cards are written at every evaluation, and a name may be one to look up on the hub
def _quoted(name: str) -> list[str]:
    """The card beside a checkpoint, if it has one, with its headings one level down."""
    checkpoint = resolve(name)
    card = (checkpoint if checkpoint.is_dir() else checkpoint.parent) / "README.md"
    text = card.read_text("utf-8") if card.is_file() else "(nothing)"
    return [f"#{line}" if line.startswith("#") else line for line in text.strip().splitlines()]
