"""Router training: from the target's final hidden state to the difference in acceptance length of a pair."""

import copy
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from whiflash.errors import WhiFlashError
from whiflash.journal import write_atomic
from whiflash.routers.mlp import RouterMLP
from whiflash.routers.neural import FORMAT
from whiflash.target.target import Target
from whiflash.training.acceptance import Measured

PAIRS = ("df-e3", "ddt-e3", "df-ddt")


@dataclass(frozen=True)
class RouterRecipe:
    """`chain` is the depth of the EAGLE-3 chain, `tree_budget` the nodes of DDTree besides the root.

    The network's `inner_size` hidden units are those of `members` networks, each trained from a start of its own: their
    mean errs less than any of them, and is itself one two-layer network. Training drops a share `dropout` of the hidden
    units, and of the inputs half that: positions are many, but texts, which is what must be generalised over, are few.
    Adam trains each until `patience` epochs bring no better validation error, at most `epochs`.
    """

    pairs: tuple[str, ...] = PAIRS
    chain: int = 5
    tree_budget: int = 16
    inner_size: int = 512
    members: int = 4
    dropout: float = 0.4
    lr: float = 1e-3
    batch: int = 2048
    epochs: int = 25
    patience: int = 6
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [p for p in self.pairs if p not in PAIRS]
        if unknown or not self.pairs:
            raise WhiFlashError(f"pair {unknown[0] if unknown else ''!r} is not known; expected {', '.join(PAIRS)}")
        if min(self.chain, self.tree_budget, self.inner_size, self.batch, self.epochs, self.patience) < 1:
            raise WhiFlashError("chain, tree_budget, inner_size, batch, epochs and patience must be at least 1")
        if self.members < 1 or self.inner_size % self.members:
            raise WhiFlashError(f"inner_size {self.inner_size} does not divide among {self.members} members")
        if not 0 <= self.dropout < 1:
            raise WhiFlashError(f"dropout must lie in 0..1, got {self.dropout}")


