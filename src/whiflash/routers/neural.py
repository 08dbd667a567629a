"""WhiFlash-Neural: a two-layer MLP reads the target's hidden state and predicts the gain of the second slot."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whiflash.errors import WhiFlashError
from whiflash.nn.weights import Weights, read_config, resolve
from whiflash.routers.mlp import RouterMLP
from whiflash.routers.router import Signal, check_threshold

FORMAT = "whiflash-router"


@dataclass(frozen=True)
class Setting:
    """What a router is used for; one trained for another setting is refused."""

    target_fingerprint: str
    target_name: str
    pair: str
    tree_budget: int | None
    hidden_size: int


class NeuralRouter:
    """Slot 1 where the predicted ΔAL = AL(slot 1) - AL(slot 0) exceeds the threshold, else slot 0.

    eagle3_depth: the EAGLE-3 chain whose gain it predicts, if it says; decoding drafts as deep unless told otherwise.
    """

    name = "neural"

    def __init__(
        self,
        network: RouterMLP,
        threshold: float = 0.0,
        flip: bool = False,
        identity: str = "",
        eagle3_depth: int | None = None,
    ):
        self.network, self.threshold = network.eval().requires_grad_(False), check_threshold(threshold)
        self.sign = -1.0 if flip else 1.0
        # tells what it decides from what other routers would
        self.identity = identity + "-flipped" * flip
        self.eagle3_depth = eagle3_depth

    def __call__(self, signal: Signal) -> tuple[Tensor, Tensor]:
        gain = self.network(signal.hidden.float()) * self.sign
        return (gain > self.threshold).long(), gain

    @classmethod
    def load(
        cls,
        name: str | Path,
        setting: Setting,
        threshold: float | None = None,
        flip: bool = False,
        device: torch.device | str = "cpu",
    ) -> "NeuralRouter":
        """Our own format (config.json + model.safetensors), or a bare two-layer `.safetensors` read by its shapes.

        A bare file says nothing about sign or use: positive is taken as "slot 1 gains" (`flip` reverses it), and the
        threshold is 0 unless given. `name` is a hub id, a directory or a file.
        """
        path = resolve(name, "router")
        config = _config(path)
        if config is not None:
            _check(name, config, setting)
            flip = flip != (config.get("positive", "slot-1") == "slot-0")
        if threshold is None:
            threshold = (config or {}).get("threshold", 0.0)
        weights = Weights(path)
        network = _read_network(weights, setting.hidden_size).to(device)
        return cls(network, threshold, flip, weights.digest(), _depth(name, config or {}))


def _config(path: Path) -> dict[str, Any] | None:
    directory = path if path.is_dir() else path.parent
    if not (directory / "config.json").is_file():
        return None
    config = read_config(directory, "router")
    return config if config.get("format") == FORMAT else None


def _check(name: str | Path, config: dict[str, Any], setting: Setting) -> None:
    def refuse(what: str, trained: Any, used: Any) -> None:
        raise WhiFlashError(
            f"router {name} was trained for {what} {trained}, but is used with {used}; train one for this setting "
            "(`whiflash train router`) or use the entropy router"
        )

    if config.get("pair") != setting.pair:
        refuse("the pair", config.get("pair"), setting.pair)
    if "ddt" in setting.pair and config.get("tree_budget") != setting.tree_budget:
        refuse("a tree budget of", config.get("tree_budget"), setting.tree_budget)
    if config.get("target_fingerprint") not in (None, setting.target_fingerprint):
        refuse("the target", config.get("target"), f"{setting.target_name} (other weights or config)")


def _depth(name: str | Path, config: dict[str, Any]) -> int | None:
    depth = config.get("eagle3_depth")
    if depth is not None and (type(depth) is not int or depth < 1):
        raise WhiFlashError(f"router {name} names an EAGLE-3 depth of {depth!r}; expected a whole number of at least 1")
    return depth


def _read_network(weights: Weights, hidden_size: int) -> RouterMLP:
    """Two matrices [M, hidden] and [1, M] and their biases, whatever they are called."""
    shapes = {name: weights.shape(name) for name in weights}
    first = [n for n, s in shapes.items() if len(s) == 2 and s[1] == hidden_size and s[0] != 1]
    if len(first) != 1:
        raise WhiFlashError(
            f"{weights.path} is not a two-layer router for a target of width {hidden_size}: its tensors are "
            f"{json.dumps({n: list(s) for n, s in shapes.items()})}"
        )
    inner = shapes[first[0]][0]
    second = [n for n, s in shapes.items() if s == (1, inner)]
    biases = {size: [n for n, s in shapes.items() if s == (size,)] for size in (inner, 1)}
    if len(second) != 1 or any(len(names) > 1 for names in biases.values()):
        raise WhiFlashError(f"{weights.path} is not a two-layer router: no single matrix [1, {inner}] and its biases")
    network = RouterMLP(hidden_size, inner)
    state = {"fc1.weight": weights.take(first[0]), "fc2.weight": weights.take(second[0])}
    state["fc1.bias"] = weights.take(biases[inner][0]) if biases[inner] else torch.zeros(inner)
    state["fc2.bias"] = weights.take(biases[1][0]) if biases[1] else torch.zeros(1)
    weights.finish()
    network.load_state_dict({key: tensor.float() for key, tensor in state.items()})
    return network
