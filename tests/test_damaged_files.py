"""Files that others wrote, or that a crash left: what is wrong with them is a sentence with the file and the place."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from whiflash.decoding.session import PHASES
from whiflash.errors import WhiFlashError
from whiflash.evaluation import positions, progress, runs
from whiflash.evaluation.datasets import load_prompts
from whiflash.evaluation.latency import Profile
from whiflash.evaluation.ranks import Ranks
from whiflash.evaluation.results import FIELDS, Results
from whiflash.journal import Journal
from whiflash.training.synthesize import read_prompts

# ends of lines to str.splitlines(), but characters of a text to JSON
ENDS = "a\u2028b\u2029c\u0085d"
TIMES = {"verify": 1.0}
PROFILE = {"plain": TIMES, "rounds": {"df": {"3": TIMES}}, "catch_up": {"df": {"fixed": 0.1, "row": 0.0, "behind": 1}}}
TURN = {
    "prompt_tokens": 1, "tokens": [1, 2], "prefill_seconds": 0.1, "decode_seconds": 0.1,
    "rounds": {name: [1] for name in (*FIELDS, *PHASES)},
}  # fmt: skip
RESULT = dict.fromkeys(("prompt", "dataset", "category", "method", "mode"), "x") | {
    "turns": [TURN],
    "left_out": None,
}
TEXT = {
    "id": "p", "category": "chat", "prompt": 3, "scores": {"entropy": [0.5, 0.5]},
    "paths": {"df": [[1], []]}, "likely": {"df": [[1], [0]]},
}  # fmt: skip


def write(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


def refused(function, *arguments) -> str:
    with pytest.raises(WhiFlashError) as raised:
        function(*arguments)
    return str(raised.value)


GOOD = {"id": "p", "category": "chat", "turns": ["q"]}


@pytest.mark.parametrize("turns", ["hello", {"a": 1}, ["q", 5], ["q", None], [["q"]], 5, None, [], ["q", " "]])
@pytest.mark.parametrize("name", ["own", "gsm8k"])
def test_turns_are_a_list_of_texts(tmp_path, name, turns):
    file = write(tmp_path / f"{name}.jsonl", GOOD, GOOD | {"id": "r", "turns": turns})
    told = refused(load_prompts, [str(file) if name == "own" else name], tmp_path)
    assert f"{file}, line 2 is no prompt" in told and "its turns are" in told and "turns, a list of texts" in told


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("mt-bench", {"prompt": "hello"}),
        ("mt-bench", {"prompt": {"a": 1}}),
        ("alpaca", {"instruction": {"a": 1}, "input": "x"}),
        ("alpaca", {"instruction": "x", "input": [1]}),
        ("ultrachat", {"data": "hello"}),
        ("ultrachat", {"messages": "hello"}),
        ("ultrachat", {"messages": [{"role": "user", "content": 5}]}),
        ("wildchat", {"language": "English", "conversation": [{"role": "user"}]}),
        ("gsm8k", {"question": None}),
        ("math500", {"problem": ["x"]}),
        ("humaneval", {"prompt": 5}),
        ("mbpp", {"task_id": 11, "prompt": ["x"]}),
        ("mbpp", {"task_id": "?", "prompt": "x"}),
        ("livecodebench", {"question_content": None}),
        ("livecodebench", {"question_content": "x", "starter_code": 5}),
        ("swe-bench", {"problem_statement": None}),
        ("agentbench", {"description": {}}),
        ("agentinstruct", {"conversations": [5]}),
    ],
)
def test_published_rows_with_other_than_texts_are_refused(tmp_path, name, row):
    told = refused(load_prompts, [name], write(tmp_path / f"{name}.jsonl", row).parent)
    assert f"{name}.jsonl, line 1 is no prompt of data set {name}" in told and "expected the format of" in told


@pytest.mark.parametrize("row", [5, None, [1, 2], "turns", True])
@pytest.mark.parametrize("form", ["lines", "lines in .json", "list", "gz"])
def test_what_is_no_object_is_refused(tmp_path, row, form):
    file = tmp_path / {"lines": "gsm8k.jsonl", "gz": "gsm8k.jsonl.gz"}.get(form, "gsm8k.json")
    if form == "list":
        file.write_text(json.dumps([GOOD, row]))
    else:
        with (gzip.open if form == "gz" else open)(file, "wt") as lines:
            lines.write(f"{json.dumps(GOOD)}\n{json.dumps(row)}\n")
    told = refused(load_prompts, ["gsm8k"], tmp_path)
    assert f"{file}, {'row' if form == 'list' else 'line'} 2 is" in told and "object" in told


@pytest.mark.parametrize("kind", ["gsm8k.jsonl.gz", "gsm8k.parquet", "gsm8k.json", "gsm8k.jsonl"])
def test_any_damaged_byte_is_a_sentence(tmp_path, kind):
    """Or leaves prompts, where it hit a letter."""
    file, rows = tmp_path / kind, [{"question": f"{n} and {n * n}?"} for n in range(20)]
    if kind.endswith("parquet"):
        parquet.write_table(pa.Table.from_pylist(rows), file)
    else:
        text = json.dumps(rows) if kind.endswith("json") else "".join(json.dumps(row) + "\n" for row in rows)
        file.write_bytes(gzip.compress(text.encode()) if kind.endswith("gz") else text.encode())
    data = file.read_bytes()
    told = 0
    for place in range(0, len(data), max(len(data) // 97, 1)):
        for other in (data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :], data[:place]):
            file.write_bytes(other)
            try:
                load_prompts(["gsm8k"], tmp_path)
            except WhiFlashError as error:
                told += str(file) in str(error) or "holds no prompt" in str(error)
    assert told > 50


@pytest.mark.parametrize(
    "source",
    [
        "TASKS = [Task(",
        "Task(instruction=f'{x}')",
        "Task(instruction=name)",
        "Task(annotator=0)",
        "Task(instruction=5)",
        "x = '\0'",
        "(" * 10_000,
        "\xff",
    ],
)
def test_tasks_that_cannot_be_read_are_refused(tmp_path, source):
    place = tmp_path / "tau-bench" / "airline"
    place.mkdir(parents=True)
    (place / "wiki.md").write_text("policy")
    (place / "tasks_test.py").write_bytes(source.encode("latin-1"))
    assert f"{place / 'tasks_test.py'}" in refused(load_prompts, ["tau-bench"], tmp_path)


@pytest.mark.parametrize("file", ["gsm8k.jsonl", "gsm8k.json"])
def test_ends_of_lines_within_a_text_stay_in_prompts(tmp_path, file):
    write(tmp_path / file, GOOD | {"turns": [ENDS]}, GOOD | {"id": "r"})
    assert [p.turns for p in load_prompts(["gsm8k"], tmp_path)] == [(ENDS,), ("q",)]
    assert [p.text for p in read_prompts([tmp_path / file])] == [ENDS, "q"]


def test_ends_of_lines_within_a_text_stay_in_what_is_measured(tmp_path):
    record = write(tmp_path / "record.jsonl", TEXT | {"id": ENDS}, TEXT)
    assert [text.id for text in positions.read_record(record).texts] == [ENDS, "p"]
    write(tmp_path / "results.jsonl", RESULT | {"prompt": ENDS}, RESULT)
    settings = {"methods": {}, "target": "t (f)", "temperature": 0}
    write(tmp_path / "summary.json", {"complete": True, "settings": settings})
    assert list(runs.read_run(tmp_path).rows["x"]) == [ENDS, "x"]
    journal = Journal(tmp_path / "journal.jsonl", {})
    journal.append({"text": ENDS})
    assert Journal(tmp_path / "journal.jsonl", {}).rows == [{"text": ENDS}]


def changed(found: dict, key: str, value: object) -> dict:
    """A copy in which `key` (with dots) is `value`, or is left out where that is ..."""
    first, _, rest = key.partition(".")
    if rest:
        return found | {first: changed(found[first], rest, value)}
    return {k: v for k, v in found.items() if k != key} if value is ... else found | {key: value}


def test_the_profile_itself_is_read(tmp_path):
    found = Profile.read(write(tmp_path / "p.json", PROFILE))
    assert json.loads(json.dumps(found.as_json())) == PROFILE | {"machine": {}}
    assert Profile.read(write(tmp_path / "c.json", {"profile": PROFILE})) == found


NUMBERS = ["x", None, -1, float("nan"), float("inf"), True, [1], {}, 10**400]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in ("plain", "rounds", "catch_up") for value in (..., None, 5, "x", [])),
        ("machine", []),
        ("profile", 5),
        ("plain", {}),
        ("plain", {"verify": 0, "draft": 0.0}),
        ("plain.sleep", 1.0),
        *(("plain.verify", value) for value in NUMBERS),
        ("rounds.df", []),
        ("rounds.df", {}),
        *((f"rounds.df.{length}", TIMES) for length in ("0", "-3", "x", "1.5", "", " 3", "3_0", "٣", "9" * 30)),
        ("rounds.df.3", {}),
        ("rounds.df.3", 1.0),
        ("rounds.df.3", {"verify": 0}),
        ("rounds.df.3.sleep", 1.0),
        *(("rounds.df.3.verify", value) for value in NUMBERS),
        ("catch_up.df", 0.1),
        *((f"catch_up.df.{name}", value) for name in ("fixed", "row") for value in [*NUMBERS, ...]),
        *(("catch_up.df.behind", value) for value in [*NUMBERS, 0.5]),
        ("catch_up.df.rows", 1),
    ],
)
def test_nonsense_in_a_profile_is_refused_by_file_and_key(tmp_path, key, value):
    split = key.partition("1.5") if "1.5" in key else None
    found = PROFILE | {"rounds": {"df": {"1.5": value}}} if split else changed(PROFILE, key, value)
    told = refused(Profile.read, write(tmp_path / "p.json", found))
    assert told.startswith(f"{tmp_path / 'p.json'} is no latency profile ({key}") and "whiflash calibrate" in told
    assert len(told) < 500


@pytest.mark.parametrize("content", ["", "{", "[]", "5", "null", '"x"', "[" * 100_000, "\xff"])
def test_what_is_no_profile_is_refused(tmp_path, content):
    (tmp_path / "p.json").write_bytes(content.encode("latin-1"))
    assert f"{tmp_path / 'p.json'} is no latency profile" in refused(Profile.read, tmp_path / "p.json")


LINES = ['{"a": 1}', "5", "null", "[]", "{", "\0\0", '"turns"', "[" * 100_000]
BAD_RESULTS = [
    *LINES,
    *(json.dumps(changed(RESULT, key, ...)) for key in RESULT),
    *(json.dumps(changed(RESULT, key, 5)) for key in RESULT if key != "left_out"),
    *(json.dumps(RESULT | {"turns": [changed(TURN, key, ...)]}) for key in TURN),
    *(json.dumps(RESULT | {"turns": [changed(TURN, key, "x")]}) for key in TURN),
    json.dumps(RESULT | {"turns": [changed(TURN, "rounds.accepted", [1, 2])]}),
    json.dumps(RESULT | {"turns": [changed(TURN, "rounds.verify", ["x"])]}),
]


@pytest.mark.parametrize("line", BAD_RESULTS, ids=range(len(BAD_RESULTS)))
@pytest.mark.parametrize("name", ["results.jsonl", "results.rank1.jsonl"])
def test_a_damaged_line_of_results_is_told(tmp_path, name, line):
    for stem in {"results", name.removesuffix(".jsonl")}:
        write(tmp_path / f"{stem}.settings.json", {"seed": 0})
        (tmp_path / f"{stem}.jsonl").write_text(f"{json.dumps(RESULT)}\n")
    (tmp_path / name).write_text(f"{json.dumps(RESULT)}\n{line}\n")
    told = refused(Results, tmp_path, {"seed": 0}, Ranks())
    assert f"{tmp_path / name}, line 2 is damaged" in told and told.endswith("remove that line and run again")
    summary = {"complete": True, "settings": {"methods": {}, "target": "t (f)", "temperature": 0}}
    write(tmp_path / "summary.json", summary)
    if name == "results.jsonl":
        assert f"{tmp_path / name}, line 2 is damaged" in refused(runs.read_run, tmp_path)


@pytest.mark.parametrize("content", ["[]", "5", "null", '"x"', "{", "", "[" * 100_000])
def test_damaged_settings_are_told(tmp_path, content):
    (tmp_path / "results.settings.json").write_text(content)
    told = refused(Results, tmp_path, {"seed": 0}, Ranks())
    assert f"{tmp_path / 'results.settings.json'} is damaged" in told and "restore it" in told
    (tmp_path / "record.settings.json").write_text(content)
    told = refused(positions.read_record, write(tmp_path / "record.jsonl", TEXT))
    assert f"{tmp_path / 'record.settings.json'} is damaged" in told and "whiflash calibrate" in told


BAD_TEXTS = [
    *LINES,
    *(json.dumps(changed(TEXT, key, ...)) for key in TEXT),
    *(json.dumps(changed(TEXT, key, [])) for key in TEXT),
    json.dumps(TEXT | {"surprise": 1}),
    json.dumps(TEXT | {"scores": {}}),
    json.dumps(TEXT | {"scores": {"entropy": [0.5]}}),
    json.dumps(TEXT | {"scores": {"entropy": "xx"}}),
    json.dumps(TEXT | {"paths": {"df": [["x"], []]}}),
    json.dumps(TEXT | {"likely": {"df": [1, 2]}}),
]


@pytest.mark.parametrize("line", BAD_TEXTS, ids=range(len(BAD_TEXTS)))
def test_a_damaged_line_of_a_record_is_told(tmp_path, line):
    (tmp_path / "record.jsonl").write_text(f"{json.dumps(TEXT)}\n{line}\n")
    told = refused(positions.read_record, tmp_path / "record.jsonl")
    assert f"{tmp_path / 'record.jsonl'}, line 2 is damaged" in told and "run `whiflash calibrate` again" in told


def test_only_what_differs_in_settings_is_told(tmp_path):
    shape = {"depth": 5, "p_min": None, "widths": list(range(200))}
    before = {"methods": {"EAGLE-3": shape, "AR": {}}, "target": "t", "seed": 0, "threads": 2}
    Journal(tmp_path / "a.jsonl", before)

    def told(**given) -> str:
        return (
            refused(Journal, tmp_path / "a.jsonl", before | given).partition("; choose")[0].partition("made with ")[2]
        )

    depth = {"EAGLE-3": shape | {"depth": 3}, "AR": {}}
    assert told(methods=depth) == "methods.EAGLE-3.depth = 5, but this run has 3"
    three = (
        "methods.EAGLE-3.depth = 5, but this run has 3; seed = 0, but this run has 1; threads = 2, but this run has 1"
    )
    assert told(methods=depth, seed=1, threads=1) == three
    assert told(methods=depth, seed=1, target="u", threads=1, new=1).endswith("and 2 more")
    assert told(methods={"AR": {}}) == "methods.EAGLE-3 = {…}, but this run has None"
    assert len(told(methods={"EAGLE-3": shape | {"widths": list(range(300))}, "AR": {}})) < 400


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ([(0, 0), (10, 0), (20, 1)], "1 of 4, 30 s left"),  # what comes before the first is a warm-up
        ([(0, 1), (10, 2)], "2 of 4, 20 s left"),
        ([(0, 3)], "3 of 4:"),
        ([(0, 4), (50, 0), (60, 2)], "2 of 4, 10 s left"),
        ([(0, 1), (5, 4), (50, 0), (60, 1)], "1 of 4, 30 s left"),
    ],
)
def test_time_left_is_told_from_what_this_process_did(monkeypatch, capsys, calls, told):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    with progress.eta_bar() as report:
        for seconds, done in calls:
            monkeypatch.setattr(progress.time, "monotonic", lambda now=seconds: 9000.0 + now)
            report(done, 4, "x")
    assert told in capsys.readouterr().err.splitlines()[-1]
