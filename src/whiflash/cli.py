"""`whiflash`: one command each; heavy imports wait for theirs."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whiflash import __version__
from whiflash import options as o
from whiflash.errors import WhiFlashError
from whiflash.evaluation import commands as evaluation
from whiflash.training.commands import app as train_app

if TYPE_CHECKING:
    from whiflash.model import Output, WhiFlash

app = typer.Typer(
    help="Speculative decoding with several drafters and a router that picks one every round; exact output.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(train_app, name="train")

evaluation.add_to(app)

# for each shape of a draft its flag, and the drafters that it is for
SHAPED = {
    "block_size": ("--block-size", ("df", "ddt")),
    "block_rows": ("--block-rows", ("df",)),
    "tree_budget": ("--tree-budget", ("ddt",)),
    "eagle3_depth": ("--eagle-depth", ("e3",)),
    "eagle3_top_k": ("--eagle-top-k", ("e3",)),
    "eagle3_total_tokens": ("--eagle-total-tokens", ("e3",)),
    "p_min": ("--draft-p-min", ("df", "ddt", "e3")),
}


def main() -> None:
    """Run the command line; bad input ends in one sentence and exit code 2, Ctrl-C in 130."""
    try:
        app()
    except WhiFlashError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"whiflash {__version__}")
        raise typer.Exit


@app.callback()
def _first(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Holds the options that stand before any command."""


def _load(**given: Any) -> "WhiFlash":
    from whiflash.calibration import parse_threshold
    from whiflash.model import Drafting, WhiFlash
    from whiflash.progress import bar

    given["threshold"] = parse_threshold(given["threshold"])
    shape = {name: given.pop(name) for name in ("tree_budget", "block_size", "block_rows")}
    eagle = {f"eagle3_{name}": given.pop(f"eagle_{name}") for name in ("depth", "top_k", "total_tokens")}
    drafting = Drafting(**shape, **eagle, p_min=given.pop("draft_p_min"))
    _check_shapes(given["drafters"], asdict(drafting), asdict(Drafting()))
    with bar("preparing the embedded target") as progress:
        return WhiFlash.from_pretrained(drafting=drafting, progress=progress, **given)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The user's text; - reads it from standard input.")],
    target: o.Target = "smollm2-135m",
    dtype: o.Dtype = None,
    device: o.Device = None,
    drafters: o.Drafters = "df-e3",
    dflash: o.Dflash = None,
    eagle3: o.Eagle3 = None,
    router: o.RouterName = None,
    threshold: o.Threshold = None,
    slot: o.Slot = 0,
    router_flip: o.Flip = False,
    tree_budget: o.TreeBudget = None,
    block_size: o.BlockSize = None,
    block_rows: o.BlockRows = None,
    eagle_depth: o.EagleDepth = None,
    eagle_top_k: o.EagleTopK = 1,
    eagle_total_tokens: o.EagleTotal = None,
    draft_p_min: o.PMin = None,
    tap_ids: o.TapIds = None,
    lazy_catchup: o.Lazy = True,
    kv_only: o.KvOnly = True,
    max_new_tokens: o.MaxNew = 256,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    seed: o.Seed = None,
    stop: o.Stop = None,
    stop_token_id: o.StopId = None,
    ignore_eos: o.IgnoreEos = False,
    system: o.System = None,
    enable_thinking: o.Thinking = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming text.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write one line of JSON a round to this file.")] = None,
    color: o.Color = False,
) -> None:
    """Answer one prompt, streaming; ends with a line of figures on standard error."""
    from rich.console import Console

    from whiflash.decoding.trace import trace_line
    from whiflash.terminal import legend, show, summary

    _check_sampling(max_new_tokens, temperature, top_k, top_p, min_p, seed)
    if trace is not None:
        _check_writable(trace)
    model = _load(
        target=target, dtype=dtype, device=device, drafters=drafters, dflash=dflash, eagle3=eagle3, router=router,
        threshold=threshold, slot=slot, router_flip=router_flip, tree_budget=tree_budget, block_size=block_size,
        block_rows=block_rows, eagle_depth=eagle_depth, eagle_top_k=eagle_top_k, eagle_total_tokens=eagle_total_tokens,
        draft_p_min=draft_p_min,
        tap_ids=tap_ids, lazy=lazy_catchup, kv_only=kv_only,
    )  # fmt: skip
    stream = model.stream(
        _read_stdin() if prompt == "-" else prompt,
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
        stop=stop or (), stop_token_ids=stop_token_id or (), ignore_eos=ignore_eos, system=system,
        **_template(enable_thinking),
    )  # fmt: skip
    console = None if as_json else Console(force_terminal=True if color else None, highlight=False)
    whole = show(stream, model.target, console, color, stop or ())
    out = stream.output()
    if console is None:
        typer.echo(json.dumps(_as_json(out, model), allow_nan=False))
    elif color:
        console.print(legend([d.name for d in model.drafters]))
    if trace is not None:
        _write(trace, "".join(trace_line(i, r) + "\n" for i, r in enumerate(out.rounds)))
    typer.echo(summary(out.stats), err=True)
    if not whole:
        raise typer.Exit(130)


