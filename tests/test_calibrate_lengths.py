"""A shorter draft is the beginning of a longer one, so one recorded draft tells what every shorter one gets."""

import pytest
import torch

from toy import PROMPT, Toy, logged, rounds
from whiflash.decoding.session import Session
from whiflash.drafters.ddtree import DDTreeDrafter
from whiflash.drafters.dflash import DFlashDrafter
from whiflash.drafters.drafter import DraftState
from whiflash.drafters.eagle3 import Eagle3Drafter
from whiflash.errors import WhiFlashError
from whiflash.routers.fixed import FixedRouter

# by the nodes a draft has besides the root
BUILD = {
    "df": (3, lambda toy, n: DFlashDrafter(toy.dflash, block_rows=n + 1)),
    "ddt": (12, lambda toy, n: DDTreeDrafter(toy.dflash, n)),
    "e3": (5, lambda toy, n: Eagle3Drafter(toy.eagle3, n)),
}


@pytest.mark.parametrize("name", BUILD)
@torch.inference_mode()
def test_a_draft_of_n_nodes_is_the_beginning_of_a_longer_one(toy: Toy, name):
    most, build = BUILD[name]

    def drafted(length: int) -> list[tuple[list[int], list[int]]]:
        drafter, log = build(toy, length), logged(toy.target, toy.text, tuple(range(3)))
        state, found = DraftState(drafter.model.new_cache(64)), []
        for log.length in range(len(PROMPT), 60):
            drafter.catch_up(state, log)
            draft = drafter.draft(state, log, None)
            found.append((draft.tokens.tolist(), draft.parents.tolist()))
        return found

    longest = drafted(most)
    for length in range(1, most):
        assert drafted(length) == [(t[: length + 1], p[: length + 1]) for t, p in longest]


def test_rows_that_are_not_verified_leave_the_answer_alone(toy: Toy):
    session = Session(toy.target, [DFlashDrafter(toy.dflash, block_rows=2)], FixedRouter())
    tokens, done = rounds(session, PROMPT, 40)
    assert tokens[:40] == toy.text[len(PROMPT) :][:40]
    assert {r.drafted for r in done} == {1} and max(r.accepted for r in done) == 1


@pytest.mark.parametrize("rows", [1, 5])
def test_rows_that_a_block_does_not_have_are_refused(toy: Toy, rows):
    with pytest.raises(WhiFlashError, match=f"of a block of 4 rows 2 to 4 can be verified, not {rows}"):
        DFlashDrafter(toy.dflash, block_rows=rows)
