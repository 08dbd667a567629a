"""WhiFlash: a target, its drafters and a router, ready to generate."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from whiflash import calibration
from whiflash.decoding.sampling import Sampler, Sampling
from whiflash.decoding.session import Round, Session
from whiflash.decoding.stopping import Answer, Stopping
from whiflash.decoding.trace import Stats, summarise
from whiflash.drafters.ddtree import DDTreeDrafter
from whiflash.drafters.dflash import DFlash, DFlashDrafter
from whiflash.drafters.drafter import Drafter
from whiflash.drafters.eagle3 import Eagle3, Eagle3Drafter
from whiflash.drafters.layouts import TapIds
from whiflash.drafters.load import load_dflash, load_eagle3
from whiflash.errors import WhiFlashError
from whiflash.routers.entropy import EntropyRouter
from whiflash.routers.fixed import FixedRouter
from whiflash.routers.neural import NeuralRouter, Setting
from whiflash.routers.router import Router, check_threshold
from whiflash.target import embedded
from whiflash.target.load import load_target
from whiflash.target.target import Prompt, Target

PAIRS = ("df-e3", "ddt-e3", "df-ddt")
SINGLES = ("df", "ddt", "e3")
ROUTERS = ("fixed", "entropy", "neural")
# what is drafted where nothing else is asked for: nodes besides the root, levels
TREE_BUDGET, EAGLE3_DEPTH = 16, 5
# more nodes than any draft is worth, and than a mask of all pairs of them should hold
MOST_NODES = 4096
ASSETS = Path(__file__).parent / "assets" / embedded.NAME


@dataclass(frozen=True)
class Drafting:
    """Shapes of the drafts: DFlash's block, DDTree's budget (nodes besides the root), EAGLE-3's chain or tree.

    None leaves it open: the block as trained and all of it verified (`block_rows`), a budget of 16, a depth of 5 or
    of what the neural router was trained for.
    p_min: drafted nodes whose path the drafter itself holds less likely than this are left out; None leaves none out.
    Where a row costs time, as on a CPU, that is faster; on an accelerator an EAGLE-3 chain then waits for every step.
    """

    block_size: int | None = None
    block_rows: int | None = None
    tree_budget: int | None = None
    eagle3_depth: int | None = None
    eagle3_top_k: int = 1
    eagle3_total_tokens: int | None = None
    p_min: float | None = None

    def __post_init__(self) -> None:
        for name, value, least in (
            ("tree budget", self.tree_budget, 1),
            ("block size", self.block_size, 2),
            ("number of block rows", self.block_rows, 2),
            ("EAGLE-3 depth", self.eagle3_depth, 1),
            ("EAGLE-3 top-k", self.eagle3_top_k, 1),
            ("EAGLE-3 total of tokens", self.eagle3_total_tokens, 2),
        ):
            if value is not None and value < least:
                raise WhiFlashError(f"the {name} must be at least {least}, got {value}")
            if value is not None and value > MOST_NODES:
                raise WhiFlashError(f"the {name} must be at most {MOST_NODES}, got {value}")
        if self.p_min is not None and not 0 <= self.p_min < 1:
            raise WhiFlashError(
                f"the least probability of a drafted path must be at least 0 and below 1, got {self.p_min}"
            )


@dataclass(frozen=True)
class Piece:
    """Text that became certain, and what it came from: the round's tokens (None for the prompt pass's own token)."""

    text: str
    tokens: list[int]
    round: Round | None = None


@dataclass
class Output:
    """A finished answer. `tokens` end with the stop token if one came; `text` leaves special tokens out."""

    text: str
    tokens: list[int]
    rounds: list[Round]
    finish_reason: str
    stats: Stats
    prompt_tokens: list[int] = field(default_factory=list)


class WhiFlash:
    """The whole system for one target. Weights are shared by all requests; a `Session` holds what belongs to one."""

    def __init__(
        self,
        target: Target,
        drafters: Sequence[Drafter] = (),
        router: Router | None = None,
        *,
        lazy: bool = True,
        kv_only: bool = True,
        timed: bool = False,
    ):
        if len(drafters) > 1 and router is None:
            raise WhiFlashError("several drafters need a router; give one, or a single drafter")
        self.target, self.drafters = target, tuple(drafters)
        self.router = router or (FixedRouter() if drafters else None)
        self.lazy, self.kv_only, self.timed = lazy, kv_only, timed

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path | Target = embedded.NAME,
        *,
        dflash: str | Path | DFlash | None = None,
        eagle3: str | Path | Eagle3 | None = None,
        drafters: str = "df-e3",
        router: str | Path | Router | None = None,
        threshold: float | str | None = None,
        drafting: Drafting | None = None,
        slot: int = 0,
        router_flip: bool = False,
        tap_ids: TapIds | None = None,
        dtype: str | None = None,
        device: str | None = None,
        lazy: bool = True,
        kv_only: bool = True,
        timed: bool = False,
        progress: Callable[[str, float], None] | None = None,
    ) -> "WhiFlash":
        """Load everything by hub id or directory; what is left out takes the embedded default.

        drafters: "none", one of df, ddt, e3, or a pair df-e3, ddt-e3, df-ddt (slot 0, slot 1). router, for a pair:
        "fixed" (always `slot`), "entropy" (the default), "neural" (the shipped one), or a neural router's hub id,
        directory or file. threshold: entropy in nats, or ΔAL; "auto" takes what `whiflash calibrate` found here, with
        the lengths of drafts that `drafting` leaves open, and so does the path of a calibration. router_flip: a bare
        router file whose positive output means slot 0. tap_ids: how a checkpoint's tap ids are meant ("output" or
        "boundary"), where its layout leaves that open. progress: called while the embedded target is prepared.
        """
        names = _parse_drafters(drafters)
        _check_router(router, names, threshold, slot, router_flip)
        if tap_ids not in (None, "output", "boundary"):
            raise WhiFlashError(f"tap ids are output (after the layer) or boundary (before it), got {tap_ids!r}")
        drafting = drafting or Drafting()
        if not isinstance(target, Target):
            target = load_target(target, dtype=dtype, device=device, progress=progress)
        elif dtype is not None or device is not None:
            raise WhiFlashError("this target is loaded already; give dtype and device where it is loaded")
        dflash_model = eagle3_model = None
        if {"df", "ddt"} & set(names):
            source = dflash if dflash is not None else _shipped("dflash", "dflash", target)
            dflash_model = source if isinstance(source, DFlash) else load_dflash(source, target, tap_ids=tap_ids)
        if "e3" in names:
            source3 = eagle3 if eagle3 is not None else _shipped("eagle3", "eagle3", target)
            eagle3_model = source3 if isinstance(source3, Eagle3) else load_eagle3(source3, target, tap_ids=tap_ids)
        if isinstance(threshold, str):
            models = {name: eagle3_model if name == "e3" else dflash_model for name in names}
            threshold, drafting = _calibrated(threshold, models, router, router_flip, target, drafting)
        chosen = _router(router, names, threshold, slot, router_flip, target, drafting)
        if isinstance(chosen, NeuralRouter) and drafting.eagle3_depth is None and drafting.eagle3_top_k == 1:
            drafting = replace(drafting, eagle3_depth=chosen.eagle3_depth)
        built = [_drafter(name, dflash_model, eagle3_model, drafting) for name in names]
        return cls(target, built, chosen, lazy=lazy, kv_only=kv_only, timed=timed)

    def session(self, capacity: int = 1024) -> Session:
        """A fresh session; hand it to `generate` or `stream` again to keep the caches between the turns of a chat."""
        return Session(
            self.target,
            self.drafters,
            self.router,
            lazy=self.lazy,
            kv_only=self.kv_only,
            timed=self.timed,
            capacity=capacity,
        )

    def generate(self, prompt: Prompt, **options: Any) -> Output:
        """The whole answer at once; options as for `stream`."""
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.output()

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        system: str | None = None,
        session: Session | None = None,
        **template: Any,
    ) -> "Stream":
        """Iterate over the answer as it comes. prompt: a text, a list of messages, or token ids.

        The answer ends at any end-of-sequence id of the target (unless `ignore_eos`), at `stop_token_ids`, before a
        `stop` string, or after max_new_tokens. `template` goes to the chat template (`enable_thinking=False`, …), which
        must read it: an option that nothing knows is refused.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, seed)
        stopping = Stopping(
            max_new_tokens,
            frozenset(stop_token_ids) | (frozenset() if ignore_eos else self.target.stop_ids),
            (stop,) if isinstance(stop, str) else tuple(stop),
        )
        if not all(0 <= i < self.target.vocab_size for i in stop_token_ids):
            raise WhiFlashError(f"stop token ids must lie in 0..{self.target.vocab_size - 1}, got {[*stop_token_ids]}")
        tokens = self.target.encode(prompt, system, **template)
        if len(tokens) + max_new_tokens > self.target.max_positions:
            raise WhiFlashError(
                f"the prompt has {len(tokens)} tokens and {max_new_tokens} new ones are asked for, but "
                f"{self.target.name} reads at most {self.target.max_positions}; shorten the prompt or ask for fewer"
            )
        if session is None:
            rows = max((d.rows for d in self.drafters), default=1)
            session = self.session(len(tokens) + max_new_tokens + rows)
        return Stream(session, tokens, sampling, stopping)