@app.command()
def chat(
    target: o.Target = "smollm2-135m",
    dtype: o.Dtype = None,
    device: o.Device = None,
    drafters: o.Drafters = "df-e3",
    dflash: o.Dflash = None,
    eagle3: o.Eagle3 = None,
    router: o.RouterName = None,
    threshold: o.Threshold = None,
    slot: o.Slot = 0,
    router_flip: o.Flip = False,
    tree_budget: o.TreeBudget = None,
    block_size: o.BlockSize = None,
    block_rows: o.BlockRows = None,
    eagle_depth: o.EagleDepth = None,
    eagle_top_k: o.EagleTopK = 1,
    eagle_total_tokens: o.EagleTotal = None,
    draft_p_min: o.PMin = None,
    tap_ids: o.TapIds = None,
    max_new_tokens: o.MaxNew = 512,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    seed: o.Seed = None,
    system: o.System = None,
    enable_thinking: o.Thinking = None,
    color: o.Color = False,
) -> None:
    """Talk in turns that share caches. Ctrl-C stops an answer, /reset starts anew, Ctrl-D or /exit leaves."""
    from whiflash.chat import converse

    _check_sampling(max_new_tokens, temperature, top_k, top_p, min_p, seed)
    model = _load(
        target=target, dtype=dtype, device=device, drafters=drafters, dflash=dflash, eagle3=eagle3, router=router,
        threshold=threshold, slot=slot, router_flip=router_flip, tree_budget=tree_budget, block_size=block_size,
        block_rows=block_rows, eagle_depth=eagle_depth, eagle_top_k=eagle_top_k, eagle_total_tokens=eagle_total_tokens,
        draft_p_min=draft_p_min,
        tap_ids=tap_ids,
    )  # fmt: skip
    converse(
        model, system=system, color=color,
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
        **_template(enable_thinking),
    )  # fmt: skip


@app.command()
def info(
    checkpoint: Annotated[str, typer.Argument(help="Hub id, directory or file of a target, drafter or router.")],
    target_layers: Annotated[
        int | None, typer.Option(help="Layers of the target, for drafters that tap its default layers.")
    ] = None,
) -> None:
    """Print what the loader understands of a checkpoint."""
    from rich.console import Console
    from rich.table import Table

    from whiflash.inspect import describe

    table = Table(show_header=False, box=None)
    for key, value in describe(checkpoint, target_layers).items():
        table.add_row(key, str(value))
    Console(highlight=False).print(table)


@app.command()
def demo(
    max_new_tokens: Annotated[int, typer.Option(help="Tokens an answer.")] = 96,
    threshold: Annotated[float | None, typer.Option(help="The router's threshold.")] = None,
) -> None:
    """Answer one prompt a category with every method, and compare speed and output."""
    from whiflash.demo import run

    if not run(max_new_tokens, threshold):
        raise typer.Exit(1)


def _check_shapes(drafters: str, given: dict[str, Any], plain: dict[str, Any]) -> None:
    """Refuse, before anything is loaded, what would otherwise be ignored."""
    for name, (flag, takers) in SHAPED.items():
        if given[name] != plain[name] and not set(takers) & set(drafters.split("-")):
            raise WhiFlashError(
                f"{flag} has no effect on drafters {drafters}, since it shapes {' or '.join(takers)} drafts; "
                "leave it out, or choose other drafters"
            )


def _template(enable_thinking: bool | None) -> dict[str, Any]:
    return {} if enable_thinking is None else {"enable_thinking": enable_thinking}


def _check_sampling(max_new_tokens: int, *sampling: Any) -> None:
    """Fail before anything is loaded, not after."""
    from whiflash.decoding.sampling import Sampling
    from whiflash.decoding.stopping import Stopping

    Sampling(*sampling)
    Stopping(max_new_tokens)


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise WhiFlashError(f"standard input is not {sys.stdin.encoding} text ({error.reason})") from error


def _check_writable(path: Path) -> None:
    if path.is_dir() or not path.parent.is_dir():
        raise WhiFlashError(f"cannot write the trace to {path}: it must be a file in a directory that exists")
    with _writing(path):
        if _is_plain(path):
            partial = _partial(path)
            partial.touch()
            partial.unlink()


def _write(path: Path, text: str) -> None:
    """Whole or not at all; a pipe or device (/dev/stdout) is written to, not replaced."""
    with _writing(path):
        if _is_plain(path):
            partial = _partial(path)
            partial.write_text(text, "utf-8")
            partial.replace(path)
        else:
            path.write_text(text, "utf-8")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WhiFlashError(f"cannot write the trace to {path}: {error.strerror}; choose another place") from error


def _is_plain(path: Path) -> bool:
    return path.is_file() or not path.exists()


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def _as_json(out: "Output", model: "WhiFlash") -> dict[str, Any]:
    from whiflash.decoding.trace import trace_line
    from whiflash.evaluation.methods import mode

    stats = {**asdict(out.stats), "tokens_per_second": out.stats.tokens_per_second}
    return {
        "mode": mode(model),
        "text": out.text,
        "tokens": out.tokens,
        "finish_reason": out.finish_reason,
        "stats": {k: None if isinstance(v, float) and v != v else v for k, v in stats.items()},
        "rounds": [json.loads(trace_line(i, r)) for i, r in enumerate(out.rounds)],
    }


if __name__ == "__main__":
    main()
