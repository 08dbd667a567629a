"""A target of ten tokens with random weights, and random drafters for it: everything decoding does, in milliseconds.

So small a vocabulary makes random guesses right often enough (chains of several tokens, scattered nodes of a tree), and
lets probabilities be enumerated. Tokens are written a, b, c, …
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from whiflash.decoding.sampling import Sampler, Sampling
from whiflash.decoding.session import Round, Session
from whiflash.drafters.ddtree import DDTreeDrafter
from whiflash.drafters.dflash import DFlash, DFlashConfig, DFlashDrafter
from whiflash.drafters.drafter import DraftState, FeatureLog
from whiflash.drafters.eagle3 import Eagle3, Eagle3Config, Eagle3Drafter
from whiflash.model import WhiFlash
from whiflash.nn.fused import pack
from whiflash.nn.layers import LayerShape
from whiflash.nn.linear import Linear
from whiflash.nn.rotary import RopeConfig
from whiflash.nn.weights import Weights, read_config
from whiflash.routers.entropy import EntropyRouter
from whiflash.routers.fixed import FixedRouter
from whiflash.routers.mlp import RouterMLP
from whiflash.routers.neural import NeuralRouter
from whiflash.routers.router import Router
from whiflash.target.config import TargetConfig
from whiflash.target.decoder import Decoder
from whiflash.target.target import Target

VOCAB, WIDTH, LAYERS = 10, 32, 2
MASK = VOCAB - 1
PROMPT = [3, 1, 4, 1, 5]

ROUTERS = ("fixed", "entropy", "neural")
PAIRS = ("df-e3", "ddt-e3", "df-ddt")
# every drafter alone (e3t: the EAGLE-3 tree; p: unlikely nodes left out), then the pairs with every router
ALONE = ("df", "ddt", "e3", "e3t", "dfp", "ddtp", "e3p", "e3tp")
P_MIN = 0.3
MODES = ("none", *ALONE, *(f"{pair}/{router}" for pair in PAIRS for router in ROUTERS))


class Letters:
    """A tokenizer of one letter a token."""

    chat_template = eos_token_id = unk_token_id = None
    all_special_ids: Sequence[int] = ()

    def __len__(self) -> int:
        return VOCAB

    def __call__(self, text: str) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[ord(c) - ord("a") for c in text])

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[None]:
        return [None] * len(tokens)

    def decode(self, tokens: Sequence[int], **options) -> str:
        return "".join(chr(ord("a") + t) for t in tokens)


def write(directory: Path, seed: int = 0, spread: float = 3.0) -> Path:
    """A Llama of `VOCAB` tokens, as transformers saves it. spread: how far its logits lie apart."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=4096, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        model.lm_head.weight.data.normal_(0, spread / WIDTH**0.5)
    model.generation_config = GenerationConfig()
    model.save_pretrained(directory)
    return directory