class Stream:
    """An answer in the making: iterate for its pieces, then ask for `output()`. `interrupt()` ends it where it is."""

    def __init__(self, session: Session, tokens: list[int], sampling: Sampling, stopping: Stopping):
        self._session, self._prompt = session, tokens
        self._sampler = None if sampling.greedy else Sampler(sampling, session.target.device)
        self._answer = Answer(session.target.decode, stopping, session.target.byte_ids)
        self._rounds: list[Round] = []
        self._prefill = self._decode = 0.0
        self._shown = 0  # tokens given out in pieces
        self._pieces = self._run()

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def __next__(self) -> Piece:
        return next(self._pieces)

    def _run(self) -> Iterator[Piece]:
        started = time.perf_counter()
        first = self._session.prefill(self._prompt, self._sampler)
        self._answer.take([first])
        self._prefill = time.perf_counter() - started
        yield self._piece()
        while self._answer.finish_reason is None:
            started = time.perf_counter()
            r = self._session.round(self._answer.take)
            self._decode += time.perf_counter() - started
            self._rounds.append(r)
            yield self._piece(r)

    def _piece(self, of: Round | None = None) -> Piece:
        tokens, self._shown = self._answer.tokens[self._shown :], len(self._answer.tokens)
        return Piece(self._answer.piece(), tokens, of)

    def interrupt(self) -> Piece:
        """End the answer now; returns what was held back."""
        self._pieces.close()  # type: ignore[attr-defined]
        self._answer.end("interrupted")
        return self._piece()

    def output(self) -> Output:
        answer = self._answer
        stats = summarise(self._rounds, len(self._prompt), len(answer.tokens), self._prefill, self._decode)
        return Output(
            answer.text, answer.tokens, self._rounds, answer.finish_reason or "unfinished", stats, self._prompt
        )


