"""An append-only JSONL file that survives being killed, and knows what it was made from."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from whiflash.errors import WhiFlashError

Check = Callable[[dict[str, Any]], object]
# how many differing settings are told, and characters of one
TOLD, LONGEST = 3, 120


class Journal:
    """Rows of `path`, with the settings they were made with beside it in `<stem>.settings.json`.

    Opening drops a last line that a kill cut short, and refuses a file made with other settings. check, then: as in
    `json_rows`.
    """

    def __init__(
        self,
        path: str | Path,
        settings: Mapping[str, Any],
        check: Check | None = None,
        then: str = "remove that line and run again",
    ):
        self.path = Path(path)
        self.rows: list[dict[str, Any]] = []
        settings = json.loads(json.dumps(settings))
        beside = self.path.with_name(f"{self.path.stem}.settings.json")
        if self.path.exists() and self.path.stat().st_size and not beside.exists():
            raise WhiFlashError(
                f"{self.path} exists and was not written by this command ({beside.name} is missing); "
                "choose another output file"
            )
        if beside.exists():
            _compare(self.path, read_json(beside), settings)
        else:
            write_atomic(beside, json.dumps(settings, indent=1) + "\n")
        if self.path.exists():
            self._read(check, then)

    def append(self, row: Mapping[str, Any]) -> None:
        line = json.dumps(row, ensure_ascii=False) + "\n"
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise WhiFlashError(
                f"{self.path} cannot be written ({error.strerror}); the rows it holds are kept: "
                "free some space and run the same command again"
            ) from error
        self.rows.append(dict(row))

    def _read(self, check: Check | None, then: str) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(self.path, whole)
        self.rows += [row for _, row in json_rows(self.path, data[:whole].split(b"\n"), then, check)]


def json_rows(
    path: Path, lines: Iterable[str | bytes], then: str, check: Check | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number of the line, its object), blank lines left out.

    lines: split at \\n only, since JSON may have other ends of lines (U+2028) within a text. check: raises an error for
    a row that cannot be right. then: what to do about it.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise TypeError(f"expected an object, got {shown(row)}")
            if check is not None:
                check(row)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise WhiFlashError(f"{path}, line {number} is damaged ({reason}); {then}") from error
        yield number, row


def fingerprint(settings: Any) -> str:
    """Sixteen hex digits that tell these settings from others."""
    return sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _compare(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    differing = list(_differences(found, wanted))
    if differing:
        more = len(differing) - TOLD
        told = "; ".join(differing[:TOLD]) + (f"; and {more} more" if more > 0 else "")
        raise WhiFlashError(
            f"{path} was made with {told}; choose another output file, or go on with the settings of that run"
        )


def _differences(found: Mapping[str, Any], wanted: Mapping[str, Any], within: str = "") -> Iterator[str]:
    for key in sorted({*found, *wanted}):
        theirs, mine, name = found.get(key), wanted.get(key), f"{within}{key}"
        if isinstance(theirs, dict) and isinstance(mine, dict):
            yield from _differences(theirs, mine, f"{name}.")
        elif theirs != mine:
            yield f"{name} = {shown(theirs)}, but this run has {shown(mine)}"


def shown(value: Any) -> str:
    """A value of JSON in a sentence."""
    text = "{…}" if isinstance(value, dict) and value else repr(value)
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]}…{text[-half:]}"


def read_json(path: Path, then: str = "choose another output") -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"expected an object, got {shown(found)}")
        return found
    except (ValueError, RecursionError) as error:
        raise WhiFlashError(f"{path} is damaged ({error}); restore it, or {then}") from error


def write_atomic(path: Path, text: str) -> None:
    """Write a text file so that a reader, or a run resumed after a kill, finds the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, "utf-8")
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise WhiFlashError(f"{path} cannot be written ({error.strerror or error})") from error


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold `path` (a file beside the output) for this process: two runs on one output would spoil each other."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise WhiFlashError(
            f"another run is writing to {path.parent}; wait for it, or choose another output"
        ) from error
    except OSError as error:
        raise WhiFlashError(f"{path.parent} cannot be written ({error.strerror or error})") from error
    try:
        yield
    finally:
        lock.release()
