"""Every forward on a fake CUDA device, which needs no GPU and fails on a tensor left on another device."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fake_cuda import CUDA, fake_cuda, on_cuda
from whiflash.decoding.sampling import Sampler, Sampling
from whiflash.decoding.session import Session
from whiflash.drafters import ddtree
from whiflash.drafters.ddtree import DDTreeDrafter
from whiflash.drafters.dflash import DFlash, DFlashConfig, DFlashDrafter
from whiflash.drafters.eagle3 import Eagle3, Eagle3Config, Eagle3Drafter
from whiflash.nn.layers import LayerShape
from whiflash.nn.rotary import RopeConfig
from whiflash.routers.entropy import EntropyRouter
from whiflash.routers.fixed import FixedRouter
from whiflash.routers.mlp import RouterMLP
from whiflash.routers.neural import NeuralRouter
from whiflash.routers.router import Signal
from whiflash.target.adapter import Adapter
from whiflash.target.config import TargetConfig
from whiflash.target.decoder import Decoder
from whiflash.target.target import Target

WIDTH, VOCAB, LAYERS = 32, 64, 2
YARN = {"factor": 2.0, "original_max_position_embeddings": 8}
KEYS = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
}


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    """Fake tensors everywhere; the one value a round reads back is made up: a prefix, or a scattered path of a tree."""

    def read(session, values, route):
        assert values.device == route.device == CUDA
        numbers = [3.0] * values.numel()
        if len(numbers) > 1:
            nodes = len(numbers) // 2
            kept = session.kept(nodes)
            numbers[:nodes] = [float(i in kept) for i in range(nodes)]
        if route.numel():
            assert route.numel() == 3
            session.slot, session.score, session.entropy = session.next_slot, 0.0, 0.0
        return numbers

    def generator(sampler, sampling, device):
        assert device == CUDA
        sampler.sampling, sampler.generator = sampling, None

    monkeypatch.setattr(Session, "_read", read)
    for name in ("prefill", "round"):  # fake tensors and inference mode do not go together
        monkeypatch.setattr(Session, name, getattr(Session, name).__wrapped__)
    monkeypatch.setattr(Sampler, "__init__", generator)
    ddtree._pairs.cache_clear()
    with fake_cuda():
        yield
    ddtree._pairs.cache_clear()


def own(family="llama", **options):
    config = TargetConfig.from_config(AutoConfig.for_model(family, **KEYS | options).to_dict())
    return on_cuda(lambda: Decoder(config))


def adapted(family, **options):
    config = AutoConfig.for_model(family, **KEYS | options)
    return Adapter(on_cuda(lambda: AutoModelForCausalLM.from_config(config)))


TARGETS = {
    "own": own,
    "own, sliding": lambda: own("mistral", sliding_window=6),
    "own, yarn and q/k norms": lambda: own("qwen3", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4} | YARN),
    "adapter": lambda: adapted("granite", logits_scaling=2.0),
}


def target(network, tmp_path):
    tokenizer = SimpleNamespace(eos_token_id=1, chat_template=None)
    sizes = {"layers": LAYERS, "width": WIDTH, "vocab_size": VOCAB, "max_positions": 512}
    return Target("fake", tmp_path, network, tokenizer, **sizes, dtype=torch.float32, device=CUDA)


def shape(**options):
    sizes = {"width": WIDTH, "width_in": WIDTH, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 48}
    return LayerShape(**sizes | {"norm_eps": 1e-6} | options)


def dflash(network, draft_vocab=None, windows=(None, 6), causal=(False, True), mask=9):
    config = DFlashConfig(
        shape=shape(qk_norm=True),
        layers=2,
        taps=(0, 2, 3),
        target_width=WIDTH,
        vocab_size=VOCAB,
        draft_vocab_size=draft_vocab or VOCAB,
        block_size=5,
        mask_token_id=mask,
        rope=RopeConfig(kind="linear", scaling={"factor": 2.0}),
        windows=windows,
        causal=causal,
        own_head=draft_vocab is not None,
    )
    model = on_cuda(lambda: DFlash(config))
    if draft_vocab:
        model.target_ids = torch.arange(draft_vocab, device=CUDA) * 2
    if mask >= VOCAB:
        model.mask_embedding = torch.zeros(WIDTH, device=CUDA)
    model.target_embed, model.target_head = network.embed, network.head
    return model


def eagle3(network, layers=1, window=None, **flags):
    config = Eagle3Config(
        shape=shape(width_in=2 * WIDTH),
        layers=layers,
        taps=(1, 2),
        target_width=WIDTH,
        vocab_size=VOCAB,
        draft_vocab_size=20,
        rope=RopeConfig(kind="yarn", scaling=YARN),
        windows=(window,) * layers,
        **flags,
    )
    model = on_cuda(lambda: Eagle3(config))
    model.target_ids, model.target_embed = torch.arange(20, device=CUDA) * 3, network.embed
    return model


DRAFTERS = {
    "plain decoding": lambda network: [],
    "dflash": lambda network: [DFlashDrafter(dflash(network))],
    "dflash, own head, mask outside": lambda network: [
        DFlashDrafter(dflash(network, draft_vocab=16, windows=(6, None), causal=(False, False), mask=VOCAB))
    ],
    "ddtree": lambda network: [DDTreeDrafter(dflash(network), tree_budget=7)],
    "eagle3 chain": lambda network: [Eagle3Drafter(eagle3(network, norm_before_fc=True), depth=3)],
    "eagle3 tree": lambda network: [Eagle3Drafter(eagle3(network, fc_norm=True), depth=3, top_k=3, total_tokens=9)],
    "eagle3, deep and windowed": lambda network: [
        Eagle3Drafter(eagle3(network, layers=2, window=6, norm_output=True), depth=3, top_k=2, total_tokens=6)
    ],
    "a pair": lambda network: [DFlashDrafter(dflash(network)), Eagle3Drafter(eagle3(network), depth=2, top_k=2)],
}
ROUTERS = {
    "no router": lambda: None,
    "fixed": lambda: FixedRouter(1, 2),
    "entropy": lambda: EntropyRouter(0.5),
    "neural": lambda: NeuralRouter(on_cuda(lambda: RouterMLP(WIDTH, 8))),
}


# which of n nodes a round keeps: all, a scattered path, nothing but the root
KEPT = (range, lambda n: (0, n - 1) if n > 2 else (0,), lambda n: (0,))
RUNS = [
    *(("own", drafters, "no router", False) for drafters in DRAFTERS),
    *(("own", drafters, "no router", True) for drafters in ("plain decoding", "ddtree", "eagle3 chain", "a pair")),
    *((network, "eagle3 tree", "no router", False) for network in TARGETS if network != "own"),
    *(("own, sliding", "a pair", router, False) for router in ROUTERS if router != "no router"),
    ("adapter", "dflash", "entropy", True),
]


@pytest.mark.parametrize(("network", "drafters", "router", "sampled"), RUNS)
def test_rounds(network, drafters, router, sampled, tmp_path):
    """A chunked prefill, rounds, and a second request; the sampled runs catch up eagerly and in full."""
    net = TARGETS[network]()
    session = Session(
        target(net, tmp_path),
        DRAFTERS[drafters](net),
        ROUTERS[router](),
        lazy=not sampled,
        kv_only=not sampled,
        prefill_chunk=8,
        capacity=4,
    )
    session.next_slot, session.kept = 0, range
    sampling = Sampling(temperature=0.7, top_k=9, top_p=0.9, min_p=0.01)
    session.prefill(list(range(1, 14)), Sampler(sampling, CUDA) if sampled else None)
    for kept in KEPT:
        session.kept, before = kept, session.cache.length
        done = session.round()
        assert session.cache.length == before + len(done.tokens)
        session.next_slot = len(session.drafters) - 1
    session.prefill(list(range(1, 7)))
    assert session.cache.length == 6


@pytest.mark.parametrize("router", [name for name in ROUTERS if name != "no router"])
def test_what_a_router_gives_is_on_the_device(router):
    """A host scalar among device scalars goes unnoticed here, and fails on a real device."""
    signal = Signal(torch.zeros(WIDTH, device=CUDA), torch.zeros(VOCAB, device=CUDA))
    assert [t.device for t in ROUTERS[router]()(signal)] == [CUDA, CUDA]


def test_a_tensor_left_elsewhere_is_caught():
    """The test of the tests: the fake device is told from the host, and indexing means what it should."""
    net, tokens = own(), torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(RuntimeError, match="device"):
        net(tokens)
    net(tokens.to(CUDA))
    net.norm.weight = torch.nn.Parameter(torch.ones(WIDTH))
    with pytest.raises(RuntimeError, match="device"):
        net(tokens.to(CUDA))
    x, i = torch.zeros(2, 3, 5, device=CUDA), torch.tensor([0, 2, 1, 1], device=CUDA)
    shapes = [
        (0, (3, 5)),
        (slice(1), (1, 3, 5)),
        ((..., 0), (2, 3)),
        ((None, 1), (1, 3, 5)),
        ((slice(None), i), (2, 4, 5)),
        ((..., i, slice(2)), (2, 4, 2)),
        ((0, i), (4, 5)),
        ((i[:2], i[:1]), (2, 5)),
        ([1, 0], (2, 3, 5)),
    ]
    for index, wanted in shapes:
        assert x[index].shape == wanted
        x[index] = 1.0
    with pytest.raises(RuntimeError, match="device"):
        x[:, i] = torch.zeros(2, 4, 5)
