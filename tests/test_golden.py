"""Acceptance on two published prompts, against figures that three independent programs agree on.

Wrong taps, positions, masks or feed-back leave the text right and only lower acceptance; this is where they show. The
two checkpoints lie in a directory `shared` beside the repository, or where WHIFLASH_SHARED says.
"""

import os
from pathlib import Path

import pytest

from whiflash.decoding.session import Session
from whiflash.drafters.dflash import DFlashDrafter
from whiflash.drafters.eagle3 import Eagle3Drafter
from whiflash.drafters.load import load_dflash, load_eagle3
from whiflash.target.load import load_target

SHARED = Path(os.environ.get("WHIFLASH_SHARED") or Path(__file__).parents[2] / "shared") / "checkpoints"
FIBONACCI = "Write a Python function that returns the n-th Fibonacci number, with a docstring."
INTERVIEW = "What are three tips for a job interview?"
TOKENS = 95

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SHARED.is_dir(), reason=f"the golden checkpoints are not at {SHARED}"),
]


@pytest.fixture(scope="module")
def target():
    return load_target(device="cpu")


@pytest.fixture(scope="module")
def drafters(target):
    return {
        "dflash": DFlashDrafter(load_dflash(SHARED / "smollm2-135m-dflash-b8", target)),
        "eagle3": Eagle3Drafter(load_eagle3(SHARED / "smollm2-135m-eagle3", target), depth=3),
    }


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize(
    ("name", "prompt", "acceptance"),
    [
        ("dflash", FIBONACCI, 1.532),
        ("dflash", INTERVIEW, 1.284),
        ("eagle3", FIBONACCI, 1.508),
        ("eagle3", INTERVIEW, 1.548),
    ],
)
def test_acceptance(name, prompt, acceptance, lazy, target, drafters):
    """Tokens of all rounds over their count; the prompt pass's own token belongs to no round."""
    session = Session(target, [drafters[name]], lazy=lazy, kv_only=lazy)
    session.prefill(target.encode(prompt))
    rounds = []
    while sum(rounds) < TOKENS:
        rounds.append(len(session.round().tokens))
    one_round = acceptance / len(rounds)
    assert sum(rounds) / len(rounds) == pytest.approx(acceptance, abs=one_round)
