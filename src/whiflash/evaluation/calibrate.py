"""`whiflash calibrate`: record once, time rounds, replay everything, keep the best threshold and lengths of drafts."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from whiflash import calibration
from whiflash.drafters.ddtree import DDTreeDrafter
from whiflash.drafters.dflash import DFlash, DFlashDrafter
from whiflash.drafters.drafter import Drafter
from whiflash.drafters.eagle3 import Eagle3, Eagle3Drafter
from whiflash.errors import WhiFlashError
from whiflash.evaluation import latency, methods, tables
from whiflash.evaluation.datasets import Prompt, load_prompts
from whiflash.evaluation.latency import Profile
from whiflash.evaluation.machine import facts
from whiflash.evaluation.methods import Method, Sources
from whiflash.evaluation.positions import check_text
from whiflash.evaluation.progress import eta_bar
from whiflash.evaluation.record import P_MINS, Text, record_all
from whiflash.evaluation.search import search
from whiflash.journal import Journal, exclusive, fingerprint, write_atomic
from whiflash.model import PAIRS, TREE_BUDGET, WhiFlash
from whiflash.progress import bar
from whiflash.routers.entropy import EntropyRouter
from whiflash.routers.router import Router
from whiflash.target import embedded
from whiflash.target.load import load_target
from whiflash.target.target import Target

# nodes besides the root that are tried; a block has no more than it was trained for
LENGTHS = {"df": (1, 2, 3, 5, 7, 11, 15, 23, 31), "ddt": (4, 8, 16, 32, 64), "e3": (1, 2, 3, 4, 5, 6, 8)}


@dataclass(frozen=True)
class Request:
    """Everything the command line decides."""

    pairs: Sequence[str] = ("df-e3",)
    datasets: Sequence[str] = ("demo",)
    dataset_dir: Path | None = None
    max_samples: int | None = None
    max_new_tokens: int = 128
    seed: int = 0
    target: str = embedded.NAME
    dtype: str | None = None
    device: str | None = None
    dflash: str | None = None
    eagle3: str | None = None
    router: str | None = None
    latency_profile: Path | None = None
    output: Path | None = None


@dataclass(frozen=True)
class Bench:
    """What is calibrated: every drafter in its longest form, and every router by the name it is recorded under."""

    target: Target
    model: WhiFlash
    lengths: dict[str, tuple[int, ...]]
    networks: dict[str, DFlash | Eagle3]
    routers: dict[str, Router]

    def build(self, name: str, length: int) -> Drafter:
        """A drafter that leaves nothing out, and tells how likely its nodes are."""
        network = self.networks[name]
        if isinstance(network, Eagle3):
            return Eagle3Drafter(network, length, p_min=0.0)
        if name == "ddt":
            return DDTreeDrafter(network, length, p_min=0.0)
        return DFlashDrafter(network, block_rows=length + 1, p_min=0.0)

    def longest(self) -> dict[str, Drafter]:
        return {name: self.build(name, max(lengths)) for name, lengths in self.lengths.items()}

    def identities(self, names: Sequence[str]) -> dict[str, str]:
        return {name: self.networks[name].identity for name in names}


def calibrate(request: Request) -> list[Path]:
    """Write one calibration a pair, print what was found, and return the files."""
    _check(request)
    given = None if request.latency_profile is None else Profile.read(request.latency_profile)
    prompts = load_prompts(request.datasets, request.dataset_dir, request.max_samples, request.seed)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    log = Console(stderr=True, highlight=False)
    with bar("preparing the embedded target") as progress:
        target = load_target(request.target, dtype=request.dtype, device=request.device, progress=progress)
    bench, missing = _load(request, target)
    for name, reason in missing.items():
        log.print(f"{name} is left out: {reason}", markup=False, soft_wrap=True)
    replayed = bench if given is None else _as_profiled(bench, given)
    settings = _settings(request, bench, prompts)
    file = calibration.directory() / f"record-{fingerprint(settings)}.jsonl"
    with exclusive(file.with_suffix(".lock")), eta_bar() as report:
        # rows are told apart by their place, so none may be taken out alone
        journal = Journal(file, settings, check_text, "remove that line and all after it, and run again")
        if journal.rows:
            told = f"resuming {file}: {len(journal.rows)} of {len(prompts)} prompts recorded"
            log.print(told, markup=False, soft_wrap=True)
        texts = record_all(
            prompts, bench.model, bench.longest(), bench.routers, journal, request.max_new_tokens, report
        )
        machine = facts(target.device)
        if given is None:
            # above any entropy, so that the router costs what it costs and the one drafter is picked
            never = EntropyRouter(1e9)
            prompt = target.encode(prompts[0].turns[0], enable_thinking=False)
            build = {name: partial(bench.build, name) for name in bench.lengths}
            profile = latency.measure(target, build, bench.lengths, never, prompt, machine, report)
        else:
            profile = given
    written = []
    for pair in request.pairs:
        found = _calibrate_pair(pair, replayed, texts, profile)
        found["made_of"] = {**settings, "machine": machine, "record": str(file)}
        path = request.output or calibration.Setting.of(target, pair).default_path
        write_atomic(path, json.dumps(found, indent=1) + "\n")
        console.print(tables.calibration_table(found))
        if all(_best_speed(routed) < found["plain_tokens_per_second"] for routed in found["routers"].values()):
            console.print(f"{pair}: plain decoding is faster here than any threshold: --drafters none")
        console.print(f"{pair}: written to {path}", markup=False, soft_wrap=True)
        written.append(path)
    return written


def _check(request: Request) -> None:
    unknown = [pair for pair in request.pairs if pair not in PAIRS]
    if unknown or not request.pairs:
        raise WhiFlashError(f"--drafters takes pairs ({', '.join(PAIRS)}), got {unknown[0] if unknown else ''!r}")
    if request.max_new_tokens < 2:
        raise WhiFlashError(f"--max-new-tokens must be at least 2, got {request.max_new_tokens}")
    for option, value in (("--router", request.router), ("--output", request.output)):
        if value is not None and len(request.pairs) > 1:
            raise WhiFlashError(f"{option} belongs to one pair, but --drafters names {', '.join(request.pairs)}")
    methods.check_router_path("--router", request.router)
    if request.output is not None and (request.output.suffix != ".json" or request.output.is_dir()):
        raise WhiFlashError(f"--output names the file of a calibration, which ends in .json; got {request.output}")
    if request.eagle3 is not None and not any("e3" in pair for pair in request.pairs):
        raise WhiFlashError(f"--eagle3 has no effect on {', '.join(request.pairs)}; leave it out")


def _load(request: Request, target: Target) -> tuple[Bench, dict[str, str]]:
    """Pairs with the entropy router, and with a neural one where there is one: the given one, or what ships."""
    entropy = [Method(pair, pair, "entropy") for pair in request.pairs]
    neural = [Method(f"neural {pair}", pair, request.router or "neural") for pair in request.pairs]
    sources = Sources(request.dflash, request.eagle3)
    lenient = request.router is None
    models, missing = methods.load([*entropy, *neural], sources, target, timed=False, lenient=lenient)
    networks: dict[str, Any] = {d.name: d.model for model in models.values() for d in model.drafters}
    lengths = {name: _lengths(name, network) for name, network in networks.items()}
    routers: dict[str, Router] = {"entropy": EntropyRouter()}
    routers |= {m.name: model.router for m, model in models.items() if m in neural and model.router is not None}
    return Bench(target, models[entropy[0]], lengths, networks, routers), missing


def _lengths(name: str, network: DFlash | Eagle3) -> tuple[int, ...]:
    if name != "df" or not isinstance(network, DFlash):
        return LENGTHS[name]
    most = network.config.block_size - 1
    return tuple(sorted({*(n for n in LENGTHS["df"] if n < most), most}))


def _as_profiled(bench: Bench, profile: Profile) -> Bench:
    """Only the lengths that the profile times can be replayed."""
    lengths = {}
    for name, mine in bench.lengths.items():
        both = tuple(n for n in sorted(profile.rounds.get(name, ())) if n <= max(mine))
        if not both or name not in profile.catch_up:
            raise WhiFlashError(
                f"the latency profile times no round of {name} with {', '.join(map(str, mine))} nodes besides the "
                "root, nor what lies below; calibrate there with this drafter first"
            )
        lengths[name] = both
    return Bench(bench.target, bench.model, lengths, bench.networks, bench.routers)


def _settings(request: Request, bench: Bench, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What a record is made of; the same ones go on with it, or use it again."""
    return {
        "kind": "calibration record",
        "target": bench.target.fingerprint(),
        "dtype": bench.target.precision,
        "device": bench.target.device.type,
        "drafters": bench.identities(list(bench.networks)),
        "p_mins": list(P_MINS),
        "longest": {name: max(lengths) for name, lengths in bench.lengths.items()},
        "routers": {name: getattr(router, "identity", None) for name, router in bench.routers.items()},
        "prompts": fingerprint([[p.id, p.turns[0]] for p in prompts]),
        "max_new_tokens": request.max_new_tokens,
    }


