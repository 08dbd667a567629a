"""An append-only JSONL file that survives being killed, and knows what it was made from."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from whiflash.errors import WhiFlashError


class Journal:
    """Rows of `path`, with the settings they were made with beside it in `<stem>.settings.json`.

    Opening drops a last line that a kill cut short, and refuses a file made with other settings.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any]):
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
            self._read()

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

    def _read(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(self.path, whole)
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                self.rows.append(json.loads(line))
            except ValueError as error:
                raise WhiFlashError(
                    f"{self.path}, line {number} is damaged ({error}); remove that line and run again"
                ) from error


def _compare(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    differing = [key for key in sorted({*found, *wanted}) if found.get(key) != wanted.get(key)]
    if differing:
        told = "; ".join(f"{key} = {found.get(key)!r}, but this run has {wanted.get(key)!r}" for key in differing)
        raise WhiFlashError(
            f"{path} was made with {told}; choose another output file, or go on with the settings of that run"
        )


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise WhiFlashError(f"{path} is damaged ({error}); restore it, or choose another output") from error


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
