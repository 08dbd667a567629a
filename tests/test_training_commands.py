"""`whiflash train …`: what each stage asks of the processes it runs in."""

import pytest
from typer.testing import CliRunner

from whiflash.errors import WhiFlashError
from whiflash.target import load
from whiflash.training.commands import app

ALONE = {
    "data": ["-o", "answers.jsonl"],
    "router": ["--texts", "answers.jsonl", "-o", "out", "--dflash", "checkpoint", "-d", "df-ddt"],
    "all": ["-o", "out"],
}


class LoadedError(Exception):
    """The command came as far as loading a target."""


@pytest.fixture
def invoke(monkeypatch, tmp_path):
    def loading(*_, **__):
        raise LoadedError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(load, "load_target", loading)
    return lambda *arguments: CliRunner().invoke(app, arguments).exception


@pytest.mark.parametrize("stage", ALONE)
def test_a_stage_for_one_process_refuses_several(invoke, monkeypatch, tmp_path, stage):
    monkeypatch.setenv("WORLD_SIZE", "2")
    error = invoke(stage, *ALONE[stage])
    assert isinstance(error, WhiFlashError)
    assert f"`train {stage}` runs in one process, and torchrun started 2" in str(error)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stage", ALONE)
@pytest.mark.parametrize("processes", [None, "1"])
def test_a_stage_for_one_process_runs_in_one(invoke, monkeypatch, stage, processes):
    if processes is None:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("WORLD_SIZE", processes)
    assert isinstance(invoke(stage, *ALONE[stage]), LoadedError)


def test_drafters_train_in_several(invoke, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for stage in ("eagle3", "dflash"):
        assert isinstance(invoke(stage, "--texts", "answers.jsonl", "-o", "out"), LoadedError)
