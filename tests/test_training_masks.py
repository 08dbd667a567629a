"""No drafter sees the future while it trains: the later changes nothing of the earlier."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import tiny_training as setup
from whiflash.nn.cache import additive
from whiflash.nn.layers import _explicit_attention
from whiflash.training import dflash, eagle3
from whiflash.training.dflash import block_mask, blocks, new_drafter
from whiflash.training.eagle3 import new_head, unroll
from whiflash.training.teacher import draft_vocabulary


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return setup.target(tmp_path_factory.mktemp("masks"))


@pytest.fixture(scope="module")
def head(target):
    return new_head(target, setup.TAPS, torch.arange(200), setup.eagle3_recipe())


@pytest.fixture(scope="module")
def drafter(target):
    return new_drafter(target, setup.TAPS, setup.dflash_recipe())


def test_block_mask_is_context_before_the_anchor_and_the_own_block():
    seen = block_mask(torch.tensor([2, 3]), context=4, block=2).int().tolist()
    assert seen == [
        [1, 1, 0, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 1, 1],
        [1, 1, 1, 0, 0, 0, 1, 1],
    ]


@torch.inference_mode()
def test_dflash_block_knows_nothing_at_or_behind_its_anchor_but_the_anchor(drafter):
    text, anchors = setup.sample(), torch.arange(10, 28)
    plain = blocks(drafter, text.features, text.tokens, anchors, 4)
    for place in (10, 15, 27):
        features, tokens = text.features.clone(), text.tokens.clone()
        features[place:] += 1
        changed = blocks(drafter, features, tokens, anchors, 4)
        assert torch.equal(changed[anchors <= place], plain[anchors <= place])
        assert not torch.isclose(changed[anchors > place], plain[anchors > place]).all(-1).any()
        tokens[place] = (tokens[place] + 1) % 200
        changed = blocks(drafter, text.features, tokens, anchors, 4)
        same = (changed == plain).flatten(1).all(1)
        assert torch.equal(same, anchors != place)


@torch.inference_mode()
def test_eagle3_rows_know_features_up_to_theirs_and_tokens_up_to_the_drafted_one(head):
    text, steps = setup.sample(), 4
    plain = unroll(head, text.features, text.tokens, text.start, steps)
    for place in (9, 14, 26):
        features, tokens = text.features.clone(), text.tokens.clone()
        features[place] += 1
        tokens[place] = (tokens[place] + 1) % 200
        by_feature = unroll(head, features, text.tokens, text.start, steps)
        by_token = unroll(head, text.features, tokens, text.start, steps)
        for step, y in enumerate(plain):
            row = torch.arange(len(y)) + text.start - 1
            assert torch.equal((by_feature[step] != y).any(1), row >= place)
            # row p of step i has read the tokens up to p+1+i
            assert torch.equal((by_token[step] != y).any(1), row + 1 + step >= place)


@torch.inference_mode()
def test_eagle3_rollouts_of_different_rows_do_not_see_each_other(head):
    text = setup.sample()
    plain = unroll(head, text.features, text.tokens, text.start, 4)
    # dropping the last tokens drops rows, and may change nothing of the rest
    cut = unroll(head, text.features[:-5], text.tokens[:-5], text.start, 4)
    for short, y in zip(cut, plain, strict=True):
        torch.testing.assert_close(short, y[: len(short)], rtol=1e-5, atol=1e-5)


def test_losses_have_gradients_everywhere(target, head, drafter):
    ids = draft_vocabulary([], target.vocab_size, 200)
    text, random = setup.sample(vocabulary=200), torch.Generator().manual_seed(0)
    for trainee in (
        eagle3.Eagle3Trainee(head, target, setup.eagle3_recipe()),
        dflash.DFlashTrainee(drafter, target, setup.dflash_recipe(), ids),
        dflash.DFlashTrainee(drafter, target, replace(setup.dflash_recipe(), weights="dpace", labels="hard"), ids),
    ):
        trainee.module.zero_grad()
        trainee.loss(text, random).backward()
        for name, parameter in trainee.module.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_attention_in_training_is_attention_with_its_gradients():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, rows, 16) for heads, rows in ((6, 5), (2, 9), (2, 9)))
    mask = additive(torch.rand(5, 9) < 0.7, q.dtype)
    mask[:, 0] = 0
    out = []
    for grouped in (
        _explicit_attention,
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True),
    ):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        y = grouped(*leaves, mask)
        y.square().sum().backward()
        out.append((y.detach(), *(t.grad for t in leaves)))
    for mine, theirs in zip(*out, strict=True):
        torch.testing.assert_close(mine, theirs)
