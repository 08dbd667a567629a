"""The whole pipeline on a tiny chat model: what it leaves loads, runs as it was measured, and is never made twice."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tiny
from whiflash import WhiFlash
from whiflash.drafters.load import load_dflash, load_eagle3
from whiflash.errors import WhiFlashError
from whiflash.journal import exclusive
from whiflash.model import EAGLE3_DEPTH, Drafting
from whiflash.target.load import load_target
from whiflash.training.acceptance import Drafters, measure
from whiflash.training.commands import app
from whiflash.training.features import Online, read_texts
from whiflash.training.loop import read_weights
from whiflash.training.pipeline import budget, prepare_texts, train_all
from whiflash.training.recipe import Recipe, TextRecipe, load_recipe, shipped
from whiflash.training.router import predict, walk

PROMPTS = [f"{word} {i}" for i in range(6) for word in ("bread?", "the sea?", "a story.")]
CHAIN, BUDGET = 3, 4


def call(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A tiny target with prompts, and the pipeline run over them once: (directory, output)."""
    directory = tmp_path_factory.mktemp("pipeline")
    tiny.build(directory / "target")
    rows = [{"category": ("chat", "math")[i % 2], "turns": [text]} for i, text in enumerate(PROMPTS)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run_all(directory, directory / "out")
    assert result.exit_code == 0, result.output
    return directory, result.output


def run_all(directory, out, *more):
    return call("all", "-t", directory / "target", "-o", out, "--recipe", "tiny", *asking(directory), *more)


def asking(directory):
    return "--prompts", directory / "prompts.jsonl"


@pytest.fixture(scope="module")
def model(work):
    out = work[0] / "out"
    target = load_target(work[0] / "target")

    def make(drafters, **options):
        drafting = Drafting(eagle3_depth=CHAIN, tree_budget=BUDGET)
        paths = {"dflash": out / "dflash", "eagle3": out / "eagle3"}
        return WhiFlash.from_pretrained(target, drafters=drafters, drafting=drafting, **paths, **options)

    return make


@pytest.fixture(scope="module")
def lengths(work, tmp_path_factory):
    """What the trainer believes is accepted on every text, by prompt tokens."""
    out = work[0] / "out"
    target = load_target(work[0] / "target")
    texts = read_texts(out / "work" / "answers.jsonl", target)
    drafters = Drafters.load(target, out / "dflash", out / "eagle3")
    directory = tmp_path_factory.mktemp("lengths")
    measured = measure(Online(target, texts, drafters.dflash.taps), "all", drafters, directory, CHAIN, BUDGET)
    return list(zip(texts, measured, strict=True))


def test_a_model_is_measured_again_only_when_it_changed(work, tmp_path, monkeypatch):
    target, out = load_target(work[0] / "target"), work[0] / "out"
    texts = read_texts(out / "work" / "answers.jsonl", target)[:3]
    calls = []
    for name in ("diffusion", "autoregressive"):
        original = getattr(Drafters, name)
        monkeypatch.setattr(Drafters, name, lambda *a, name=name, original=original: calls.append(name) or original(*a))

    def measured(dflash):
        calls.clear()
        drafters = Drafters.load(target, dflash, out / "eagle3")
        return measure(Online(target, texts, drafters.dflash.taps), "few", drafters, tmp_path, CHAIN, BUDGET)

    first = measured(out / "dflash")
    assert calls == ["diffusion", "autoregressive"] * 3
    measured(out / "dflash")
    assert not calls
    changed = shutil.copytree(out / "dflash", tmp_path / "changed")
    (changed / "draft_vocabulary.json").write_text(json.dumps(list(range(50))))
    other = measured(changed)
    assert calls == ["diffusion"] * 3
    assert all(torch.equal(a.lengths["e3"], b.lengths["e3"]) for a, b in zip(first, other, strict=True))


def test_everything_is_there_and_loads(work):
    directory, output = work
    out, target = directory / "out", load_target(directory / "target")
    assert load_dflash(out / "dflash", target).config.block_size == 4
    assert load_eagle3(out / "eagle3", target).config.draft_vocab_size == 200
    for pair in ("df-e3", "ddt-e3", "df-ddt"):
        config = json.loads((out / f"router-{pair}" / "config.json").read_text())
        assert config["format"] == "whiflash-router" and config["pair"] == pair
        assert config["target_fingerprint"] == target.fingerprint()
        assert config["tree_budget"] == (BUDGET if "ddt" in pair else None)
        assert pair in output
    for name in ("eagle3", "dflash", "router-df-e3"):
        assert (out / name / "README.md").read_text().startswith("# ")
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["drafters"]) == {"eagle3", "dflash"} and set(summary["routers"]) == {"df-e3", "ddt-e3", "df-ddt"}
    assert not [f for f in out.rglob("*") if f.name.endswith(".tmp")]


