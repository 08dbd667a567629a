"""The best threshold and lengths of drafts among all replayed, and how close the closed form comes to them."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from whiflash.calibration import OVERALL
from whiflash.evaluation.latency import Profile
from whiflash.evaluation.record import P_MINS, Text
from whiflash.evaluation.replay import DIGITS, Pair, Walked, above, thresholds, walk

# steps of the closed form's fixed point, which takes two or three
STEPS = 20


def search(
    texts: Sequence[Text], names: Sequence[str], router: str, lengths: Mapping[str, Sequence[int]], profile: Profile
) -> dict[str, Any]:
    """Per category and overall: the threshold and lengths with the most tokens a second, and what they compare with.

    held_out: the share of the best throughput on one half of the texts that the choice on the other half gets.
    """
    pair, tried = Pair.of(names, lengths, profile, (None, *P_MINS)), thresholds(texts, router)
    walked = [walk(text, pair, above(text, router, tried)) for text in texts]
    found: dict[str, Any] = {}
    for category in [*dict.fromkeys(text.category for text in texts), OVERALL]:
        members = [i for i, text in enumerate(texts) if category in (text.category, OVERALL)]
        total = reduce(add, [walked[i] for i in members])
        shape, place = _best(total)
        chosen = [texts[i] for i in members]
        own = pair.only(shape)
        found[category] = {
            "threshold": tried[place],
            "lengths": {slot.name: slot.shapes[0][0] for slot in (own.first, own.second)},
            "p_min": own.first.shapes[0][1],
            "texts": len(members),
            **_figures(total, shape, place),
            "alone": _alone(chosen, pair),
            "closed_form": closed_form(chosen, own, router),
            "oracle_tokens_per_second": round(oracle(chosen, own), 3),
            "curve": [[t, round(float(s), 3)] for t, s in zip(tried, total.speed[shape], strict=True)],
        }
    return {"categories": found, "held_out": _held_out(walked)}


def _best(walked: Walked) -> tuple[int, int]:
    shape, place = np.unravel_index(np.argmax(walked.speed), walked.speed.shape)
    return int(shape), int(place)


def _figures(walked: Walked, shape: int, place: int) -> dict[str, float]:
    return {
        "tokens_per_second": round(float(walked.speed[shape, place]), 3),
        "acceptance_length": round(float(walked.acceptance[shape, place]), 4),
        "second_share": round(float(walked.second[shape, place] / walked.rounds[shape, place]), 4),
    }


def _held_out(walked: Sequence[Walked]) -> float | None:
    halves = [walked[0::2], walked[1::2]]
    if not all(halves):
        return None
    sums = [reduce(add, half) for half in halves]
    ratios = [judge.speed[_best(picks)] / judge.speed.max() for picks, judge in (sums, sums[::-1])]
    return round(float(np.mean(ratios)), 4)


def _total(texts: Sequence[Text], pair: Pair, choose: Callable[[Text], np.ndarray]) -> Walked:
    return reduce(add, [walk(text, pair, choose(text)) for text in texts])


def _alone(texts: Sequence[Text], pair: Pair) -> dict[str, dict[str, Any]]:
    """Either drafter without the other, in the shape that is best for it."""
    found = {}
    for slot, second in ((pair.first, False), (pair.second, True)):
        walked = _total(texts, pair, lambda text, second=second: np.full((1, text.roots), second))  # type: ignore[misc]
        shape, place = _best(walked)
        length, p_min = slot.shapes[shape]
        found[slot.name] = {"length": length, "p_min": p_min, **_figures(walked, shape, place)}
    return found


def closed_form(texts: Sequence[Text], pair: Pair, router: str) -> dict[str, float]:
    """The threshold that the renewal-reward theorem gives, without a sweep, for one pair of shapes.

    With θ tokens a second a round's worth is its tokens less θ times its seconds, so the second slot pays where
    AL₁ - AL₀ > θ·(c₁ - c₀). The threshold is where the mean of that difference, among the positions above, stops
    growing; θ is what decoding with it then achieves, and so on to the fixed point. For a neural router, which
    predicts AL₁ - AL₀, `predicted` is θ·(c₁ - c₀) itself, with the mean of the costs where a p_min makes them vary.
    """
    gain, cost = (np.concatenate(parts) for parts in zip(*map(pair.gains, texts), strict=True))
    scores = np.concatenate([text.scores[router] for text in texts])
    order = np.argsort(-scores, kind="stable")
    scores, gain, cost = scores[order], gain[order], cost[order]
    least = 0.0 if router == "entropy" else -np.inf

    def speed(threshold: float) -> float:
        return float(_total(texts, pair, lambda text: above(text, router, [threshold])).speed[0, 0])

    def crossing(theta: float) -> float:
        worth = np.cumsum(gain - theta * cost)
        if worth.max() <= 0:
            return round(float(scores[0]) + 1, DIGITS)
        last = int(worth.argmax())
        below = scores[last + 1] if last + 1 < len(scores) else scores[last] - 1
        return round(max(float(scores[last] + below) / 2, least), DIGITS)

    threshold, theta = fixed_point(crossing, speed, speed(float(scores[0]) + 1))
    found = {"threshold": threshold, "tokens_per_second": round(theta, 3)}
    if router != "entropy":
        threshold, theta = fixed_point(lambda theta: round(theta * float(cost.mean()), DIGITS), speed, theta)
        found |= {"predicted": threshold, "predicted_tokens_per_second": round(theta, 3)}
    return found


def fixed_point(rule: Callable[[float], float], speed: Callable[[float], float], theta: float) -> tuple[float, float]:
    """Threshold and tokens a second where rule(θ) gives the threshold that achieves θ; the best one if it circles."""
    tried: dict[float, float] = {}
    for _ in range(STEPS):
        threshold = rule(theta)
        if threshold in tried:
            break
        theta = tried[threshold] = speed(threshold)
    return max(tried.items(), key=lambda item: item[1])


def oracle(texts: Sequence[Text], pair: Pair) -> float:
    """Tokens a second of the closed form's rule when it knows both acceptance lengths: what no router can know."""

    def speed(theta: float) -> float:
        return float(_total(texts, pair, lambda text: pays(text, pair, theta)).speed[0, 0])

    return fixed_point(lambda theta: theta, speed, speed(0.0))[1]


def pays(text: Text, pair: Pair, theta: float) -> np.ndarray:
    """Where a round of the second slot is worth more at `theta` tokens a second, [1, roots]."""
    gain, cost = pair.gains(text)
    return (gain > theta * cost)[None]
