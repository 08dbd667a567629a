"""A tiny target with tiny drafters on disk, and benchmark runs over them: what the tests of the benchmark share."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

import tiny
from whiflash.evaluation.benchmark import Protocol
from whiflash.evaluation.measure import Request, measure
from whiflash.evaluation.methods import Flags

ALL = ("EAGLE3", "DFLASH", "DDTREE", "WHIFLASH")


@dataclass(frozen=True)
class Kit:
    target: Path
    dflash: Path
    eagle3: Path
    prompts: Path

    def flags(self, algorithms=ALL, **given) -> Flags:
        eagle = None if set(algorithms) == {"DFLASH"} else str(self.eagle3)
        return Flags(**{"algorithms": algorithms, "draft": str(self.dflash), "eagle_draft": eagle, **given})

    def request(self, output: Path, tokens: int = 12, flags: Flags | None = None, **given) -> Request:
        options = {"datasets": (str(self.prompts),), "target": str(self.target), "output": output, **given}
        return Request(flags or self.flags(), Protocol(tokens), **options)

    def arguments(self, output: Path, tokens: int = 12, *more: str) -> list[str]:
        """The same request for the command line."""
        return [
            "bench", "--speculative-algorithm", ",".join(ALL), "--model-name-or-path", str(self.target),
            "--draft-name-or-path", str(self.dflash), "--whiflash-eagle-draft", str(self.eagle3),
            "--dataset", str(self.prompts), "--max-new-tokens", str(tokens), "--output", str(output), *more,
        ]  # fmt: skip


def build(directory: Path, prompts: int = 4) -> Kit:
    directory.mkdir(parents=True, exist_ok=True)
    target = tiny.build(directory / "target")
    vocab = json.loads((target / "config.json").read_text())["vocab_size"]
    rows = [
        {
            "id": f"p/{n}",
            "category": ("chat", "math")[n % 2],
            "turns": [f"{'abcdefgh'[n % 8]} {n}?", "more"][: 1 + n % 2],
        }
        for n in range(prompts)
    ]
    return Kit(
        target,
        tiny.write(directory / "dflash", *tiny.dflash_model(vocab, 6)),
        tiny.write(directory / "eagle3", *tiny.eagle3_head(vocab)),
        write_rows(directory / "prompts.jsonl", rows),
    )


def router(directory: Path, pair: str, budget: int | None = None) -> Path:
    """A random neural router for the tiny target."""
    random = torch.Generator().manual_seed(0)
    shapes = {"fc1.weight": (8, 32), "fc1.bias": (8,), "fc2.weight": (1, 8), "fc2.bias": (1,)}
    tensors = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    return tiny.write(directory, {"format": "whiflash-router", "pair": pair, "tree_budget": budget}, tensors)


def profile(path: Path, **costs: float) -> Path:
    """Seconds of a drafted round, the same in every length but for a thousandth a node."""
    rounds = {name: {n: {"draft": cost, "verify": n / 1000} for n in range(1, 17)} for name, cost in costs.items()}
    catch_up = {name: {"fixed": 0.0, "row": 0.0} for name in costs}
    path.write_text(json.dumps({"plain": {"verify": 1.0}, "rounds": rounds, "catch_up": catch_up}))
    return path


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def rows(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "results.jsonl").read_text("utf-8").splitlines()]


def answers(output: Path) -> dict[tuple[str, str], list[list[int]]]:
    """(prompt, method) → tokens of every turn; fails if an answer is there twice."""
    found: dict[tuple[str, str], list[list[int]]] = {}
    for row in rows(output):
        assert (row["prompt"], row["method"]) not in found
        found[row["prompt"], row["method"]] = [turn["tokens"] for turn in row["turns"]]
    return found


def run(request: Request) -> Path:
    return measure(request)
