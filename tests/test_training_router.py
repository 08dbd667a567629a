"""Routers: acceptance at every position is exact, the network learns a rule, and a wrong use is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from whiflash.drafters.ddtree import best_prefixes
from whiflash.errors import WhiFlashError
from whiflash.routers.mlp import RouterMLP
from whiflash.routers.neural import NeuralRouter, Setting
from whiflash.routers.router import Signal
from whiflash.training.acceptance import Measured, to_draft, tree_lengths
from whiflash.training.router import (
    RouterRecipe,
    best_threshold,
    evaluate,
    export,
    fit,
    joined,
    predict,
    split_prompts,
    train_router,
    walk,
)

WIDTH = 12
RECIPE = RouterRecipe(pairs=("df-e3",), inner_size=32, dropout=0.0, lr=5e-3, batch=64, epochs=80, patience=15)


class FakeTarget:
    name, width, device, path = "org/model", WIDTH, torch.device("cpu"), Path("none")

    def fingerprint(self):
        return "0123456789abcdef"


def measured(texts=60, positions=40, seed=0, noise=0.0):
    """Texts whose first drafter gains where the signal points one way; far from standardised, as hidden states are."""
    rng = torch.Generator().manual_seed(seed)
    rule = torch.randn(WIDTH, generator=torch.Generator().manual_seed(7))
    result = []
    for number in range(texts):
        x = torch.randn(positions, WIDTH, generator=rng)
        wish = (x @ rule).clamp(-3, 3) + noise * torch.randn(positions, generator=rng)
        lengths = {"df": (4 - wish).round().clamp(1, 8).long(), "e3": (4 + wish).round().clamp(1, 8).long()}
        left = torch.arange(positions, 0, -1)
        lengths = {name: torch.minimum(length, left) for name, length in lengths.items()}
        result.append(Measured("chat", f"{number // 2:03d}", x * 20 + 5, lengths))
    return result


def naive_depth(log_probs, wanted, budget):
    """Walk the tree that decoding builds."""
    tokens, parents, _ = best_prefixes(log_probs, budget)
    node, depth = -1, 0
    while depth < len(wanted):
        child = [i for i in range(len(tokens)) if parents[i] == node and tokens[i] == wanted[depth]]
        if not child:
            break
        node, depth = child[0], depth + 1
    return depth


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("vocab", "depths", "budget"), [(5, 3, 4), (20, 7, 16), (6, 4, 40), (3, 5, 1), (4, 1, 3)])
def test_tree_lengths_are_those_of_the_tree(vocab, depths, budget, ties):
    rng = torch.Generator().manual_seed(vocab * depths + budget)
    logits = 2 * torch.randn(60, depths, vocab, generator=rng)
    logits = logits.round() if ties else logits
    log_probs = logits.log_softmax(-1)
    # likely continuations, so that deep ones occur
    wanted = torch.distributions.Categorical(logits=2 * logits).sample() if not ties else logits.argmax(-1)
    wanted[::7, depths // 2 :] = -1
    lengths = tree_lengths(log_probs, wanted, budget)
    assert lengths == [naive_depth(log_probs[i], wanted[i].tolist(), budget) for i in range(60)]
    assert budget == 1 or depths == 1 or max(lengths) > 1


def test_a_budget_of_one_is_the_first_token_of_the_block():
    logits = torch.randn(50, 4, 9, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    wanted = logits.argmax(-1)
    assert tree_lengths(logits, wanted, 1) == [1] * 50
    assert tree_lengths(logits, (wanted + 1) % 9, 1) == [0] * 50


def test_tokens_outside_the_draft_vocabulary_are_never_right():
    ids = torch.tensor([2, 5, 9])
    assert to_draft(torch.tensor([[0, 2, 5], [9, 10, 3]]), ids).tolist() == [[-1, 0, 1], [2, -1, -1]]


def test_walk_counts_rounds():
    assert walk([1, 1, 1]) == (3, 3)
    assert walk([3, 9, 9, 2, 9]) == (2, 5)
    assert walk([]) == (0, 0)


def test_a_router_learns_a_rule(tmp_path):
    config = tmp_path / "router" / "config.json"
    scores = train_router("df-e3", FakeTarget(), measured(), measured(20, seed=1), RECIPE, tmp_path / "router")
    overall = scores["overall"]
    assert overall["r2"] > 0.9
    assert overall["sign"] > 0.9
    assert overall["regret"] < 0.2
    rounds = overall["rounds"]
    assert list(rounds) == ["df", "e3", "router", "oracle"]
    assert rounds["router"] > 1.2 * max(rounds["df"], rounds["e3"])
    written = json.loads(config.read_text())
    assert written["scores"] == scores
    assert written["positive"] == "slot-1" and written["tree_budget"] is None and written["hidden_size"] == WIDTH


def test_noise_gives_no_r2(tmp_path):
    texts = measured(noise=0.0)
    shuffled = [replace(t, signal=o.signal) for t, o in zip(texts, texts[1:] + texts[:1], strict=True)]
    scores = train_router("df-e3", FakeTarget(), shuffled, measured(20, seed=1), RECIPE, tmp_path)
    assert scores["overall"]["r2"] < 0.1


def test_what_runs_is_what_was_trained(tmp_path):
    texts, held = measured(), measured(3, seed=2)
    train_router("df-e3", FakeTarget(), texts, held, RECIPE, tmp_path)
    setting = Setting("0123456789abcdef", "org/model", "df-e3", None, WIDTH)
    router = NeuralRouter.load(tmp_path, setting)
    config = json.loads((tmp_path / "config.json").read_text())
    assert router.threshold == config["threshold"]
    for position in range(0, 40, 5):
        slot, gain = router(Signal(held[0].signal[position], torch.zeros(4)))
        assert gain == pytest.approx(float(predict(router.network, held[0])[position]), abs=1e-4)
        assert int(slot) == int(gain > config["threshold"])
    assert evaluate(router.network, held, ("df", "e3"), router.threshold) == config["scores"]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_training_is_deterministic(dropout):
    texts, recipe = measured(10), replace(RECIPE, dropout=dropout)
    x, y = torch.cat([t.signal for t in texts]), torch.cat([t.lengths["e3"] for t in texts]).float()
    first, second = (fit(x, y, x[:50], y[:50], recipe) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_the_threshold_is_set_where_it_pays():
    """A predictor with a constant offset needs a threshold of that offset."""
    texts = measured()
    network = fit(
        torch.cat([t.signal for t in texts]),
        torch.cat([t.lengths["e3"] - t.lengths["df"] for t in texts]).float() + 3,
        texts[0].signal,
        (texts[0].lengths["e3"] - texts[0].lengths["df"]).float() + 3,
        RECIPE,
    )
    threshold = best_threshold(network, texts, ("df", "e3"))
    assert 2 < threshold < 4
    routed = evaluate(network, texts, ("df", "e3"), threshold)["overall"]["rounds"]["router"]
    assert routed > evaluate(network, texts, ("df", "e3"), 0.0)["overall"]["rounds"]["router"]


@pytest.mark.parametrize("better", ["df", "e3"])
def test_a_router_that_cannot_help_leaves_the_better_drafter_alone(better):
    worse = {"df": "e3", "e3": "df"}[better]
    left = torch.arange(40, 0, -1)
    texts = [replace(t, lengths={better: left.clamp(max=4), worse: left.clamp(max=2)}) for t in measured(4)]
    network = RouterMLP(WIDTH, 4)
    rounds = evaluate(network, texts, ("df", "e3"), best_threshold(network, texts, ("df", "e3")))["overall"]["rounds"]
    assert rounds["router"] == rounds[better] == 4
    assert rounds[worse] == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pair": "df-ddt"}, "pair ddt-e3"),
        ({"tree_budget": 32}, "tree budget of 16"),
        ({"target_fingerprint": "ffff"}, "target org/model"),
        ({"hidden_size": 13}, "width 13"),
    ],
)
def test_a_router_for_something_else_is_refused(tmp_path, changes, words):
    texts = [replace(t, lengths={"ddt": t.lengths["df"], "e3": t.lengths["e3"]}) for t in measured(8)]
    train_router("ddt-e3", FakeTarget(), texts, texts[:2], RECIPE, tmp_path)
    setting = Setting("0123456789abcdef", "org/model", "ddt-e3", 16, WIDTH)
    NeuralRouter.load(tmp_path, setting)
    with pytest.raises(WhiFlashError, match=words):
        NeuralRouter.load(tmp_path, replace(setting, **changes))


def test_prompts_are_never_split():
    texts = measured(40)
    fitted, validation = split_prompts(texts)
    assert len(fitted) + len(validation) == 40 and validation
    assert not {m.prompt for m in fitted} & {m.prompt for m in validation}
    with pytest.raises(WhiFlashError, match="two different prompts"):
        split_prompts(measured(2))


def test_bad_input_gets_a_sentence(tmp_path):
    with pytest.raises(WhiFlashError, match="not known"):
        RouterRecipe(pairs=("e3-df",))
    with pytest.raises(WhiFlashError, match="at least 1"):
        RouterRecipe(tree_budget=0)
    with pytest.raises(WhiFlashError, match="dropout"):
        RouterRecipe(dropout=1.0)
    with pytest.raises(WhiFlashError, match="inner_size 32 does not divide among 5 members"):
        RouterRecipe(inner_size=32, members=5)
    with pytest.raises(WhiFlashError, match="not given: ddt"):
        train_router("ddt-e3", FakeTarget(), measured(4), measured(2), RECIPE, tmp_path)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(WhiFlashError, match="could not be written"):
        export(fit(torch.randn(9, 4), torch.randn(9), torch.randn(3, 4), torch.randn(3), RECIPE), {}, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_members_are_joined_into_their_mean():
    members = [RouterMLP(6, 4).requires_grad_(False) for _ in range(3)]
    whole, x = joined(members), torch.randn(9, 6)
    assert whole.fc1.weight.shape == (12, 6)
    torch.testing.assert_close(whole(x), torch.stack([m(x) for m in members]).mean(0))
