"""The target's states on known texts, which is all that a drafter learns from: computed once, or text by text.

A `Cached` directory holds one `manifest.json` and shards of 64 texts, `00007-<texts>-<crc32>.npy`: float16 rows,
one a position, the tapped states followed by the final-normed hidden state. A shard's name carries the hash of its
texts and the checksum of its content, so there is no side file that could disagree with it.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from whiflash.errors import WhiFlashError
from whiflash.target.target import Target

SHARD_TEXTS = 64


@dataclass(frozen=True)
class Text:
    """Token ids of prompt and answer; the answer begins at `start`."""

    category: str
    start: int
    tokens: list[int]

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.start :]


@dataclass(frozen=True)
class Sample:
    """A text with the target's states: features [n, taps·width], hidden [n, width] (final-normed), n positions."""

    category: str
    start: int
    tokens: Tensor
    features: Tensor
    hidden: Tensor

    def to(self, device: torch.device | str) -> "Sample":
        move = [t.to(device) for t in (self.tokens, self.features.float(), self.hidden.float())]
        return Sample(self.category, self.start, *move)


class Source(Protocol):
    """Texts with states, by index. `fingerprint` tells one set of texts, target and taps from another."""

    texts: Sequence[Text]
    taps: tuple[int, ...]
    fingerprint: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


