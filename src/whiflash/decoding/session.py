"""One sequence being decoded: the caches, the feature log, and the round."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from whiflash.decoding.accept import accept
from whiflash.decoding.sampling import Sampler
from whiflash.drafters.draft import chain
from whiflash.drafters.drafter import Drafter, DraftState, FeatureLog
from whiflash.routers.router import Router, Signal
from whiflash.target.target import Target

PHASES = ("route", "catch_up", "draft", "verify", "accept", "commit")


@dataclass(frozen=True)
class Round:
    """What one round did. `tokens` are those committed (their count is the acceptance length, the bonus included).

    `accepted` of them were drafted, by `slot` (None: no drafter); `drafted` nodes were verified besides the root.
    entropy (nats) and score (what the router compared) belong to the node that produced the round's root, which sits at
    `position`. `times` are seconds per phase; `caught_up` feature rows were consumed before drafting.
    """

    slot: str | None
    position: int
    tokens: list[int]
    accepted: int
    drafted: int
    caught_up: int
    entropy: float
    score: float
    times: dict[str, float]

    @property
    def latency(self) -> float:
        return sum(self.times.values())


@dataclass
class _Clock:
    """Seconds per phase. On an accelerator phases overlap unless `sync` waits for each."""

    sync: bool
    times: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    last: float = field(default_factory=time.perf_counter)

    def lap(self, phase: str) -> None:
        if self.sync:
            torch.accelerator.synchronize()
        now = time.perf_counter()
        self.times[phase] += now - self.last
        self.last = now


class Session:
    """Decodes one sequence; reusable for the next turn of a chat, whose common prefix it keeps.

    lazy: a draft model catches up only when the router picks it (or its backlog exceeds `backlog` rows); otherwise all
    do every round. kv_only: catching up writes K/V and nothing else. Both are exact; the switches exist to measure.
    timed: wait for the device at the end of each phase, so that times on an accelerator are true.

    An interrupt may come between any two steps and the next `prefill` still starts from sound caches: `tokens` are set
    before the rows that stand for them count, and rows count in the target's cache before they do in the log.
    """

    def __init__(
        self,
        target: Target,
        drafters: Sequence[Drafter] = (),
        router: Router | None = None,
        *,
        lazy: bool = True,
        kv_only: bool = True,
        backlog: int = 2048,
        prefill_chunk: int = 512,
        capacity: int = 1024,
        timed: bool = False,
    ):
        self.target, self.drafters, self.router = target, tuple(drafters), router
        self.lazy, self.kv_only, self.backlog, self.prefill_chunk = lazy, kv_only, backlog, prefill_chunk
        self.timed = timed and target.device.type != "cpu"
        self.cache = target.network.new_cache(capacity)
        models = {id(d.model): d.model for d in self.drafters}
        self.states = {key: DraftState(model.new_cache(capacity)) for key, model in models.items()}
        taps = sorted({t for model in models.values() for t in model.taps})
        self.log = FeatureLog(taps, target.width, target.dtype, target.device)
        self.tokens: list[int] = []
        self.sampler: Sampler | None = None
        self.slot, self.entropy, self.score = 0, float("nan"), float("nan")

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int], sampler: Sampler | None = None) -> int:
        """Run the target over the prompt and return the first new token, which becomes the root.

        tokens: the whole sequence so far; what it shares with the last one is kept. sampler None is greedy.
        """
        tokens = list(tokens)
        self.sampler = sampler
        start = self._rewind(tokens)
        self.tokens = tokens
        new = torch.tensor(tokens[start:], device=self.target.device)
        self.log.set_tokens(start, new)
        self.cache.reserve(len(tokens) + 1)
        for piece in new.split(self.prefill_chunk):
            hidden, features = self.target.network(piece[None], self.cache, taps=self.log.taps)
            self.cache.advance(piece.shape[0])
            self._append(features)
            if not self.lazy:
                self._catch_up(self.drafters)
        logits = self.target.network.head(hidden[:, -1])
        root = logits.argmax(-1) if sampler is None else sampler.draw(sampler.probabilities(logits))
        (token,) = self._read(root, self._route(Signal(hidden[0, -1], logits[0])))
        self.tokens = [*tokens, int(token)]
        self.log.set_tokens(len(tokens), root)
        return int(token)

    @torch.inference_mode()
    def round(self, take: Callable[[list[int]], int] | None = None) -> Round:
        """Route, catch up, draft, verify, accept, commit.

        take: called with the round's tokens, returns how many of them the sequence may keep (it ends inside a block
        at a stop token, a stop string or the token budget).
        """
        clock = _Clock(self.timed)
        start, entropy, score = self.cache.length, self.entropy, self.score
        drafter = self.drafters[self.slot] if self.drafters else None
        clock.lap("route")

        caught_up = self._catch_up([drafter] if self.lazy else self.drafters) if drafter else 0
        clock.lap("catch_up")

        root = self.log.tokens[start : start + 1]
        choose = self.sampler.choose if self.sampler else None
        draft = drafter.draft(self._state(drafter), self.log, choose) if drafter else chain(root)
        room = max(self.target.max_positions - 1 - start, 0)
        if len(draft) - 1 > room:
            # behind the context a learned position does not exist, and some ropes change the angles of all others
            draft = draft.cut(room)
        clock.lap("draft")

        self.cache.reserve(start + len(draft))
        positions = None if draft.ancestors is None else start + draft.depths
        hidden, features = self.target.network(
            draft.tokens[None], self.cache, positions, draft.ancestors, taps=self.log.taps
        )
        logits = self.target.network.head(hidden[0])
        clock.lap("verify")

        path, node, bonus = accept(draft, logits, self.sampler)
        clock.lap("accept")
        at = node[None]
        signal = Signal(hidden[0].index_select(0, at)[0], logits.index_select(0, at)[0])
        route = self._route(signal)
        clock.lap("route")
        values = self._read(torch.cat([path, draft.tokens, bonus[None]]), route)  # the one wait for the device
        kept, guessed = values[: len(draft)], values[len(draft) : -1]
        nodes = [i for i, on_path in enumerate(kept) if on_path]
        tokens = [int(guessed[i]) for i in nodes[1:]] + [int(values[-1])]
        clock.lap("accept")

        count = len(tokens) if take is None else take(tokens)
        accepted = min(count, len(tokens) - 1)
        self._commit(start, nodes[:count], tokens[:count], features)
        clock.lap("commit")
        return Round(
            slot=drafter.name if drafter else None,
            position=start,
            tokens=tokens[:count],
            accepted=accepted,
            drafted=len(draft) - 1,
            caught_up=caught_up,
            entropy=entropy,
            score=score,
            times=clock.times,
        )

    def _state(self, drafter: Drafter) -> DraftState:
        return self.states[id(drafter.model)]

    def _rewind(self, tokens: list[int]) -> int:
        """Keep what the caches share with `tokens`; returns the first position to compute.

        One shared position less than there could be is kept: an EAGLE-3 row joins a feature with the token after it.
        """
        shared = 0
        for old, new in zip(self.tokens[: self.cache.length], tokens[:-1], strict=False):
            if old != new:
                break
            shared += 1
        keep = max(shared - 1, 0)
        if self.log.taps:
            keep = min(keep, self.log.length)
        self.cache.truncate(keep)
        for state in self.states.values():
            state.cache.truncate(min(state.cursor, keep))
        self.log.truncate(keep)
        return keep

    def _catch_up(self, drafters: Sequence[Drafter]) -> int:
        return sum(d.catch_up(self._state(d), self.log, self.kv_only) for d in drafters)

    def _append(self, features: Tensor | None) -> None:
        """Log features [1, m, …], and see to the models whose backlog has grown too long."""
        if features is None:
            return
        self.log.append(features[0], min(state.cursor for state in self.states.values()))
        self._catch_up([d for d in self.drafters if self.log.length - self._state(d).cursor > self.backlog])

    def _commit(self, start: int, nodes: list[int], tokens: list[int], features: Tensor | None) -> None:
        self.tokens += tokens
        self.log.set_tokens(start + 1, torch.tensor(tokens, device=self.target.device))
        if nodes[-1] == len(nodes) - 1:
            self.cache.advance(len(nodes))
            kept = None if features is None else features[:, : len(nodes)]
        else:
            path = torch.tensor(nodes, device=self.target.device)
            self.cache.keep_path(start, path)
            kept = None if features is None else features[:, path]
        self._append(kept)

    def _route(self, signal: Signal) -> Tensor:
        """slot, score, entropy as one float64 vector on the device."""
        if self.router is None:
            return torch.zeros(0, dtype=torch.float64, device=signal.hidden.device)
        slot, score = self.router(signal)
        return torch.stack([slot.double(), score.double(), signal.entropy().double()])

    def _read(self, values: Tensor, route: Tensor) -> list[float]:
        """Bring integers and the route to the host in one transfer; keeps the route for the next round."""
        numbers = torch.cat([values.double(), route]).tolist()
        if route.numel():
            self.slot, self.score, self.entropy = int(numbers[-3]), numbers[-2], numbers[-1]
            del numbers[-3:]
        return numbers
