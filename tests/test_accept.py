"""Acceptance, by enumeration: whatever was drafted, the emitted tokens are distributed as the target's own."""

import itertools

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import branching
from whiflash.decoding import accept as rejection
from whiflash.decoding.accept import accept, walk
from whiflash.decoding.sampling import Sampler, Sampling
from whiflash.drafters.draft import chain, tree

VOCAB = 4
SAMPLINGS = [
    Sampling(1.0),
    Sampling(0.3, top_p=0.9),
    Sampling(1.0, top_k=2),
    Sampling(2.0, min_p=0.3),
    Sampling(0.7, top_k=3, top_p=0.8, min_p=0.1),
]
# parents of the nodes behind the root
TREES = {
    "chain": [-1, 0, 1, 2],
    "siblings": [-1, 0, 0, 0],
    "comb": [-1, 0, 0, 1, 1, 2],
    "scattered": [-1, 0, 0, 2, 0, 3, 3],
    "whole": [-1, 0, 0, 0, 0, 3],
}


class Table:
    """The target as a table: logits after every prefix, drawn at random."""

    def __init__(self, seed: int, spread: float = 1.5):
        self.random, self.rows, self.spread = torch.Generator().manual_seed(seed), {}, spread

    def __call__(self, prefix: tuple[int, ...]) -> torch.Tensor:
        if prefix not in self.rows:
            self.rows[prefix] = torch.randn(VOCAB, generator=self.random) * self.spread
        return self.rows[prefix]


def emitted(draft, accepted) -> tuple[int, ...]:
    nodes = accepted.path.nonzero().flatten().tolist()[1:]
    return (*draft.tokens[nodes].tolist(), int(accepted.bonus))


def check(run, table: Table, sampling: Sampling, length: int) -> None:
    """The outcomes of `run`, cut or completed by the target itself to `length` tokens, are the target's sequences."""
    judge = Sampler(sampling, torch.device("cpu"))

    def probability(prefix: tuple[int, ...], token: int) -> float:
        return float(judge.probabilities(table(prefix))[token])

    wanted = dict.fromkeys(itertools.product(range(VOCAB), repeat=length), 0.0)
    got = dict(wanted)
    for sequence in wanted:
        wanted[sequence] = 1.0
        for i, token in enumerate(sequence):
            wanted[sequence] *= probability(sequence[:i], token)
    outcomes = branching.distribution(run, sampling)
    assert sum(outcomes.values()) == pytest.approx(1, abs=1e-5)
    for sequence in got:
        for outcome, weight in outcomes.items():
            known = min(len(outcome), length)
            if outcome[:known] == sequence[:known]:
                for i in range(known, length):
                    weight *= probability(sequence[:i], sequence[i])
                got[sequence] += weight
    assert got == pytest.approx(wanted, abs=1e-5)


def tree_run(parents: list[int], tokens: list[int], table: Table):
    draft = tree(torch.tensor(tokens), torch.tensor(parents), len(parents))
    prefixes = [()]
    for node in range(1, len(parents)):
        prefixes.append((*prefixes[parents[node]], tokens[node]))
    logits = torch.stack([table(prefix) for prefix in prefixes])
    return lambda sampler: emitted(draft, accept(draft, logits, sampler))


def chain_run(table: Table, guess: Table, length: int = 2):
    """Drafts drawn from `guess`, whose distributions acceptance is told."""

    def run(sampler):
        tokens, drawn_from = [], []
        for _ in range(length):
            choice, probs = sampler.choose(guess(tuple(tokens))[None])
            tokens.append(int(choice))
            drawn_from.append(probs)
        draft = chain(torch.tensor([0, *tokens]), torch.cat(drawn_from))
        logits = torch.stack([table(tuple(tokens[:i])) for i in range(length + 1)])
        return emitted(draft, accept(draft, logits, sampler))

    return run


def siblings(parents: list[int], seed: int) -> list[int]:
    """Random tokens, different among siblings."""
    random, tokens = torch.Generator().manual_seed(seed), [0]
    order = {p: iter(torch.randperm(VOCAB, generator=random).tolist()) for p in sorted(set(parents))}
    return tokens + [next(order[p]) for p in parents[1:]]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("shape", TREES)
def test_a_tree_emits_what_the_target_would(shape, sampling):
    if sampling.top_k == 0 and len(TREES[shape]) > 5:
        sampling = Sampling(
            sampling.temperature, 2, sampling.top_p, sampling.min_p
        )  # 2 draws a node are courses enough
    table = Table(seed=len(shape))
    check(tree_run(TREES[shape], siblings(TREES[shape], 3), table), table, sampling, 3)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_a_sampled_chain_emits_what_the_target_would(seed, sampling):
    table = Table(seed)
    check(chain_run(table, Table(seed + 100)), table, sampling, 3)


@pytest.mark.parametrize("noise", [0.0, 1e-7, 1e-4])
def test_a_chain_drafted_from_almost_the_same_distribution(noise):
    table, guess = Table(5), Table(6)
    for prefix in [(), *((t,) for t in range(VOCAB))]:
        guess.rows[prefix] = table(prefix) + noise * torch.randn(VOCAB, generator=torch.Generator().manual_seed(9))
    check(chain_run(table, guess), table, Sampling(1.0), 3)


def test_a_draft_from_the_very_distribution_is_always_kept():
    table = Table(5)
    run = chain_run(table, table)
    sampler = Sampler(Sampling(1.0, seed=0), torch.device("cpu"))
    assert all(len(run(sampler)) == 3 for _ in range(300))


