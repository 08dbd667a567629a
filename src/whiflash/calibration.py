"""What `whiflash calibrate` found best for a machine: a threshold, lengths of drafts, and where they are kept."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whiflash.errors import WhiFlashError
from whiflash.home import home
from whiflash.target.target import Target

FORMAT, VERSION = "whiflash-calibration", 3
AUTO, OVERALL = "auto", "overall"


@dataclass(frozen=True)
class Calibrated:
    """`lengths` of each drafter's draft: most nodes besides the root; `p_min` as in `Drafting`."""

    threshold: float
    lengths: dict[str, int]
    p_min: float | None


def directory() -> Path:
    return home() / "calibration"


@dataclass(frozen=True)
class Setting:
    """What a calibration holds for: another precision or kind of device has other latencies, and other weights."""

    target: str
    fingerprint: str
    dtype: str
    device: str
    pair: str

    @classmethod
    def of(cls, target: Target, pair: str) -> "Setting":
        return cls(target.name, target.fingerprint(), target.precision, target.device.type, pair)

    @property
    def default_path(self) -> Path:
        return directory() / f"{self.fingerprint}-{self.dtype}-{self.device}-{self.pair}.json"


def parse_threshold(text: str | None, flag: str = "--threshold") -> float | str | None:
    """A number, `auto`, or the path of a calibration (.json)."""
    if text is None or text == AUTO or text.endswith(".json"):
        return text
    try:
        return float(text)
    except ValueError as error:
        raise WhiFlashError(f"{flag} takes a number, auto, or the .json file of a calibration, got {text!r}") from error


def read(threshold: str, setting: Setting, drafters: Mapping[str, str], router: tuple[str, str | None]) -> Calibrated:
    """What the calibration holds for the identities of the drafters, and a router (kind, identity). threshold: `auto`
    for the one in the cache, or a file.

    Raises where there is none, or it was made for something else.
    """
    kind, network = router
    path = setting.default_path if threshold == AUTO else Path(threshold)
    again = f"`whiflash calibrate --target {setting.target} --drafters {setting.pair}` with the same models"
    if not path.is_file():
        run = f"{setting.target} with {setting.pair} in {setting.dtype} on {setting.device}"
        where = f"there is no calibration of {run}" if threshold == AUTO else f"there is no file {path}"
        raise WhiFlashError(f"{where}; run {again}, or give a threshold as a number")
    found = _parse(path)
    for what, made, used in (
        ("target", found.get("target_fingerprint"), setting.fingerprint),
        ("pair", found.get("pair"), setting.pair),
        ("dtype", found.get("dtype"), setting.dtype),
        ("device", found.get("device"), setting.device),
        *((f"{slot} checkpoint", found["drafters"].get(slot), own) for slot, own in drafters.items()),
    ):
        if made != used:
            raise WhiFlashError(f"calibration {path} was made for another {what} ({made}, not {used}); run {again}")
    routed = found["routers"].get(kind)
    if routed is None or routed.get("identity") != network:
        other = "no" if routed is None else "another"
        raise WhiFlashError(f"calibration {path} was made with {other} {kind} router; run {again} and this router")
    try:
        best = routed["categories"][OVERALL]
        lengths = {slot: int(best["lengths"][slot]) for slot in setting.pair.split("-")}
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
    drafters, routers = found.get("drafters"), found.get("routers")
    if not (
        isinstance(drafters, dict) and isinstance(routers, dict) and all(isinstance(r, dict) for r in routers.values())
    ):
        raise WhiFlashError(f"calibration {path} is damaged; run `whiflash calibrate` again")
    return found
