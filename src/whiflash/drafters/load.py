"""From a checkpoint's name to a draft model bound to its target."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from whiflash.drafters import layouts
from whiflash.drafters.dflash import DFlash, DFlashConfig
from whiflash.drafters.eagle3 import Eagle3
from whiflash.errors import WhiFlashError
from whiflash.nn.fused import pack
from whiflash.nn.weights import MASK_EMBEDDING, Part, Weights, load_parts, read_config, read_torch, resolve
from whiflash.target.target import Target

# buffers that some exporters write and nobody needs
IGNORED = ("rotary_emb.inv_freq",)


def load_eagle3(
    name: str | Path,
    target: Target,
    *,
    tap_ids: layouts.TapIds | None = None,
    norm_output: bool | None = None,
    packed: bool = True,
) -> Eagle3:
    """An EAGLE-3 head in any of the three published layouts, in the target's dtype and on its device.

    tap_ids: how explicit tap ids are meant, where the checkpoint's family leaves it open ("output" = after that layer,
    "boundary" = before it). norm_output: whether the normed output is fed back, where a checkpoint does not say.
    """
    weights, raw = _open(name, "eagle3")
    config = layouts.read_eagle3(raw, weights, target.layers, tap_ids, norm_output)
    if config.target_width != target.width:
        raise WhiFlashError(
            f"EAGLE-3 head {name} reads features of width {config.target_width}, but target {target.name} has width "
            f"{target.width}; use the head trained for this target"
        )
    if not config.own_embedding and config.shape.width != target.width:
        raise WhiFlashError(f"EAGLE-3 head {name} is not as wide as its target and brings no embedding of its own")
    _check_taps(name, config.taps, target)
    _check_vocabulary(name, config.vocab_size, target)
    with torch.device("meta"):
        model = Eagle3(config)
    prefix = layouts.eagle3_prefix(weights)
    plain_norm = "hidden_norm" if "layers.1.hidden_norm.weight" in weights else "input_layernorm"
    parts = [_legacy_norm(part, weights) for part in model.parts(prefix, plain_norm)]
    load_parts(parts, weights, target.dtype, target.device)
    _bind_vocabulary(name, model, weights, target)
    weights.finish(IGNORED)
    model.identity = weights.digest()
    model.target_embed = target.network.embed
    if packed:
        model.layer.attention.split_kv()
        pack(model)
    return model.eval().requires_grad_(False)


def load_dflash(
    name: str | Path, target: Target, *, tap_ids: layouts.TapIds | None = None, packed: bool = True
) -> DFlash:
    """A DFlash model in z-lab's or speculators' layout, in the target's dtype and on its device."""
    weights, raw = _open(name, "dflash")
    config = layouts.read_dflash(raw, weights, target.layers, tap_ids)
    if config.target_width != target.width or (
        config.shape.width != target.width and not (config.own_embedding and config.own_head)
    ):
        raise WhiFlashError(
            f"DFlash model {name} reads features of width {config.target_width} and has width {config.shape.width}, "
            f"but target {target.name} has width {target.width}; use the model trained for this target"
        )
    declared = raw.get("num_target_layers")
    if declared is not None and int(declared) != target.layers:
        raise WhiFlashError(
            f"DFlash model {name} is for a target of {declared} layers, {target.name} has {target.layers}"
        )
    _check_taps(name, config.taps, target)
    _check_vocabulary(name, config.vocab_size or target.vocab_size, target)
    config = replace(config, vocab_size=config.vocab_size or target.vocab_size)
    if not config.own_head:
        config = replace(config, draft_vocab_size=target.vocab_size)
    with torch.device("meta"):
        model = DFlash(config)
    load_parts(model.parts(), weights, target.dtype, target.device)
    _bind_vocabulary(name, model, weights, target)
    weights.finish((*IGNORED, "t2d", "verifier_lm_head.weight", "verifier_norm.weight"))
    model.identity = weights.digest()
    table = config.vocab_size if config.own_embedding else target.vocab_size
    if config.mask_token_id >= table:
        mask = _mask_embedding(Path(weights.path), config, table)
        model.mask_embedding = mask.to(target.device, target.dtype)
    model.target_embed, model.target_head = target.network.embed, target.network.head
    ids = None if model.lm_head else layouts.read_draft_vocabulary(Path(weights.path), target.vocab_size)
    if ids is not None:
        model.draft_from(ids.to(target.device), target.network.head_rows(ids).to(target.dtype))
    if packed:
        for layer in model.layers:
            layer.attention.split_kv()
        pack(model)
    return model.eval().requires_grad_(False)