def test_near_ties_keep_their_odds():
    """Two tokens a rounding apart: the draft prefers one, the target the other; both come up half the time."""
    table, guess = Table(0), Table(0)
    table.rows[()] = torch.tensor([0.0, 1e-6, -9.0, -9.0])
    guess.rows[()] = torch.tensor([1e-6, 0.0, -9.0, -9.0])
    check(chain_run(table, guess, 1), table, Sampling(1.0), 1)


def half_precision(seed: int) -> Table:
    table = Table(seed)
    for length in range(3):
        for prefix in itertools.product(range(VOCAB), repeat=length):
            table.rows[prefix] = table(prefix).bfloat16()
    return table


def test_half_precision_drafts_are_judged_by_the_distribution_they_came_from(monkeypatch):
    """Drawn and judged in float32 alike; a draw from probabilities rounded to bfloat16 would shift the odds."""
    table, guess = half_precision(7), half_precision(8)
    check(chain_run(table, guess), table, Sampling(0.9), 3)

    def rounded(sampler, logits):
        probs = sampler.probabilities(logits)
        return sampler.draw(probs.bfloat16()), probs

    monkeypatch.setattr(Sampler, "choose", rounded)
    with pytest.raises(AssertionError):
        check(chain_run(table, guess), table, Sampling(0.9), 3)


def residual_without_q(draft, p, q, sampler):
    kept = sampler.uniform(len(draft) - 1, p.device) < (p[:-1] / q).gather(1, draft.tokens[1:, None])[:, 0]
    path = torch.cat([kept.new_ones(1), kept]).long().cumprod(0).bool()
    node = path.sum() - 1
    return rejection.Accepted(path, node, sampler.draw(p[node][None])[0])


def everything_kept(draft, p, q, sampler):
    return rejection.Accepted(torch.ones(len(draft), dtype=torch.bool), p.shape[0] - 1, sampler.draw(p[-1:])[0])


@pytest.mark.parametrize("broken", [residual_without_q, everything_kept])
def test_the_enumeration_notices_a_broken_acceptance(monkeypatch, broken):
    monkeypatch.setattr(rejection, "_reject", broken)
    table = Table(1)
    with pytest.raises(AssertionError):
        check(chain_run(table, Table(101)), table, Sampling(1.0), 3)


def test_the_enumeration_notices_a_tree_walk_that_prefers_drafts(monkeypatch):
    """Emitting the first child whenever it is likely enough is a common shortcut, and wrong."""
    monkeypatch.setattr(rejection, "walk", lambda draft, drawn: walk(draft, draft.tokens[1].expand_as(drawn)))
    table = Table(1)
    with pytest.raises(AssertionError):
        check(tree_run(TREES["siblings"], siblings(TREES["siblings"], 3), table), table, Sampling(1.0), 3)


@pytest.mark.parametrize(
    ("drawn", "path", "bonus"),
    [
        ([5, 0, 8, 0, 0, 0, 9], [0, 2, 6], 9),  # scattered: nodes 0, 2, 6
        ([5, 0, 7, 0, 0, 4, 0], [0, 2, 5], 4),
        ([4, 6, 0, 3, 0, 0, 0], [0, 1, 3], 3),
        ([9, 7, 8, 8, 8, 8, 8], [0], 9),  # nothing agrees
        ([4, 1, 8, 6, 6, 6, 6], [0, 1], 1),  # a child of another parent agrees, which does not count
    ],
)
def test_the_walk_takes_the_path_that_agrees(drawn, path, bonus):
    draft = tree(torch.tensor([1, 4, 5, 6, 7, 7, 8]), torch.tensor([-1, 0, 0, 1, 1, 2, 2]), 2)
    accepted = walk(draft, torch.tensor(drawn))
    assert accepted.path.nonzero().flatten().tolist() == path
    assert (int(accepted.node), int(accepted.bonus)) == (path[-1], bonus)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_filters_are_those_of_transformers(sampling):
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)) * 3
    wanted = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    for on, warper in (
        (sampling.top_k, lambda: TopKLogitsWarper(sampling.top_k)),
        (sampling.top_p < 1, lambda: TopPLogitsWarper(sampling.top_p)),
        (sampling.min_p, lambda: MinPLogitsWarper(sampling.min_p)),
    ):
        wanted = warper()(None, wanted) if on else wanted
    got = Sampler(sampling, torch.device("cpu")).probabilities(logits)
    torch.testing.assert_close(got, wanted.softmax(-1), atol=1e-6, rtol=1e-5)
    assert torch.equal(got > 0, wanted.softmax(-1) > 0)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-45, 1e-300])
def test_the_smallest_temperatures_are_greedy(temperature):
    logits = torch.tensor([[1.0, 3.0, 2.99], [-1e4, -2e4, -3e4]])
    sampler = Sampler(Sampling(temperature, seed=0), torch.device("cpu"))
    probs = sampler.probabilities(logits)
    assert probs.tolist() == [[0, 1, 0], [1, 0, 0]]
    assert sampler.draw(probs).tolist() == [1, 0]


def test_draws_follow_the_distribution_and_never_take_the_impossible():
    probs = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.15, 0.05, 0.0])
    count = 20_000
    drawn = Sampler(Sampling(1.0, seed=3), torch.device("cpu")).draw((3 * probs).expand(count, -1))
    observed = drawn.bincount(minlength=7)
    possible = probs > 0
    assert not observed[~possible].any()
    expected = count * probs[possible]
    statistic = ((observed[possible] - expected) ** 2 / expected).sum()
    assert torch.special.gammaincc(torch.tensor(1.5), statistic / 2) > 1e-4
