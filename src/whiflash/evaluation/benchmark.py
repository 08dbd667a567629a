"""The protocol: every prompt goes to every method in turn, in one process, over one target; all of it is kept."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from whiflash.errors import WhiFlashError
from whiflash.evaluation.datasets import Prompt
from whiflash.evaluation.machine import PeakMemory
from whiflash.evaluation.methods import BASELINE, Method, mode
from whiflash.evaluation.ranks import Ranks
from whiflash.evaluation.results import Results, columns
from whiflash.journal import fingerprint
from whiflash.model import WhiFlash
from whiflash.routers.neural import NeuralRouter
from whiflash.target.target import Target

WARM_UP = "Say hello and count to ten."
WARM_UP_TOKENS = 16
# done, total, what is being answered
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Protocol:
    """How every answer is made. seed: of the sampling, and of everything else that is drawn."""

    max_new_tokens: int = 2048
    temperature: float = 0.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def settings(
    protocol: Protocol,
    prompts: Sequence[Prompt],
    models: Mapping[Method, WhiFlash],
    target: Target,
    sources: Mapping[str, str | None],
    machine: Mapping[str, Any],
    processes: int,
) -> dict[str, Any]:
    """What a run is made of. A run is resumed only with the same, since its figures would mix two things otherwise."""
    counts = {name: sum(p.dataset == name for p in prompts) for name in dict.fromkeys(p.dataset for p in prompts)}
    return {
        **asdict(protocol),
        "datasets": counts,
        "prompts": fingerprint([[p.id, p.turns] for p in prompts]),
        "methods": {m.name: asdict(m) for m in models},
        "target": f"{target.name} ({target.fingerprint()})",
        **sources,
        "drafters": {d.name: d.model.identity for model in models.values() for d in model.drafters},
        "routers": {m.name: r.identity for m, model in models.items() if isinstance(r := model.router, NeuralRouter)},
        "dtype": target.precision,
        "processes": processes,
        **{name: machine[name] for name in ("device", "cpu", "gpu", "threads", "torch", "whiflash") if name in machine},
    }


def run(
    prompts: Sequence[Prompt],
    models: Mapping[Method, WhiFlash],
    protocol: Protocol,
    results: Results,
    ranks: Ranks,
    progress: Progress,
) -> None:
    """Answer what is not answered yet of this rank's prompts; every answer is on disk before the next one starts."""
    methods = list(models)
    if methods[0].name != BASELINE:
        raise WhiFlashError("the first method must be plain decoding: its answers are what others are compared with")
    mine = ranks.share(list(enumerate(prompts)))
    left = [(p, m) for i, p in mine for m in _order(methods, i) if results.get(p.id, m.name) is None]
    if not left:
        return
    progress(0, len(left), "warm-up")
    for model in models.values():
        model.generate(WARM_UP, max_new_tokens=WARM_UP_TOKENS, temperature=protocol.temperature, seed=protocol.seed)
    for number, (prompt, method) in enumerate(left):
        progress(number, len(left), f"{method.name} on {prompt.id}")
        before = None if method.name == BASELINE else results.get(prompt.id, BASELINE)
        results.add(answer(prompt, method, models[method], protocol, before, ranks.rank))
    progress(len(left), len(left), "done")


def _order(methods: Sequence[Method], index: int) -> list[Method]:
    """The baseline, whose answers are the others' history, then the rest, each prompt beginning with another."""
    rest = list(methods[1:])
    turn = index % len(rest) if rest else 0
    return [methods[0], *rest[turn:], *rest[:turn]]


def answer(
    prompt: Prompt,
    method: Method,
    model: WhiFlash,
    protocol: Protocol,
    baseline: Mapping[str, Any] | None,
    rank: int = 0,
) -> dict[str, Any]:
    """One row of results.jsonl: a conversation answered by a method.

    The history of a later turn is the baseline's answers, for all methods alike: so all are given the same prompts.
    Turns that do not fit the target's context with max_new_tokens are left out, as is what comes after them.
    """
    memory = PeakMemory(model.target.device)
    memory.reset()
    turns: list[dict[str, Any]] = []
    left_out = None
    for index in range(len(prompt.turns)):
        tokens = _encode(model.target, prompt, index, turns if baseline is None else baseline["turns"])
        if tokens is None:
            left_out = "the target has no chat template, so only first turns are asked"
            break
        if len(tokens) + protocol.max_new_tokens > model.target.max_positions:
            left_out = (
                f"turn {index} has {len(tokens)} tokens, too many for the context of {model.target.max_positions}"
            )
            break
        out = model.generate(
            tokens,
            max_new_tokens=protocol.max_new_tokens,
            temperature=protocol.temperature,
            seed=None if protocol.greedy else _seed(protocol.seed, prompt.id, index),
        )
        turns.append(
            {
                "prompt_tokens": len(tokens),
                "tokens": out.tokens,
                "finish_reason": out.finish_reason,
                "prefill_seconds": out.stats.prefill_seconds,
                "decode_seconds": out.stats.decode_seconds,
                "rounds": columns(out.rounds),
            }
        )
    return {
        "prompt": prompt.id,
        "dataset": prompt.dataset,
        "category": prompt.category,
        "method": method.name,
        "mode": mode(model),
        "turns": turns,
        "left_out": left_out,
        "peak_memory": memory.read(),
        "rank": rank,
    }


def _encode(target: Target, prompt: Prompt, index: int, answered: Sequence[Mapping[str, Any]]) -> list[int] | None:
    if target.tokenizer.chat_template is None:
        return target.encode(prompt.turns[0]) if index == 0 else None
    messages = []
    for text, turn in zip(prompt.turns[:index], answered, strict=False):
        messages += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": target.decode(turn["tokens"])},
        ]
    messages.append({"role": "user", "content": prompt.turns[index]})
    # the benchmarks this one follows switch thinking off where a template knows it
    return target.encode(messages, enable_thinking=False)


def _seed(seed: int, prompt: str, turn: int) -> int:
    """A seed of its own for every answer, whatever the order and the process it is made in."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{prompt}/{turn}".encode()).digest()[:6], "big")