def _open(name: str | Path, expected: str) -> tuple[Weights, dict]:
    path = resolve(name, "drafter")
    raw = read_config(path if path.is_dir() else path.parent, "drafter")
    weights = Weights(path)
    if all(n.startswith("model.") for n in weights):
        weights.strip_prefix("model.")
    found = layouts.kind(weights, raw)
    if found != expected:
        raise WhiFlashError(
            f"{name} is a checkpoint of kind {found}, expected {expected}; swap the two drafter arguments?"
        )
    return weights, raw


def _check_taps(name: str | Path, taps: tuple[int, ...], target: Target) -> None:
    if not all(0 <= t <= target.layers + 1 for t in taps):
        raise WhiFlashError(f"{name} taps layers {list(taps)}, but {target.name} has only {target.layers}")


def _check_vocabulary(name: str | Path, vocab_size: int, target: Target) -> None:
    """Tables may be padded differently, but both must hold every token the tokenizer can produce."""
    if vocab_size != target.vocab_size and min(vocab_size, target.vocab_size) < len(target.tokenizer):
        raise WhiFlashError(
            f"{name} is for a vocabulary of {vocab_size} tokens, {target.name} has {target.vocab_size}; "
            "a drafter works only with the tokenizer it was trained on"
        )


def _bind_vocabulary(name: str | Path, model: Eagle3 | DFlash, weights: Weights, target: Target) -> None:
    """Read which target token each draft id means, and fit own tables to the target's, which may be padded."""
    config = model.config
    if model.lm_head is not None:
        target_ids = layouts.read_target_ids(weights, config.vocab_size, config.draft_vocab_size)
        if target_ids is not None and int(target_ids.max()) >= target.vocab_size:
            raise WhiFlashError(
                f"d2t of {name} reaches token {int(target_ids.max())}, beyond {target.name}'s vocabulary"
            )
        if target_ids is None and config.draft_vocab_size != target.vocab_size:
            # rows that both tables have, and no other, may be drafted
            shared = min(config.draft_vocab_size, target.vocab_size)
            model.lm_head.weight = nn.Parameter(model.lm_head.weight[:shared].contiguous())
            target_ids = torch.arange(shared)
        model.target_ids = None if target_ids is None else target_ids.to(target.device)
        config = replace(config, draft_vocab_size=model.lm_head.weight.shape[0])
    if model.embedding is not None and (missing := target.vocab_size - config.vocab_size) > 0:
        # the target can sample a padding row, if hardly ever
        model.embedding.weight = nn.Parameter(F.pad(model.embedding.weight, (0, 0, 0, missing)))
    model.config = replace(config, vocab_size=target.vocab_size)


def _legacy_norm(part: Part, weights: Weights) -> Part:
    """fc_norm.{0,1,2} were once called aux_norm_{low,mid,high}."""
    name = part.names[0]
    if name.startswith("fc_norm.") and name not in weights:
        return part._replace(names=[f"aux_norm_{('low', 'mid', 'high')[int(name.split('.')[1])]}.weight"])
    return part


def _mask_embedding(path: Path, config: DFlashConfig, table: int) -> torch.Tensor:
    file = (path if path.is_dir() else path.parent) / MASK_EMBEDDING
    if not file.is_file():
        raise WhiFlashError(
            f"mask token {config.mask_token_id} of {path} lies outside the embedding table of {table} rows, and there "
            "is no mask_embedding.pt beside the weights to replace it"
        )
    stored = read_torch(file)
    vector = stored.get("embedding") if isinstance(stored, dict) else stored
    if not isinstance(vector, torch.Tensor) or vector.numel() != config.shape.width:
        raise WhiFlashError(
            f"{file} does not hold one vector of {config.shape.width} values (alone, or under the key 'embedding')"
        )
    return vector.flatten()