def load(directory: Path) -> Target:
    config = TargetConfig.from_config(read_config(directory))
    network = pack(Decoder.load(config, Weights(directory), torch.float32, "cpu"))
    return Target(
        "toy", directory, network, Letters(), layers=LAYERS, width=WIDTH, vocab_size=VOCAB, max_positions=4096,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip


def _shape(inputs: int = 1, qk_norm: bool = False) -> LayerShape:
    return LayerShape(WIDTH, inputs * WIDTH, 2, 1, 16, 32, 1e-6, qk_norm=qk_norm)


def dflash(target: Target, text: list[int], seed: int = 1, block: int = 4) -> DFlash:
    """One layer that sees everything, one that slides and is causal within the block."""
    config = DFlashConfig(
        _shape(qk_norm=True), 2, (1, LAYERS), WIDTH, VOCAB, VOCAB, block, MASK, RopeConfig(), (None, 6), (False, True),
        own_head=True,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = DFlash(config).eval().requires_grad_(False)
    model.target_embed = target.network.embed
    drafter, states, anchors = DFlashDrafter(model), [], range(4, len(text) - block)
    log, state = logged(target, text, model.taps), DraftState(model.new_cache(512))
    model.lm_head = nn.Identity()
    for anchor in anchors:
        log.length = anchor
        drafter.catch_up(state, log)
        states.append(drafter.block_logits(state, log))
    after = target_logits(target, torch.tensor([text]))[0]
    model.lm_head = fitted(torch.cat(states), torch.cat([after[a : a + block - 1] for a in anchors]))
    return model


def eagle3(target: Target, text: list[int], seed: int = 2, layers: int = 1, dropped: Sequence[int] = (3, 9)) -> Eagle3:
    """A head whose vocabulary is the target's without `dropped`."""
    kept = torch.tensor([t for t in range(VOCAB) if t not in dropped])
    config = Eagle3Config(
        _shape(2), layers, (0, 1, LAYERS), WIDTH, VOCAB, len(kept), RopeConfig(), (None,) * layers, fc_norm=True
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Eagle3(config).eval().requires_grad_(False)
    model.target_ids = kept if dropped else None
    model.target_embed = target.network.embed
    log, count = logged(target, text, model.taps), len(text) - 1
    features, tokens = log.features(model.taps, 0, count), log.tokens[None, 1 : count + 1]
    y = model(model.fuse(features), tokens, torch.arange(count), model.new_cache(512))
    after = target_logits(target, torch.tensor([text]))[0, 1:, kept]
    model.lm_head = fitted(model.norm(y[0]), after)
    return model


def logged(target: Target, text: list[int], taps: tuple[int, ...]) -> FeatureLog:
    """The log of a whole text."""
    log, tokens = FeatureLog(taps, WIDTH, torch.float32, target.device), torch.tensor(text)
    log.set_tokens(0, tokens)
    log.append(target.network(tokens[None], taps=taps)[1][0], 0)
    return log


def fitted(states: torch.Tensor, logits: torch.Tensor) -> Linear:
    """The head that comes closest to the target's distribution from these states: random drafters become fair ones."""
    head = Linear(*(t.shape[1] for t in (states, logits)), bias=False)
    steps = torch.optim.LBFGS(head.parameters(), max_iter=60, line_search_fn="strong_wolfe")
    wanted = logits.softmax(-1)

    def loss() -> torch.Tensor:
        steps.zero_grad()
        value = nn.functional.cross_entropy(head(states), wanted) + 1e-4 * head.weight.square().sum()
        value.backward()
        return value

    steps.step(loss)
    return head.requires_grad_(False)


class Toy:
    """The target, its draft models, and every mode of decoding by name."""

    def __init__(self, directory: Path):
        self.path = write(Path(directory))
        self.target = load(self.path)
        text = [*PROMPT, *decode(Session(self.target, capacity=512), PROMPT, 150)]
        text += decode(Session(self.target, capacity=512), text, 150, sampler(7))
        self.text, self.dflash, self.eagle3 = text, dflash(self.target, text), eagle3(self.target, text)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.mlp = RouterMLP(WIDTH, 8)
        with torch.inference_mode():
            self.middle = float(self.mlp(self.target.network(torch.tensor([text]))[0][0]).median())

    def drafter(self, name: str):
        p_min = P_MIN if name.endswith("p") else None
        match name.removesuffix("p"):
            case "df":
                return DFlashDrafter(self.dflash, p_min=p_min)
            case "ddt":
                return DDTreeDrafter(self.dflash, tree_budget=7, p_min=p_min)
            case "e3":
                return Eagle3Drafter(self.eagle3, depth=3, p_min=p_min)
            case "e3t":
                return Eagle3Drafter(self.eagle3, depth=3, top_k=3, total_tokens=9, p_min=p_min)
        raise KeyError(name)

    def router(self, name: str) -> Router:
        """Thresholds in the middle, so that both slots come up."""
        return {
            "fixed": FixedRouter(1, 2),
            "entropy": EntropyRouter(0.7),
            "neural": NeuralRouter(self.mlp, self.middle),
        }[name]

    def model(self, name: str) -> WhiFlash:
        names, _, router = name.partition("/")
        drafters = [] if names == "none" else [self.drafter(n) for n in names.split("-")]
        return WhiFlash(self.target, drafters, self.router(router) if router else None)

    def mode(self, name: str, **options) -> Session:
        model = self.model(name)
        return Session(model.target, model.drafters, model.router, **{"capacity": 64, **options})


def decode(session: Session, prompt: Sequence[int], count: int, sampler: Sampler | None = None) -> list[int]:
    """At least `count` tokens, in whole rounds."""
    return rounds(session, prompt, count, sampler)[0]


def rounds(
    session: Session, prompt: Sequence[int], count: int, sampler: Sampler | None = None
) -> tuple[list[int], list[Round]]:
    tokens, done = [session.prefill(prompt, sampler)], []
    while len(tokens) < count:
        done.append(session.round())
        tokens += done[-1].tokens
    return tokens, done


def sampler(seed: int = 0, **options) -> Sampler:
    return Sampler(Sampling(seed=seed, **{"temperature": 1.0, **options}), torch.device("cpu"))


@torch.inference_mode()
def target_logits(target: Target, sequences: torch.Tensor) -> torch.Tensor:
    """[B, T] → [B, T, vocab], without any cache."""
    return target.network.head(target.network(sequences)[0])
