"""From a chat model to drafters and routers: the stages in order, within a time budget, each resumed or skipped."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from whiflash.errors import WhiFlashError
from whiflash.journal import exclusive, fingerprint, read_json, write_atomic
from whiflash.target.load import load_target
from whiflash.target.target import Target
from whiflash.training.acceptance import Drafters, Measured, measure
from whiflash.training.dflash import train_dflash
from whiflash.training.eagle3 import train_eagle3
from whiflash.training.features import Sample, Source, check_alone, describe, prepare
from whiflash.training.loop import LoopConfig, Run
from whiflash.training.recipe import Recipe, TextRecipe
from whiflash.training.router import RouterRecipe, train_router
from whiflash.training.synthesize import Report, Status, make_data

Log = Callable[[str], None]
# seconds between two looks of the clock at a stage that is running
NOTE = 10.0


def silent(status: Status) -> None:
    """A report that nobody reads."""


@dataclass(frozen=True)
class Texts:
    """Training texts with the target's states, the held-out ones, and those kept for routers."""

    source: Source
    held: list[Sample]
    apart: Source

    @property
    def routers(self) -> Source:
        """What routers learn from."""
        return self.apart if len(self.apart) else self.source


def prepare_texts(target: Target, file: str | Path, recipe: TextRecipe, features: str | Path, log: Log) -> Texts:
    """Read answers, set some apart, and compute the target's states into `features` (unless `recipe.online`)."""
    recipe.check(target)
    reader = None
    if recipe.precision is not None and recipe.precision != target.precision:
        reader = load_target(target.path, dtype=recipe.precision, device=target.device)
    source, held, apart = prepare(
        file,
        target,
        None if recipe.online else features,
        taps=recipe.taps,
        held_out=recipe.held_out,
        apart=recipe.apart,
        max_length=recipe.max_length,
        reader=reader,
        log=log,
    )
    if not len(source) or not held:
        raise WhiFlashError(f"{file} holds too few different prompts to train on some and evaluate on others")
    return Texts(source, held, apart)


class Progress:
    """`work/progress.json`: for each stage its seconds so far, and what it was made from once it is done."""

    def __init__(self, path: Path, log: Log):
        self.path, self.log = path, log
        self.stages: dict[str, dict[str, Any]] = read_json(path) if path.exists() else {}

    def seconds(self, stage: str) -> float:
        return float(self.stages.get(stage, {}).get("seconds", 0.0))

    def done(self, stage: str, made_from: Any) -> bool:
        """Whether the stage was finished with these inputs before; says so if it was."""
        if self.stages.get(stage, {}).get("done") != fingerprint(made_from):
            return False
        self.log(f"{stage}: done before, skipped")
        return True

    @contextmanager
    def running(self, stage: str) -> Iterator[Callable[[], None]]:
        """Times a stage; the callback it yields notes the time now and then, so that a kill forgets little of it."""
        entry = self.stages.setdefault(stage, {})
        entry.pop("done", None)
        before, began, noted = self.seconds(stage), time.monotonic(), time.monotonic()

        def note(always: bool = False) -> None:
            nonlocal noted
            if always or time.monotonic() - noted >= NOTE:
                noted = time.monotonic()
                entry["seconds"] = round(before + noted - began, 1)
                self._write()

        try:
            yield note
        finally:
            note(always=True)

    def finish(self, stage: str, made_from: Any) -> None:
        self.stages.setdefault(stage, {})["done"] = fingerprint(made_from)
        self._write()

    def _write(self) -> None:
        write_atomic(self.path, json.dumps(self.stages, indent=1) + "\n")


def train_all(
    target: Target,
    out: str | Path,
    recipe: Recipe,
    *,
    hours: float | None = None,
    prompts: Sequence[str | Path] = (),
    exclude: Sequence[str | Path] = (),
    texts: str | Path | None = None,
    report: Report = silent,
    log: Log = lambda line: None,
) -> dict[str, Any]:
    """Leave `eagle3`, `dflash` and `router-*` in `out`, whatever they grew from in `out/work`; returns the summary.

    hours: time budget, shared out as the recipe says; without one, the recipe's counts and steps decide. texts: answers
    that exist already, instead of a data stage. The same call on the same `out` resumes, and skips what is done.
    """
    if hours is not None and not hours > 0:
        raise WhiFlashError(f"the time budget must be positive, got {hours} hours")
    check_alone("all")
    out, work = Path(out), Path(out) / "work"
    with exclusive(work / "lock"):
        progress = Progress(work / "progress.json", log)
        answers = Path(texts) if texts else work / "answers.jsonl"
        if texts is None:
            _data(target, answers, recipe, hours, prompts, exclude, progress, report, log)
        with progress.running("states"):
            ready = prepare_texts(target, answers, recipe.texts, work / "features", log)
        log("texts: " + ", ".join(f"{k} {v}" for k, v in describe(ready.source.texts).items()))
        data = [ready.source.fingerprint, held_fingerprint(ready), ready.routers.fingerprint]
        eagle3 = replace(recipe.eagle3, loop=budget(recipe.eagle3.loop, hours, recipe.shares.eagle3))
        dflash = replace(recipe.dflash, loop=budget(recipe.dflash.loop, hours, recipe.shares.dflash))
        stages: Iterable[tuple[str, Any, Callable[[], Run]]] = (
            ("eagle3", eagle3, lambda: train_eagle3(eagle3, target, ready.source, ready.held, work / "eagle3", log)),
            ("dflash", dflash, lambda: train_dflash(dflash, target, ready.source, ready.held, work / "dflash", log)),
        )
        for name, settings, run in stages:
            if not progress.done(name, [data, asdict(settings)]):
                with progress.running(name):
                    run()
                publish(work / name / "best", out / name)
                progress.finish(name, [data, asdict(settings)])
        _routers(target, out, recipe, ready, data, progress, report, log)
        summary = summarise(out, ready, progress)
        write_atomic(out / "summary.json", json.dumps(summary, indent=1) + "\n")
        return summary


