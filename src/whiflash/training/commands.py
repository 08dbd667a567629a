"""`whiflash train …`: the training stages on the command line."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from whiflash.errors import WhiFlashError

if TYPE_CHECKING:
    from whiflash.target.target import Target
    from whiflash.training.pipeline import Texts
    from whiflash.training.recipe import Recipe
    from whiflash.training.synthesize import Status

app = typer.Typer(
    help="Train drafters and routers for a chat model from its own answers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TargetName = Annotated[
    str, typer.Option("--target", "-t", help="Hub id, directory, or smollm2-135m (the embedded one).")
]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; float32 on CPU, bfloat16 elsewhere.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, …; a GPU if there is one.")]
OutDir = Annotated[Path, typer.Option("--out", "-o", help="Directory of the results; the same one resumes.")]
RecipeName = Annotated[
    str | None, typer.Option("--recipe", help="TOML file or shipped recipe; the target's own, else defaults.")
]
Prompts = Annotated[
    list[Path] | None,
    typer.Option("--prompts", help="JSONL prompts: a category, and turns of which the first counts; repeatable."),
]
Exclude = Annotated[
    list[Path] | None, typer.Option("--exclude", help="JSONL of prompts that must not be trained on; repeatable.")
]
TextsFile = Annotated[Path, typer.Option("--texts", help="Answers as `train data` writes them.")]
Hours = Annotated[
    float | None, typer.Option(help="Time budget, loading apart; without one, the recipe's counts and steps decide.")
]
Steps = Annotated[int | None, typer.Option(help="Steps to train, if there is no time budget.")]
Seed = Annotated[int | None, typer.Option(help="Draws everything random anew; the recipe's if left out.")]
Features = Annotated[
    Path | None, typer.Option(help="Where the target's states are kept; beside the texts if left out.")
]
Online = Annotated[bool, typer.Option("--online", help="Compute the target's states when needed, keeping none.")]

Init = Annotated[
    str | None, typer.Option("--init", help="Checkpoint to go on from; the target's own weights if left out.")
]

_console = Console(stderr=True, highlight=False)


@app.command()
def data(
    out: Annotated[Path, typer.Option("--out", "-o", help="JSONL of answers; the same one resumes.")],
    target: TargetName = "smollm2-135m",
    prompts: Prompts = None,
    exclude: Exclude = None,
    synthesise: Annotated[int | None, typer.Option(help="Questions the target writes itself.")] = None,
    count: Annotated[int | None, typer.Option(help="Most answers; one for every prompt if left out.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
    max_prompt: Annotated[int | None, typer.Option(help="Longer prompts are left out, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 answers greedily.")] = None,
    slots: Annotated[int | None, typer.Option(help="Answers generated at a time.")] = None,
    hours: Hours = None,
    recipe: RecipeName = None,
    seed: Seed = None,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Answer prompts with the target, greedily or sampled, many at a time."""
    from whiflash.training.features import check_alone
    from whiflash.training.recipe import Recipe
    from whiflash.training.synthesize import make_data

    check_alone("data")
    chosen = (_recipe(recipe, target, seed) if recipe else Recipe().seeded(seed or 0)).data
    given: dict[str, Any] = {
        "synthesise": synthesise, "count": count, "max_tokens": max_tokens, "max_prompt": max_prompt,
        "temperature": temperature, "slots": slots,
    }  # fmt: skip
    chosen = replace(chosen, **{name: value for name, value in given.items() if value is not None})
    _check_hours(hours)
    loaded = _target(target, dtype, device)
    with _progress() as report:
        seconds = None if hours is None else hours * 3600
        rows = make_data(loaded, out, chosen, prompts or (), exclude or (), report, seconds)
    _console.print(f"{out}: {rows} answers")


