"""Routers: what they compare, which side of the threshold is which, and which files they accept."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from toy import PROMPT, decode, rounds
from whiflash.errors import WhiFlashError
from whiflash.model import WhiFlash
from whiflash.routers.entropy import EntropyRouter
from whiflash.routers.fixed import FixedRouter
from whiflash.routers.mlp import RouterMLP
from whiflash.routers.neural import FORMAT, NeuralRouter, Setting
from whiflash.routers.router import Signal

WIDTH, INNER = 32, 8
SETTING = Setting("f" * 16, "toy", "ddt-e3", 7, WIDTH)


def signal(seed: int = 0, vocab: int = 50, spread: float = 2.0) -> Signal:
    random = torch.Generator().manual_seed(seed)
    return Signal(torch.randn(WIDTH, generator=random), spread * torch.randn(vocab, generator=random))


@pytest.mark.parametrize("spread", [0.0, 0.01, 2.0, 50.0])
def test_entropy_is_in_nats_at_temperature_one(spread):
    for seed in range(5):
        given = signal(seed, spread=spread)
        wanted = torch.distributions.Categorical(logits=given.logits).entropy()
        torch.testing.assert_close(given.entropy(), wanted, atol=1e-5, rtol=1e-5)
        assert EntropyRouter(0.3)(given)[1] == given.entropy()


def test_entropy_bears_forbidden_and_half_precision_logits():
    logits = torch.tensor([0.0, 0.0, float("-inf")])
    assert Signal(torch.zeros(1), logits).entropy() == pytest.approx(torch.log(torch.tensor(2.0)))
    half = Signal(torch.zeros(1), logits.bfloat16()).entropy()
    assert half.dtype == torch.float32
    assert half == pytest.approx(0.6931, abs=1e-3)


def test_above_the_threshold_is_slot_one():
    given = signal()
    entropy = float(given.entropy())
    assert [int(EntropyRouter(entropy + d)(given)[0]) for d in (-1e-3, 0, 1e-3)] == [1, 0, 0]
    network = RouterMLP(WIDTH, INNER)
    gain = float(network(given.hidden).detach())
    assert [int(NeuralRouter(network, gain + d)(given)[0]) for d in (-1e-3, 0, 1e-3)] == [1, 0, 0]
    assert [int(NeuralRouter(network, -gain + d, flip=True)(given)[0]) for d in (-1e-3, 1e-3)] == [1, 0]


def test_the_fixed_router_is_fixed():
    assert [int(FixedRouter(slot, 2)(signal())[0]) for slot in (0, 1)] == [0, 1]
    with pytest.raises(WhiFlashError, match="slot 2 does not exist; there are 2"):
        FixedRouter(2, 2)


def test_each_round_tells_the_entropy_that_chose_its_slot(toy):
    """The signal is that of the node that produced the root: the token before this round's first."""
    tokens, done = rounds(toy.mode("df-e3/entropy"), PROMPT, 60)
    with torch.inference_mode():
        logits = toy.target.network.head(toy.target.network(torch.tensor([PROMPT + tokens]))[0])[0]
    for r in done:
        wanted = Signal(logits[0], logits[r.position - 1]).entropy()
        assert r.entropy == pytest.approx(float(wanted), abs=1e-4)
        assert r.score == r.entropy
        assert r.slot == ("e3" if r.entropy > 0.7 else "df")


def test_the_neural_score_reads_the_same_nodes_hidden_state(toy):
    tokens, done = rounds(toy.mode("ddt-e3/neural"), PROMPT, 60)
    with torch.inference_mode():
        scores = toy.mlp(toy.target.network(torch.tensor([PROMPT + tokens]))[0][0])
    for r in done:
        assert r.score == pytest.approx(float(scores[r.position - 1]), abs=1e-4)
        assert r.slot == ("e3" if r.score > toy.middle else "ddt")
    assert {r.slot for r in done} == {"e3", "ddt"}


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return RouterMLP(WIDTH, INNER).state_dict()