def budget(loop: LoopConfig, hours: float | None, share: float) -> LoopConfig:
    """The loop's settings with its share of the time budget, if there is one."""
    return loop if hours is None else replace(loop, hours=hours * share)


def _data(
    target: Target,
    answers: Path,
    recipe: Recipe,
    hours: float | None,
    prompts: Sequence[str | Path],
    exclude: Sequence[str | Path],
    progress: Progress,
    report: Report,
    log: Log,
) -> None:
    made_from = [target.fingerprint(), asdict(recipe.data), [_content(f) for f in (*prompts, *exclude)]]
    # what time bought is not bought again: once other stages have begun, the texts stay as they are
    if progress.done("data", made_from):
        return
    seconds = None if hours is None else hours * 3600 * recipe.shares.data - progress.seconds("data")
    with progress.running("data") as note:

        def told(status: Status) -> None:
            note()
            report(status)

        rows = make_data(target, answers, recipe.data, prompts, exclude, told, seconds)
    if not rows:
        raise WhiFlashError("the time budget ended before there was a single answer; give it more --hours")
    log(f"data: {rows} answers")
    progress.finish("data", made_from)


def _content(file: str | Path) -> str:
    try:
        return sha256(Path(file).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise WhiFlashError(f"{file} cannot be read ({error.strerror}); expected a JSONL file") from error


def _routers(
    target: Target,
    out: Path,
    recipe: Recipe,
    ready: Texts,
    data: list[str],
    progress: Progress,
    report: Report,
    log: Log,
) -> None:
    pairs = [pair for pair in recipe.router.pairs if not (out / f"router-{pair}" / "config.json").exists()]
    drafters = Drafters.load(target, out / "dflash", out / "eagle3")
    made_from = [data, drafters.identity, asdict(recipe.router)]
    if not pairs and progress.done("routers", made_from):
        return
    with progress.running("routers") as note:

        def told(status: Status) -> None:
            note()
            report(status)

        train, held = measure_all(ready, drafters, out / "work", recipe.router, told)
        for pair in recipe.router.pairs:
            train_router(pair, target, train, held, recipe.router, out / f"router-{pair}", log)
    progress.finish("routers", made_from)


def measure_all(
    ready: Texts, drafters: Drafters, work: Path, recipe: RouterRecipe, report: Report = silent
) -> tuple[list[Measured], list[Measured]]:
    """Acceptance of each drafter at every position of the routers' and of the held-out texts, kept in `work`."""
    results = []
    for samples, texts in (
        (ready.routers, ready.routers.fingerprint),
        (ready.held, held_fingerprint(ready)),
    ):
        began = time.monotonic()

        def told(done: int, total: int, began: float = began) -> None:
            report(Status("acceptance at every position", done, total, done, 0, time.monotonic() - began))

        results.append(measure(samples, texts, drafters, work, recipe.chain, recipe.tree_budget, told))
    return results[0], results[1]


def held_fingerprint(ready: Texts) -> str:
    return fingerprint([ready.source.fingerprint, [sample.tokens.tolist() for sample in ready.held]])


def publish(best: Path, out: Path) -> None:
    """Copy a finished checkpoint to where users look for it; each file is replaced whole, the config last."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file in sorted(best.iterdir(), key=lambda f: f.name == "config.json"):
            temporary = out / f".{file.name}.tmp"
            shutil.copyfile(file, temporary)
            os.replace(temporary, out / file.name)
    except OSError as error:
        raise WhiFlashError(f"the checkpoint could not be copied from {best} to {out} ({error.strerror})") from error


def summarise(out: Path, ready: Texts, progress: Progress) -> dict[str, Any]:
    """What was made, from how much, and what it accepts on the held-out texts."""
    answers = sum(len(sample.tokens) - sample.start for sample in ready.held)
    summary: dict[str, Any] = {
        "texts": {
            "train": describe(ready.source.texts),
            "routers": describe(ready.routers.texts),
            "held_out": {"texts": len(ready.held), "answer tokens": answers},
        },
        "hours": {stage: round(progress.seconds(stage) / 3600, 3) for stage in progress.stages},
        "drafters": {},
        "routers": {},
    }
    for name in ("eagle3", "dflash"):
        rows = [json.loads(line) for line in (out / "work" / name / "log.jsonl").read_text("utf-8").splitlines()]
        best = max(rows, key=lambda row: row["acceptance"]["overall"]["rounds"])
        summary["drafters"][name] = {"step": best["step"], "acceptance": best["acceptance"]}
    for directory in sorted(out.glob("router-*")):
        config = read_json(directory / "config.json")
        summary["routers"][config["pair"]] = config["scores"]
    return summary