@app.command()
def eagle3(
    texts: TextsFile,
    out: OutDir,
    target: TargetName = "smollm2-135m",
    recipe: RecipeName = None,
    hours: Hours = None,
    steps: Steps = None,
    features: Features = None,
    online: Online = False,
    init: Init = None,
    seed: Seed = None,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Train an EAGLE-3 head; OUT/best is the checkpoint."""
    from whiflash.training.eagle3 import train_eagle3

    _train_drafter(
        train_eagle3, "eagle3", texts, out, target, recipe, hours, steps, features, online, init, seed, dtype, device
    )


@app.command()
def dflash(
    texts: TextsFile,
    out: OutDir,
    target: TargetName = "smollm2-135m",
    recipe: RecipeName = None,
    hours: Hours = None,
    steps: Steps = None,
    features: Features = None,
    online: Online = False,
    init: Init = None,
    seed: Seed = None,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Train a DFlash model; OUT/best is the checkpoint."""
    from whiflash.training.dflash import train_dflash

    _train_drafter(
        train_dflash, "dflash", texts, out, target, recipe, hours, steps, features, online, init, seed, dtype, device
    )


@app.command()
def router(
    texts: TextsFile,
    out: OutDir,
    dflash: Annotated[str, typer.Option(help="DFlash checkpoint: hub id or directory.")],
    drafters: Annotated[str, typer.Option("--drafters", "-d", help="df-e3, ddt-e3 or df-ddt.")] = "df-e3",
    eagle3: Annotated[str | None, typer.Option(help="EAGLE-3 checkpoint: hub id or directory.")] = None,
    tree_budget: Annotated[int | None, typer.Option(help="DDTree nodes besides the root.")] = None,
    eagle_depth: Annotated[int | None, typer.Option(help="EAGLE-3 levels.")] = None,
    apart: Annotated[
        int | None, typer.Option(help="Texts kept from the drafters to learn from; 0: all, for drafters of others.")
    ] = None,
    target: TargetName = "smollm2-135m",
    recipe: RecipeName = None,
    features: Features = None,
    online: Online = False,
    seed: Seed = None,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Train a router for a pair of drafters."""
    from whiflash.training import pipeline
    from whiflash.training.acceptance import Drafters
    from whiflash.training.features import check_alone
    from whiflash.training.router import train_router

    check_alone("router")
    chosen = _recipe(recipe, target, seed)
    given: dict[str, Any] = {"tree_budget": tree_budget, "chain": eagle_depth}
    settings = replace(
        chosen.router, pairs=(drafters,), **{name: value for name, value in given.items() if value is not None}
    )
    if "e3" in drafters and eagle3 is None:
        raise WhiFlashError(f"the pair {drafters} needs an EAGLE-3 head; give --eagle3")
    chosen = replace(chosen, router=settings)
    if apart is not None:
        chosen = replace(chosen, texts=replace(chosen.texts, apart=apart))
    loaded = _target(target, dtype, device)
    models = Drafters.load(loaded, dflash, eagle3)
    with _progress() as report:
        ready = _texts(loaded, texts, chosen, features, online)
        measured = pipeline.measure_all(ready, models, texts.with_name(f"{texts.stem}.acceptance"), settings, report)
        scores = train_router(drafters, loaded, *measured, settings, out, _log)
    _print_routers({drafters: scores})


@app.command("all")
def everything(
    out: OutDir,
    target: TargetName = "smollm2-135m",
    recipe: RecipeName = None,
    hours: Hours = None,
    prompts: Prompts = None,
    exclude: Exclude = None,
    texts: Annotated[Path | None, typer.Option(help="Answers that exist already, instead of a data stage.")] = None,
    seed: Seed = None,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Answers, EAGLE-3, DFlash and routers in one go; run again, it resumes and skips what is done."""
    from whiflash.training.features import check_alone
    from whiflash.training.pipeline import train_all

    check_alone("all")
    chosen = _recipe(recipe, target, seed)
    _check_hours(hours)
    loaded = _target(target, dtype, device)
    with _progress() as report:
        summary = train_all(
            loaded, out, chosen, hours=hours, prompts=prompts or (), exclude=exclude or (), texts=texts,
            report=report, log=_log,
        )  # fmt: skip
    _print_drafters(summary["drafters"])
    _print_routers(summary["routers"])


def _train_drafter(
    run: Callable[..., Any],
    kind: str,
    texts: Path,
    out: Path,
    target: str,
    recipe: str | None,
    hours: float | None,
    steps: int | None,
    features: Path | None,
    online: bool,
    init: str | None,
    seed: int | None,
    dtype: str | None,
    device: str | None,
) -> None:
    chosen = _recipe(recipe, target, seed)
    settings = getattr(chosen, kind)
    given = {name: value for name, value in (("hours", hours), ("steps", steps)) if value is not None}
    settings = replace(settings, loop=replace(settings.loop, **given), init=init or settings.init)
    loaded = _target(target, dtype, device)
    ready = _texts(loaded, texts, chosen, features, online)
    history = run(settings, loaded, ready.source, ready.held, out, _log).history
    if history:
        best = max(history, key=lambda row: row["acceptance"]["overall"]["rounds"])
        _print_drafters({kind: {"step": best["step"], "acceptance": best["acceptance"]}})


def _recipe(name: str | None, target: str, seed: int | None) -> "Recipe":
    from whiflash.training.recipe import load_recipe

    recipe = load_recipe(name, target)
    return recipe if seed is None else recipe.seeded(seed)


def _target(name: str, dtype: str | None, device: str | None) -> "Target":
    from whiflash.progress import bar
    from whiflash.target.load import load_target

    with bar("preparing the embedded target") as progress:
        return load_target(name, dtype=dtype, device=device, progress=progress)


def _texts(
    target: "Target",
    file: Path,
    recipe: "Recipe",
    features: Path | None,
    online: bool,
) -> "Texts":
    from whiflash.training.pipeline import prepare_texts

    settings = replace(recipe.texts, online=True) if online else recipe.texts
    return prepare_texts(target, file, settings, features or file.with_name(f"{file.stem}.features"), _log)


def _check_hours(hours: float | None) -> None:
    if hours is not None and not hours > 0:
        raise WhiFlashError(f"the time budget must be positive, got {hours} hours")


def _log(line: str) -> None:
    _console.print(line, markup=False, soft_wrap=True)


@contextmanager
def _progress() -> "Iterator[Callable[[Status], None]]":
    """Draws where a stage stands: in place on a terminal, else a line every half minute."""
    live = _console.status("") if _console.is_terminal else None
    stage, told = "", 0.0

    def report(status: "Status") -> None:
        nonlocal stage, told
        line = f"{status.stage}: {status.done} of {status.total}"
        if status.rate > 1:
            line += f", {status.rate:.0f} tok/s"
        if status.eta is not None:
            line += f", {_duration(status.eta)} left"
        if live is not None:
            live.update(line)
            live.start()
        elif status.stage != stage or time.monotonic() - told > 30 or status.done == status.total:
            stage, told = status.stage, time.monotonic()
            _log(line)

    try:
        yield report
    finally:
        if live is not None:
            live.stop()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _print_drafters(drafters: dict[str, Any]) -> None:
    """Acceptance length in rounds (bonus token included) on held-out texts, per category."""
    names = next(iter(drafters.values()))["acceptance"] if drafters else []
    table = Table("drafter", "step", *names, title="held-out acceptance length in rounds, bonus token included")
    for name, row in drafters.items():
        table.add_row(name, str(row["step"]), *(f"{values['rounds']:.3f}" for values in row["acceptance"].values()))
    _console.print(table)


def _print_routers(routers: dict[str, Any]) -> None:
    headings = ("R²", "sign right", "regret", "first drafter", "second drafter", "router", "oracle")
    table = Table("pair", *headings, title="routers on held-out texts; acceptance length in rounds")
    for pair, scores in routers.items():
        row = scores["overall"]
        values = [row["r2"], row["sign"], row["regret"], *row["rounds"].values()]
        table.add_row(pair, *(f"{value:.3f}" for value in values))
    _console.print(table)
