"""One training loop for every drafter: schedule, optimiser, evaluation, exact resume, data-parallel.

Nothing random is kept between steps: which texts a step reads and what is drawn for each follows from the seed and the
step number. A run that is killed goes on from its last state file as if nothing had happened.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whiflash.errors import WhiFlashError
from whiflash.training.evaluate import Scores
from whiflash.training.features import Sample, Source, describe, processes

# settings that may change when a run is resumed
FREE = ("steps", "hours", "evaluate_every", "save_every")


@dataclass(frozen=True)
class LoopConfig:
    """How long and how to optimise. The schedule ends after `steps`, or after `hours` of run time if given.

    `lr` is the peak after `warmup` steps, then a cosine to `lr_floor`·lr. With "muon", hidden matrices take Muon steps
    scaled to AdamW's size, the rest AdamW. A step averages `texts_per_step` texts, one pass each, shared by all
    processes. `ema` > 0 evaluates and saves an exponential average of the weights. `precision`: "bfloat16" autocasts.
    """

    steps: int = 2000
    hours: float | None = None
    texts_per_step: int = 1
    optimizer: str = "adamw"
    lr: float = 1e-3
    lr_floor: float = 0.02
    warmup: int = 30
    weight_decay: float = 0.0
    beta2: float = 0.99
    clip: float = 1.0
    ema: float = 0.0
    precision: str = "bfloat16"
    evaluate_every: int = 500
    save_every: int = 250
    seed: int = 0

    def __post_init__(self) -> None:
        if self.optimizer not in ("adamw", "muon"):
            raise WhiFlashError(f"optimizer {self.optimizer!r} is not known; expected adamw or muon")
        if self.precision not in ("float32", "bfloat16"):
            raise WhiFlashError(f"precision {self.precision!r} is not known; expected float32 or bfloat16")
        if self.steps < 1 or self.texts_per_step < 1 or (self.hours is not None and self.hours <= 0):
            raise WhiFlashError("steps, texts_per_step and hours must be positive")


class Trainee(Protocol):
    """A drafter in training. `loss` is the mean over one text; `hidden_matrices` are those that Muon may take."""

    @property
    def module(self) -> nn.Module: ...

    def loss(self, sample: Sample, generator: torch.Generator) -> Tensor: ...

    def evaluate(self) -> Scores: ...

    def hidden_matrices(self) -> Sequence[Tensor]: ...

    def export(self, directory: Path, report: dict[str, Any]) -> None: ...


@dataclass
class Run:
    """Where a training run stands: `history` holds one row an evaluation, `best` its best AL in rounds."""

    step: int = 0
    elapsed: float = 0.0
    best: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)


def train(
    trainee: Trainee,
    source: Source,
    config: LoopConfig,
    out: str | Path,
    identity: dict[str, Any] | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Run:
    """Train until the schedule ends; leaves `best/`, `last/`, `log.jsonl` and `state.pt` under `out`.

    Called again with the same arguments it resumes where the last state was saved. `identity` (the recipe) and the
    source's fingerprint must be those of the saved run. Under torchrun each process calls this alike.
    """
    rank, world = processes()
    if world > config.texts_per_step:
        raise WhiFlashError(
            f"{world} processes share {config.texts_per_step} text(s) a step; set texts_per_step to {world} or more"
        )
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    module = trainee.module
    device = next(module.parameters()).device
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizers = _optimizers(trainee, parameters, config)
    average = [p.detach().clone() for p in parameters] if config.ema else []
    settings = {k: v for k, v in asdict(config).items() if k not in FREE}
    identity = {"loop": settings, "source": source.fingerprint, **(identity or {})}
    run = Run()
    if (out / "state.pt").exists():
        run = _restore(out / "state.pt", identity, module, optimizers, average)
        log(f"resumed at step {run.step} after {run.elapsed / 3600:.2f} h")
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bfloat16")
    before, began = run.elapsed, time.monotonic()
    window: list[float] = []
    if identity.get("init") and not run.step:  # what it went on from is the first point of its curve
        _evaluate(trainee, source, run, window, out, rank, log)
    module.train()
    while (progress := _progress(run, config, world)) < 1:
        factor = _schedule(run.step, progress, config)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = config.lr * factor
        total = torch.zeros((), device=device)
        for number, index in _texts(run.step, len(source), config, rank, world):
            generator = torch.Generator(device).manual_seed(config.seed * 1_000_003 + number)
            with autocast:
                loss = trainee.loss(source[index].to(device), generator) / config.texts_per_step
            loss.backward()
            total += loss.detach()
        if world > 1:
            _sum_gradients(parameters, total)
        nn.utils.clip_grad_norm_(parameters, config.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if average:
            # early on the average would be mostly the starting weights
            torch._foreach_lerp_(average, [p.detach() for p in parameters], max(1 - config.ema, 1 / (run.step + 1)))
        run.step += 1
        run.elapsed = before + time.monotonic() - began
        window.append(float(total))
        finished = _progress(run, config, world) >= 1
        if run.step % config.evaluate_every == 0 or finished:
            with _swapped(parameters, average):
                _evaluate(trainee, source, run, window, out, rank, log)
            window.clear()
            run.elapsed = before + time.monotonic() - began
        if rank == 0 and (run.step % config.save_every == 0 or run.step % config.evaluate_every == 0 or finished):
            _save(out, run, identity, module, optimizers, average)
            log(f"step {run.step}  {run.elapsed / 3600:.2f} h  loss {window[-1] if window else float(total):.3f}")
    return run


def read_weights(out: str | Path) -> dict[str, Tensor]:
    """The float32 weights of a run's last state."""
    return _load(Path(out) / "state.pt")["module"]


