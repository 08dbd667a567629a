"""What a finished answer tells about itself: totals, and one line of JSON a round."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from whiflash.decoding.session import PHASES, Round


@dataclass(frozen=True)
class Stats:
    """tokens include the one the prompt pass gave, which belongs to no round; decode times and rates leave it out.

    acceptance_length is tokens per round, the bonus included; `rounds` and `drafted_tokens` count by slot.
    """

    prompt_tokens: int
    tokens: int
    prefill_seconds: float
    decode_seconds: float
    acceptance_length: float
    rounds: dict[str, int]
    drafted_tokens: dict[str, int]
    switches: int
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Decode throughput: tokens of all rounds by the time of all rounds."""
        return (self.tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def catch_up_share(self) -> float:
        total = sum(self.phases.values())
        return self.phases.get("catch_up", 0.0) / total if total else 0.0


def summarise(rounds: Sequence[Round], prompt_tokens: int, tokens: int, prefill: float, decode: float) -> Stats:
    slots = [r.slot for r in rounds if r.slot]
    drafted: Counter[str] = Counter()
    for r in rounds:
        if r.slot:
            drafted[r.slot] += r.accepted
    return Stats(
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        prefill_seconds=prefill,
        decode_seconds=decode,
        acceptance_length=sum(len(r.tokens) for r in rounds) / len(rounds) if rounds else float("nan"),
        rounds=dict(Counter(slots)),
        drafted_tokens=dict(drafted),
        switches=sum(a != b for a, b in pairwise(slots)),
        phases={p: sum(r.times[p] for r in rounds) for p in PHASES},
    )


def trace_line(index: int, r: Round) -> str:
    """One round as JSON; numbers that do not exist (no router) are null."""
    row: dict[str, Any] = {"round": index, **asdict(r), "acceptance_length": len(r.tokens), "latency": r.latency}
    return json.dumps({k: None if isinstance(v, float) and v != v else v for k, v in row.items()})