def test_routers_learn_from_texts_that_no_drafter_saw(work, tmp_path):
    out = work[0] / "out"
    target = load_target(work[0] / "target")
    file = out / "work" / "answers.jsonl"

    def prepared(apart):
        return prepare_texts(target, file, TextRecipe(held_out=4, apart=apart, online=True), tmp_path, print)

    ready, everything = prepared(4), prepared(0)
    drafters, routers = ({tuple(t.tokens) for t in texts} for texts in (ready.source.texts, ready.routers.texts))
    held = {tuple(sample.tokens.tolist()) for sample in ready.held}
    assert drafters and routers and held
    assert not (drafters & routers or drafters & held or routers & held)
    assert {tuple(t.tokens) for t in everything.source.texts} == drafters | routers
    assert everything.routers is everything.source
    summary = json.loads((out / "summary.json").read_text())
    assert summary["texts"]["train"] != summary["texts"]["routers"]


def test_again_is_nothing(work):
    directory, _ = work
    before = {f: f.stat().st_mtime_ns for f in (directory / "out").rglob("*.safetensors")}
    result = run_all(directory, directory / "out")
    assert len(re.findall("done before, skipped", result.output)) == 4
    assert {f: f.stat().st_mtime_ns for f in (directory / "out").rglob("*.safetensors")} == before


@pytest.mark.parametrize("name", ["df", "ddt", "e3"])
def test_decoding_accepts_what_was_measured(model, lengths, name):
    """Rounds on a text, one by one: the trainer's walk and the runtime's."""
    runtime, gained = model(name), 0
    for text, measured in lengths:
        out = runtime.generate(text.tokens[: text.start], max_new_tokens=len(text.answer))
        assert out.tokens == text.answer
        walked, root, expected = measured.lengths[name].tolist(), 0, []
        while root < len(walked):
            expected.append(walked[root])
            root += walked[root]
        found = [len(r.tokens) for r in out.rounds]
        assert found == expected
        assert walk(walked) == (len(found), sum(found))
        gained += sum(n > 1 for n in found)
    assert gained > 3, "a drafter that never hits proves nothing"


@pytest.mark.parametrize("pair", ["df-e3", "ddt-e3", "df-ddt"])
def test_the_router_sees_what_it_was_trained_on(work, model, lengths, pair):
    """In decoding every score is the prediction at the node that produced the root, and every slot follows from it."""
    runtime = model(pair, router=work[0] / "out" / f"router-{pair}")
    rounds = 0
    for text, measured in lengths[:8]:
        predicted = predict(runtime.router.network, measured)
        out = runtime.generate(text.tokens[: text.start], max_new_tokens=len(text.answer))
        for r in out.rounds:
            at = r.position - text.start
            assert r.score == pytest.approx(float(predicted[at]), abs=1e-4)
            assert r.slot == pair.split("-")[int(r.score > runtime.router.threshold)]
            assert len(r.tokens) == int(measured.lengths[r.slot][at])
            rounds += 1
    assert rounds > 20


