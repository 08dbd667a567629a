"""A killed run ends as an undisturbed one does, and several processes train what one process trains."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import tiny_training as setup
from whiflash.errors import WhiFlashError
from whiflash.training.dflash import train_dflash
from whiflash.training.eagle3 import train_eagle3
from whiflash.training.features import Online
from whiflash.training.loop import read_weights

KINDS = {"eagle3": (train_eagle3, setup.eagle3_recipe), "dflash": (train_dflash, setup.dflash_recipe)}


class Killed(Exception):
    pass


class Dying:
    """A source that fails at its n-th reading."""

    def __init__(self, source, readings):
        self.source, self.left = source, readings
        self.texts, self.taps, self.fingerprint = source.texts, source.taps, source.fingerprint

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        self.left -= 1
        if self.left < 0:
            raise Killed
        return self.source[index]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("resume")
    return setup.online(setup.target(directory), directory)


def quiet(line):
    pass


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", [{}, {"optimizer": "muon", "ema": 0.9, "texts_per_step": 2}], ids=["adamw", "muon"])
def test_resume_is_exact(source, tmp_path, kind, changes):
    run, recipe = KINDS[kind][0], KINDS[kind][1](**changes)
    held = [source[0], source[1]]
    plain = run(recipe, source.target, source, held, tmp_path / "plain", quiet)
    dice = random.Random(kind)
    for readings in (dice.randrange(1, 8), dice.randrange(4)):
        with pytest.raises(Killed):
            run(recipe, source.target, Dying(source, readings), held, tmp_path / "killed", quiet)
    again = run(recipe, source.target, source, held, tmp_path / "killed", quiet)
    assert again.step == plain.step == 12 and again.best == plain.best
    assert [h["acceptance"] for h in again.history] == [h["acceptance"] for h in plain.history]
    for name, weight in read_weights(tmp_path / "plain").items():
        assert torch.equal(weight, read_weights(tmp_path / "killed")[name]), name
    for file in ("best/model.safetensors", "last/model.safetensors"):
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "killed" / file).read_bytes()


def test_a_run_of_other_settings_or_texts_is_not_continued(source, tmp_path):
    train_eagle3(setup.eagle3_recipe(steps=3), source.target, source, [], tmp_path, quiet)
    before = (tmp_path / "state.pt").read_bytes()
    with pytest.raises(WhiFlashError, match=r"loop\.lr = 0\.003, but this one has 0\.1"):
        train_eagle3(setup.eagle3_recipe(lr=0.1), source.target, source, [], tmp_path, quiet)
    with pytest.raises(WhiFlashError, match="source = "):
        fewer = Online(source.target, source.texts[:3], source.taps)
        train_eagle3(setup.eagle3_recipe(), source.target, fewer, [], tmp_path, quiet)
    assert (tmp_path / "state.pt").read_bytes() == before
    # only the length of the schedule may change
    assert train_eagle3(setup.eagle3_recipe(steps=4), source.target, source, [], tmp_path, quiet).step == 4
    (tmp_path / "state.pt").write_bytes(before[:1000])
    with pytest.raises(WhiFlashError, match="cannot be read"):
        train_eagle3(setup.eagle3_recipe(steps=5), source.target, source, [], tmp_path, quiet)


PROGRAM = """
import sys, torch
torch.set_num_threads(1)
sys.path.insert(0, {tests!r})
import tiny_training as setup
from whiflash.target.load import load_target
from whiflash.training.eagle3 import train_eagle3
from whiflash.training.features import Online, read_texts
target = load_target({target!r})
source = Online(target, read_texts({texts!r}, target), setup.TAPS)
recipe = setup.eagle3_recipe(steps={steps}, texts_per_step={texts_per_step})
train_eagle3(recipe, target, source, [source[0]], sys.argv[1], lambda line: None)
"""


def program(directory: Path, **settings) -> Path:
    target = setup.target(directory)
    texts = setup.write_texts(target, directory / "texts.jsonl")
    tests = str(Path(__file__).parent)
    file = directory / "program.py"
    file.write_text(PROGRAM.format(tests=tests, target=str(target.path), texts=str(texts), **settings), "utf-8")
    return file


def assert_equal_weights(one: Path, other: Path, tolerance: float = 0.0) -> None:
    theirs = read_weights(other)
    for name, weight in read_weights(one).items():
        torch.testing.assert_close(weight, theirs[name], rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_ten_kills_change_nothing(tmp_path):
    file = program(tmp_path, steps=60, texts_per_step=1)
    subprocess.run([sys.executable, file, tmp_path / "plain"], check=True)
    dice, kills = random.Random(0), 0
    while kills < 10:
        process = subprocess.Popen([sys.executable, file, tmp_path / "killed"])
        state = tmp_path / "killed" / "state.pt"
        before = state.stat().st_mtime_ns if state.exists() else 0
        while process.poll() is None and (not state.exists() or state.stat().st_mtime_ns == before):
            time.sleep(0.01)
        time.sleep(dice.random() * 0.1)
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
    assert kills >= 5
    subprocess.run([sys.executable, file, tmp_path / "killed"], check=True)
    assert_equal_weights(tmp_path / "plain", tmp_path / "killed")


@pytest.mark.slow
def test_two_processes_train_what_one_does(tmp_path):
    file = program(tmp_path, steps=6, texts_per_step=2)
    subprocess.run([sys.executable, file, tmp_path / "one"], check=True)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*launch, str(file), str(tmp_path / "two")], check=True, env=environment)
    assert_equal_weights(tmp_path / "one", tmp_path / "two", 1e-5)
