"""Training goes on from a checkpoint: with its weights and draft vocabulary, and from no other make."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import tiny_training as setup
from whiflash.errors import WhiFlashError
from whiflash.training.dflash import train_dflash
from whiflash.training.eagle3 import train_eagle3
from whiflash.training.features import Online

KINDS = {"dflash": (train_dflash, setup.dflash_recipe), "eagle3": (train_eagle3, setup.eagle3_recipe)}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    directory = tmp_path_factory.mktemp("init")
    target = setup.target(directory)
    source = setup.online(target, directory)
    return target, source, [source[0]], directory


@pytest.fixture(scope="module", params=KINDS)
def first(request, world):
    """A finished run, the function that trains its kind, and its recipe."""
    target, source, held, directory = world
    run, recipe = KINDS[request.param]
    out = directory / request.param
    run(recipe(), target, source, held, out, lambda line: None)
    return out / "last", run, recipe


def go_on(world, run, recipe, init, out, log=lambda line: None):
    target, source, held, _ = world
    return run(replace(recipe, init=str(init)), target, source, held, out, log)


def test_it_starts_where_the_checkpoint_stands(first, world, tmp_path):
    init, run, recipe = first
    # other texts and another size would have led to another draft vocabulary
    still = replace(recipe(steps=1, lr=1e-12), draft_vocab=150)
    go_on(world, run, still, init, tmp_path)
    before, after = (load_file(d / "model.safetensors") for d in (init, tmp_path / "last"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    vocabularies = [d / "draft_vocabulary.json" for d in (init, tmp_path / "last")]
    assert vocabularies[0].exists() == vocabularies[1].exists()
    if vocabularies[0].exists():
        assert vocabularies[0].read_text() == vocabularies[1].read_text()


def test_it_learns_further_and_says_from_where(first, world, tmp_path):
    init, run, recipe = first
    history = go_on(world, run, recipe(steps=12), init, tmp_path).history
    beginning = run(recipe(steps=12), *world[:3], tmp_path / "fresh", lambda line: None).history
    assert history[-1]["loss"] < beginning[-1]["loss"]
    assert [row["step"] for row in history] == [0, 6, 12] and [row["step"] for row in beginning] == [6, 12]
    assert history[0]["acceptance"] == _last(init)["acceptance"]
    card = (tmp_path / "last" / "README.md").read_text()
    assert f"went on from {init}" in card and card.count("# ") == card.count("## ") + 1


def _last(checkpoint):
    return json.loads((checkpoint.parent / "log.jsonl").read_text().splitlines()[-1])


def test_another_make_is_refused(first, world, tmp_path):
    init, run, recipe = first
    target, source, held, _ = world
    source = Online(target, source.texts, (1, 2, 3))
    with pytest.raises(WhiFlashError, match=r"cannot go on from .*: it has taps = \(1, 3, 5\), but .* = \(1, 2, 3\)"):
        run(replace(recipe(), init=str(init)), target, source, held, tmp_path, lambda line: None)
    assert not list(tmp_path.iterdir())


def test_a_run_resumes_only_from_the_same_checkpoint(first, world, tmp_path):
    init, run, recipe = first
    go_on(world, run, recipe(steps=3), init, tmp_path)
    with pytest.raises(WhiFlashError, match="holds a run with init = "):
        run(recipe(steps=6), *world[:3], tmp_path, lambda line: None)
    lines = []
    go_on(world, run, recipe(steps=6), init, tmp_path, lines.append)
    assert any(line.startswith("resumed at step 3") for line in lines)
