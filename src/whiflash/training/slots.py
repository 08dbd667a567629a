"""Batched generation where every sequence has a length of its own.

A fixed number of slots decode in lockstep, one token a step; a slot whose answer ended takes the next job at once, and
when jobs run out the batch shrinks. An answer depends on what shares its batch only as far as matrix products round
differently for another number of rows, which our own kernel does not.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from whiflash.nn import kernel
from whiflash.nn.cache import KVCache, additive
from whiflash.target.decoder import Decoder
from whiflash.target.target import Target

# Attended lengths are rounded up to this, so that reductions over keys fill whole vectors whatever the lengths are.
ROUND = 64


@dataclass(frozen=True)
class Job:
    """One sequence to generate: prompt ids, most new tokens, temperature (0: greedy), seed of its random numbers."""

    tokens: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0


class SlotCache(KVCache):
    """A `KVCache` of many sequences, [layers, 2, slots, kv_heads, capacity, head_dim], each with its own length.

    It takes one new row a slot; an idle slot has length 0 and its row is overwritten by the next.
    """

    def __init__(self, like: KVCache, slots: int):
        layers, _, _, kv_heads, capacity, head_dim = like.rows.shape
        self.rows = like.rows.new_zeros(layers, 2, slots, kv_heads, capacity, head_dim)
        self.lengths = [0] * slots
        library = kernel.load() if self.rows.device.type == "cpu" else None
        fits = self.rows.dtype in (torch.float32, torch.bfloat16) and library and head_dim % library.lanes() == 0
        self.library = library if fits else None
        self.commit()

    @property
    def length(self) -> int:  # type: ignore[override]
        return self._end

    def commit(self) -> None:
        """Bring the tensors that `append` and `mask` use up to date with `lengths`; once a step."""
        self.index = torch.tensor(self.lengths, device=self.rows.device)
        self.seen = self.index + 1
        self._end = -(-(max(self.lengths) + 1) // ROUND) * ROUND
        self.reserve(self._end)
        # where each slot's and head's new row lies among all rows of a layer
        _, _, slots, heads, capacity, _ = self.rows.shape
        first = torch.arange(slots * heads, device=self.rows.device) * capacity
        self._new = first + self.index.repeat_interleave(heads)

    def reserve(self, capacity: int) -> None:
        if capacity <= self.capacity:
            return
        shape = list(self.rows.shape)
        shape[4] = max(capacity, self.capacity * 3 // 2)
        rows = self.rows.new_zeros(shape)
        rows[..., : self.capacity, :] = self.rows
        self.rows = rows

    def keep(self, slots: list[int]) -> None:
        """Forget all but these slots, which are numbered anew."""
        self.rows = self.rows[:, :, slots]
        self.lengths = [self.lengths[slot] for slot in slots]

    def load(self, slot: int, cache: KVCache) -> None:
        """Make `slot` hold the committed rows of a cache of one sequence."""
        self.reserve(cache.length + 1)
        self.rows[:, :, slot, :, : cache.length] = cache.rows[:, :, 0, :, : cache.length]
        self.lengths[slot] = cache.length

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.rows[layer]
        for rows, new in ((keys, k), (values, v)):
            rows.view(-1, rows.shape[-1]).index_copy_(0, self._new, new.reshape(-1, rows.shape[-1]))
        return keys[:, :, : self._end], values[:, :, : self._end]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor | None:
        """Each slot over its own rows, however many others have."""
        if mask is not None or self.library is None:
            return None
        slots, heads, _, dim = q.shape
        query, out, threads = q.float().contiguous(), q.new_empty(q.shape, dtype=torch.float32), torch.get_num_threads()
        scores = query.new_empty(threads * (self.capacity + self.library.lanes()))
        self.library.attend_slots(
            query.data_ptr(), k.data_ptr(), v.data_ptr(), kernel.KINDS[k.dtype], self.seen.data_ptr(),
            out.data_ptr(), slots, heads, k.shape[1], self.capacity, dim, scores.data_ptr(), threads,
        )  # fmt: skip
        return out.to(q.dtype)

    def mask(
        self, rows: int, tree: Tensor | None = None, window: int | None = None, positions: Tensor | None = None
    ) -> Tensor | None:
        """Additive mask [slots, 1, 1, keys]: a slot sees its own rows and the new one; None if `attend` can do."""
        assert rows == 1 and tree is None, "slots decode one token a step"
        if window is None and self.library is not None:
            return None
        keys = torch.arange(self._end, device=self.rows.device)
        seen = keys <= self.index[:, None]
        if window is not None:
            seen &= keys > self.index[:, None] - window
        return additive(seen, self.rows.dtype)[:, None, None]


@dataclass
class _Slot:
    number: int
    job: Job
    tokens: list[int]
    noise: Tensor | None = field(repr=False, default=None)


@torch.inference_mode()
def generate(
    target: Target,
    jobs: Iterable[Job],
    *,
    slots: int = 40,
    stops: Iterable[int] | None = None,
    prefix: Sequence[int] = (),
) -> Iterator[list[int]]:
    """Answers of `jobs`, in their order, the stop token included where it came.

    stops: ids that end an answer, the target's own unless given. prefix: ids that every job starts with, whose K/V are
    computed once. Jobs are drawn as slots fall free, at most `slots` plus the finished ones behind an unfinished one.
    """
    engine = _Engine(target, slots, frozenset(target.stop_ids if stops is None else stops), list(prefix))
    queue = enumerate(jobs)
    done: dict[int, list[int]] = {}
    turn = 0
    while True:
        for place in engine.free():
            for number, job in queue:
                if engine.start(place, number, job, done):
                    break
        while turn in done:
            yield done.pop(turn)
            turn += 1
        if not engine.busy:
            return
        engine.compact()
        engine.step(done)


class _Engine:
    def __init__(self, target: Target, slots: int, stops: frozenset[int], prefix: list[int]):
        self.network, self.device, self.stops = target.network, target.device, stops
        self.prompt = self.network.new_cache(max(len(prefix), 256))
        # only our own decoder asks its cache for masks; another network decodes one sequence at a time
        self.batched = isinstance(self.network, Decoder)
        self.cache = SlotCache(self.network.new_cache(256), slots) if self.batched else None
        self.slots: list[_Slot | None] = [None] * (slots if self.batched else 1)
        self.prefix = prefix
        self.last: tuple[tuple[int, ...], Tensor | None] = ((), None)
        if prefix:
            self.network(torch.tensor([prefix], device=self.device), self.prompt)
            self.prompt.advance(len(prefix))

    @property
    def busy(self) -> bool:
        return any(slot is not None for slot in self.slots)

    def free(self) -> list[int]:
        return [i for i, slot in enumerate(self.slots) if slot is None]

    def compact(self) -> None:
        """Drop idle slots once they are half of all: rows cost time, whether they decode something or not."""
        kept = [i for i, slot in enumerate(self.slots) if slot is not None]
        if self.cache is not None and 2 * len(kept) <= len(self.slots):
            self.cache.keep(kept)
            self.slots = [self.slots[i] for i in kept]

    def start(self, place: int, number: int, job: Job, done: dict[int, list[int]]) -> bool:
        """Prefill a job into a free slot; False if its first token already ended it."""
        if job.max_tokens < 1:
            done[number] = []
            return False
        logits = self._prefill(job.tokens)
        noise = None
        if job.temperature > 0:
            noise = torch.rand(job.max_tokens, generator=torch.Generator().manual_seed(job.seed), dtype=torch.float64)
        slot = _Slot(number, job, [], noise)
        slot.tokens.append(self._pick(logits, [slot])[0])
        if self._ended(slot):
            done[number] = slot.tokens
            return False
        self.slots[place] = slot
        if self.cache is not None:
            self.cache.load(place, self.prompt)
        return True

    def step(self, done: dict[int, list[int]]) -> None:
        """One more token for every slot."""
        last = torch.tensor([[slot.tokens[-1]] if slot else [0] for slot in self.slots], device=self.device)
        if self.cache is None:
            hidden, _ = self.network(last, self.prompt)
            self.prompt.advance(1)
        else:
            self.cache.commit()
            hidden, _ = self.network(last, self.cache, self.cache.index[:, None])
        tokens = self._pick(self.network.head(hidden[:, -1]), self.slots)
        for place, slot in enumerate(self.slots):
            if slot is None:
                continue
            if self.cache is not None:
                self.cache.lengths[place] += 1
            slot.tokens.append(tokens[place])
            if self._ended(slot):
                done[slot.number] = slot.tokens
                self.slots[place] = None
                if self.cache is not None:
                    self.cache.lengths[place] = 0

    def _prefill(self, tokens: Sequence[int]) -> Tensor:
        """Logits [1, vocab] behind a prompt whose K/V are left in `self.prompt`."""
        shared = len(self.prefix)
        assert list(tokens[:shared]) == self.prefix and len(tokens) > shared, "a job does not start with the prefix"
        before, logits = self.last
        if self.batched and logits is not None and tuple(tokens) == before:  # the same again, as in self-synthesis
            return logits
        self.prompt.truncate(shared)
        self.prompt.reserve(len(tokens))
        hidden, _ = self.network(torch.tensor([tokens[shared:]], device=self.device), self.prompt)
        self.prompt.advance(len(tokens) - shared)
        logits = self.network.head(hidden[:, -1])
        self.last = tuple(tokens), logits
        return logits

    def _ended(self, slot: _Slot) -> bool:
        return slot.tokens[-1] in self.stops or len(slot.tokens) >= slot.job.max_tokens

    @staticmethod
    def _pick(logits: Tensor, slots: Sequence[_Slot | None]) -> list[int]:
        """The next token of each slot: argmax, or where its own random number falls in the distribution."""
        tokens = logits.float().argmax(-1)  # argmax of bfloat16 is slow on CPU
        drawn = [i for i, slot in enumerate(slots) if slot is not None and slot.noise is not None]
        if drawn:
            chosen = [slots[i] for i in drawn]
            heat = logits.new_tensor([s.job.temperature for s in chosen], dtype=torch.float32)  # type: ignore[union-attr]
            total = (logits[drawn].float() / heat[:, None]).softmax(-1).cumsum(-1, dtype=torch.float64)
            noise = torch.stack([s.noise[len(s.tokens)] for s in chosen]).to(total.device)  # type: ignore[union-attr,index]
            at = torch.searchsorted(total, (noise[:, None] * total[:, -1:]), right=True)
            tokens[drawn] = at.squeeze(1).clamp(max=logits.shape[-1] - 1)
        return tokens.tolist()
