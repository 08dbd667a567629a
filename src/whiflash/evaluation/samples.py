"""Answers of a run, token by token, with who drafted what: what the report's heat map shows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from whiflash.decoding.stopping import Answer, Stopping
from whiflash.errors import WhiFlashError
from whiflash.evaluation.results import Row
from whiflash.evaluation.runs import Routed, Run
from whiflash.target import embedded
from whiflash.target.target import Target

SAMPLES, TOKENS = 4, 500
# texts of an answer's tokens, one each; joined they are the answer
Reader = Callable[[Sequence[int]], list[str]]


def reader(name: str) -> Reader:
    """Texts of a target's tokens, by its tokenizer alone; raises where there is none."""
    from transformers import AutoTokenizer

    try:
        path = str(embedded.prepare()) if name == embedded.NAME else name
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError … for a tokenizer that is not there
        raise WhiFlashError(f"{name} has no tokenizer here ({error})".splitlines()[0]) from error
    network: Any = None  # is not asked for a thing
    target = Target(
        name, Path(path), network, tokenizer, layers=0, width=0, vocab_size=len(tokenizer), max_positions=0,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip

    def texts(tokens: Sequence[int]) -> list[str]:
        answer = Answer(target.decode, Stopping(2**62), target.byte_ids)
        found = []
        for token in tokens:
            answer.take([token])
            found.append(answer.piece())
        answer.end("end")
        found[-1] += answer.piece()
        return found

    return texts


def ids(tokens: Sequence[int]) -> list[str]:
    """What stands for the texts where the tokenizer is missing."""
    return [f"{token} " for token in tokens]


def choose(run: Run, method: Routed) -> list[Row]:
    """The answer with the most switches of each category, at most SAMPLES of them."""

    def switches(row: Row) -> int:
        return sum(a != b for a, b in pairwise(row["turns"][0]["rounds"]["slot"]))

    best: dict[str, Row] = {}
    for row in run.rows[method.name].values():
        category = row["category"]
        if category not in best or switches(row) > switches(best[category]):
            best[category] = row
    return list(best.values())[:SAMPLES]


def rounds(turn: Mapping[str, Any], read: Reader) -> Iterator[dict[str, Any]]:
    """The first TOKENS tokens round by round: who drafted, figures, and [text, drafted] of each token.

    The first token comes from the prompt pass; a round's bonus token is the target's own, and not drafted.
    """
    texts, table, at = read(turn["tokens"]), turn["rounds"], 1
    yield {"slot": None, "tokens": [[texts[0], False]]}
    names = ("slot", "acceptance_length", "accepted", "drafted", "entropy", "score")
    for number, values in enumerate(zip(*(table[name] for name in names), strict=True), 1):
        if at >= TOKENS:
            return
        found = dict(zip(names, values, strict=True))
        end = at + found["acceptance_length"]
        marked = [[text, place < found["accepted"]] for place, text in enumerate(texts[at:end])]
        yield {"round": number, **found, "tokens": marked}
        at = end


def samples(run: Run, method: Routed, read: Reader) -> list[dict[str, Any]]:
    found = []
    for row in choose(run, method):
        turn = row["turns"][0]
        found.append(
            {
                "prompt": row["prompt"],
                "category": row["category"],
                "rounds": list(rounds(turn, read)),
                "tokens": len(turn["tokens"]),
                "cut": len(turn["tokens"]) > TOKENS,
            }
        )
    return found
