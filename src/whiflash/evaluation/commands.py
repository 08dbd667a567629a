"""`whiflash bench` and `whiflash sweep` with the paper's flags; `calibrate` and `analyse`."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from whiflash.errors import WhiFlashError

T = TypeVar("T")
METHODS, ROUTING, DATA, RUN = "What is compared", "WhiFlash", "Prompts", "Run"


def _option(help: str, panel: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel)


Algorithms = Annotated[
    list[str],
    _option(
        "NONE, EAGLE3, DFLASH, DDTREE or WHIFLASH; several with commas or repeated. Plain decoding (AR) always runs.",
        METHODS,
        "--speculative-algorithm",
    ),
]
Model = Annotated[
    str, _option("Target: hub id, directory, or smollm2-135m (the embedded one).", METHODS, "--model-name-or-path")
]
Draft = Annotated[
    str | None,
    _option(
        "DFlash draft; EAGLE-3's if EAGLE3 runs alone. What ships with the package if left out.",
        METHODS,
        "--draft-name-or-path",
    ),
]
Budget = Annotated[
    list[str] | None,
    _option("DDTree nodes besides the root (16); several with commas.", METHODS, "--ddtree-tree-budget"),
]
BlockSize = Annotated[int | None, _option("DFlash block, anchor included; as trained if left out.", METHODS)]
EagleDepth = Annotated[
    int | None, _option("EAGLE-3 levels; 5, or what the neural router was trained for, if left out.", METHODS)
]
EagleTopK = Annotated[int | None, _option("EAGLE-3 children a node; 1 (a chain) if left out.", METHODS)]
EagleTotal = Annotated[int | None, _option("EAGLE-3 tree nodes, root included.", METHODS, "--eagle-total-tokens")]
PMin = Annotated[
    float | None,
    _option("Leave out drafted nodes whose path the drafter holds less likely than this.", METHODS, "--draft-p-min"),
]
Dtype = Annotated[str | None, _option("float32, bfloat16 or float16; float32 on CPU, bfloat16 elsewhere.", METHODS)]
Device = Annotated[str | None, _option("cpu, cuda, …; a GPU if there is one.", METHODS)]

EagleDraft = Annotated[str | None, _option("EAGLE-3 draft: hub id or directory.", ROUTING, "--whiflash-eagle-draft")]
Pairs = Annotated[
    list[str] | None,
    _option("df-e3 (if left out), ddt-e3 or df-ddt; several with commas.", ROUTING, "--whiflash-drafters"),
]
Routers = Annotated[
    list[str] | None, _option("entropy (if left out) or neural; several with commas.", ROUTING, "--whiflash-router")
]
RouterPath = Annotated[
    str | None, _option("Neural router: hub id, directory or file.", ROUTING, "--whiflash-neural-router-path")
]
NeuralThreshold = Annotated[
    str | None,
    _option(
        "Predicted ΔAL above which slot 1 drafts; auto, or a file, as whiflash calibrate found.",
        ROUTING,
        "--whiflash-neural-router-threshold",
    ),
]
EntropyThreshold = Annotated[
    str | None,
    _option(
        "Entropy in nats above which slot 1 drafts; auto, or a file, as whiflash calibrate found.",
        ROUTING,
        "--whiflash-entropy-threshold",
    ),
]
NoLazy = Annotated[
    bool,
    typer.Option("--whiflash-no-lazy-catchup", help="Every drafter catches up every round.", rich_help_panel=ROUTING),
]
NoKvOnly = Annotated[
    bool,
    typer.Option("--whiflash-no-kv-only", help="Catching up runs the whole draft model.", rich_help_panel=ROUTING),
]

Datasets = Annotated[
    list[str],
    _option("A data set, category:chat, … or demo (built in); several with commas or repeated.", DATA, "--dataset"),
]
DatasetDir = Annotated[Path | None, _option("Local data sets: their own files, or JSONL of id, category, turns.", DATA)]
MaxSamples = Annotated[int | None, _option("Prompts of each data set and category, drawn with the seed.", DATA)]
MaxNew = Annotated[int, _option("Most tokens of an answer.", RUN)]
Temperature = Annotated[float, _option("0 is greedy.", RUN)]
Seed = Annotated[int, _option("Of the sampling and of the prompts drawn.", RUN)]
Output = Annotated[
    Path | None, _option("Directory of the results; the same one resumes. runs/bench-… if left out.", RUN, "--output")
]
PhaseTimes = Annotated[
    bool,
    typer.Option(
        "--phase-times/--no-phase-times",
        help="On a GPU, wait for it at the end of each phase, so that their times are true.",
        rich_help_panel=RUN,
    ),
]


def add_to(app: typer.Typer) -> None:
    app.command()(bench)
    app.command()(sweep)
    app.command()(calibrate)
    app.command()(analyse)


def bench(
    speculative_algorithm: Algorithms = ["WHIFLASH"],  # noqa: B006
    model_name_or_path: Model = "smollm2-135m",
    draft_name_or_path: Draft = None,
    whiflash_eagle_draft: EagleDraft = None,
    whiflash_drafters: Pairs = None,
    whiflash_router: Routers = None,
    whiflash_neural_router_path: RouterPath = None,
    whiflash_neural_router_threshold: NeuralThreshold = None,
    whiflash_entropy_threshold: EntropyThreshold = None,
    whiflash_no_lazy_catchup: NoLazy = False,
    whiflash_no_kv_only: NoKvOnly = False,
    ddtree_tree_budget: Budget = None,
    block_size: BlockSize = None,
    eagle_depth: EagleDepth = None,
    eagle_top_k: EagleTopK = None,
    eagle_total_tokens: EagleTotal = None,
    draft_p_min: PMin = None,
    dataset: Datasets = ["demo"],  # noqa: B006
    dataset_dir: DatasetDir = None,
    max_samples: MaxSamples = None,
    max_new_tokens: MaxNew = 2048,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    dtype: Dtype = None,
    device: Device = None,
    output: Output = None,
    phase_times: PhaseTimes = True,
) -> None:
    """Measure decoding methods against plain decoding on prompts of benchmarks; a killed run resumes.

    Several processes: torchrun --nproc-per-node N benchmark.py …
    """
    from whiflash.evaluation.methods import Flags

    flags = Flags(
        _split(speculative_algorithm), draft_name_or_path, whiflash_eagle_draft, _split(whiflash_drafters),
        _split(whiflash_router), whiflash_neural_router_path,
        *_thresholds(whiflash_neural_router_threshold, whiflash_entropy_threshold),
        _numbers(ddtree_tree_budget, "--ddtree-tree-budget"), block_size, eagle_depth, eagle_top_k, eagle_total_tokens,
        draft_p_min, whiflash_no_lazy_catchup, whiflash_no_kv_only,
    )  # fmt: skip
    _measure(
        flags, model_name_or_path, dtype, device, dataset, dataset_dir, max_samples, max_new_tokens, temperature, seed,
        output, phase_times, lenient=False,
    )  # fmt: skip


def sweep(
    model_name_or_path: Model = "smollm2-135m",
    draft_name_or_path: Annotated[str | None, _option("DFlash draft.", METHODS, "--draft-name-or-path")] = None,
    whiflash_eagle_draft: EagleDraft = None,
    whiflash_drafters: Pairs = ["df-e3", "ddt-e3", "df-ddt"],  # noqa: B006
    whiflash_neural_router_path: RouterPath = None,
    whiflash_neural_router_threshold: NeuralThreshold = None,
    whiflash_entropy_threshold: EntropyThreshold = None,
    ddtree_tree_budget: Budget = ["32", "128"],  # noqa: B006
    draft_p_min: PMin = None,
    dataset: Datasets = ["demo"],  # noqa: B006
    dataset_dir: DatasetDir = None,
    max_samples: MaxSamples = None,
    max_new_tokens: MaxNew = 2048,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    dtype: Dtype = None,
    device: Device = None,
    output: Output = None,
    phase_times: PhaseTimes = True,
) -> None:
    """The paper's table: AR, EAGLE-3, DFlash, DDTree, and every pair with both routers, over all categories.

    Pairs for which no neural router ships run with the entropy router only.
    """
    from whiflash.evaluation.methods import ALGORITHMS, ROUTERS, Flags

    flags = Flags(
        ALGORITHMS, draft_name_or_path, whiflash_eagle_draft, _split(whiflash_drafters), ROUTERS,
        whiflash_neural_router_path, *_thresholds(whiflash_neural_router_threshold, whiflash_entropy_threshold),
        _numbers(ddtree_tree_budget, "--ddtree-tree-budget"), p_min=draft_p_min,
    )  # fmt: skip
    _measure(
        flags, model_name_or_path, dtype, device, dataset, dataset_dir, max_samples, max_new_tokens, temperature, seed,
        output, phase_times, lenient=True,
    )  # fmt: skip


def calibrate(
    target: Annotated[str, _option("Target: hub id, directory, or smollm2-135m.", METHODS, "--target", "-t")] = (
        "smollm2-135m"
    ),
    drafters: Annotated[
        list[str], _option("df-e3, ddt-e3 or df-ddt; several with commas.", METHODS, "--drafters", "-d")
    ] = ["df-e3"],  # noqa: B006
    dflash: Annotated[str | None, _option("DFlash checkpoint.", METHODS, "--dflash")] = None,
    eagle3: Annotated[str | None, _option("EAGLE-3 checkpoint.", METHODS, "--eagle3")] = None,
    router: Annotated[
        str | None, _option("Neural router for the pair; what ships if left out.", METHODS, "--router")
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    dataset: Datasets = ["demo"],  # noqa: B006
    dataset_dir: DatasetDir = None,
    max_samples: MaxSamples = 6,
    max_new_tokens: MaxNew = 128,
    seed: Annotated[int, _option("Of the prompts drawn.", RUN)] = 0,
    latency_profile: Annotated[
        Path | None, _option("Replay with the times of this profile, or calibration, of another machine.", RUN)
    ] = None,
    output: Annotated[
        Path | None, _option("File of the calibration; in the cache, where auto looks, if left out.", RUN, "--output")
    ] = None,
) -> None:
    """Find the threshold and the lengths of drafts that are fastest on this machine, for --threshold auto."""
    from whiflash.evaluation.calibrate import Request
    from whiflash.evaluation.calibrate import calibrate as run

    run(
        Request(
            _split(drafters), _split(dataset), dataset_dir, max_samples, max_new_tokens, seed, target, dtype, device,
            dflash, eagle3, router, latency_profile, output,
        )
    )  # fmt: skip


def analyse(
    run: Annotated[Path, typer.Argument(help="Directory of results of bench or sweep.", show_default=False)],
    others: Annotated[
        list[Path] | None,
        typer.Argument(
            help="More of them, to compare what switching costs (such as one with --whiflash-no-kv-only).",
            show_default=False,
        ),
    ] = None,
    record: Annotated[
        Path | None,
        _option("File that whiflash calibrate wrote for the same prompts and drafters; brings the oracles.", RUN),
    ] = None,
    latency_profile: Annotated[
        Path | None,
        _option("Replay with the times of this profile, or calibration; else the record's, else the run's.", RUN),
    ] = None,
    output: Annotated[
        Path | None, _option("Directory of the report; analysis in that of the run if left out.", RUN, "--output")
    ] = None,
) -> None:
    """Explain a run: oracles, who wins where, the router's choices, what switching costs; plots and a report."""
    from whiflash.evaluation.analyse import Request
    from whiflash.evaluation.analyse import analyse as explain

    if latency_profile is not None and record is None:
        raise WhiFlashError("--latency-profile is what a record is replayed with; give --record too, or leave it out")
    explain(Request(run, others or (), record, latency_profile, output))