def _parse_drafters(drafters: str) -> tuple[str, ...]:
    if drafters == "none":
        return ()
    if drafters not in (*SINGLES, *PAIRS):
        raise WhiFlashError(
            f"drafters {drafters!r} are not known; expected none, one of {', '.join(SINGLES)}, "
            f"or a pair {', '.join(PAIRS)}"
        )
    return tuple(drafters.split("-"))


def _shipped(name: str, argument: str, target: Target) -> Path:
    """What the package ships for the embedded target."""
    if target.name != embedded.NAME:
        raise WhiFlashError(
            f"no {argument} checkpoint ships for {target.name}; name one (a hub id or a directory), train one "
            "(`whiflash train`), or decode plainly with drafters none"
        )
    if not (ASSETS / name).is_dir():
        raise WhiFlashError(f"this build ships no {argument} for {target.name}; give one with {argument}=…")
    return ASSETS / name


def _drafter(name: str, dflash: DFlash | None, eagle3: Eagle3 | None, drafting: Drafting) -> Drafter:
    if name == "e3":
        assert eagle3 is not None
        depth = drafting.eagle3_depth or EAGLE3_DEPTH
        return Eagle3Drafter(eagle3, depth, drafting.eagle3_top_k, drafting.eagle3_total_tokens, drafting.p_min)
    assert dflash is not None
    if name == "ddt":
        return DDTreeDrafter(dflash, drafting.tree_budget or TREE_BUDGET, drafting.block_size, drafting.p_min)
    return DFlashDrafter(dflash, drafting.block_size, drafting.block_rows, drafting.p_min)


