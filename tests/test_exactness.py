"""Sampled output has the target's own distribution, in every mode: by enumeration, and by χ² on samples."""

import itertools

import pytest
import torch

import branching
from toy import MODES, P_MIN, PROMPT, VOCAB, Toy, decode, sampler, target_logits
from whiflash.decoding import accept as rejection
from whiflash.decoding.sampling import Sampler, Sampling
from whiflash.decoding.session import Session
from whiflash.drafters.ddtree import DDTreeDrafter
from whiflash.drafters.dflash import DFlashDrafter
from whiflash.drafters.eagle3 import Eagle3Drafter
from whiflash.routers.fixed import FixedRouter

SAMPLINGS = [
    Sampling(1.0),
    Sampling(0.3, top_p=0.9),
    Sampling(1.0, top_k=4),
    Sampling(1.5, min_p=0.15),
]


def sequences(toy: Toy, sampling: Sampling, length: int) -> dict[tuple[int, ...], float]:
    """The target's own probability of every continuation of the prompt."""
    judge = Sampler(sampling, torch.device("cpu"))
    every = torch.tensor(list(itertools.product(range(VOCAB), repeat=length)))
    prompt = torch.tensor(PROMPT).expand(len(every), -1)
    probs = judge.probabilities(target_logits(toy.target, torch.cat([prompt, every], 1))[:, len(PROMPT) - 1 : -1])
    weights = probs.gather(2, every[..., None])[..., 0].double().prod(1)
    return {tuple(s): w for s, w in zip(every.tolist(), weights.tolist(), strict=True) if w > 0}


def small(toy: Toy, mode: str) -> Session:
    """A mode whose drafts are so small that all their courses can be walked."""
    names, _, router = mode.partition("/")
    drafters = {
        "df": lambda p_min: DFlashDrafter(toy.dflash, block_size=3, p_min=p_min),
        "ddt": lambda p_min: DDTreeDrafter(toy.dflash, tree_budget=4, block_size=3, p_min=p_min),
        "e3": lambda p_min: Eagle3Drafter(toy.eagle3, depth=2, p_min=p_min),
        "e3t": lambda p_min: Eagle3Drafter(toy.eagle3, depth=2, top_k=2, total_tokens=5, p_min=p_min),
    }

    def build(name: str):
        return drafters[name.removesuffix("p")](P_MIN if name.endswith("p") else None)

    built = [] if names == "none" else [build(name) for name in names.split("-")]
    return Session(toy.target, built, toy.router(router) if router else FixedRouter() if built else None, capacity=32)


def check_enumeration(toy: Toy, mode: str, sampling: Sampling, length: int) -> None:
    session = small(toy, mode)
    got = branching.distribution(lambda s: tuple(decode(session, PROMPT, length, s)[:length]), sampling)
    assert got == pytest.approx(sequences(toy, sampling, length), abs=1e-5)


@pytest.mark.parametrize("mode", [m for m in MODES if "/" not in m or m.endswith("/entropy")])
def test_every_course_of_two_tokens(toy, mode):
    check_enumeration(toy, mode, Sampling(0.8, top_k=2), 2)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Sampling(1.0, top_k=2), Sampling(0.5, top_p=0.7)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_every_course_of_three_tokens(toy, mode, sampling):
    check_enumeration(toy, mode, sampling, 3)


def survival(statistic: float, freedom: int) -> float:
    """Probability of a χ² at least this large; with one class there is nothing to miss."""
    if freedom == 0:
        return 1.0
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), torch.tensor(statistic / 2).double()))


def p_value(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """χ² of counts, classes of fewer than five expected pooled."""
    few = expected < 5
    observed, expected = (
        torch.cat([t[~few], t[few].sum()[None]]) if few.any() else t for t in (observed.double(), expected.double())
    )
    kept = expected > 0
    statistic = float(((observed - expected)[kept] ** 2 / expected[kept]).sum())
    return survival(statistic, int(kept.sum()) - 1)


def settings(sampling: Sampling, seed: int) -> Sampler:
    return sampler(
        seed, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p
    )


def fit(toy: Toy, answer: list[int], sampling: Sampling, seed: int) -> float:
    """p-value of an answer's tokens against the target's distribution at each: one sequence is a sample a token.

    A token's place u = P(likelier tokens) + v·P(token), v uniform, is uniform on 0..1 if it was drawn from P.
    """
    tokens, count = torch.tensor(answer), len(answer)
    logits = target_logits(toy.target, torch.cat([torch.tensor(PROMPT), tokens])[None])[0, len(PROMPT) - 1 : -1]
    probs = settings(sampling, seed).probabilities(logits).double()
    own = probs.gather(1, tokens[:, None])
    if not bool((own > 0).all()):
        return 0.0  # a token that these settings rule out
    own_random = torch.Generator().manual_seed(1_000_003 + seed)  # not the numbers the answer was drawn with
    before = torch.where(probs > own, probs, 0).sum(1)
    place = before + own[:, 0] * torch.rand(count, generator=own_random, dtype=torch.float64)
    return p_value(place.clamp_max(1 - 1e-9).mul(12).long().bincount(minlength=12), torch.full((12,), count / 12))


def long_run(toy: Toy, mode: str, sampling: Sampling, count: int = 200, seed: int = 0) -> float:
    return fit(toy, decode(toy.mode(mode), PROMPT, count, settings(sampling, seed))[:count], sampling, seed)


@pytest.mark.parametrize(("number", "mode"), list(enumerate(MODES)))
def test_long_runs_follow_the_target(toy, number, mode):
    for sampling in (SAMPLINGS[number % 4], SAMPLINGS[(number + 1) % 4]):
        assert long_run(toy, mode, sampling) > 1e-4, sampling


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_longer_runs_follow_the_target(toy, mode, sampling):
    assert min(long_run(toy, mode, sampling, 1500, seed) for seed in (1, 2)) > 1e-4


def starts(toy: Toy, mode: str, sampling: Sampling, count: int) -> float:
    """p-value of the first two tokens of `count` answers."""
    session, wanted = toy.mode(mode), sequences(toy, sampling, 2)
    observed = dict.fromkeys(wanted, 0)
    for seed in range(count):
        start = tuple(decode(session, PROMPT, 2, settings(sampling, seed))[:2])
        if start not in observed:
            return 0.0
        observed[start] += 1
    return p_value(torch.tensor(list(observed.values())), count * torch.tensor(list(wanted.values())))


@pytest.mark.parametrize("mode", ["e3", "ddt-e3/entropy"])
def test_the_first_two_tokens_follow_the_target(toy, mode):
    assert starts(toy, mode, Sampling(1.0), 200) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_many_first_two_tokens_follow_the_target(toy, mode, sampling):
    assert starts(toy, mode, sampling, 1500) > 1e-4


def everything_kept(draft, p, q, sampler):
    nodes = len(draft)
    return rejection.Accepted(torch.ones(nodes, dtype=torch.bool), torch.tensor(nodes - 1), sampler.draw(p[-1:])[0])


def test_the_samples_would_notice(toy, monkeypatch):
    """Power: a verification without the sampling parameters, and one that keeps every draft, fail the tests above."""
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "probabilities", lambda self, logits: logits.softmax(-1))
        answer = decode(toy.mode("e3"), PROMPT, 200, sampler(0))
    assert fit(toy, answer, Sampling(0.3), 0) < 1e-4
    monkeypatch.setattr(rejection, "_reject", everything_kept)
    assert long_run(toy, "df", Sampling(1.0)) < 1e-4
    assert starts(toy, "df", Sampling(1.0), 200) < 1e-4
