"""The command line's options, stated once and shared by the commands."""

from typing import Annotated, Any

import typer

TARGET = "Target model"
DRAFTING = "Drafters and router"
SAMPLING = "Sampling and stopping"


def _option(help: str, panel: str, *names: str, **extra: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **extra)


Target = Annotated[str, _option("Hub id, directory, or smollm2-135m (the embedded one).", TARGET, "--target", "-t")]
Dtype = Annotated[str | None, _option("float32, bfloat16 or float16; float32 on CPU, bfloat16 elsewhere.", TARGET)]
Device = Annotated[str | None, _option("cpu, cuda, cuda:1, …; a GPU if there is one.", TARGET)]

Drafters = Annotated[str, _option("none, df, ddt, e3, df-e3, ddt-e3 or df-ddt.", DRAFTING, "--drafters", "-d")]
Dflash = Annotated[str | None, _option("DFlash checkpoint: hub id or directory.", DRAFTING, "--dflash")]
Eagle3 = Annotated[str | None, _option("EAGLE-3 checkpoint: hub id or directory.", DRAFTING, "--eagle3")]
RouterName = Annotated[
    str | None, _option("fixed, entropy, neural, or a neural router's hub id, directory or file.", DRAFTING, "--router")
]
Threshold = Annotated[
    str | None,
    _option(
        "Entropy in nats, or predicted ΔAL; above it slot 1 drafts. auto: what whiflash calibrate found, or its file.",
        DRAFTING,
        "--threshold",
    ),
]
Slot = Annotated[int, _option("The slot that --router fixed always takes.", DRAFTING)]
Flip = Annotated[bool, _option("A bare router file whose positive output means slot 0.", DRAFTING, "--router-flip")]
TreeBudget = Annotated[int | None, _option("DDTree nodes besides the root; 16 if left out.", DRAFTING)]
BlockSize = Annotated[int | None, _option("DFlash block, anchor included; as trained.", DRAFTING)]
BlockRows = Annotated[
    int | None, _option("Rows of DFlash's block that are verified, anchor included; all if left out.", DRAFTING)
]
EagleDepth = Annotated[
    int | None, _option("EAGLE-3 levels; 5, or what the neural router was trained for, if left out.", DRAFTING)
]
EagleTopK = Annotated[int, _option("EAGLE-3 children a node; 1 is a chain.", DRAFTING)]
EagleTotal = Annotated[int | None, _option("EAGLE-3 tree nodes, root included.", DRAFTING, "--eagle-total-tokens")]
PMin = Annotated[
    float | None,
    _option("Leave out drafted nodes whose path the drafter holds less likely than this.", DRAFTING, "--draft-p-min"),
]
TapIds = Annotated[
    str | None, _option("How a checkpoint's tap ids are meant: output (after layer) or boundary.", DRAFTING)
]
Lazy = Annotated[bool, _option("A drafter catches up only when picked.", DRAFTING, "--lazy-catchup/--no-lazy-catchup")]
KvOnly = Annotated[bool, _option("Catching up writes K/V and nothing else.", DRAFTING, "--kv-only/--no-kv-only")]

MaxNew = Annotated[int, _option("Most tokens to generate.", SAMPLING, "--max-new-tokens", "-n")]
Temperature = Annotated[float, _option("0 is greedy.", SAMPLING)]
TopK = Annotated[int, _option("Keep the k likeliest tokens; 0 is off.", SAMPLING)]
TopP = Annotated[float, _option("Keep the likeliest tokens of this mass; 1 is off.", SAMPLING)]
MinP = Annotated[float, _option("Keep tokens at least this likely relative to the likeliest; 0 is off.", SAMPLING)]
Seed = Annotated[int | None, _option("Same seed, same answer.", SAMPLING)]
Stop = Annotated[list[str] | None, _option("End before this text; may be repeated.", SAMPLING, "--stop")]
StopId = Annotated[list[int] | None, _option("End at this token id; may be repeated.", SAMPLING, "--stop-token-id")]
IgnoreEos = Annotated[bool, _option("Go on past the end of sequence.", SAMPLING, "--ignore-eos")]
System = Annotated[str | None, _option("System text in front of the conversation.", SAMPLING)]
Thinking = Annotated[
    bool | None, _option("Passed to chat templates that know it.", SAMPLING, "--enable-thinking/--no-enable-thinking")
]
Color = Annotated[bool, typer.Option("--color", help="Paint each token by the slot that drafted it.")]