def _optimizers(trainee: Trainee, parameters: list[nn.Parameter], config: LoopConfig) -> list[torch.optim.Optimizer]:
    adamw: dict[str, Any] = {
        "lr": config.lr,
        "betas": (0.9, config.beta2),
        "weight_decay": config.weight_decay,
        "fused": True,
    }
    if config.optimizer == "adamw":
        return [torch.optim.AdamW(parameters, **adamw)]
    hidden = {id(p) for p in trainee.hidden_matrices()}
    return [
        torch.optim.Muon(
            [p for p in parameters if id(p) in hidden],
            lr=config.lr,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW([p for p in parameters if id(p) not in hidden], **adamw),
    ]


def _progress(run: Run, config: LoopConfig, world: int) -> float:
    if config.hours is None:
        return run.step / config.steps
    elapsed = torch.tensor(run.elapsed, dtype=torch.float64)
    if world > 1:
        dist.broadcast(elapsed, 0)  # clocks differ, and all processes must stop at the same step
    return float(elapsed) / (config.hours * 3600)


def _schedule(step: int, progress: float, config: LoopConfig) -> float:
    cosine = config.lr_floor + (1 - config.lr_floor) * (1 + math.cos(math.pi * min(progress, 1))) / 2
    return min(1.0, (step + 1) / max(config.warmup, 1)) * cosine


def _texts(step: int, count: int, config: LoopConfig, rank: int, world: int) -> Iterator[tuple[int, int]]:
    """(running number, index) of the texts this process reads in a step; each epoch is a new permutation."""
    for offset in range(rank, config.texts_per_step, world):
        number = step * config.texts_per_step + offset
        order = torch.Generator().manual_seed(config.seed * 7_919 + number // count)
        yield number, int(torch.randperm(count, generator=order)[number % count])


def _sum_gradients(parameters: list[nn.Parameter], total: Tensor) -> None:
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([g.flatten() for g in (*gradients, total[None])])
    dist.all_reduce(flat)
    *pieces, summed = flat.split([p.numel() for p in parameters] + [1])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = piece.view_as(parameter)
    total.copy_(summed[0])


class _swapped:
    """The averaged weights in place of the raw ones, for the length of a block."""

    def __init__(self, parameters: list[nn.Parameter], average: list[Tensor]):
        self.parameters, self.average = parameters if average else [], average

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *_: object) -> None:
        self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, other in zip(self.parameters, self.average, strict=True):
            held = parameter.detach().clone()
            parameter.copy_(other)
            other.copy_(held)


def _evaluate(
    trainee: Trainee, source: Source, run: Run, window: list[float], out: Path, rank: int, log: Callable[[str], None]
) -> None:
    device = next(trainee.module.parameters()).device
    trainee.module.eval()
    scores = trainee.evaluate() if rank == 0 else Scores()
    trainee.module.train()
    if rank != 0:
        return
    row = {
        "step": run.step,
        "hours": round(run.elapsed / 3600, 4),
        "loss": round(sum(window) / len(window), 4) if window else None,
        "acceptance": scores.table(),
    }
    run.history.append(row)
    log(f"step {run.step}  loss {row['loss']}  held-out AL {scores.acceptance:.4f} in rounds")
    report = {"history": run.history, "data": describe(source.texts), "compute": _compute(device)}
    # without held-out texts the last is the best
    for name in ("last", "best") if scores.acceptance >= run.best else ("last",):
        trainee.export(out / name, report)
    run.best = max(run.best, scores.acceptance)


def _compute(device: torch.device) -> str:
    """What a card says a run was trained on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU thread(s)"
    return f"{name}, {processes()[1]} process(es)"


def _save(
    out: Path,
    run: Run,
    identity: dict,
    module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    average: list[Tensor],
) -> None:
    state = {
        "run": asdict(run),
        "identity": identity,
        "module": module.state_dict(),
        "optimizers": [o.state_dict() for o in optimizers],
        "average": average,
    }
    temporary = out / "state.pt.tmp"
    try:
        torch.save(state, temporary)
        os.replace(temporary, out / "state.pt")
        lines = "".join(json.dumps(row) + "\n" for row in run.history)
        (out / "log.jsonl.tmp").write_text(lines, "utf-8")
        os.replace(out / "log.jsonl.tmp", out / "log.jsonl")
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        temporary.unlink(missing_ok=True)
        raise WhiFlashError(
            f"the training state could not be written to {out} ({error}); the state of the last save is untouched: "
            "free some space and run the same command again"
        ) from error


def _load(path: Path) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # many kinds, all of which mean the same to the reader
        raise WhiFlashError(
            f"{path} cannot be read ({error.__class__.__name__}); restore it, or choose another output directory"
        ) from error


def _restore(
    path: Path, identity: dict, module: nn.Module, optimizers: list[torch.optim.Optimizer], average: list[Tensor]
) -> Run:
    state = _load(path)
    found = json.loads(json.dumps(state["identity"]))
    wanted = json.loads(json.dumps(identity))
    for key in wanted:
        if found.get(key) != wanted[key]:
            old, new = found.get(key), wanted[key]
            if isinstance(new, dict) and isinstance(old, dict):
                key, old, new = next((f"{key}.{k}", old.get(k), new[k]) for k in new if old.get(k) != new[k])
            raise WhiFlashError(
                f"{path.parent} holds a run with {key} = {old!r}, but this one has {new!r}; "
                "choose another output directory, or go on with the settings of that run"
            )
    module.load_state_dict(state["module"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    for mine, saved in zip(average, state["average"], strict=True):
        mine.copy_(saved)
    return Run(**{f.name: state["run"][f.name] for f in fields(Run)})
