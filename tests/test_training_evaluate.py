"""The acceptance that training reports is what decoding, step by step with caches, arrives at."""

import pytest
import torch

import tiny_training as setup
from whiflash.training import dflash, eagle3
from whiflash.training.dflash import DFlashTrainee, new_drafter
from whiflash.training.eagle3 import Eagle3Trainee, new_head
from whiflash.training.evaluate import accepted_lengths, rounds
from whiflash.training.loop import train
from whiflash.training.teacher import draft_vocabulary


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("evaluate")
    return setup.online(setup.target(directory), directory)


def test_rounds_walk_the_answer_to_its_end():
    assert rounds([0, 2, 0, 0, 1, 0]) == [1, 3, 2]
    assert rounds([5, 0, 0]) == [3]
    assert accepted_lengths(torch.tensor([[True, False, True], [True, True, True]])) == [1, 3]


@torch.inference_mode(False)
def fitted(make, source, out):
    """A drafter that has learnt these few texts by heart, so that acceptance lengths vary."""
    module = make()
    train(module, source, setup.loop(steps=150, evaluate_every=150, save_every=150, lr=1e-2), out)
    return module.module.eval().requires_grad_(False)


@torch.inference_mode()
def test_eagle3_chain(source, tmp_path):
    recipe, target = setup.eagle3_recipe(), source.target
    ids = draft_vocabulary(source.texts, target.vocab_size, 200)
    head = fitted(
        lambda: Eagle3Trainee(new_head(target, setup.TAPS, ids, recipe), target, recipe, [source[0]]), source, tmp_path
    )
    committed_lengths = []
    for text in (source[i] for i in range(len(source))):
        tokens, root, cache, walked = text.tokens, text.start, head.new_cache(256), []
        while root < len(tokens) - 1:
            # catch up with the true features, then feed the chain its own outputs
            rows = torch.arange(cache.length, root)
            x, read = head.fuse(text.features[None, rows]), tokens[None, rows + 1]
            drafted = []
            kept = root
            for depth in range(4):
                y = head(x, read, rows + 0, cache)
                cache.advance(len(rows))
                best = ids[head.logits(y[:, -1:]).argmax(-1)]
                drafted.append(int(best))
                x, read, rows = head.feedback(y[:, -1:]), best, torch.tensor([root + depth])
            cache.truncate(kept)
            right = 0
            while right < 4 and root + 1 + right < len(tokens) and drafted[right] == tokens[root + 1 + right]:
                right += 1
            walked.append(min(right + 1, len(tokens) - 1 - root))
            root += walked[-1]
        assert walked == rounds(eagle3.accepted(head, text, 4))
        committed_lengths += walked
    assert len(set(committed_lengths)) > 2, "the drafter must be good enough for this test to mean something"


@torch.inference_mode()
def test_dflash_block(source, tmp_path):
    recipe, target = setup.dflash_recipe(), source.target
    ids = draft_vocabulary(source.texts, target.vocab_size, 200)
    drafter = fitted(
        lambda: DFlashTrainee(new_drafter(target, setup.TAPS, recipe, source), target, recipe, ids, [source[0]]),
        source,
        tmp_path,
    )
    committed_lengths = []
    for text in (source[i] for i in range(len(source))):
        tokens, root, cache, walked = text.tokens, text.start, drafter.new_cache(256), []
        while root < len(tokens) - 1:
            rows = torch.arange(cache.length, root)
            drafter.write_context(text.features[None, rows], rows, cache)
            cache.advance(len(rows))
            block = torch.full((1, 4), drafter.config.mask_token_id)
            block[0, 0] = tokens[root]
            drafted = drafter.logits(drafter(block, root + torch.arange(4), cache))[0, 1:].argmax(-1).tolist()
            right = 0
            while right < 3 and root + 1 + right < len(tokens) and drafted[right] == tokens[root + 1 + right]:
                right += 1
            walked.append(min(right + 1, len(tokens) - 1 - root))
            root += walked[-1]
        assert walked == rounds(dflash.accepted(drafter, text, 4))
        committed_lengths += walked
    assert len(set(committed_lengths)) > 2, "the drafter must be good enough for this test to mean something"
