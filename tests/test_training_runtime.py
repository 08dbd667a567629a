"""Exported drafters, run by the decoding runtime, accept exactly what their trainer's evaluation counted."""

import pytest

import tiny_training as setup
from whiflash import Drafting, WhiFlash
from whiflash.drafters.load import load_dflash, load_eagle3
from whiflash.training import dflash, eagle3
from whiflash.training.dflash import train_dflash
from whiflash.training.eagle3 import train_eagle3
from whiflash.training.evaluate import rounds

CHANGES = {"steps": 150, "evaluate_every": 150, "save_every": 150, "lr": 1e-2}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runtime")
    return setup.online(setup.target(directory), directory)


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_rounds_agree(source, tmp_path, kind):
    target, held = source.target, [source[0]]
    if kind == "eagle3":
        train_eagle3(setup.eagle3_recipe(**CHANGES), target, source, held, tmp_path, lambda line: None)
        model = load_eagle3(tmp_path / "best", target, packed=False)
        options = {"drafters": "e3", "eagle3": model, "drafting": Drafting(eagle3_depth=4)}
    else:
        train_dflash(setup.dflash_recipe(**CHANGES), target, source, held, tmp_path, lambda line: None)
        model = load_dflash(tmp_path / "best", target, packed=False)
        options = {"drafters": "df", "dflash": model}
    runtime, lengths = WhiFlash.from_pretrained(target, **options), []
    for index, text in enumerate(source.texts):
        accepted = eagle3.accepted(model, source[index], 4) if kind == "eagle3" else None
        accepted = accepted or dflash.accepted(model, source[index], 4)
        prompt, answer = text.tokens[: text.start], text.answer
        output = runtime.generate(prompt, max_new_tokens=len(answer), ignore_eos=True)
        assert output.tokens == answer
        assert [len(r.tokens) for r in output.rounds] == rounds(accepted)
        lengths += rounds(accepted)
    assert len(set(lengths)) > 2, "the drafter must be good enough for this test to mean something"
