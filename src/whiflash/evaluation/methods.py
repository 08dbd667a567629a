"""What is compared: from the benchmark's flags to named ways of decoding over one target and shared drafters."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from whiflash.calibration import AUTO
from whiflash.drafters.dflash import DFlash
from whiflash.drafters.drafter import Drafter
from whiflash.drafters.eagle3 import Eagle3
from whiflash.errors import WhiFlashError
from whiflash.model import PAIRS, TREE_BUDGET, Drafting, WhiFlash
from whiflash.routers.router import check_threshold
from whiflash.target.target import Target

ALGORITHMS = ("NONE", "EAGLE3", "DFLASH", "DDTREE", "WHIFLASH")
ROUTERS = ("entropy", "neural")
BASELINE = "AR"


@dataclass(frozen=True)
class Flags:
    """What the command line said; None or empty where it said nothing."""

    algorithms: Sequence[str] = ("WHIFLASH",)
    draft: str | None = None
    eagle_draft: str | None = None
    pairs: Sequence[str] = ()
    routers: Sequence[str] = ()
    router_path: str | None = None
    neural_threshold: float | str | None = None
    entropy_threshold: float | str | None = None
    tree_budgets: Sequence[int] = ()
    block_size: int | None = None
    eagle_depth: int | None = None
    eagle_top_k: int | None = None
    eagle_total_tokens: int | None = None
    p_min: float | None = None
    no_lazy_catchup: bool = False
    no_kv_only: bool = False


@dataclass(frozen=True)
class Method:
    """One way of decoding. `drafters` and `router` as in `WhiFlash.from_pretrained`."""

    name: str
    drafters: str
    router: str | None = None
    threshold: float | str | None = None
    drafting: Drafting = field(default_factory=Drafting)
    lazy: bool = True
    kv_only: bool = True


@dataclass(frozen=True)
class Sources:
    """Draft models by hub id or directory; None takes what ships with the package."""

    dflash: str | None = None
    eagle3: str | None = None


def plan(flags: Flags) -> tuple[list[Method], Sources]:
    """The methods to compare, plain decoding (AR) always among them and first, and where their draft models come from.

    Raises for every flag that none of the chosen algorithms would use.
    """
    flags = _upper(flags)
    _refuse(flags)
    return list(_methods(flags)), _sources(flags)


def _upper(flags: Flags) -> Flags:
    names = tuple(dict.fromkeys(a.upper() for a in flags.algorithms))
    for known, given, flag in (
        (ALGORITHMS, names, "--speculative-algorithm"),
        (PAIRS, flags.pairs, "--whiflash-drafters"),
        (ROUTERS, flags.routers, "--whiflash-router"),
    ):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise WhiFlashError(f"{flag} {unknown[0]!r} is not known; expected one of {', '.join(known)}")
    if not names:
        raise WhiFlashError(f"--speculative-algorithm is empty; expected one or more of {', '.join(ALGORITHMS)}")
    return Flags(**{**vars(flags), "algorithms": names})


def _refuse(flags: Flags) -> None:
    chosen = set(flags.algorithms)
    whiflash = "WHIFLASH" in chosen
    used = {name for pair in _pairs(flags) for name in pair.split("-")} if whiflash else set()
    used |= {name for algorithm, name in (("EAGLE3", "e3"), ("DFLASH", "df"), ("DDTREE", "ddt")) if algorithm in chosen}
    routers = set(_routers(flags)) if whiflash else set()
    ran = f"--speculative-algorithm {','.join(flags.algorithms)}"
    if whiflash:
        ran += f" with --whiflash-drafters {','.join(_pairs(flags))} and --whiflash-router {','.join(_routers(flags))}"
    eagle = "e3" in used
    for flag, given, applies, wanted in (
        ("--draft-name-or-path", flags.draft, used, "an algorithm that drafts"),
        ("--whiflash-eagle-draft", flags.eagle_draft, eagle, "EAGLE3, or WHIFLASH with a pair that has e3"),
        ("--whiflash-drafters", flags.pairs, whiflash, "WHIFLASH"),
        ("--whiflash-router", flags.routers, whiflash, "WHIFLASH"),
        ("--whiflash-neural-router-path", flags.router_path, "neural" in routers, "--whiflash-router neural"),
        ("--whiflash-neural-router-threshold", flags.neural_threshold, "neural" in routers, "--whiflash-router neural"),
        ("--whiflash-entropy-threshold", flags.entropy_threshold, "entropy" in routers, "--whiflash-router entropy"),
        ("--whiflash-no-lazy-catchup", flags.no_lazy_catchup or None, whiflash, "WHIFLASH"),
        ("--whiflash-no-kv-only", flags.no_kv_only or None, whiflash, "WHIFLASH"),
        ("--ddtree-tree-budget", flags.tree_budgets, "ddt" in used, "DDTREE, or WHIFLASH with a pair that has ddt"),
        ("--block-size", flags.block_size, used & {"df", "ddt"}, "DFLASH, DDTREE, or WHIFLASH"),
        ("--eagle-depth", flags.eagle_depth, eagle, "EAGLE3, or WHIFLASH with a pair that has e3"),
        ("--eagle-top-k", flags.eagle_top_k, eagle, "EAGLE3, or WHIFLASH with a pair that has e3"),
        ("--draft-p-min", flags.p_min, used, "an algorithm that drafts"),
        ("--eagle-total-tokens", flags.eagle_total_tokens, eagle, "EAGLE3, or WHIFLASH with a pair that has e3"),
    ):
        if given is not None and given != () and not applies:
            raise WhiFlashError(f"{flag} has no effect on {ran}; it needs {wanted}: leave it out, or choose that")
    if used == {"e3"} and flags.draft and flags.eagle_draft:
        raise WhiFlashError(
            "with EAGLE3 alone, --draft-name-or-path and --whiflash-eagle-draft both name its draft; give one of them"
        )
    check_router_path("--whiflash-neural-router-path", flags.router_path)
    for threshold, least in ((flags.neural_threshold, None), (flags.entropy_threshold, 0.0)):
        if isinstance(threshold, float):
            check_threshold(threshold, least)
    if flags.router_path is not None and len(_pairs(flags)) > 1:
        raise WhiFlashError(
            f"--whiflash-neural-router-path is one router, trained for one pair, but --whiflash-drafters names "
            f"{', '.join(_pairs(flags))}; give one pair"
        )


def check_router_path(flag: str, path: str | None) -> None:
    """Refuse the name of a kind of router where a checkpoint is meant."""
    if path in (*ROUTERS, "fixed"):
        raise WhiFlashError(f"{flag} names a neural router's checkpoint (hub id, directory or file), got {path!r}")


def _pairs(flags: Flags) -> tuple[str, ...]:
    return tuple(flags.pairs) or ("df-e3",)


def _routers(flags: Flags) -> tuple[str, ...]:
    return tuple(flags.routers) or ("entropy",)


def _sources(flags: Flags) -> Sources:
    """With EAGLE3 alone the draft model named first is EAGLE-3's, as in the paper's commands."""
    if set(flags.algorithms) - {"NONE"} == {"EAGLE3"}:
        return Sources(None, flags.draft or flags.eagle_draft)
    return Sources(flags.draft, flags.eagle_draft)


def _methods(flags: Flags) -> Iterator[Method]:
    def drafting(budget: int | None) -> Drafting:
        given: dict[str, Any] = {
            "tree_budget": budget,
            "block_size": flags.block_size,
            "eagle3_depth": flags.eagle_depth,
            "eagle3_top_k": flags.eagle_top_k,
            "eagle3_total_tokens": flags.eagle_total_tokens,
            "p_min": flags.p_min,
        }
        return Drafting(**{name: value for name, value in given.items() if value is not None})

    budgets = tuple(flags.tree_budgets) or (TREE_BUDGET,)
    yield Method(BASELINE, "none")
    for algorithm in ALGORITHMS[1:]:
        if algorithm not in flags.algorithms:
            continue
        if algorithm == "EAGLE3":
            yield Method("EAGLE-3", "e3", drafting=drafting(TREE_BUDGET))
        elif algorithm == "DFLASH":
            yield Method("DFlash", "df", drafting=drafting(TREE_BUDGET))
        elif algorithm == "DDTREE":
            for budget in budgets:
                yield Method(f"DDTree {budget}", "ddt", drafting=drafting(budget))
        else:
            for pair, router in product(_pairs(flags), _routers(flags)):
                threshold = flags.neural_threshold if router == "neural" else flags.entropy_threshold
                # a calibration brings the budget along, unless one is asked for
                calibrated = isinstance(threshold, str) and not flags.tree_budgets
                for nodes in budgets if "ddt" in pair and not calibrated else (None,):
                    yield Method(
                        f"WhiFlash-{router.capitalize()} {pair}{f' {nodes or AUTO}' if 'ddt' in pair else ''}",
                        pair,
                        flags.router_path or router if router == "neural" else router,
                        threshold,
                        drafting(nodes),
                        not flags.no_lazy_catchup,
                        not flags.no_kv_only,
                    )


def load(
    methods: Sequence[Method], sources: Sources, target: Target, timed: bool, lenient: bool = False
) -> tuple[dict[Method, WhiFlash], dict[str, str]]:
    """Build every method over the one target; draft models are loaded once and shared.

    Returns the models, and why methods were left out: lenient leaves out those whose neural router does not exist.
    """
    dflash: str | DFlash | None = sources.dflash
    eagle3: str | Eagle3 | None = sources.eagle3
    models: dict[Method, WhiFlash] = {}
    missing: dict[str, str] = {}
    for method in methods:
        try:
            model = WhiFlash.from_pretrained(
                target, dflash=dflash, eagle3=eagle3, drafters=method.drafters, router=method.router,
                threshold=method.threshold, drafting=method.drafting, lazy=method.lazy, kv_only=method.kv_only,
                timed=timed,
            )  # fmt: skip
        except WhiFlashError as error:
            if not (lenient and method.router == "neural"):
                raise
            missing[method.name] = str(error)
            continue
        for drafter in model.drafters:
            if isinstance(drafter.model, DFlash):
                dflash = drafter.model
            elif isinstance(drafter.model, Eagle3):
                eagle3 = drafter.model
        models[method] = model
    return models, missing


def standalone(methods: Sequence[Method]) -> dict[str, list[str]]:
    """For every pair, the methods that run one of its drafters alone, in the same shape."""
    return {
        pair.name: [
            m.name
            for m in methods
            if m.drafters in pair.drafters.split("-")
            and (m.drafters != "ddt" or m.drafting.tree_budget == pair.drafting.tree_budget)
        ]
        for pair in methods
        if pair.router
    }


def _shape(drafter: Drafter) -> str:
    least = "" if drafter.p_min is None else f", p ≥ {drafter.p_min:g}"
    return f"{drafter.name} (≤ {drafter.rows - 1} drafted{least})"


def mode(model: WhiFlash) -> str:
    """What this model does, read off the parts that will run rather than off the flags."""
    target = model.target
    parts = [_shape(drafter) for drafter in model.drafters] or ["no drafter"]
    if len(model.drafters) > 1 and model.router is not None:
        threshold = getattr(model.router, "threshold", None)
        parts.append(f"{model.router.name} router" + ("" if threshold is None else f" at {threshold:g}"))
        catch_up = "lazy catch-up" if model.lazy else "eager catch-up"
        parts.append(catch_up if model.kv_only else f"{catch_up} by full passes")
    return ", ".join([*parts, target.precision, str(target.device)])
