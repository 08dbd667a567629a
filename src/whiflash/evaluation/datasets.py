"""Prompts by name: the benchmark's data sets from the hub or from files, and the set that ships with the package."""

import ast
import difflib
import gzip
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from whiflash.errors import WhiFlashError
from whiflash.evaluation import formats
from whiflash.evaluation.formats import Row, Turns
from whiflash.journal import json_rows, shown

CATEGORIES = ("chat", "math", "coding", "agentic")
DEMO = Path(__file__).parents[1] / "assets" / "demo"
# where a row is, for a message, and the row
Placed = tuple[str, Any]
SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".parquet")
# Rows looked at in sets too big to download: enough to draw a sample from.
STREAMED = 1000


@dataclass(frozen=True)
class Prompt:
    """One conversation: the user's turns, answered one after the other."""

    id: str
    dataset: str
    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class Hub:
    """Where `datasets.load_dataset` finds a set; `files` for repositories whose loading script no longer runs."""

    path: str
    config: str | None = None
    split: str = "test"
    streaming: bool = False
    files: str | None = None


@dataclass(frozen=True)
class Spec:
    """`files` are the names (or patterns) of the set's own published files, looked for in DIR and in DIR/<name>."""

    category: str
    turns: Callable[[Row], Turns]
    source: str
    files: tuple[str, ...]
    hub: Hub | None = None


DATASETS: dict[str, Spec] = {
    "mt-bench": Spec(
        "chat", formats.mt_bench, "question.jsonl of lm-sys/FastChat (fastchat/llm_judge/data/mt_bench)",
        ("mt-bench/question.jsonl",), Hub("HuggingFaceH4/mt_bench_prompts", split="train"),
    ),
    "alpaca": Spec(
        "chat", formats.alpaca, "alpaca_data.json of tatsu-lab/stanford_alpaca",
        ("alpaca_data.json", "alpaca/question.jsonl"),
        Hub("tatsu-lab/alpaca", split="train"),
    ),
    "ultrachat": Spec(
        "chat", formats.ultrachat, "a file of thunlp/UltraChat or of HuggingFaceH4/ultrachat_200k",
        ("ultrachat/test*", "ultrachat/train*"), Hub("HuggingFaceH4/ultrachat_200k", split="test_sft", streaming=True),
    ),
    "wildchat": Spec(
        "chat", formats.wildchat, "a parquet file of allenai/WildChat-1M", ("wildchat/train*",),
        Hub("allenai/WildChat-1M", split="train", streaming=True),
    ),
    "gsm8k": Spec(
        "math", formats.mathematics, "test.jsonl of openai/grade-school-math", ("gsm8k/test*", "gsm8k/main/test*"),
        Hub("openai/gsm8k", "main"),
    ),
    "math500": Spec(
        "math", formats.mathematics, "test.jsonl of HuggingFaceH4/MATH-500", ("math500/test*",),
        Hub("HuggingFaceH4/MATH-500"),
    ),
    "aime24": Spec(
        "math", formats.mathematics, "a file of HuggingFaceH4/aime_2024", ("aime24/*",),
        Hub("HuggingFaceH4/aime_2024", split="train"),
    ),
    "aime25": Spec(
        "math", formats.mathematics, "a file of MathArena/aime_2025", ("aime25/*",),
        Hub("MathArena/aime_2025", split="train"),
    ),
    "humaneval": Spec(
        "coding", formats.humaneval, "HumanEval.jsonl.gz of openai/human-eval", ("HumanEval.jsonl*", "humaneval/test*"),
        Hub("openai/openai_humaneval"),
    ),
    "mbpp": Spec(
        "coding", formats.mbpp, "sanitized-mbpp.json of google-research/mbpp",
        ("mbpp-sanitized.jsonl", "sanitized-mbpp.json", "mbpp/test*"),
        Hub("google-research-datasets/mbpp", "sanitized"),
    ),
    "livecodebench": Spec(
        "coding", formats.livecodebench, "test.jsonl of livecodebench/code_generation_lite", ("livecodebench/test*",),
        Hub("json", files="hf://datasets/livecodebench/code_generation_lite/test.jsonl", split="train"),
    ),
    "swe-bench": Spec(
        "agentic", formats.swe_bench, "the test file of princeton-nlp/SWE-bench_Lite", ("swe-bench/test*",),
        Hub("princeton-nlp/SWE-bench_Lite"),
    ),
    "tau-bench": Spec(
        "agentic", formats.tau_bench,
        "airline/ and retail/ of sierra-research/tau-bench (tau_bench/envs, with tasks_test.py and wiki.md)",
        ("tau-bench/**/tasks_test.py",),
    ),
    "agentbench": Spec(
        "agentic", formats.agentbench, "the numbered directories of THUDM/AgentBench (data/os_interaction/data)",
        ("agentbench/**/[0-9]*/*.json", "agentbench/*.json"),
    ),
    "agentinstruct": Spec(
        "agentic", formats.agentinstruct, "the parquet files of zai-org/AgentInstruct",
        ("agentinstruct/**/*.parquet", "agentinstruct/*"),
        Hub("THUDM/AgentInstruct", split="os+db+alfworld+webshop+kg+mind2web"),
    ),
}  # fmt: skip