def test_a_router_brings_its_chain_along(work, tmp_path):
    out = work[0] / "out"
    given = {"dflash": out / "dflash", "eagle3": out / "eagle3", "drafters": "df-e3"}

    def depth(router, **shape):
        drafting = Drafting(**shape)
        model = WhiFlash.from_pretrained(work[0] / "target", router=router, drafting=drafting, **given)
        return model.drafters[1].depth

    assert CHAIN != EAGLE3_DEPTH
    assert depth(out / "router-df-e3") == CHAIN
    assert depth(out / "router-df-e3", eagle3_depth=2) == 2, "what is asked for is done"
    assert depth(out / "router-df-e3", eagle3_top_k=2) == EAGLE3_DEPTH, "a tree is no chain"
    assert depth("entropy") == EAGLE3_DEPTH
    card = (out / "router-ddt-e3" / "README.md").read_text()
    assert f"tree budget {BUDGET}, EAGLE-3 depth {CHAIN}." in card
    deep = shutil.copytree(out / "router-df-e3", tmp_path / "deep")
    config = json.loads((deep / "config.json").read_text())
    (deep / "config.json").write_text(json.dumps({**config, "eagle3_depth": 10**6}))
    with pytest.raises(WhiFlashError, match="EAGLE-3 depth must be at most"):
        depth(deep)
    assert json.loads((out / "router-df-ddt" / "config.json").read_text())["eagle3_depth"] is None


def test_a_router_of_another_budget_is_refused(work):
    out = work[0] / "out"
    with pytest.raises(WhiFlashError, match="tree budget of 4"):
        WhiFlash.from_pretrained(
            load_target(work[0] / "target"), drafters="ddt-e3", dflash=out / "dflash", eagle3=out / "eagle3",
            router=out / "router-ddt-e3", drafting=Drafting(tree_budget=8),
        )  # fmt: skip


def test_stages_by_themselves(work, tmp_path):
    """The single commands leave what `all` leaves."""
    directory, _ = work
    out, common = directory / "out", ("-t", directory / "target", "--recipe", "tiny")
    answers = tmp_path / "answers.jsonl"
    result = call("data", *common, "-o", answers, "--prompts", directory / "prompts.jsonl")
    assert answers.read_bytes() == (out / "work" / "answers.jsonl").read_bytes(), result.output
    call("eagle3", *common, "--texts", answers, "-o", tmp_path / "eagle3")
    call("dflash", *common, "--texts", answers, "-o", tmp_path / "dflash", "--online")
    for name in ("eagle3", "dflash"):
        mine, theirs = (read_weights(d / name) for d in (tmp_path, out / "work"))
        # states kept on disk are rounded to half precision
        assert all(torch.allclose(mine[key].float(), theirs[key].float(), atol=5e-2) for key in theirs)
    result = call(
        "router", *common, "--texts", answers, "-o", tmp_path / "router", "-d", "df-e3",
        "--dflash", out / "dflash", "--eagle3", out / "eagle3",
    )  # fmt: skip
    assert "df-e3" in result.output
    theirs = json.loads((out / "router-df-e3" / "config.json").read_text())
    assert json.loads((tmp_path / "router" / "config.json").read_text())["scores"] == theirs["scores"]


def test_answers_that_exist_skip_the_data_stage(work, tmp_path):
    directory, _ = work
    answers = directory / "out" / "work" / "answers.jsonl"
    result = run_all(directory, tmp_path / "out", "--texts", answers)
    assert "answering" not in result.output
    assert not (tmp_path / "out" / "work" / "answers.jsonl").exists()
    for name in ("eagle3", "dflash"):
        mine, theirs = ((d / name / "model.safetensors").read_bytes() for d in (tmp_path / "out", directory / "out"))
        assert mine == theirs


def test_a_time_budget_is_shared_out(work, tmp_path):
    recipe = load_recipe("tiny")
    assert budget(recipe.eagle3.loop, None, 0.3) == recipe.eagle3.loop
    assert budget(recipe.eagle3.loop, 2.0, 0.3).hours == pytest.approx(0.6)
    train_all(load_target(work[0] / "target"), tmp_path, recipe, hours=1e-4, texts=work[0] / "out/work/answers.jsonl")
    steps = [json.loads(line)["step"] for line in (tmp_path / "work/eagle3/log.jsonl").read_text().splitlines()]
    assert steps and steps[-1] < 100, "a budget of a tenth of a second ended it"
    assert (tmp_path / "router-df-e3" / "config.json").exists()


def test_another_run_at_work_is_refused(work):
    with exclusive(work[0] / "out" / "work" / "lock"), pytest.raises(WhiFlashError, match="another run"):
        run_all(work[0], work[0] / "out")