def train_router(
    pair: str,
    target: Target,
    texts: Sequence[Measured],
    held: Sequence[Measured],
    recipe: RouterRecipe,
    out: str | Path,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Fit a router for `pair` on `texts`, score it on `held`, write it to `out`; returns the scores.

    A tenth of the prompts of `texts` stops the training and sets the threshold. Positive means that the pair's second
    drafter gains.
    """
    slots = pair.split("-")
    missing = [s for s in slots if s not in texts[0].lengths]
    if missing:
        raise WhiFlashError(f"pair {pair} needs a drafter that was not given: {', '.join(missing)}")
    fitted, validation = split_prompts(texts)
    network = fit(*_table(fitted, slots), *_table(validation, slots), recipe, target.device)
    network.half().float()  # as it is saved, so that threshold and scores are those of the file
    threshold = best_threshold(network, validation, slots)
    scores = evaluate(network, held, slots, threshold)
    budget = recipe.tree_budget if "ddt" in slots else None
    config = {
        "format": FORMAT,
        "version": 1,
        "target": target.path.name if Path(target.name).is_dir() else target.name,
        "target_fingerprint": target.fingerprint(),
        "pair": pair,
        "tree_budget": budget,
        "eagle3_depth": recipe.chain if "e3" in slots else None,
        "hidden_size": target.width,
        "inner_size": recipe.inner_size,
        "positive": "slot-1",
        "threshold": threshold,
        "data": {
            "texts": len(texts),
            "positions": sum(len(m.signal) for m in texts),
            "held_out_texts": len(held),
            "held_out_positions": sum(len(m.signal) for m in held),
        },
        "recipe": {**asdict(recipe), "pairs": [pair]},
        "scores": scores,
    }
    export(network, config, Path(out))
    rounds = scores["overall"]["rounds"]
    log(
        f"router {pair}: R² {scores['overall']['r2']:.3f}, sign {scores['overall']['sign']:.3f}, AL in rounds "
        + ", ".join(f"{name} {value:.3f}" for name, value in rounds.items())
    )
    return scores


def split_prompts(texts: Sequence[Measured]) -> tuple[list[Measured], list[Measured]]:
    """A tenth of the prompts, one at least, for validation; the choice depends on the prompts alone."""
    prompts = sorted({m.prompt for m in texts})
    if len(prompts) < 2:
        raise WhiFlashError("a router needs texts with at least two different prompts")
    chosen = set(prompts[: max(1, len(prompts) // 10)])
    return [m for m in texts if m.prompt not in chosen], [m for m in texts if m.prompt in chosen]


def gain(text: Measured, slots: Sequence[str]) -> Tensor:
    """ΔAL [m] at every root: what the second drafter commits more than the first."""
    return (text.lengths[slots[1]] - text.lengths[slots[0]]).float()


def _table(texts: Sequence[Measured], slots: Sequence[str]) -> tuple[Tensor, Tensor]:
    return torch.cat([m.signal for m in texts]), torch.cat([gain(m, slots) for m in texts])


def fit(
    x: Tensor,
    y: Tensor,
    x_validation: Tensor,
    y_validation: Tensor,
    recipe: RouterRecipe,
    device: torch.device | str = "cpu",
) -> RouterMLP:
    """Regress y [N] on x [N, width] by mean squared error; the epoch with the least validation error is returned."""
    x, y, x_validation, y_validation = (t.to(device) for t in (x, y, x_validation, y_validation))
    mean, scale = x.mean(0), x.std(0).clamp_min(1e-4)
    x, x_validation = (x - mean) / scale, (x_validation - mean) / scale
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        network = joined([_descend(x, y, x_validation, y_validation, recipe) for _ in range(recipe.members)])
    with torch.no_grad():  # the router reads hidden states as they are
        network.fc1.weight.div_(scale)
        network.fc1.bias.sub_(network.fc1.weight @ mean)
    return network.cpu().requires_grad_(False)


@torch.no_grad()
def joined(members: Sequence[RouterMLP]) -> RouterMLP:
    """The network whose output is the mean of the members'."""
    first = members[0].fc1.weight
    network = RouterMLP(first.shape[1], sum(len(m.fc1.weight) for m in members)).to(first.device)
    network.fc1.weight.copy_(torch.cat([m.fc1.weight for m in members]))
    network.fc1.bias.copy_(torch.cat([m.fc1.bias for m in members]))
    network.fc2.weight.copy_(torch.cat([m.fc2.weight for m in members], 1) / len(members))
    network.fc2.bias.copy_(torch.stack([m.fc2.bias for m in members]).mean(0))
    return network


def _descend(x: Tensor, y: Tensor, x_validation: Tensor, y_validation: Tensor, recipe: RouterRecipe) -> RouterMLP:
    network = RouterMLP(x.shape[1], recipe.inner_size // recipe.members).to(x.device)
    optimizer = torch.optim.Adam(network.parameters(), lr=recipe.lr)
    best, best_error, waited = copy.deepcopy(network.state_dict()), math.inf, 0
    for _ in range(recipe.epochs):
        for batch in torch.randperm(len(x), device=x.device).split(recipe.batch):
            read = F.dropout(x[batch], recipe.dropout / 2)
            hidden = F.dropout(F.gelu(network.fc1(read)), recipe.dropout)
            loss = F.mse_loss(network.fc2(hidden).squeeze(-1), y[batch])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        with torch.inference_mode():
            error = float(F.mse_loss(network(x_validation), y_validation))
        waited += 1
        if error < best_error:
            best, best_error, waited = copy.deepcopy(network.state_dict()), error, 0
        if waited >= recipe.patience:
            break
    network.load_state_dict(best)
    return network


def predict(network: RouterMLP, text: Measured) -> Tensor:
    with torch.inference_mode():
        return network(text.signal)


def walk(lengths: Sequence[int]) -> tuple[int, int]:
    """(rounds, tokens) of decoding a text, where the round at root i commits lengths[i] tokens."""
    rounds = root = 0
    while root < len(lengths):
        root += lengths[root]
        rounds += 1
    return rounds, root


def _in_rounds(texts: Sequence[Measured], choose: Callable[[Measured], Tensor]) -> float:
    """Tokens a round when `choose` gives the length committed at each root."""
    walked = [walk(choose(text).tolist()) for text in texts]
    return sum(tokens for _, tokens in walked) / max(sum(rounds for rounds, _ in walked), 1)


def _routed(predicted: Tensor, text: Measured, slots: Sequence[str], threshold: float) -> Tensor:
    return torch.where(predicted > threshold, text.lengths[slots[1]], text.lengths[slots[0]])


def best_threshold(network: RouterMLP, texts: Sequence[Measured], slots: Sequence[str]) -> float:
    """Of a few thresholds the one with the most tokens a round; of equals the nearest to 0."""
    predicted = [predict(network, text) for text in texts]
    everywhere = torch.cat(predicted)
    spread = everywhere.quantile(torch.linspace(0.05, 0.95, 19)).tolist()
    ends = [float(everywhere.min()) - 0.01, float(everywhere.max()) + 0.01]  # one drafter alone
    by_text = {id(text): p for text, p in zip(texts, predicted, strict=True)}

    def quality(threshold: float) -> tuple[float, float]:
        rounds = _in_rounds(texts, lambda text: _routed(by_text[id(text)], text, slots, threshold))
        return round(rounds, 4), -abs(threshold)

    candidates: list[float] = [0.0, *spread, *ends]
    return round(max((quality(c), c) for c in candidates)[1], 4)


def evaluate(network: RouterMLP, texts: Sequence[Measured], slots: Sequence[str], threshold: float) -> dict[str, Any]:
    """Per category and overall: R², accuracy of the sign (where there is one), regret, and AL in rounds.

    Regret is what the oracle commits more than the router, averaged over positions.
    """

    def rows() -> Iterator[tuple[str, list[Measured]]]:
        for category in sorted({text.category for text in texts}):
            yield category, [text for text in texts if text.category == category]
        yield "overall", list(texts)

    scores: dict[str, Any] = {"threshold": threshold}
    predicted = {id(text): predict(network, text) for text in texts}
    for name, members in rows():
        guess, truth = torch.cat([predicted[id(m)] for m in members]), torch.cat([gain(m, slots) for m in members])
        differs = truth != 0
        oracle = torch.cat([torch.maximum(m.lengths[slots[0]], m.lengths[slots[1]]) for m in members]).float()
        chosen = torch.cat([_routed(predicted[id(m)], m, slots, threshold) for m in members]).float()
        error, spread = (guess - truth).square().mean(), truth.var(correction=0)
        scores[name] = {
            "r2": round(1 - float(error / spread), 4) if spread > 0 else 0.0,
            "sign": round(float(((guess > 0) == (truth > 0))[differs].float().mean()), 4) if differs.any() else 1.0,
            "regret": round(float((oracle - chosen).mean()), 4),
            "rounds": {
                slots[0]: round(_in_rounds(members, lambda m: m.lengths[slots[0]]), 4),
                slots[1]: round(_in_rounds(members, lambda m: m.lengths[slots[1]]), 4),
                "router": round(_in_rounds(members, lambda m: _routed(predicted[id(m)], m, slots, threshold)), 4),
                "oracle": round(
                    _in_rounds(members, lambda m: torch.maximum(m.lengths[slots[0]], m.lengths[slots[1]])), 4
                ),
            },
        }
    return scores


def export(network: RouterMLP, config: dict[str, Any], out: Path) -> None:
    """Write config.json, model.safetensors and a card."""
    temporary = out / "model.safetensors.tmp"
    try:
        out.mkdir(parents=True, exist_ok=True)
        save_file({name: t.half().contiguous() for name, t in network.state_dict().items()}, temporary)
        os.replace(temporary, out / "model.safetensors")
    except Exception as error:  # safetensors has its own error for a full disk
        with suppress(OSError):
            temporary.unlink()
        raise WhiFlashError(f"the router could not be written to {out} ({error})") from error
    write_atomic(out / "config.json", json.dumps(config, indent=1) + "\n")
    write_atomic(out / "README.md", card(config))


def card(config: dict[str, Any]) -> str:
    (first, second), data = config["pair"].split("-"), config["data"]
    shapes = "".join(
        f", {what} {config[key]}"
        for what, key in (("tree budget", "tree_budget"), ("EAGLE-3 depth", "eagle3_depth"))
        if config[key]
    )
    lines = [
        f"# Router {config['pair']} for {config['target']}",
        "",
        "A two-layer MLP on the target's final hidden state predicts how many more tokens a round commits with",
        f"{second} than with {first}{shapes}. Above the threshold ({config['threshold']:g}) {second} drafts.",
        "",
        f"Trained by WhiFlash (`whiflash train router`) on {data['texts']} texts, {data['positions']} positions.",
        "",
        f"On {data['held_out_texts']} held-out texts (acceptance length in rounds, bonus token included):",
        "",
        f"| category | R² | sign right | regret | {first} | {second} | router | oracle |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in config["scores"].items():
        if name != "threshold":
            values = [row["r2"], row["sign"], row["regret"], *row["rounds"].values()]
            lines.append(f"| {name} | " + " | ".join(f"{v:.3f}" for v in values) + " |")
    return "\n".join([*lines, ""])