def _check_router(
    router: str | Path | Router | None, names: tuple[str, ...], threshold: float | str | None, slot: int, flip: bool
) -> None:
    """Refuse, before anything is loaded, what would otherwise be ignored."""
    if len(names) < 2 and (router is not None or threshold is not None or slot or flip):
        raise WhiFlashError(
            f"a router with its threshold, slot or flip chooses between two drafters, but drafters is "
            f"{'-'.join(names) or 'none'!r}"
        )
    kind = "entropy" if router is None else router if router in ("entropy", "fixed") else "neural"
    if slot and kind != "fixed":
        raise WhiFlashError(f"only the fixed router takes slot {slot}; leave the slot out, or use router fixed")
    if flip and kind != "neural":
        raise WhiFlashError(f"only a neural router's output can be flipped, not the {kind} router's")
    if threshold is not None and (kind == "fixed" or not isinstance(router, str | Path | None)):
        raise WhiFlashError("this router takes no threshold; leave it out, or use entropy or neural")
    if threshold is not None and not isinstance(threshold, str):
        check_threshold(threshold, least=0.0 if kind == "entropy" else None)


def _calibrated(
    source: str,
    models: dict[str, Any],
    router: str | Path | Router | None,
    flip: bool,
    target: Target,
    drafting: Drafting,
) -> tuple[float, Drafting]:
    """Threshold and shapes of a calibration; shapes that were asked for stay."""
    names = tuple(models)
    chosen = _router(router, names, None, 0, flip, target, drafting)
    assert chosen is not None
    found = calibration.read(
        source,
        calibration.Setting.of(target, "-".join(names)),
        {name: model.identity for name, model in models.items()},
        (chosen.name, getattr(chosen, "identity", None)),
    )
    shapes: dict[str, Any] = {}
    if "df" in names and drafting.block_rows is None and drafting.block_size is None:
        shapes["block_rows"] = found.lengths["df"] + 1
    if "ddt" in names and drafting.tree_budget is None:
        shapes["tree_budget"] = found.lengths["ddt"]
    if "e3" in names and drafting.eagle3_depth is None and drafting.eagle3_top_k == 1:
        shapes["eagle3_depth"] = found.lengths["e3"]
    if drafting.p_min is None and drafting.eagle3_top_k == 1:
        shapes["p_min"] = found.p_min
    return found.threshold, replace(drafting, **shapes)


def _router(
    router: str | Path | Router | None,
    names: tuple[str, ...],
    threshold: float | None,
    slot: int,
    flip: bool,
    target: Target,
    drafting: Drafting,
) -> Router | None:
    if len(names) < 2:
        return None
    if router is not None and not isinstance(router, str | Path):
        return router
    if router in (None, "entropy"):
        return EntropyRouter() if threshold is None else EntropyRouter(threshold)
    if router == "fixed":
        return FixedRouter(slot, len(names))
    pair = "-".join(names)
    source = _shipped(f"router-{pair}", "router", target) if router == "neural" else router
    budget = drafting.tree_budget or TREE_BUDGET if "ddt" in names else None
    setting = Setting(target.fingerprint(), target.name, pair, budget, target.width)
    assert source is not None
    return NeuralRouter.load(source, setting, threshold, flip, target.device)
