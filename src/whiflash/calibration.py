"""What `whiflash calibrate` found best for a machine: a threshold, lengths of drafts, and where they are kept."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from whiflash.errors import WhiFlashError
from whiflash.home import home

FORMAT, VERSION = "whiflash-calibration", 2
AUTO, OVERALL = "auto", "overall"


@dataclass(frozen=True)
class Calibrated:
    """`lengths` of each drafter's draft: most nodes besides the root; `p_min` as in `Drafting`."""

    threshold: float
    lengths: dict[str, int]
    p_min: float | None


def directory() -> Path:
    return home() / "calibration"


def default_path(fingerprint: str, pair: str) -> Path:
    return directory() / f"{fingerprint}-{pair}.json"


def parse_threshold(text: str | None, flag: str = "--threshold") -> float | str | None:
    """A number, `auto`, or the path of a calibration (.json)."""
    if text is None or text == AUTO or text.endswith(".json"):
        return text
    try:
        return float(text)
    except ValueError as error:
        raise WhiFlashError(f"{flag} takes a number, auto, or the .json file of a calibration, got {text!r}") from error


def identity(network: nn.Module) -> str:
    """Tells one draft model or router from another by its norms and biases, which packing leaves as they are."""
    digest = hashlib.sha256()
    for name, tensor in sorted(network.named_parameters()):
        if tensor.ndim == 1:
            digest.update(name.encode() + tensor.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def read(
    threshold: str,
    target: tuple[str, str],
    pair: str,
    drafters: Mapping[str, str],
    router: tuple[str, str | None],
) -> Calibrated:
    """What the calibration holds for a target (name, fingerprint), the identities of its drafters, and a router (kind,
    identity). threshold: `auto` for the one in the cache, or a file.

    Raises where there is none, or it was made for something else.
    """
    (name, fingerprint), (kind, network) = target, router
    path = default_path(fingerprint, pair) if threshold == AUTO else Path(threshold)
    again = f"`whiflash calibrate --target {name} --drafters {pair}` with the same models"
    if not path.is_file():
        where = f"there is no calibration of {name} with {pair}" if threshold == AUTO else f"there is no file {path}"
        raise WhiFlashError(f"{where}; run {again}, or give a threshold as a number")
    found = _parse(path)
    for what, made, used in (
        ("target", found.get("target_fingerprint"), fingerprint),
        ("pair", found.get("pair"), pair),
        *((f"{slot} checkpoint", found.get("drafters", {}).get(slot), own) for slot, own in drafters.items()),
    ):
        if made != used:
            raise WhiFlashError(f"calibration {path} was made for another {what} ({made}, not {used}); run {again}")
    routed = found.get("routers", {}).get(kind)
    if routed is None or routed.get("identity") != network:
        other = "no" if routed is None else "another"
        raise WhiFlashError(f"calibration {path} was made with {other} {kind} router; run {again} and this router")
    try:
        best = routed["categories"][OVERALL]
        lengths = {slot: int(n) for slot, n in best["lengths"].items()}
        return Calibrated(float(best["threshold"]), lengths, None if best["p_min"] is None else float(best["p_min"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WhiFlashError(f"calibration {path} is damaged ({type(error).__name__}: {error}); run {again}") from error


def _parse(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise WhiFlashError(f"calibration {path} cannot be read ({error}); run `whiflash calibrate` again") from error
    if not isinstance(found, dict) or (found.get("format"), found.get("version")) != (FORMAT, VERSION):
        raise WhiFlashError(f"{path} is no calibration of this version; write one with `whiflash calibrate`")
    return found
