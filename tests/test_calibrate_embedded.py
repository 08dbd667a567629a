"""Replay against reality on the embedded target with trained drafters: the acceptance length of a threshold."""

import numpy as np
import pytest

from whiflash.drafters.dflash import DFlashDrafter
from whiflash.drafters.eagle3 import Eagle3Drafter
from whiflash.drafters.load import load_dflash, load_eagle3
from whiflash.evaluation.latency import CatchUp, Profile
from whiflash.evaluation.record import Text, record
from whiflash.evaluation.replay import Pair, above, walk
from whiflash.model import WhiFlash
from whiflash.routers.entropy import EntropyRouter

PROMPTS = ("What are three tips for a job interview?", "Write a Python function that reverses a string.")
TOKENS, ROWS, DEPTH = 64, 5, 4
THRESHOLDS = (0.1, 0.6, 1.5)


@pytest.mark.slow
@pytest.mark.parametrize("p_min", [None, 0.1])
def test_the_acceptance_length_of_a_replayed_threshold_is_that_of_a_real_run(smollm, shared, p_min):
    dflash = load_dflash(shared / "checkpoints" / "smollm2-135m-dflash-b8", smollm)
    eagle3 = load_eagle3(shared / "checkpoints" / "smollm2-135m-eagle3", smollm)
    # recorded longer than they are replayed
    recorded = {"df": DFlashDrafter(dflash, p_min=0.0), "e3": Eagle3Drafter(eagle3, DEPTH + 2, p_min=0.0)}
    used = [DFlashDrafter(dflash, block_rows=ROWS, p_min=p_min), Eagle3Drafter(eagle3, DEPTH, p_min=p_min)]
    free = {"df": CatchUp(0.0, 0.0), "e3": CatchUp(0.0, 0.0)}
    same = Profile({}, {}, {"df": {ROWS - 1: {"verify": 1.0}}, "e3": {DEPTH: {"verify": 1.0}}}, free)
    pair = Pair.of(("df", "e3"), {"df": (ROWS - 1,), "e3": (DEPTH,)}, same, (p_min,))
    real = np.zeros((3, len(THRESHOLDS)))
    replayed = np.zeros_like(real)
    for prompt in PROMPTS:
        for place, threshold in enumerate(THRESHOLDS):
            out = WhiFlash(smollm, used, EntropyRouter(threshold)).generate(prompt, max_new_tokens=TOKENS)
            second = sum(r.slot == "e3" for r in out.rounds)
            real[:, place] += len(out.tokens) - 1, len(out.rounds), second
        start = len(out.prompt_tokens)
        answer = [*out.prompt_tokens, *out.tokens]
        text = Text(prompt, "chat", start, *record(smollm, recorded, {"entropy": EntropyRouter()}, answer, start))
        walked = walk(text, pair, above(text, "entropy", THRESHOLDS))
        replayed += walked.tokens[0], walked.rounds[0], walked.second[0]
    assert (real[0] == replayed[0]).all()
    assert replayed[0] / replayed[1] == pytest.approx(real[0] / real[1], rel=0.03)
    assert replayed[2] / replayed[1] == pytest.approx(real[2] / real[1], abs=0.05)
    # both slots were at work, and the thresholds differ in what they do
    assert (real[2] > 0).all() and (real[2] < real[1]).all() and len(set(real[2])) == 3
