"""Prompts by name: published formats, wording, sampling, and sentences for what is not there."""

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from bench_kit import write_rows
from whiflash.errors import WhiFlashError
from whiflash.evaluation import formats
from whiflash.evaluation.datasets import CATEGORIES, DATASETS, load_prompts

SHARED = Path(os.environ.get("WHIFLASH_SHARED", Path(__file__).parents[2] / "shared")) / "data"
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def first(name: str, directory: Path) -> tuple[str, ...]:
    return load_prompts([name], directory)[0].turns


def test_demo_needs_nothing():
    prompts = load_prompts(["demo"])
    assert [sum(p.category == c for p in prompts) for c in CATEGORIES] == [12, 12, 12, 12]
    assert len({p.turns for p in prompts}) == len(prompts)
    assert any(len(p.turns) == 2 for p in prompts)


@pytest.mark.parametrize(
    ("name", "file", "row", "turns"),
    [
        (
            "mt-bench",
            "mt-bench/question.jsonl",
            {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
            ["a", "b"],
        ),
        ("mt-bench", "mt-bench.jsonl", {"prompt": ["a", "b"], "reference": []}, ["a", "b"]),
        ("alpaca", "alpaca.jsonl", {"instruction": "Do", "input": "", "output": "x"}, ["Do"]),
        ("alpaca", "alpaca/x.jsonl", {"instruction": "Do", "input": "this"}, ["Do\n\nInput:\nthis"]),
        ("ultrachat", "ultrachat/train_0.jsonl", {"id": "0", "data": ["u1", "a1", "u2", "a2"]}, ["u1", "u2"]),
        (
            "ultrachat",
            "ultrachat.jsonl",
            {"prompt": "u1", "messages": [{"role": "user", "content": "u1"}, {"role": "assistant", "content": "a"}]},
            ["u1"],
        ),
        (
            "wildchat",
            "wildchat.jsonl",
            {
                "language": "English",
                "toxic": False,
                "conversation": [
                    {"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "a"), ("user", "r"))
                ],
            },
            ["q"],
        ),
        ("gsm8k", "gsm8k/test.jsonl", {"question": "1+1?", "answer": "2"}, ["1+1?" + BOXED]),
        ("math500", "math500/test.jsonl", {"problem": "x", "answer": "2"}, ["x" + BOXED]),
        ("aime24", "aime24/any.jsonl", {"problem": "x", "answer": "2"}, ["x" + BOXED]),
        ("aime25", "aime25.jsonl", {"problem": "x", "answer": 2}, ["x" + BOXED]),
        (
            "humaneval",
            "humaneval.jsonl",
            {"task_id": "HumanEval/0", "prompt": "def f():\n"},
            [
                "Write a solution to the following problem and make sure that it passes the tests:\n"
                "```python\ndef f():\n\n```"
            ],
        ),
        ("mbpp", "mbpp.jsonl", {"task_id": 11, "prompt": "Write f."}, ["Write f."]),
        ("swe-bench", "swe-bench/test.jsonl", {"problem_statement": "It fails."}, None),
        ("agentbench", "agentbench/1/stock.jsonl", {"description": "Count."}, None),
        (
            "agentinstruct",
            "agentinstruct/os.jsonl",
            {"conversations": [{"from": "human", "value": "Do"}, {"from": "gpt", "value": "x"}], "id": "os_0"},
            ["Do"],
        ),
    ],
)
def test_published_formats(tmp_path, name, file, row, turns):
    write_rows(tmp_path / file, [row])
    if name == "agentbench":
        (tmp_path / file).with_suffix(".json").write_text(json.dumps([row]))
        turns = [formats.AGENTBENCH_OS.read_text("utf-8") + "Count."]
    if name == "swe-bench":
        turns = ["Problem Statement:\nIt fails.\nPlease fix the issue described above."]
    (prompt,) = load_prompts([name], tmp_path)
    assert (prompt.turns, prompt.category, prompt.dataset) == (tuple(turns), DATASETS[name].category, name)


def test_containers(tmp_path):
    row = {"task_id": "HumanEval/0", "prompt": "def f():\n"}
    with gzip.open(tmp_path / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps(row) + "\n")
    assert first("humaneval", tmp_path)[0].endswith("def f():\n\n```")
    (tmp_path / "sanitized-mbpp.json").write_text(
        json.dumps([{"task_id": 2, "prompt": "no"}, {"task_id": 12, "prompt": "yes"}])
    )
    assert first("mbpp", tmp_path) == ("yes",)
    (tmp_path / "math500").mkdir()
    parquet.write_table(
        pa.Table.from_pylist([{"problem": "p", "answer": "a"}]), tmp_path / "math500" / "test-0.parquet"
    )
    assert first("math500", tmp_path) == ("p" + BOXED,)


def test_a_training_file_beside_the_test_file_is_not_read(tmp_path):
    write_rows(tmp_path / "gsm8k" / "train.jsonl", [{"question": "train", "answer": ""}])
    write_rows(tmp_path / "gsm8k" / "test.jsonl", [{"question": "test", "answer": ""}])
    assert first("gsm8k", tmp_path) == ("test" + BOXED,)


def test_tau_bench_is_read_from_its_python_without_running_it(tmp_path):
    for domain in ("airline", "retail"):
        place = tmp_path / "tau-bench" / "envs" / domain
        place.mkdir(parents=True)
        (place / "wiki.md").write_text(f"# {domain}\n")
        (place / "tasks_test.py").write_text(
            "from nowhere import Task, Action\nraise SystemExit\n"
            f"TASKS = [Task(annotator=0, instruction='fly ' 'home, {domain}', actions=[Action(name='x')])]\n"
        )
    turns = [p.turns for p in load_prompts(["tau-bench"], tmp_path)]
    assert turns == [(f"# {d}\n\nUser:\nfly home, {d}",) for d in ("airline", "retail")]


def test_livecodebench_wording(tmp_path):
    write_rows(
        tmp_path / "livecodebench.jsonl",
        [{"question_content": "Q", "starter_code": ""}, {"question_content": "Q", "starter_code": "class S:"}],
    )
    plain, started = (p.turns[0] for p in load_prompts(["livecodebench"], tmp_path))
    assert plain.endswith(
        "### Question:\nQ\n\n### Format: Write your code in the following format:\n```python\n# YOUR CODE HERE\n```\n\n"
        "### Answer: (use the provided format with backticks)"
    )
    assert "### Format: Use the following code structure:\n```python\nclass S:\n```" in started


def test_rows_left_out(tmp_path):
    def said(text, **extra):
        return {"conversation": [{"role": "user", "content": text}], "language": "English", "toxic": False, **extra}

    write_rows(
        tmp_path / "wildchat.jsonl", [said("a", toxic=True), said("b", language="French"), said("c"), said("  ")]
    )
    assert [p.turns for p in load_prompts(["wildchat"], tmp_path)] == [("c",)]


def test_samples_are_drawn_by_seed_in_order_and_per_category(tmp_path):
    write_rows(tmp_path / "gsm8k.jsonl", [{"id": f"g/{i}", "turns": [f"q{i}"]} for i in range(50)])
    draws = [[p.id for p in load_prompts(["gsm8k"], tmp_path, 5, seed)] for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2] and len(draws[0]) == 5
    assert draws[0] == sorted(draws[0], key=lambda i: int(i[2:]))
    assert len(load_prompts(["demo"], None, 2)) == 8
    assert len(load_prompts(["gsm8k", "gsm8k"], tmp_path)) == 50


def test_a_category_is_all_its_data_sets(tmp_path):
    for name in ("gsm8k", "math500", "aime24", "aime25"):
        write_rows(tmp_path / f"{name}.jsonl", [{"id": f"{name}/0", "turns": ["q"]}])
    assert [p.dataset for p in load_prompts(["category:math"], tmp_path)] == ["gsm8k", "math500", "aime24", "aime25"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gsm", "did you mean gsm8k"),
        ("MT_Bench", "did you mean mt-bench"),
        ("zzz", "there are mt-bench, alpaca"),
        ("category:maths", "did you mean math"),
        ("nowhere.jsonl", "there is no file nowhere.jsonl"),
    ],
)
def test_unknown_names(name, words):
    with pytest.raises(WhiFlashError, match=words):
        load_prompts([name])


def test_offline_and_missing_says_which_file_to_put_where(tmp_path, monkeypatch):
    import datasets

    def offline(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(WhiFlashError, match=r"test\.jsonl of openai/grade-school-math into .*gsm8k/"):
        load_prompts(["gsm8k"], tmp_path)
    with pytest.raises(WhiFlashError, match=r"tau-bench is not on the hub: put airline/.*--dataset-dir DIR"):
        load_prompts(["tau-bench"])


def test_the_hub_is_asked_for_the_right_rows(monkeypatch):
    import datasets

    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        return iter([{"prompt": ["a", "b"]}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_prompts(["mt-bench"])[0].turns == ("a", "b")
    assert asked == [(("HuggingFaceH4/mt_bench_prompts", None), {"split": "train", "streaming": False})]


def test_bad_files_get_a_sentence(tmp_path):
    write_rows(tmp_path / "gsm8k.jsonl", [{"text": "?"}])
    with pytest.raises(
        WhiFlashError, match=r"gsm8k\.jsonl, line 1 is no prompt of data set gsm8k \(it has no 'problem', only text\)"
    ):
        load_prompts(["gsm8k"], tmp_path)
    (tmp_path / "math500.jsonl").write_text("{broken\n")
    with pytest.raises(WhiFlashError, match=r"math500\.jsonl, line 1 is damaged"):
        load_prompts(["math500"], tmp_path)
    own = write_rows(tmp_path / "own.jsonl", [{"id": "a", "category": "poetry", "turns": ["x"]}])
    with pytest.raises(WhiFlashError, match="a category of chat, math, coding, agentic"):
        load_prompts([str(own)])
    with pytest.raises(WhiFlashError, match="does not exist"):
        load_prompts(["gsm8k"], tmp_path / "nowhere")
    with pytest.raises(WhiFlashError, match="at least 1"):
        load_prompts(["demo"], None, 0)


# What wraps a question in each set: from a finished prompt back to the row, and through the format again.
WRAPPED = {
    "gsm8k": lambda t: formats.mathematics({"question": t.removesuffix(BOXED)}),
    "math500": lambda t: formats.mathematics({"problem": t.removesuffix(BOXED)}),
    "aime24": lambda t: formats.mathematics({"problem": t.removesuffix(BOXED)}),
    "aime25": lambda t: formats.mathematics({"problem": t.removesuffix(BOXED)}),
    "humaneval": lambda t: formats.humaneval({"prompt": t.split("```python\n", 1)[1].removesuffix("\n```")}),
    "swe-bench": lambda t: formats.swe_bench(
        {"problem_statement": t.split("\n", 1)[1].removesuffix("\nPlease fix the issue described above.")}
    ),
    "tau-bench": lambda t: formats.tau_bench(dict(zip(("wiki", "instruction"), t.split("\n\nUser:\n"), strict=True))),
    "agentbench": lambda t: formats.agentbench({"description": t.split("Now, my problem is:\n\n", 1)[1]}),
    "livecodebench": lambda t: formats.livecodebench(_livecodebench_row(t)),
}


def _livecodebench_row(text: str) -> dict:
    question, code = text.split("### Question:\n", 1)[1].rsplit("\n\n### Format: ", 1)
    start = code.split("```python\n", 1)[1].split("\n```\n\n### Answer", 1)[0]
    return {"question_content": question, "starter_code": "" if start == "# YOUR CODE HERE" else start}


@pytest.mark.skipif(not SHARED.is_dir(), reason="no prepared prompts beside the checkout")
@pytest.mark.parametrize("name", WRAPPED)
def test_wording_equals_prepared_prompts(name):
    for prompt in load_prompts([name], SHARED):
        assert WRAPPED[name](prompt.turns[0]) == [prompt.turns[0]]
