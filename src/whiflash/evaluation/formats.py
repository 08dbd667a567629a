"""From a row of a public data set to the user turns of a prompt, worded as the DFlash and DDTree benchmarks word them.

Every function takes a row as the data set's own files have it and returns the turns, or None to leave the row out.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whiflash.journal import shown

Row = Mapping[str, Any]
Turns = list[str] | None

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."

# The instruction of AgentBench's operating-system task (THUDM/AgentBench, Apache-2.0), a part of that data set.
AGENTBENCH_OS = Path(__file__).parents[1] / "assets" / "prompts" / "agentbench-os.txt"


def _text(row: Row, key: str) -> str:
    if not isinstance(row[key], str):
        raise TypeError(f"its {key} is no text: {shown(row[key])}")
    return row[key]


def mathematics(row: Row) -> Turns:
    return [_text(row, "question" if "question" in row else "problem") + BOXED]


def mt_bench(row: Row) -> Turns:
    return row["prompt"]


def alpaca(row: Row) -> Turns:
    instruction = _text(row, "instruction")
    return [f"{instruction}\n\nInput:\n{_text(row, 'input')}" if row.get("input") else instruction]


def ultrachat(row: Row) -> Turns:
    """The original lists the turns of user and assistant in alternation under `data`, the 200k edition messages."""
    if "data" in row:
        return row["data"][::2]
    return _said_by("user", row["messages"], "role", "content")


def wildchat(row: Row) -> Turns:
    """English and harmless conversations; what comes after the first turn answers another model, so it is left out."""
    if row.get("language") != "English" or row.get("toxic") or row.get("redacted"):
        return None
    return _said_by("user", row["conversation"], "role", "content")[:1]


def humaneval(row: Row) -> Turns:
    problem = _text(row, "prompt")
    return [
        f"Write a solution to the following problem and make sure that it passes the tests:\n```python\n{problem}\n```"
    ]


def mbpp(row: Row) -> Turns:
    """The test problems, ids 11 to 510; the full edition calls its text `text`."""
    return [_text(row, "prompt" if row.get("prompt") else "text")] if 11 <= int(row["task_id"]) <= 510 else None


def livecodebench(row: Row) -> Turns:
    if row.get("starter_code"):
        form, code = "Use the following code structure:", _text(row, "starter_code")
    else:
        form, code = "Write your code in the following format:", "# YOUR CODE HERE"
    return [
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
        "correct Python program that matches the specification and passes all tests. You will NOT return anything "
        f"except for the program\n\n### Question:\n{_text(row, 'question_content')}\n\n### Format: {form}\n"
        f"```python\n{code}\n```\n\n### Answer: (use the provided format with backticks)"
    ]


def swe_bench(row: Row) -> Turns:
    return [f"Problem Statement:\n{_text(row, 'problem_statement')}\nPlease fix the issue described above."]


def tau_bench(row: Row) -> Turns:
    """The domain's policy, then what the simulated user is told; both come from the environment's files."""
    return [f"{_text(row, 'wiki').strip()}\n\nUser:\n{_text(row, 'instruction')}"]


def agentbench(row: Row) -> Turns:
    return [AGENTBENCH_OS.read_text("utf-8") + _text(row, "description")]


def agentinstruct(row: Row) -> Turns:
    return _said_by("human", row["conversations"], "from", "value")[:1]


def _said_by(who: str, messages: Sequence[Row], role: str, text: str) -> list[str]:
    return [m[text] for m in messages if m[role] == who]