def read_texts(file: str | Path, target: Target, max_length: int = 2048) -> list[Text]:
    """Read JSONL rows `category`, `prompt`, `response_ids`; texts are cut to `max_length` tokens.

    Rows whose answer has fewer than two tokens within `max_length` teach nothing and are left out.
    """
    texts = []
    try:
        lines = Path(file).read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise WhiFlashError(f"the texts {file} cannot be read ({error}); expected a JSONL file") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            category, answer = str(row.get("category", "")), [int(t) for t in row["response_ids"]]
            prompt = target.encode(row["prompt"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WhiFlashError(
                f"{file}, line {number}: expected a JSON object with 'prompt' and 'response_ids' ({error})"
            ) from error
        if answer and not 0 <= min(answer) <= max(answer) < target.vocab_size:
            raise WhiFlashError(f"{file}, line {number}: response_ids exceed the vocabulary of {target.name}")
        tokens = (prompt + answer)[:max_length]
        if len(tokens) >= len(prompt) + 2:
            texts.append(Text(category, len(prompt), tokens))
    if not texts:
        raise WhiFlashError(f"{file} holds no text with an answer of two tokens or more within {max_length} tokens")
    return texts


def split(texts: Sequence[Text], held_out: int) -> tuple[list[Text], list[Text]]:
    """Set up to `held_out` texts apart, evenly over categories, at most a fifth of any, prompts never split.

    The choice depends on the texts alone, so growing the data keeps what was held out (up to its share) held out.
    """
    groups: dict[str, dict[str, list[int]]] = {}
    for index, text in enumerate(texts):
        prompt = sha256(repr(text.tokens[: text.start]).encode()).hexdigest()
        groups.setdefault(text.category, {}).setdefault(prompt, []).append(index)
    share = -(-held_out // max(len(groups), 1))
    held: set[int] = set()
    for prompts in groups.values():
        taken, total = 0, sum(map(len, prompts.values()))
        for _, members in sorted(prompts.items()):
            if taken + len(members) > min(share, total // 5):
                break
            held.update(members)
            taken += len(members)
    return [t for i, t in enumerate(texts) if i not in held], [texts[i] for i in sorted(held)]


def hash_texts(texts: Sequence[Text]) -> str:
    digest = sha256()
    for text in texts:
        digest.update(f"{text.category}\0{text.start}\0{text.tokens}\n".encode())
    return digest.hexdigest()[:16]


@torch.inference_mode()
def states(target: Target, texts: Sequence[Text], taps: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """(features [n, taps·width], hidden [n, width]) of each text, from one right-padded pass."""
    tokens = torch.zeros(len(texts), max(len(t.tokens) for t in texts), dtype=torch.long)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text.tokens)] = torch.tensor(text.tokens)
    hidden, features = target.network(tokens.to(target.device), taps=taps)
    assert features is not None
    return [(features[i, : len(t.tokens)], hidden[i, : len(t.tokens)]) for i, t in enumerate(texts)]


class Online:
    """States computed whenever a text is asked for: no disk, one target pass a text."""

    def __init__(self, target: Target, texts: Sequence[Text], taps: Sequence[int]):
        self.target, self.texts, self.taps = target, texts, tuple(taps)
        self.fingerprint = f"{target.fingerprint()}-{list(taps)}-{hash_texts(texts)}"

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Sample:
        text = self.texts[index]
        features, hidden = states(self.target, [text], self.taps)[0]
        # out of inference mode, so that autograd may save them
        return Sample(text.category, text.start, torch.tensor(text.tokens), features.clone(), hidden.clone())


class Cached:
    """States in a directory. Opening computes the shards that are missing; everything present is verified and kept.

    A directory made from another target, other taps or other texts is refused, and nothing in it is touched.
    With `world` > 1, each process computes its share of the shards; call `wait` before reading.
    """

    def __init__(self, directory: str | Path, target: Target, texts: Sequence[Text], taps: Sequence[int]):
        self.directory, self.target, self.taps = Path(directory), target, tuple(taps)
        self.texts: Sequence[Text] = list(texts)
        self.fingerprint = f"{target.fingerprint()}-{list(taps)}-{hash_texts(texts)}"
        self.width = (len(self.taps) + 1) * target.width
        self._maps: dict[int, np.ndarray] = {}
        self._starts = np.cumsum([0, *(len(t.tokens) for t in texts)])
        manifest = {
            "target": target.fingerprint(),
            "taps": list(taps),
            "width": target.width,
            "texts": hash_texts(texts),
            "count": len(texts),
            "shard_texts": SHARD_TEXTS,
        }
        self._check_manifest(manifest)

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def shards(self) -> int:
        return -(-len(self.texts) // SHARD_TEXTS)

    def build(self, rank: int = 0, world: int = 1, batch_tokens: int = 512) -> Iterator[tuple[int, int]]:
        """Compute what is missing, in batches of about `batch_tokens` tokens; yields (texts done, texts in all)."""
        for shard in range(rank, self.shards, world):
            members = self._members(shard)
            if self._find(shard) is None:
                self._write(shard, members, batch_tokens)
            self._verify(shard)
            yield min((shard + 1) * SHARD_TEXTS, len(self.texts)), len(self.texts)

    def __getitem__(self, index: int) -> Sample:
        shard, text = index // SHARD_TEXTS, self.texts[index]
        if shard not in self._maps:
            path = self._find(shard)
            if path is None:
                raise WhiFlashError(f"{self.directory} lacks shard {shard}; run the feature stage to its end")
            self._maps[shard] = np.load(path, mmap_mode="r")
        begin = int(self._starts[index] - self._starts[shard * SHARD_TEXTS])
        rows = torch.from_numpy(np.array(self._maps[shard][begin : begin + len(text.tokens)]))
        features, hidden = rows.split([self.width - self.target.width, self.target.width], -1)
        return Sample(text.category, text.start, torch.tensor(text.tokens), features, hidden)

    def _members(self, shard: int) -> Sequence[Text]:
        return self.texts[shard * SHARD_TEXTS : (shard + 1) * SHARD_TEXTS]

    def _find(self, shard: int) -> Path | None:
        found = sorted(self.directory.glob(f"{shard:05d}-{hash_texts(self._members(shard))}-*.npy"))
        return found[0] if found else None

    def _verify(self, shard: int) -> None:
        path = self._find(shard)
        assert path is not None
        if f"{zlib.crc32(path.read_bytes()):08x}" != path.stem.split("-")[-1]:
            raise WhiFlashError(
                f"{path} is damaged (its checksum differs from its name); delete that file and run again"
            )

    def _write(self, shard: int, members: Sequence[Text], batch_tokens: int) -> None:
        rows = np.empty((sum(len(t.tokens) for t in members), self.width), np.float16)
        begins = np.cumsum([0, *(len(t.tokens) for t in members)])
        for batch in _batches(members, batch_tokens):
            for index, pair in zip(batch, states(self.target, [members[i] for i in batch], self.taps), strict=True):
                joined = torch.cat(pair, -1).float().clamp(-65504, 65504)  # some targets exceed float16 at a few places
                rows[begins[index] : begins[index + 1]] = joined.to(torch.float16).cpu().numpy()
        temporary = self.directory / f".{shard:05d}.{os.getpid()}.tmp"
        try:
            with temporary.open("wb") as file:
                np.save(file, rows)
            checksum = zlib.crc32(temporary.read_bytes())
            os.replace(temporary, self.directory / f"{shard:05d}-{hash_texts(members)}-{checksum:08x}.npy")
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise WhiFlashError(
                f"shard {shard} of {self.directory} cannot be written ({error.strerror}); finished shards are kept: "
                f"free about {rows.nbytes * (self.shards - shard) >> 20} MB and run again, or use online features"
            ) from error

    def _check_manifest(self, manifest: dict[str, Any]) -> None:
        path = self.directory / "manifest.json"
        if not path.exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{os.getpid()}.tmp")
            temporary.write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
            os.replace(temporary, path)
            return
        try:
            found = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise WhiFlashError(f"{path} is damaged ({error}); delete the directory and run again") from error
        for key, value in manifest.items():
            if found.get(key) != value:
                raise WhiFlashError(
                    f"{self.directory} holds features with {key} = {found.get(key)!r}, but this run has {value!r}; "
                    "choose another directory, or delete that one"
                )


def _batches(texts: Sequence[Text], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of texts of similar length, so that little is padded."""
    batch: list[int] = []
    for index in sorted(range(len(texts)), key=lambda i: len(texts[i].tokens)):
        if batch and (len(batch) + 1) * len(texts[index].tokens) > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def describe(texts: Sequence[Text]) -> dict[str, int]:
    """Answer tokens and texts per category, for reports."""
    return {
        **{f"texts {c}": sum(t.category == c for t in texts) for c in sorted({t.category for t in texts})},
        "answer tokens": sum(len(t.answer) for t in texts),
    }


def default_taps(layers: int, count: int = 3) -> tuple[int, ...]:
    """Boundary ids of `count` taps, spread as the published DFlash models spread theirs; EAGLE-3 heads share them."""
    if count == 1:
        return (layers // 2 + 1,)
    return tuple(round(1 + i * (layers - 4) / (count - 1)) + 1 for i in range(count))


def prepare(
    file: str | Path,
    target: Target,
    directory: str | Path | None,
    *,
    taps: Sequence[int] | None = None,
    held_out: int = 80,
    apart: int = 0,
    max_length: int = 2048,
    reader: Target | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> tuple[Source, list[Sample], Source]:
    """From a JSONL of answers to what a trainer needs: (texts with states, held-out samples, texts set apart).

    States go to `directory`, or are computed on the fly if it is None; `reader` is the same target in another
    precision, to compute the training states faster. Held-out states always come from `target`, and stay in memory.
    About `apart` texts of those left are in neither set, for a model that learns from what the drafters do with new
    texts; their states are computed on the fly.
    """
    taps = default_taps(target.layers) if taps is None else tuple(taps)
    texts, held = split(read_texts(file, target, max_length), held_out)
    texts, kept = split(texts, apart)
    online = Online(target, held, taps)
    samples = [online[i] for i in range(len(held))]
    spare = Online(reader or target, kept, taps)
    if directory is None:
        return Online(reader or target, texts, taps), samples, spare
    rank, world = processes()
    source = Cached(directory, reader or target, texts, taps)
    for done, count in source.build(rank, world):
        log(f"features of {done} of {count} texts")
    if world > 1:
        dist.barrier()
    return source, samples, spare


def check_alone(stage: str) -> None:
    """Refuse `stage`, which runs in one process, where torchrun started several."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        raise WhiFlashError(
            f"`train {stage}` runs in one process, and torchrun started {world}; "
            "start only `train eagle3` and `train dflash` under torchrun"
        )


def processes() -> tuple[int, int]:
    """(rank, number) of this process under torchrun, joined; (0, 1) otherwise."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return (dist.get_rank(), world) if world > 1 else (0, 1)
