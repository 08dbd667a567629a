"""Speed against other implementations on the same weights, interleaved in one process; `make bench` runs it.

Every prompt goes to every subject in turn, so that a noisy machine is noisy for all. Figures are end to end (prompt
pass included), greedy, batch 1. A ratio is the quotient of the medians over all runs, with the range of its quartiles.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from whiflash import WhiFlash
from whiflash.demo import PROMPTS
from whiflash.model import ASSETS, Output
from whiflash.target.load import load_target

Subject = Callable[[list[int], int], list[int]]


def transformers_generate(path: Path, dtype: torch.dtype) -> tuple[Any, Subject]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

    def run(prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        return out[0, len(prompt) :].tolist()

    return model, run


def dflash_package(path: Path, target: Any, stop_ids: list[int], dtype: torch.dtype) -> Subject:
    from dflash.model import DFlashDraftModel, dflash_generate

    model = DFlashDraftModel.from_pretrained(path, dtype=dtype).eval()

    def run(prompt: list[int], count: int) -> list[int]:
        out = dflash_generate(model, target, torch.tensor([prompt]), count, stop_ids)
        return out[0, len(prompt) :].tolist()

    return run


def ours(model: WhiFlash, kept: list[Output]) -> Subject:
    def run(prompt: list[int], count: int) -> list[int]:
        kept.append(model.generate(prompt, max_new_tokens=count))
        return kept[-1].tokens

    return run


def main(
    dflash: Annotated[str, typer.Option(help="DFlash checkpoint.")] = str(ASSETS / "dflash"),
    eagle3: Annotated[str, typer.Option(help="EAGLE-3 checkpoint.")] = str(ASSETS / "eagle3"),
    tokens: Annotated[int, typer.Option(help="Tokens an answer.")] = 64,
    rounds: Annotated[int, typer.Option(help="Times over all prompts.")] = 3,
) -> None:
    """Print the table of speeds and ratios, the cost of wider target passes, and what switching costs."""
    console = Console(highlight=False)
    target = load_target()
    torch.set_grad_enabled(False)
    options = {"dflash": dflash, "eagle3": eagle3}
    outputs: dict[str, list[Output]] = {}
    subjects: dict[str, Subject] = {}
    hf, subjects["transformers generate"] = transformers_generate(target.path, target.dtype)
    try:
        subjects["dflash 0.1.0"] = dflash_package(Path(dflash), hf, sorted(target.stop_ids), target.dtype)
    except ImportError as error:
        console.print(f"the dflash package cannot be imported ({error}); its row is left out")
    for name, drafters in {
        "plain": "none",
        "DFlash": "df",
        "EAGLE-3": "e3",
        "DDTree 16": "ddt",
        "df-e3": "df-e3",
    }.items():
        outputs[name] = []
        subjects[f"whiflash {name}"] = ours(
            WhiFlash.from_pretrained(target, drafters=drafters, **options), outputs[name]
        )

    prompts = [target.encode(text) for text in PROMPTS.values()]
    for run in subjects.values():
        run(prompts[0], 8)
    for kept in outputs.values():
        kept.clear()
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    differing = dict.fromkeys(subjects, 0)
    for _ in range(rounds):
        for prompt in prompts:
            answers = {}
            for name, run in subjects.items():
                started = time.perf_counter()
                answers[name] = run(prompt, tokens)
                seconds[name].append((time.perf_counter() - started) / len(answers[name]))
            for name, answer in answers.items():
                differing[name] += answer != answers["transformers generate"]

    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {target.name}, {target.dtype}")
    table = Table("subject", "tok/s", "ratio to transformers", "ratio to dflash 0.1.0", "AL", "answers that differ")
    for name in subjects:
        kept = outputs.get(name.removeprefix("whiflash "), [])
        lengths = [len(r.tokens) for out in kept for r in out.rounds]
        table.add_row(
            name,
            f"{1 / statistics.median(seconds[name]):.1f}",
            ratio(seconds["transformers generate"], seconds[name]),
            ratio(seconds["dflash 0.1.0"], seconds[name]) if "dflash 0.1.0" in seconds else "–",
            f"{statistics.fmean(lengths):.2f}" if lengths else "–",
            str(differing[name]),
        )
    console.print(table)
    console.print(passes(target))
    rounds_seen = [r for out in outputs["df-e3"] for r in out.rounds]
    total = sum(r.latency for r in rounds_seen)
    shares = {p: sum(r.times[p] for r in rounds_seen) / total for p in rounds_seen[0].times}
    console.print("df-e3, share of a round: " + ", ".join(f"{p} {100 * s:.1f} %" for p, s in shares.items()))


def ratio(base: list[float], other: list[float]) -> str:
    each = sorted(b / o for b, o in zip(base, other, strict=True))
    low, high = each[len(each) // 4], each[-1 - len(each) // 4]
    return f"{statistics.median(base) / statistics.median(other):.2f} ({low:.2f}–{high:.2f})"


def passes(target: Any, repeats: int = 15) -> Table:
    """Milliseconds of one target pass over n rows behind 128 committed ones, head included, interleaved over n."""
    widths = (1, 2, 4, 8, 16, 32)
    cache = target.network.new_cache(256)
    tokens = torch.randint(0, target.vocab_size, (1, 128), generator=torch.Generator().manual_seed(0))
    target.network(tokens, cache)
    cache.advance(128)
    times: dict[int, list[float]] = {n: [] for n in widths}
    for _ in range(repeats):
        for n in widths:
            started = time.perf_counter()
            hidden, _ = target.network(tokens[:, :n], cache)
            target.network.head(hidden)
            times[n].append(1000 * (time.perf_counter() - started))
    table = Table("rows of a target pass", *map(str, widths))
    table.add_row("ms", *(f"{statistics.median(times[n]):.1f}" for n in widths))
    table.add_row(
        "ratio to 1 row", *(f"{statistics.median(times[n]) / statistics.median(times[1]):.2f}" for n in widths)
    )
    return table


if __name__ == "__main__":
    typer.run(main)
