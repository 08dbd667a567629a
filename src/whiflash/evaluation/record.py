"""What every drafter would get accepted at every position of a known greedy answer, by drafting there for real.

The runtime's own drafters run at each position in turn, so that a replay of the record is what decoding does, whatever
the checkpoint's layers and the shape of the draft. The router's signal is recorded beside it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from whiflash.decoding.accept import walk
from whiflash.drafters.drafter import Drafter, DraftState, FeatureLog
from whiflash.errors import WhiFlashError
from whiflash.evaluation.benchmark import Progress
from whiflash.evaluation.datasets import Prompt
from whiflash.journal import Journal
from whiflash.model import WhiFlash
from whiflash.routers.router import Router, Signal
from whiflash.target.target import Target

# positions whose features, or whose logits, are computed at a time
CHUNK, LOGITS = 512, 64
# what `Drafting.p_min` is tried at
P_MINS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)


@dataclass(frozen=True)
class Text:
    """A greedy answer with m roots: every token of it but the last. `prompt` is the tokens before it.

    scores[router][i] is what the router compares at root i. paths[drafter][i] are the nodes of the longest draft that
    are accepted there (1 is the first besides the root), ascending: a draft of n nodes is the first n of a longer one,
    so those ≤ n are what it gets. likely[drafter][i] counts its nodes that are at least as likely as each of P_MINS.
    """

    id: str
    category: str
    prompt: int
    scores: dict[str, list[float]]
    paths: dict[str, list[list[int]]]
    likely: dict[str, list[list[int]]]

    @property
    def roots(self) -> int:
        return len(next(iter(self.scores.values())))


@torch.inference_mode()
def record(
    target: Target,
    drafters: Mapping[str, Drafter],
    routers: Mapping[str, Router],
    tokens: Sequence[int],
    prompt: int,
) -> tuple[dict[str, list[float]], dict[str, list[list[int]]], dict[str, list[list[int]]]]:
    """(scores, paths, likely) as `Text` has them. tokens: prompt and greedy answer; the answer starts at `prompt`.

    drafters: with a p_min of 0, which leaves nothing out and tells how likely each node is.
    """
    text, last = torch.tensor(tokens, device=target.device), len(tokens) - 1
    taps = sorted({tap for drafter in drafters.values() for tap in drafter.model.taps})
    log = FeatureLog(taps, target.width, target.dtype, target.device, last)
    log.set_tokens(0, text)
    cache, hidden = target.network.new_cache(last), []
    for piece in text[:-1].split(CHUNK):
        rows, features = target.network(piece[None], cache, taps=log.taps)
        cache.advance(len(piece))
        assert features is not None, "a drafter taps at least one layer"
        log.append(features[0], 0)
        hidden.append(rows[0])
    # the node before a root produced it, and is what the router saw
    seen = torch.cat(hidden)[prompt - 1 : last - 1]
    drafted = {name: _drafts(d, log, text, prompt) for name, d in drafters.items()}
    paths, likely = ({name: found[i] for name, found in drafted.items()} for i in (0, 1))
    return _scores(target, routers, seen), paths, likely


def _scores(target: Target, routers: Mapping[str, Router], hidden: Tensor) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in routers}
    for rows in hidden.split(LOGITS):
        signals = [Signal(*pair) for pair in zip(rows, target.network.head(rows), strict=True)]
        for name, router in routers.items():
            found[name] += torch.stack([router(signal)[1] for signal in signals]).tolist()
    return found


def _drafts(drafter: Drafter, log: FeatureLog, text: Tensor, prompt: int) -> tuple[list[list[int]], list[list[int]]]:
    state, last = DraftState(drafter.model.new_cache(len(text) + drafter.rows)), len(text) - 1
    wanted, paths, likely = F.pad(text, (0, drafter.rows), value=-1), [], []
    least = torch.tensor(P_MINS, device=text.device)
    for root in range(prompt, last):
        log.length = root
        drafter.catch_up(state, log)
        draft = drafter.draft(state, log, None)
        path = walk(draft, wanted[root + 1 + draft.depths]).path
        paths.append(path.nonzero()[1:, 0].tolist())
        assert draft.confidence is not None, "a drafter to record has a p_min of 0"
        likely.append((draft.confidence >= least[:, None]).sum(1).tolist())
    log.length = last
    return paths, likely


def record_all(
    prompts: Sequence[Prompt], model: WhiFlash, drafters: Mapping[str, Drafter], routers: Mapping[str, Router],
    journal: Journal, max_new_tokens: int, progress: Progress,
) -> list[Text]:  # fmt: skip
    """Answer every first turn with `model` and record it; goes on where a killed run stopped."""
    for index in range(len(journal.rows), len(prompts)):
        prompt = prompts[index]
        progress(index, len(prompts), f"recording {prompt.id}")
        tokens = model.target.encode(prompt.turns[0], enable_thinking=False)
        room = model.target.max_positions - max_new_tokens
        out = model.generate(tokens, max_new_tokens=max_new_tokens) if len(tokens) <= room else None
        if out is None or len(out.tokens) < 2:
            # too long, or answered with one token: no round to learn from
            journal.append({"id": prompt.id, "left_out": True})
            continue
        found = record(model.target, drafters, routers, [*tokens, *out.tokens], len(tokens))
        journal.append(asdict(Text(prompt.id, prompt.category, len(tokens), *found)))
    progress(len(prompts), len(prompts), "recorded")
    texts = [Text(**row) for row in journal.rows if "left_out" not in row]
    if not texts:
        raise WhiFlashError(
            "no prompt gave an answer of two tokens or more, so there is nothing to calibrate on; "
            "use other prompts, or more --max-new-tokens"
        )
    return texts