def by_hand(tensors: dict[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    inner = F.gelu(tensors["fc1.weight"] @ hidden + tensors["fc1.bias"])
    return (tensors["fc2.weight"] @ inner + tensors["fc2.bias"])[0]


def write(directory, tensors, **config):
    """Our own format."""
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    known = {"format": FORMAT, "pair": "ddt-e3", "tree_budget": 7, "target_fingerprint": SETTING.target_fingerprint}
    (directory / "config.json").write_text(json.dumps({**known, "target": "toy", "threshold": 0.25, **config}))
    return directory


def test_our_own_format(tmp_path):
    router = NeuralRouter.load(write(tmp_path / "r", state()), SETTING)
    slot, score = router(signal())
    assert (router.threshold, router.sign) == (0.25, 1.0)
    torch.testing.assert_close(score, by_hand(state(), signal().hidden))
    assert int(slot) == int(score > 0.25)
    assert NeuralRouter.load(tmp_path / "r", SETTING, threshold=-1.5).threshold == -1.5
    assert NeuralRouter.load(write(tmp_path / "s", state(), positive="slot-0"), SETTING).sign == -1.0
    assert NeuralRouter.load(tmp_path / "s", SETTING, flip=True).sign == 1.0


@pytest.mark.parametrize(
    "names",
    [
        {"fc1.weight": "fc1.weight", "fc1.bias": "fc1.bias", "fc2.weight": "fc2.weight", "fc2.bias": "fc2.bias"},
        {
            "fc1.weight": "net.0.weight",
            "fc1.bias": "net.0.bias",
            "fc2.weight": "net.2.weight",
            "fc2.bias": "net.2.bias",
        },
        {"fc1.weight": "z", "fc1.bias": "b", "fc2.weight": "a", "fc2.bias": "c"},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bare_file_is_read_by_its_shapes(tmp_path, names, dtype):
    tensors = {k: v.to(dtype) for k, v in state().items()}
    save_file({names[k]: v for k, v in tensors.items()}, tmp_path / "router.safetensors")
    for name in (tmp_path, tmp_path / "router.safetensors"):
        router = NeuralRouter.load(name, SETTING)
        wanted = by_hand({k: v.float() for k, v in tensors.items()}, signal().hidden)
        torch.testing.assert_close(router(signal())[1], wanted)
        assert (router.threshold, router.sign) == (0.0, 1.0)
    assert NeuralRouter.load(tmp_path, SETTING, flip=True).sign == -1.0


def test_a_bare_file_without_biases(tmp_path):
    tensors = {k: v for k, v in state().items() if k.endswith("weight")}
    save_file(tensors, tmp_path / "router.safetensors")
    zeros = {"fc1.bias": torch.zeros(INNER), "fc2.bias": torch.zeros(1)}
    torch.testing.assert_close(
        NeuralRouter.load(tmp_path, SETTING)(signal())[1], by_hand(tensors | zeros, signal().hidden)
    )


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"pair": "df-e3"}, "trained for the pair df-e3, but is used with ddt-e3"),
        ({"tree_budget": 16}, "trained for a tree budget of 16, but is used with 7"),
        ({"target_fingerprint": "0" * 16, "target": "other"}, "trained for the target other, but is used with toy"),
        ({"threshold": float("nan")}, "threshold must be a finite number, got nan"),
        ({"threshold": None}, "threshold must be a finite number, got None"),
        ({"eagle3_depth": 0}, "EAGLE-3 depth of 0; expected a whole number"),
        ({"eagle3_depth": "3"}, "EAGLE-3 depth of '3'; expected a whole number"),
        ({"eagle3_depth": True}, "EAGLE-3 depth of True; expected a whole number"),
    ],
)
def test_a_router_for_another_setting_is_refused(tmp_path, config, sentence):
    with pytest.raises(WhiFlashError, match=sentence):
        NeuralRouter.load(write(tmp_path / "r", state(), **config), SETTING)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda s: {**s, "fc1.weight": torch.zeros(INNER, 31)}, "not a two-layer router for a target of width 32"),
        (lambda s: {**s, "fc3.weight": torch.zeros(INNER, WIDTH)}, "not a two-layer router for a target of width 32"),
        (lambda s: {**s, "fc2.weight": torch.zeros(2, INNER)}, "no single matrix"),
        (lambda s: {**s, "fc4.bias": torch.zeros(1)}, "no single matrix"),
        (lambda s: {**s, "scale": torch.zeros(3, 3, 3)}, "does not use"),
    ],
)
def test_a_file_of_other_shapes_is_refused(tmp_path, change, sentence):
    save_file(change(state()), tmp_path / "router.safetensors")
    with pytest.raises(WhiFlashError, match=sentence):
        NeuralRouter.load(tmp_path, SETTING)


@pytest.mark.parametrize("threshold", [float("nan"), float("inf"), -0.1])
def test_entropy_thresholds_that_cannot_be(threshold):
    with pytest.raises(WhiFlashError, match="finite number of at least 0"):
        EntropyRouter(threshold)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"drafters": "df", "router": "entropy"},
            "chooses between two drafters, but drafters is 'df'",
        ),
        ({"drafters": "none", "threshold": 0.2}, "drafters is 'none'"),
        ({"drafters": "df", "slot": 1}, "drafters is 'df'"),
        ({"slot": 1}, "only the fixed router takes slot 1"),
        ({"router": "fixed", "slot": 2}, "slot 2 does not exist"),
        ({"router_flip": True}, "only a neural router's output can be flipped"),
        ({"router": "fixed", "threshold": 0.1}, "takes no threshold"),
        ({"threshold": -1.0}, "at least 0"),
        ({"router": "somewhere/else/router"}, "neither a path that exists nor a hub id"),
        ({"router": "neural"}, "no router checkpoint ships for toy"),
        ({"drafters": "e3-df"}, "drafters 'e3-df' are not known"),
        ({"tap_ids": "input"}, "tap ids are output"),
        ({"dtype": "float32"}, "loaded already"),
        ({"dflash": None}, "no dflash checkpoint ships for toy"),
    ],
)
def test_options_that_make_no_sense_together_are_refused(toy, options, sentence):
    with pytest.raises(WhiFlashError, match=sentence):
        WhiFlash.from_pretrained(toy.target, **{"dflash": toy.dflash, "eagle3": toy.eagle3, **options})


def test_a_router_of_ones_own(toy):
    """Anything that takes a signal and gives slot and score."""

    class Longest:
        name = "own"

        def __call__(self, given):
            return (given.logits.argmax() % 2).long(), given.logits.max()

    model = WhiFlash.from_pretrained(toy.target, dflash=toy.dflash, eagle3=toy.eagle3, router=Longest())
    output = model.generate(PROMPT, max_new_tokens=40)
    assert output.tokens == decode(toy.mode("none"), PROMPT, 40)
    assert set(output.stats.rounds) == {"df", "e3"}
    with pytest.raises(WhiFlashError, match="several drafters need a router"):
        WhiFlash(toy.target, model.drafters)
