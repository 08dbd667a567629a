"""`make demo`: one prompt a category, every method, the same output, side by side."""

from statistics import fmean

from rich.console import Console
from rich.table import Table

from whiflash.errors import WhiFlashError
from whiflash.model import ASSETS, Output, WhiFlash
from whiflash.progress import bar
from whiflash.target.load import load_target
from whiflash.terminal import Painter, legend, print_painted

PROMPTS = {
    "chat": "I am moving to a new city next month. How can I make friends there?",
    "math": "A shop sells pens at 3 dollars each. I buy 7 and pay with a 50 dollar bill. How much do I get back?",
    "coding": "Write a Python function that checks whether a string is a palindrome, with a docstring and an example.",
    "agentic": "You can run shell commands. List the steps and commands to find the five largest files under /var/log.",
}


def run(max_new_tokens: int, threshold: float | None) -> bool:
    """Print answers and the table; True if all outputs agree."""
    if max_new_tokens < 2:
        raise WhiFlashError(f"the demo compares speeds, which takes at least 2 tokens an answer, not {max_new_tokens}")
    console = Console(highlight=False)
    with bar("preparing the embedded target") as progress:
        target = load_target(progress=progress)
    neural = (ASSETS / "router-df-e3").is_dir()
    methods = {
        "plain": WhiFlash.from_pretrained(target, drafters="none"),
        "DFlash": WhiFlash.from_pretrained(target, drafters="df"),
        "EAGLE-3": WhiFlash.from_pretrained(target, drafters="e3"),
        "WhiFlash": WhiFlash.from_pretrained(
            target, drafters="df-e3", router="neural" if neural else "entropy", threshold=threshold
        ),
    }
    for model in methods.values():
        model.generate("Hi", max_new_tokens=8)  # the first pass of a process is not the speed of the second
    console.print(f"{target.name}: one prompt a category, greedy, up to {max_new_tokens} tokens each\n")
    outputs: dict[str, list[Output]] = {name: [] for name in methods}
    for category, prompt in PROMPTS.items():
        console.print(f"{category}: {prompt}", style="bold")
        for name, model in methods.items():
            stream = model.stream(prompt, max_new_tokens=max_new_tokens)
            painter = Painter(target)
            for piece in stream:
                if name == "WhiFlash":
                    print_painted(console, painter.spans(piece))
            outputs[name].append(stream.output())
        print_painted(console, [painter.rest()])
        console.print("\n")
    console.print(legend(["df", "e3"]))
    console.print(_table(outputs))
    return all(_same(outputs, name) for name in methods)


def _same(outputs: dict[str, list[Output]], name: str) -> bool:
    return [o.tokens for o in outputs[name]] == [o.tokens for o in outputs["plain"]]


def _speed(answers: list[Output]) -> float:
    return sum(o.stats.tokens - 1 for o in answers) / sum(o.stats.decode_seconds for o in answers)


def _table(outputs: dict[str, list[Output]]) -> Table:
    table = Table("method", "tok/s", "ratio to plain", "AL", "switches", "output")
    plain = _speed(outputs["plain"])
    for name, answers in outputs.items():
        rounds = [len(r.tokens) for o in answers for r in o.rounds]
        table.add_row(
            name,
            f"{_speed(answers):.1f}",
            f"{_speed(answers) / plain:.2f}",
            f"{fmean(rounds):.2f}",
            str(sum(o.stats.switches for o in answers)),
            "same output ✓" if _same(outputs, name) else "DIFFERENT ✗",
        )
    table.caption = "AL: tokens a round, the target's own included"
    return table
