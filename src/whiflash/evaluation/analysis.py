"""What a run says about its pair of drafters and their router, as figures: pure functions over roots and rounds."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import groupby, pairwise
from operator import add
from typing import Any

import numpy as np

from whiflash.decoding.session import PHASES
from whiflash.evaluation.latency import Profile
from whiflash.evaluation.positions import Roots, score_name
from whiflash.evaluation.record import Text
from whiflash.evaluation.replay import Pair, Slot, Walked, above, walk
from whiflash.evaluation.runs import Routed, Run
from whiflash.evaluation.search import fixed_point, pays

PARTS = 10

DEFINITIONS = {
    "acceptance length (AL)": "tokens committed in a round, the target's own bonus token included",
    "wins": "positions at which a slot would commit more tokens than the other",
    "run length": "consecutive rounds of one slot within an answer; the best choice stays with its slot at a tie",
    "accuracy": "share of the positions without a tie at which the router takes the better slot",
    "R²": "of ΔAL = AL of slot 1 - AL of slot 0: of what the neural router predicts, which is below 0 where the mean "
    "would predict better; of the best straight line through what any other router compares",
    "regret": "tokens a round that the better slot would have committed beyond the one taken, mean over positions",
    "oracle, best AL": "the slot that commits more, every round; the cheaper one at a tie",
    "oracle, best utility": "the slot with the larger AL - θ·seconds, every round; θ: the tokens a second it achieves",
    "bound": "fewest rounds, or least time with catching up for free, that any choice of slots could take, found "
    "backwards from the end of each answer: taking the most every round may land where the next round gets little",
}


def wins(roots: Sequence[Roots]) -> list[dict[str, Any]]:
    """Per answer: the share of its positions that slot 0 wins, that are tied, and that slot 1 wins."""
    found: dict[tuple[str, str], list[np.ndarray]] = {}
    for part in roots:
        found.setdefault((part.prompt, part.category), []).append(part.gain)
    rows = []
    for (prompt, category), parts in found.items():
        gain = np.concatenate(parts)
        shares = [float((np.sign(gain) == sign).mean()) for sign in (-1, 0, 1)]
        rows.append({"prompt": prompt, "category": category, "positions": len(gain), "shares": shares})
    return rows


def run_lengths(slots: Iterable[Any]) -> Counter[int]:
    """How many runs of equal neighbours there are of each length."""
    return Counter(sum(1 for _ in run) for _, run in groupby(slots))


def best_slots(roots: Roots) -> list[int]:
    """The winner at every root; at a tie the one before it, so that only a gain counts as a switch."""
    found: list[int] = []
    for gain in roots.gain:
        found.append(int(gain > 0) if gain or not found else found[-1])
    return found


def decoded(roots: Roots, slots: Sequence[int]) -> list[int]:
    """The slots of the rounds that decoding takes when slots[i] drafts at root i; needs every root of the answer."""
    found, root = [], 0
    while root < len(slots):
        found.append(slots[root])
        root += int(roots.lengths[slots[root], root])
    return found


def deciles(roots: Sequence[Roots], by: str = "entropy") -> list[dict[str, Any]]:
    """Positions in ten parts of equal size by entropy (or `score`), with the mean AL of either slot in each.

    An edge belongs to the part below it. A part is left out where values repeat so often that none falls into it.
    """
    values = np.concatenate([getattr(part, by) for part in roots])
    lengths = np.concatenate([part.lengths for part in roots], axis=1)
    edges = np.percentile(values, np.arange(PARTS + 1) * (100 // PARTS))
    part = np.searchsorted(edges[1:-1], values, side="left")
    return [
        {
            "decile": number + 1,
            "low": float(edges[number]),
            "high": float(edges[number + 1]),
            "positions": int(inside.sum()),
            "acceptance_length": [float(mean) for mean in lengths[:, inside].mean(1)],
        }
        for number in range(PARTS)
        if (inside := part == number).any()
    ]


def judge(roots: Sequence[Roots], predicts: bool) -> dict[str, Any]:
    """The router's choices against the better slot. predicts: its score is a prediction of ΔAL.

    Null where there is nothing to tell: no position without a tie, or ΔAL, or the score, the same everywhere.
    """
    gain = np.concatenate([part.gain for part in roots])
    score = np.concatenate([part.score for part in roots]).astype(float)
    picked = np.concatenate([part.picked for part in roots]).astype(bool)
    decided = gain != 0
    spread = float(((gain - gain.mean()) ** 2).sum())
    straight = float(np.corrcoef(score, gain)[0, 1]) if spread and np.ptp(score) else None
    predicted = 1 - float(((gain - score) ** 2).sum()) / spread if spread else None
    better = gain > 0

    def share(choice: np.ndarray) -> float | None:
        return float((choice == better)[decided].mean()) if decided.any() else None

    def regret(choice: np.ndarray) -> float:
        return float(np.where(choice == better, 0, np.abs(gain)).mean())

    always = np.ones(len(gain), bool)
    return {
        "positions": len(gain),
        "ties": float((~decided).mean()),
        "accuracy": share(picked),
        "accuracy_always": [share(~always), share(always)],
        "r2": predicted if predicts else None if straight is None else straight**2,
        "correlation": straight,
        "regret": regret(picked),
        "regret_always": [regret(~always), regret(always)],
    }


def bounds(texts: Sequence[Text], method: Routed, profile: Profile) -> dict[str, dict[str, float | None]]:
    """Recorded answers decoded by either slot alone, by the router, by the oracles, and as well as is possible at all.

    name → acceptance_length, tokens_per_second on `profile`, second_share. See DEFINITIONS.
    """
    names = [shape.drafter for shape in method.shapes]
    pair = Pair(*(Slot(name, ((nodes, p_min),), profile) for name, nodes, p_min in method.shapes))

    def total(choose: Callable[[Text], np.ndarray]) -> Walked:
        return reduce(add, [walk(text, pair, choose(text)) for text in texts])

    def longest(text: Text) -> np.ndarray:
        gain, cost = pair.gains(text)
        return ((gain > 0) | (gain == 0) & (cost < 0))[None]

    def worth(theta: float) -> Walked:
        return total(lambda text: pays(text, pair, theta))

    theta, _ = fixed_point(lambda theta: theta, lambda theta: float(worth(theta).speed[0, 0]), 0.0)
    walked = {
        f"{names[0]} alone": total(lambda text: np.zeros((1, text.roots), bool)),
        f"{names[1]} alone": total(lambda text: np.ones((1, text.roots), bool)),
        method.name: total(lambda text: above(text, score_name(method), [method.threshold])),
        "oracle, best AL": total(longest),
        "oracle, best utility": worth(theta),
    }
    found: dict[str, dict[str, float | None]] = {
        name: {
            "acceptance_length": float(w.acceptance[0, 0]),
            "tokens_per_second": float(w.speed[0, 0]),
            "second_share": float(w.second[0, 0] / w.rounds[0, 0]),
        }
        for name, w in walked.items()
    }
    tables = [tuple(table[:, 0] for table in pair.tables(text)) for text in texts]
    tokens = sum(text.roots for text in texts)
    found["bound"] = {
        "acceptance_length": tokens / sum(least(lengths, np.ones_like(lengths)) for lengths, _ in tables),
        "tokens_per_second": tokens / sum(least(lengths, seconds) for lengths, seconds in tables),
        "second_share": None,
    }
    return found


def least(lengths: np.ndarray, costs: np.ndarray) -> float:
    """Least cost of getting from the first root to the end, where a round of slot s at root i goes lengths[s, i] on for
    costs[s, i]."""
    count = lengths.shape[1]
    best = [0.0] * (count + 1)
    for root in reversed(range(count)):
        steps = zip(costs[:, root], lengths[:, root], strict=True)
        best[root] = min(float(cost) + best[root + int(step)] for cost, step in steps)
    return best[0]


def switching(run: Run, method: Routed) -> dict[str, Any]:
    """What switching cost in the rounds of a method: catching up right after a switch, and when the slot stayed.

    Seconds and rows a round, means; the first round of an answer, which catches up with the prompt, stands alone.
    """
    kinds: dict[str, list[tuple[float, int]]] = {"first": [], "stayed": [], "switched": []}
    latency = 0.0
    for _, _, turn in run.turns(method.name):
        table = turn["rounds"]
        latency += sum(sum(table[phase]) for phase in PHASES)
        seen = list(zip(table["catch_up"], table["caught_up"], strict=True))
        kinds["first"] += seen[:1]
        for (before, after), cost in zip(pairwise(table["slot"]), seen[1:], strict=True):
            kinds["stayed" if before == after else "switched"].append(cost)
    means: dict[str, dict[str, float] | None] = {
        kind: {"rounds": len(seen), "seconds": _mean(s for s, _ in seen), "rows": _mean(n for _, n in seen)}
        if seen
        else None
        for kind, seen in kinds.items()
    }
    after, stayed = means["switched"], means["stayed"]
    rounds = sum(map(len, kinds.values()))
    spent = sum(seconds for seen in kinds.values() for seconds, _ in seen)
    return {
        "mode": method.mode,
        "catching": method.catching,
        "rounds": rounds,
        "switches_per_100_rounds": 100 * len(kinds["switched"]) / rounds,
        "catch_up_share": spent / latency if latency else None,
        "catch_up": means,
        "switch_seconds": after["seconds"] - stayed["seconds"] if after and stayed else None,
    }


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return float(sum(found) / len(found))


def slots_by_answer(run: Run, method: Routed) -> list[list[str]]:
    return [list(turn["rounds"]["slot"]) for _, _, turn in run.turns(method.name)]
