"""The transformers adapter against the own decoder, against transformers itself, and what it refuses."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tiny
from whiflash.decoding.session import Session
from whiflash.drafters.draft import chain, tree
from whiflash.errors import WhiFlashError
from whiflash.nn.cache import KVCache
from whiflash.target import adapter
from whiflash.target.adapter import Adapter
from whiflash.target.load import load_target

LAYERS = 4
PROMPT = list(b"a prompt of some length")
# families the runtime does not read, each for what it does differently
OTHERS = {
    "gpt2": {},  # learned positions
    "gpt_neox": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "phi3": {},  # fused projections
    "olmo2": {},  # norms after attention and MLP
    "gemma": {},  # scaled embedding, norms of 1 + w
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.7,
        "logits_scaling": 4.0,
    },
    "cohere": {"logit_scale": 0.25},  # parallel attention and MLP
    "mixtral": {"sliding_window": None, "num_local_experts": 4},
    "llama": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},  # a rope we do not read
}


class Scripted:
    """Drafts a tree round the known answer: the right path scattered among wrong siblings, and wrong now and then."""

    name, family, rows = "scripted", "autoregressive", 6

    def __init__(self, sequence):
        self.sequence = sequence
        self.model = SimpleNamespace(taps=(1,), new_cache=lambda n: KVCache(1, 1, 2, n, torch.float32, "cpu"))

    def catch_up(self, state, log, kv_only=True):
        return 0

    def draft(self, state, log, choose):
        at = log.length
        a, b, c = ([*self.sequence, 0, 0, 0])[at + 1 : at + 4]
        if at % 4 == 0:
            b = 1 if b != 1 else 2
        nodes = [self.sequence[at], 3 if a != 3 else 4, a, 3 if b != 3 else 4, b, c]
        return tree(torch.tensor(nodes), torch.tensor([-1, 0, 0, 2, 2, 4]), 3)


class Refused(Scripted):
    """Drafts a token that never comes, so that every position is a root once."""

    def draft(self, state, log, choose):
        return chain(torch.tensor([self.sequence[log.length], 0, 0, 0, 0, 0]))


def greedy(target, count, drafters=()):
    """Tokens of a session, and how long its rounds were."""
    session = Session(target, drafters)
    session.prefill(PROMPT)
    rounds = []
    while len(session.tokens) < len(PROMPT) + count:
        rounds.append(len(session.round().tokens))
    return session.tokens[: len(PROMPT) + count], rounds


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def twins(request, tmp_path_factory):
    path = tiny.build(tmp_path_factory.mktemp("twins") / request.param, request.param, layers=LAYERS)
    return load_target(path, device="cpu"), load_target(path, device="cpu", runtime=False)


@torch.inference_mode()
def test_the_adapter_does_what_the_own_decoder_does(twins):
    own, other = twins
    assert type(other.network) is Adapter and type(own.network) is not Adapter
    for name in ("layers", "width", "vocab_size", "max_positions", "stop_ids"):
        assert getattr(own, name) == getattr(other, name), name
    tokens, nodes = torch.tensor([PROMPT]), torch.tensor([[5, 6, 7, 8]])
    sees = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    results = []
    for network in (own.network, other.network):
        cache = network.new_cache(64)
        steps = [network(tokens, cache, taps=range(LAYERS + 2))]
        cache.advance(len(PROMPT))
        network(nodes, cache)  # speculation that is never committed
        steps.append(network(nodes, cache, len(PROMPT) + sees.sum(1) - 1, sees, taps=(2, 0, LAYERS)))
        cache.keep_path(len(PROMPT), torch.tensor([0, 2, 3]))
        steps.append(network(nodes[:, :2], cache, taps=(1,)))
        cache.advance(2)
        cache.truncate(10)
        steps.append(network(nodes, cache, taps=(LAYERS + 1,)))
        assert cache.length == 10
        results.append([network.embed(tokens), *(network.head(h) for h, _ in steps), *(t for _, t in steps)])
    for mine, theirs in zip(*results, strict=True):
        close(theirs, mine)


def test_sessions_agree_round_by_round(twins):
    plain, _ = greedy(twins[0], 40)
    drafted = [greedy(target, 40, [Scripted(plain)]) for target in twins]
    assert drafted[0] == drafted[1]
    assert drafted[0][0] == plain == greedy(twins[1], 40)[0]
    assert max(drafted[0][1]) > 2, "the scripted drafts were never accepted"


@pytest.mark.parametrize("family", OTHERS)
def test_families_the_runtime_does_not_read(family, tmp_path):
    path = tiny.build(tmp_path / family, family, layers=LAYERS, **OTHERS[family])
    target = load_target(path, device="cpu")
    assert type(target.network) is Adapter
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    body, tokens, last = reference.get_decoder(), torch.tensor([PROMPT]), []
    norm = next(getattr(body, n) for n in ("norm", "ln_f", "final_layer_norm") if hasattr(body, n))
    norm.register_forward_pre_hook(lambda module, args: last.append(args[0]))
    with torch.inference_mode():
        expected = reference(tokens, output_hidden_states=True)
        hidden, tapped = target.network(tokens, taps=range(LAYERS + 2))
        close(target.network.head(hidden), expected.logits)
        states = [*expected.hidden_states[:LAYERS], last[0], expected.hidden_states[LAYERS]]
        for state, wanted in zip(tapped.chunk(LAYERS + 2, -1), states, strict=True):
            close(state, wanted)
        answer = reference.generate(tokens, do_sample=False, max_new_tokens=24, eos_token_id=None)[0].tolist()
    found, rounds = greedy(target, 24, [Scripted(answer)])
    assert found == answer and max(rounds) > 2


REFUSED = {
    "mamba": "cannot be rolled back.*full attention in every layer",
    "gemma2": "cannot be rolled back.*SlidingWindow",
    "gemma3_text": "cannot be rolled back.*SlidingWindow",
    "rwkv": "cannot be rolled back.*recurrent",
    "bloom": "positions from the order of tokens",
    "t5": "encoder-decoder",
    "vit": "cannot load a causal language model",
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_rolled_back_is_refused_with_a_sentence(family, tmp_path):
    if family in ("t5", "vit"):
        AutoConfig.for_model(family).save_pretrained(tmp_path)
    else:
        tiny.build(tmp_path, family, layers=2)
    with pytest.raises(WhiFlashError, match=REFUSED[family]) as error:
        Adapter.load(tmp_path, torch.float32, "cpu")
    assert "\n" not in str(error.value)


def test_an_unknown_treatment_of_logits_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(adapter, "LOGIT_KEYS", ("none", "of", "these"))
    tiny.build(tmp_path, "granite", layers=2, **OTHERS["granite"])
    with pytest.raises(WhiFlashError, match="granite models give other logits"):
        Adapter.load(tmp_path, torch.float32, "cpu")


def test_longrope_ends_where_its_frequencies_change(tmp_path):
    """Beyond the original context every cached key would have to be computed anew; transformers starts over there."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    options = {"rope_parameters": rope | {"original_max_position_embeddings": 64}}
    tiny.build(tmp_path, "phi3", layers=2, original_max_position_embeddings=64, **options)
    assert Adapter.load(tmp_path, torch.float32, "cpu").max_positions == 64


SHORT = 64
ENDS = {
    "gpt2": {"max_position_embeddings": SHORT},  # a table of positions
    "llama": OTHERS["llama"] | {"max_position_embeddings": SHORT},  # frequencies that grow with the longest position
    "phi3": {
        "original_max_position_embeddings": SHORT,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
            "original_max_position_embeddings": SHORT,
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("family", ENDS)
def test_no_draft_reaches_beyond_the_context(family, tmp_path):
    """The last rounds of a full context draft less: what lies behind it has no position, or changes all the others."""
    target = load_target(tiny.build(tmp_path, family, layers=LAYERS, **ENDS[family]), device="cpu")
    assert target.max_positions == SHORT and type(target.network) is Adapter
    room = SHORT - len(PROMPT)
    plain, _ = greedy(target, room)
    for drafter in (Scripted(plain), Refused(plain)):
        assert greedy(target, room, [drafter])[0] == plain
