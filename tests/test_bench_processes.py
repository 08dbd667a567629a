"""A benchmark in processes of its own: killed at random moments, and shared among two ranks."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import bench_kit
from bench_kit import Kit, answers, rows, run

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def kit(tmp_path_factory) -> Kit:
    return bench_kit.build(tmp_path_factory.mktemp("kit"), prompts=8)


@pytest.fixture(scope="module")
def whole(kit, tmp_path_factory) -> dict:
    return answers(run(kit.request(tmp_path_factory.mktemp("runs") / "whole", tokens=40)))


def start(arguments: list[str], **options) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **options}
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def kill_at_random(process: subprocess.Popen, output: Path, moments: random.Random) -> bool:
    """Wait until the run is writing answers (and then a while), and kill it; False if it was done before."""
    file, before = output / "results.jsonl", len(rows(output)) if (output / "results.jsonl").exists() else 0
    goal = before + moments.randint(0, 3)
    while process.poll() is None and not (file.exists() and file.read_bytes().count(b"\n") >= goal):
        time.sleep(0.01)
    time.sleep(moments.uniform(0, 0.15))
    finished = process.poll() is not None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return not finished


def check_kills(kit: Kit, whole: dict, output: Path, count: int, seed: int) -> None:
    moments, killed = random.Random(seed), 0
    for _ in range(count):
        process = start(["benchmark.py", *kit.arguments(output, 40)[1:]])
        killed += kill_at_random(process, output, moments)
        assert set(answers(_whole_lines(output))) <= set(whole)
    assert killed > count / 2
    run(kit.request(output, tokens=40))
    assert answers(output) == whole


def _whole_lines(output: Path) -> Path:
    """A copy of what a kill left, without the line it cut."""
    copy = output.with_name(output.name + "-copy")
    copy.mkdir(exist_ok=True)
    data = (output / "results.jsonl").read_bytes() if (output / "results.jsonl").exists() else b""
    (copy / "results.jsonl").write_bytes(data[: data.rfind(b"\n") + 1])
    return copy


def test_killed_once_resumes_to_the_same(kit, whole, tmp_path):
    check_kills(kit, whole, tmp_path / "out", 1, seed=0)


@pytest.mark.slow
def test_killed_ten_times_resumes_to_the_same(kit, whole, tmp_path):
    check_kills(kit, whole, tmp_path / "out", 10, seed=1)


def torchrun(kit: Kit, output: Path, *more: str) -> subprocess.Popen:
    arguments = kit.arguments(output, 40, *more)[1:]
    return start(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "benchmark.py", *arguments])


@pytest.mark.slow
def test_two_ranks_give_the_outputs_of_one(kit, whole, tmp_path):
    process = torchrun(kit, tmp_path / "two")
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    assert answers(tmp_path / "two") == whole
    assert {row["rank"] for row in rows(tmp_path / "two")} == {0, 1}
    assert not list((tmp_path / "two").glob("results.rank*"))
    assert printed.count("greedy output is not AR's: none") == 1
    assert (tmp_path / "two" / "rounds.parquet").is_file()


@pytest.mark.slow
def test_two_ranks_refuse_with_one_sentence(kit, tmp_path):
    bench_kit.run(kit.request(tmp_path / "two", tokens=4))
    process = torchrun(kit, tmp_path / "two")
    printed, _ = process.communicate(timeout=300)
    assert process.returncode != 0 and "was made with" in printed
    assert "barrier" not in printed and "results.py" not in printed


@pytest.mark.slow
def test_two_ranks_killed_resume_to_the_same(kit, whole, tmp_path):
    output = tmp_path / "two"
    process = torchrun(kit, output)
    while process.poll() is None and not sum(f.read_bytes().count(b"\n") for f in output.glob("results*.jsonl")) > 6:
        time.sleep(0.02)
    assert process.poll() is None
    children = [int(p) for p in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    for pid in (*children, process.pid):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    process = torchrun(kit, output)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    assert "answers are there" in printed
    assert answers(output) == whole