def load_prompts(
    names: Sequence[str], directory: Path | None = None, max_samples: int | None = None, seed: int = 0
) -> list[Prompt]:
    """Prompts of the named sets, in order.

    A name is a data set, `category:<category>` (all its data sets), `demo` (built in), or the path of a .jsonl file
    with {"id", "category", "turns"}. max_samples: of each category of each set, drawn with `seed`, in the set's order.
    """
    if max_samples is not None and max_samples < 1:
        raise WhiFlashError(f"--max-samples must be at least 1, got {max_samples}")
    if directory is not None and not directory.is_dir():
        raise WhiFlashError(f"the data set directory {directory} does not exist")
    if directory is not None and set(names) == {"demo"}:
        raise WhiFlashError("--dataset-dir has no effect on demo, which is built in; name another --dataset")
    prompts: list[Prompt] = []
    for name in dict.fromkeys(chain.from_iterable(map(_expand, names))):
        loaded = list(_load(name, directory))
        if not loaded:
            raise WhiFlashError(f"data set {name} holds no prompt")
        for category in dict.fromkeys(p.category for p in loaded):
            prompts += _sample([p for p in loaded if p.category == category], max_samples, seed)
    if not prompts:
        raise WhiFlashError("no data set is named; give --dataset, for example --dataset demo")
    doubled = len(prompts) - len({p.id for p in prompts})
    if doubled:
        raise WhiFlashError(f"{doubled} prompts have the same id as another one; ids must differ")
    return prompts


def _expand(name: str) -> list[str]:
    if name.startswith("category:"):
        category = name.removeprefix("category:")
        if category not in CATEGORIES:
            raise WhiFlashError(f"category {category!r} is not known{_near(category, CATEGORIES)}")
        return [n for n, spec in DATASETS.items() if spec.category == category]
    if name in DATASETS or name == "demo" or name.endswith(".jsonl"):
        return [name]
    known = (*DATASETS, "demo", *(f"category:{c}" for c in CATEGORIES))
    raise WhiFlashError(f"data set {name!r} is not known{_near(name, known)}")


