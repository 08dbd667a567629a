"""Every course a sampled computation can take, with its probability: exact distributions instead of samples."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from whiflash.decoding import accept as rejection
from whiflash.decoding.sampling import Sampler, Sampling

Result = TypeVar("Result", bound=Hashable)


class Branching(Sampler):
    """A sampler that follows `tape` and then the first possibility everywhere, noting the others in `untried`."""

    def __init__(self, sampling: Sampling, tape: Sequence[int] = ()):
        super().__init__(sampling, torch.device("cpu"))
        self.tape, self.taken, self.untried = tape, [], []
        self.weight = 1.0
        self.ratios = torch.zeros(0)

    def decide(self, weights: Sequence[float]) -> int:
        possible = [i for i, w in enumerate(weights) if w > 0]
        if len(self.taken) < len(self.tape):
            choice = self.tape[len(self.taken)]
        else:
            choice = possible[0]
            self.untried += [[*self.taken, other] for other in possible[1:]]
        self.taken.append(choice)
        self.weight *= weights[choice]
        return choice

    def draw(self, probs: Tensor) -> Tensor:
        rows = probs.double()
        return torch.tensor([self.decide(row) for row in (rows / rows.sum(-1, keepdim=True)).tolist()])

    def uniform(self, count: int, device: torch.device) -> Tensor:
        """One number a drafted token on either side of p/q, as long as it matters."""
        numbers, refused = [], False
        for ratio in self.ratios.clamp_max(1).tolist():
            refused = refused or self.decide([ratio, 1 - ratio]) == 1
            numbers.append(0.5 * (ratio + refused))
        return torch.tensor(numbers)


def runs(run: Callable[[Branching], Result], sampling: Sampling) -> Iterator[tuple[Result, float]]:
    """Every result of `run` with its probability; results repeat."""
    reject = rejection._reject

    def watched(draft, p, q, sampler):
        drafted = draft.tokens[1:, None]
        sampler.ratios = (p[:-1].double().gather(1, drafted) / q.double().gather(1, drafted))[:, 0]
        return reject(draft, p, q, sampler)

    rejection._reject = watched
    try:
        tapes: list[list[int]] = [[]]
        while tapes:
            sampler = Branching(sampling, tapes.pop())
            yield run(sampler), sampler.weight
            tapes += sampler.untried
    finally:
        rejection._reject = reject


def distribution(run: Callable[[Branching], Result], sampling: Sampling) -> dict[Result, float]:
    total: dict[Result, float] = defaultdict(float)
    for result, weight in runs(run, sampling):
        total[result] += weight
    return dict(total)