@pytest.mark.slow
def test_kill_at_random_moments(work, tmp_path):
    directory, _ = work
    source, rng, kills, finished = Path(__file__).parents[1] / "src", random.Random(2), 0, False
    command = [
        sys.executable, "-c", "from whiflash.training.commands import app; app()", "all",
        "-t", directory / "target", "-o", tmp_path / "out", "--recipe", "tiny", *asking(directory),
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    while not finished:
        run = subprocess.Popen([str(c) for c in command], stderr=subprocess.PIPE, text=True, env=env)
        for line in (run.stderr.readline() for _ in range(rng.randint(1, 9) if kills < 10 else 10**6)):
            if not line:
                finished = run.wait() == 0
                assert finished
                break
        run.send_signal(signal.SIGKILL)
        run.wait()
        run.stderr.close()
        kills += not finished
    assert kills > 4, "it may finish early, for it runs ahead of what is read from it"
    for file in sorted((directory / "out").rglob("*.safetensors")):
        assert (tmp_path / "out" / file.relative_to(directory / "out")).read_bytes() == file.read_bytes(), file
    assert (tmp_path / "out/work/answers.jsonl").read_bytes() == (directory / "out/work/answers.jsonl").read_bytes()


def test_shipped_recipes_are_read():
    assert {"smollm2-135m", "tiny"} <= set(shipped())
    for name in shipped():
        assert load_recipe(name) != Recipe()
    assert load_recipe(None, "smollm2-135m") == load_recipe("smollm2-135m")
    assert load_recipe(None, "org/unknown") == Recipe()


def test_seeds_reach_every_stage():
    recipe = Recipe().seeded(7)
    stages = (recipe.data, recipe.eagle3.loop, recipe.dflash.loop, recipe.router)
    assert [stage.seed for stage in stages] == [7] * 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[data]\nslots = ", "not valid TOML"),
        ("[dada]\nslots = 3", "no setting 'dada'; expected one of data"),
        ("[data]\nslot = 3", r"\[data\] has no setting 'slot'"),
        ("data = 3", "must be a table"),
        ('[data]\nslots = "many"', "slots = 'many' is not a int"),
        ("[data]\nslots = true", "slots = True"),
        ("[texts]\ntaps = [1, 2.5]", "taps"),
        ("[eagle3.loop]\nlr = 'high'", "lr = 'high' is not a float"),
        ("[eagle3.loop]\noptimizer = 'sgd'", "optimizer"),
        ("[shares]\ndata = 0.9", "shares"),
        ("[router]\npairs = ['e3']", "pair 'e3'"),
        ("[texts]\nprecision = 'int4'", "precision"),
    ],
)
def test_bad_recipes_get_a_sentence(tmp_path, text, words):
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(WhiFlashError, match=words):
        load_recipe(tmp_path / "r.toml")


def test_bad_input_gets_a_sentence(work, tmp_path):
    directory, _ = work
    target = load_target(directory / "target")
    answers = directory / "out" / "work" / "answers.jsonl"
    with pytest.raises(WhiFlashError, match="neither a file nor one of"):
        load_recipe("nonesuch")
    with pytest.raises(WhiFlashError, match="must be positive"):
        train_all(target, tmp_path, Recipe(), hours=0)
    with pytest.raises(WhiFlashError, match="nothing to answer"):
        train_all(target, tmp_path, Recipe())
    with pytest.raises(WhiFlashError, match="cannot be read"):
        train_all(target, tmp_path, Recipe(), prompts=[tmp_path / "none"])
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(WhiFlashError, match="cannot be read"):
        train_all(target, tmp_path, Recipe(), texts=tmp_path / "latin.jsonl")
    with pytest.raises(WhiFlashError, match="taps"):
        train_all(target, tmp_path, replace(Recipe(), texts=TextRecipe(taps=(99,))), texts=answers)
    with pytest.raises(WhiFlashError, match="needs an EAGLE-3 head"):
        call("router", "-t", directory / "target", "--texts", answers, "-o", tmp_path, "--dflash", "x")
    few = tmp_path / "few.jsonl"
    few.write_text(max(answers.read_text().splitlines(), key=len) + "\n")
    with pytest.raises(WhiFlashError, match="too few"):
        train_all(target, tmp_path / "few", load_recipe("tiny"), texts=few)