def _near(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else f"; there are {', '.join(known)}"


def _sample(prompts: list[Prompt], count: int | None, seed: int) -> list[Prompt]:
    if count is None or count >= len(prompts):
        return prompts
    return [prompts[i] for i in sorted(random.Random(seed).sample(range(len(prompts)), count))]


def _load(name: str, directory: Path | None) -> Iterator[Prompt]:
    if name == "demo":
        for category in CATEGORIES:
            yield from _prompts("demo", _read(DEMO / f"{category}.jsonl"), None)
    elif name not in DATASETS:
        if not Path(name).is_file():
            raise WhiFlashError(f"there is no file {name}; expected JSONL of id, category and turns")
        yield from _prompts(Path(name).stem, _read(Path(name)), None)
    else:
        spec = DATASETS[name]
        files = _find(name, spec, directory) if directory else []
        rows = (row for file in files for row in _read(file)) if files else _from_hub(name, spec, directory)
        yield from _prompts(name, rows, spec)


def _prompts(name: str, rows: Iterable[Placed], spec: Spec | None) -> Iterator[Prompt]:
    for index, (place, row) in enumerate(rows):
        try:
            turns = _turns(row, spec)
            category = spec.category if spec else row["category"]
            if category not in CATEGORIES:
                raise ValueError(f"its category is {shown(category)}")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            reason = f"it has no {error}, only {', '.join(row)}" if isinstance(error, KeyError) else error
            expected = f"the format of {spec.source}, or" if spec else f"a category of {', '.join(CATEGORIES)} and"
            raise WhiFlashError(
                f"{place} is no prompt of data set {name} ({reason}); expected {expected} turns, a list of texts"
            ) from error
        if turns:
            own = row.get("id") if "turns" in row else None
            yield Prompt(str(own or f"{name}/{index}"), name, category, turns)


def _turns(row: Any, spec: Spec | None) -> tuple[str, ...]:
    """Nothing for a published row that its format leaves out, or that holds no text."""
    if not isinstance(row, dict):
        raise TypeError(f"it is no object: {shown(row)}")
    published = None if spec is None or "turns" in row else spec.turns
    turns = published(row) if published else row["turns"]
    if published and turns is None:
        return ()
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise TypeError(f"its turns are no list of texts: {shown(turns)}")
    blank = not turns or not all(map(str.strip, turns))
    if blank and not published:
        raise ValueError(f"its turns are empty: {shown(turns)}")
    return () if blank else tuple(turns)


def _find(name: str, spec: Spec, directory: Path) -> list[Path]:
    """The files of a set: what carries its name, else its own files; all that match the first pattern that does."""
    for pattern in (*(name + s for s in SUFFIXES), *spec.files, f"{name}/*"):
        files = sorted(f for f in directory.glob(pattern) if f.name.endswith((*SUFFIXES, "tasks_test.py")))
        if files:
            return files
    return []


def _read(file: Path) -> Iterator[Placed]:
    try:
        if file.name.endswith((".jsonl", ".jsonl.gz")):
            with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as lines:
                yield from _lines(file, lines)
        elif file.suffix == ".json":
            yield from _rows_of_json(file)
        elif file.suffix == ".parquet":
            yield from _parquet(file)
        else:
            yield from _tasks(file)
    except WhiFlashError:
        raise
    except Exception as error:  # json, gzip, zlib, pyarrow and ast raise their own
        raise WhiFlashError(
            f"{file} cannot be read as a data set ({type(error).__name__}: {error}); restore it, or take it away"
        ) from error


def _lines(file: Path, lines: Iterable[str]) -> Iterator[Placed]:
    for number, row in json_rows(file, lines, "expected a JSON object with the row of a data set in every line"):
        yield f"{file}, line {number}", row


def _numbered(file: Path, rows: Iterable[Any]) -> Iterator[Placed]:
    for number, row in enumerate(rows, 1):
        yield f"{file}, row {number}", row


def _rows_of_json(file: Path) -> Iterator[Placed]:
    """A list of rows, or (in files named .json that hold one) one row a line."""
    text = file.read_text("utf-8")
    try:
        rows = json.loads(text)
    except ValueError:
        if text.lstrip().startswith("["):
            raise
        yield from _lines(file, text.split("\n"))
    else:
        yield from _numbered(file, rows if isinstance(rows, list) else [rows])


def _parquet(file: Path) -> Iterator[Placed]:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise WhiFlashError(f"reading {file.name} needs pyarrow: pip install 'whiflash[bench]'") from error
    batches = ParquetFile(file).iter_batches()
    yield from _numbered(file, chain.from_iterable(batch.to_pylist() for batch in batches))


def _tasks(file: Path) -> Iterator[Placed]:
    """tau-bench states its tasks as Python: the instruction of every `Task(…)`, with the policy that lies beside it."""
    wiki = (file.parent / "wiki.md").read_text("utf-8")
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Task":
            fields = {k.arg: k.value for k in node.keywords}
            yield f"{file}, line {node.lineno}", {"wiki": wiki, "instruction": ast.literal_eval(fields["instruction"])}


def _from_hub(name: str, spec: Spec, directory: Path | None) -> Iterator[Placed]:
    where = f"{directory}/{name}/" if directory else f"DIR/{name}/ and give --dataset-dir DIR"
    put = f"put {spec.source} into {where}"
    if spec.hub is None:
        raise WhiFlashError(f"data set {name} is not on the hub: {put}")
    try:
        import datasets
    except ImportError as error:
        raise WhiFlashError(
            f"loading {name} from the hub needs the datasets library: pip install 'whiflash[bench]'; or {put}"
        ) from error
    hub, options = spec.hub, {}
    if hub.files:
        options["data_files"] = hub.files
    try:
        rows: Any = datasets.load_dataset(hub.path, hub.config, split=hub.split, streaming=hub.streaming, **options)
        for number, row in enumerate(islice(rows, STREAMED) if hub.streaming else rows, 1):
            yield f"row {number} of {hub.path}", row
    except Exception as error:  # the library raises its own, the hub's, the network's and the file system's errors
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise WhiFlashError(f"data set {name} could not be loaded from the hub ({reason}); offline, {put}") from error
