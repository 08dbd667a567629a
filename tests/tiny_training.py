"""A tiny target with texts it answered greedily, and drafters fitted to them: what the training tests share."""

import json
from functools import cache
from pathlib import Path

import torch

import tiny
from whiflash.target.load import load_target
from whiflash.target.target import Target
from whiflash.training.dflash import DFlashRecipe
from whiflash.training.eagle3 import Eagle3Recipe
from whiflash.training.features import Online, Sample, read_texts
from whiflash.training.loop import LoopConfig

TAPS = (1, 3, 5)
ANSWER = 40


def target(directory: Path) -> Target:
    return load_target(tiny.build(directory / "target"))


@torch.inference_mode()
def continuation(target: Target, prompt: list[int], count: int = ANSWER) -> list[int]:
    """The target's greedy answer, one token a pass, without stopping."""
    cache, tokens, answer = target.network.new_cache(512), prompt, []
    while len(answer) < count:
        hidden, _ = target.network(torch.tensor([tokens]), cache)
        cache.advance(len(tokens))
        answer.append(int(target.network.head(hidden[:, -1]).argmax()))
        tokens = answer[-1:]
    return answer


def write_texts(target: Target, file: Path, count: int = 6) -> Path:
    rows = []
    for number in range(count):
        prompt = f"{'abcdefgh'[number % 8]} {number}?"
        answer = continuation(target, target.encode(prompt))
        rows.append({"category": ("chat", "math")[number % 2], "prompt": prompt, "response_ids": answer})
    file.write_text("".join(json.dumps(r) + "\n" for r in rows), "utf-8")
    return file


def online(target: Target, directory: Path, count: int = 6) -> Online:
    return Online(target, read_texts(write_texts(target, directory / "texts.jsonl", count), target), TAPS)


def sample(length: int = 30, start: int = 10, width: int = 32, vocabulary: int = 256, seed: int = 0) -> Sample:
    """A text of random tokens and states."""
    random = torch.Generator().manual_seed(seed)
    return Sample(
        "chat",
        start,
        torch.randint(vocabulary, (length,), generator=random),
        torch.randn(length, len(TAPS) * width, generator=random),
        torch.randn(length, width, generator=random),
    )


@cache
def loop(**changes) -> LoopConfig:
    defaults = {"steps": 12, "warmup": 2, "evaluate_every": 6, "save_every": 3, "lr": 3e-3, "precision": "float32"}
    return LoopConfig(**{**defaults, **changes})


def eagle3_recipe(**changes) -> Eagle3Recipe:
    return Eagle3Recipe(draft_vocab=200, chain=4, loop=loop(**changes))


def dflash_recipe(**changes) -> DFlashRecipe:
    return DFlashRecipe(layers=2, block=4, draft_vocab=200, anchors=16, loop=loop(**changes))