def _measure(
    flags: Any, target: str, dtype: str | None, device: str | None, dataset: list[str], dataset_dir: Path | None,
    max_samples: int | None, max_new_tokens: int, temperature: float, seed: int, output: Path | None,
    phase_times: bool, lenient: bool,
) -> None:  # fmt: skip
    from whiflash.evaluation.benchmark import Protocol
    from whiflash.evaluation.measure import Request, measure

    protocol = Protocol(max_new_tokens, temperature, seed)
    measure(
        Request(
            flags,
            protocol,
            _split(dataset),
            dataset_dir,
            max_samples,
            target,
            dtype,
            device,
            output,
            phase_times,
            lenient,
        )
    )


def _split(values: Iterable[str] | None, read: Callable[[str], T] = str) -> tuple[T, ...]:  # type: ignore[assignment]
    """Repeated options and comma-separated values as one tuple, each once."""
    parts = [part.strip() for value in values or () for part in value.split(",")]
    return tuple(dict.fromkeys(read(part) for part in parts if part))


def _thresholds(neural: str | None, entropy: str | None) -> tuple[float | str | None, float | str | None]:
    from whiflash.calibration import parse_threshold

    return (
        parse_threshold(neural, "--whiflash-neural-router-threshold"),
        parse_threshold(entropy, "--whiflash-entropy-threshold"),
    )


def _numbers(values: list[str] | None, flag: str) -> tuple[int, ...]:
    try:
        return _split(values, int)
    except ValueError as error:
        raise WhiFlashError(f"{flag} takes whole numbers, got {','.join(values or ())!r}") from error