def _calibrate_pair(pair: str, bench: Bench, texts: Sequence[Text], profile: Profile) -> dict[str, Any]:
    names, setting = pair.split("-"), calibration.Setting.of(bench.target, pair)
    routers: dict[str, Any] = {}
    for kind, recorded in (("entropy", "entropy"), ("neural", f"neural {pair}")):
        if recorded not in bench.routers:
            continue
        lengths = _open_lengths(bench.lengths, kind)
        routers[kind] = {
            "identity": getattr(bench.routers[recorded], "identity", None),
            **search(texts, names, recorded, lengths, profile),
        }
    return {
        "format": calibration.FORMAT,
        "version": calibration.VERSION,
        "target": setting.target,
        "target_fingerprint": setting.fingerprint,
        "dtype": setting.dtype,
        "device": setting.device,
        "pair": pair,
        "drafters": bench.identities(names),
        "texts": len(texts),
        "positions": sum(text.roots for text in texts),
        "plain_tokens_per_second": round(1 / sum(profile.plain.values()), 3),
        "routers": routers,
        "profile": profile.as_json(),
    }


def _best_speed(routed: Mapping[str, Any]) -> float:
    return routed["categories"][calibration.OVERALL]["tokens_per_second"]


def _open_lengths(lengths: Mapping[str, tuple[int, ...]], kind: str) -> dict[str, tuple[int, ...]]:
    """A neural router was trained for one tree budget and is refused with another."""
    if kind != "neural" or "ddt" not in lengths:
        return dict(lengths)
    if TREE_BUDGET not in lengths["ddt"]:
        raise WhiFlashError(f"the latency profile times no tree of {TREE_BUDGET} nodes, which neural routers need")
    return {**lengths, "ddt": (TREE_BUDGET,)}
