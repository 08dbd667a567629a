"""The fused layer is the layer: same outputs and K/V within rounding, and a row's bits do not depend on its company."""

from itertools import cycle

import pytest
import torch

from whiflash.drafters.eagle3 import Eagle3, Eagle3Config
from whiflash.nn import kernel
from whiflash.nn.cache import KVCache
from whiflash.nn.fused import MOST_ROWS, pack
from whiflash.nn.layers import Layer, LayerShape
from whiflash.nn.rotary import RopeConfig, Rotary

pytestmark = pytest.mark.skipif(kernel.load() is None, reason="no C compiler")

PLAIN = {"width": 96, "width_in": 96, "heads": 6, "kv_heads": 2, "head_dim": 32, "intermediate": 128, "norm_eps": 1e-5}
SHAPES = {
    "grouped": PLAIN,
    "one head each": {**PLAIN, "kv_heads": 6},
    "qwen2": {**PLAIN, "qkv_bias": True},
    "qwen3": {**PLAIN, "qk_norm": True, "head_dim": 64},
    "all biases": {**PLAIN, "qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "odd width": {**PLAIN, "width": 90, "width_in": 90},
}


STORED = {"float32": [torch.float32], "mixed": [torch.bfloat16, torch.float32, torch.float16]}


def make(shape: dict, stored=STORED["float32"]) -> tuple[Layer, Layer, Rotary]:
    torch.manual_seed(0)
    layer = Layer(LayerShape(**shape))
    for p, dtype in zip(layer.parameters(), cycle(stored), strict=False):
        torch.nn.init.normal_(p, std=0.3)
        p.data = p.data.to(dtype).float()
    packed = Layer(LayerShape(**shape))
    packed.load_state_dict(layer.state_dict())
    pack(packed)
    assert packed.fused is not None
    return layer.requires_grad_(False), packed, Rotary(RopeConfig(), shape["head_dim"])


def cache_for(shape: dict, past: int) -> KVCache:
    cache = KVCache(2, shape["kv_heads"], shape["head_dim"], past + 80, torch.float32, "cpu")
    torch.manual_seed(1)
    cache.rows[..., :past, :].normal_()
    cache.advance(past)
    return cache


def tree(rows: int) -> torch.Tensor:
    """Each node under the one two before it."""
    seen = torch.eye(rows, dtype=torch.bool)
    for i in range(2, rows):
        seen[i] |= seen[i - 2]
    return seen


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("past", [0, 1, 37, 200])
def test_equals_the_layer(name, past, stored):
    shape = SHAPES[name]
    layer, packed, rotary = make(shape, STORED[stored])
    for rows in (1, 2, 3, 7, 12, 17, 33, MOST_ROWS):
        x = torch.randn(1, rows, shape["width"])
        rope = rotary(torch.arange(past, past + rows), x.dtype)
        chain = cache_for(shape, past).mask(rows)
        window = cache_for(shape, past).mask(rows, window=9)
        for mask, causal in ((chain, False), (cache_for(shape, past).mask(rows, tree(rows)), False), (None, False),
                             (window, False), *([(None, True)] if past == 0 else [])):  # fmt: skip
            ours, theirs = cache_for(shape, past), cache_for(shape, past)
            got = packed(x, rope, ours, 1, mask, causal)
            want = layer(x, rope, theirs, 1, mask, causal)
            torch.testing.assert_close(got, want, atol=2e-5 * float(want.abs().max()), rtol=0)
            torch.testing.assert_close(ours.rows, theirs.rows, atol=1e-4, rtol=1e-4)


def test_a_row_of_a_chain_has_the_same_bits_alone_and_among_others():
    shape = SHAPES["qwen3"]
    _, packed, rotary = make(shape)
    x, past = torch.randn(1, 20, shape["width"]), 30
    one_by_one, together = cache_for(shape, past), cache_for(shape, past)
    alone = []
    for i in range(20):
        rope = rotary(torch.tensor([past + i]), x.dtype)
        alone.append(packed(x[:, i : i + 1], rope, one_by_one, 0, None))
        one_by_one.advance(1)
    mask = together.mask(20)
    got = packed(x, rotary(torch.arange(past, past + 20), x.dtype), together, 0, mask)
    assert torch.equal(got, torch.cat(alone, 1))
    assert torch.equal(together.rows[0], one_by_one.rows[0])


@pytest.mark.parametrize("before_residual", [False, True])
def test_equals_the_layer_of_an_eagle3_head(before_residual):
    torch.manual_seed(0)
    config = Eagle3Config(
        LayerShape(**{**PLAIN, "width_in": 192}), 1, (1, 2, 3), 96, 50, 50, RopeConfig(), (None,), before_residual
    )
    plain, packed = Eagle3(config), Eagle3(config)
    packed.load_state_dict(plain.state_dict())
    pack(packed)
    assert packed.layer.fused is not None
    x, past, table = torch.randn(1, 5, 96), 20, torch.randn(50, 96)
    tokens, results = torch.randint(0, 50, (1, 5)), []
    for head in (plain, packed):
        cache = cache_for(PLAIN, past)
        head.target_embed = lambda tokens: table[tokens]
        with torch.no_grad():
            results.append((head(x, tokens, torch.arange(past, past + 5), cache), cache.rows))
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=1e-4)


def test_a_full_cache_is_an_error_and_not_a_crash():
    shape = SHAPES["grouped"]
    _, packed, rotary = make(shape)
    cache = cache_for(shape, 3)
    cache.length = cache.capacity - 1
    with pytest.raises(IndexError, match="no room"):
        packed(torch.randn(1, 2, 96), rotary(torch.arange(2), torch.float32), cache, 0, None)


@pytest.mark.parametrize("change", [{"head_dim": 12}, {"intermediate": 100}])
def test_sizes_that_do_not_fit_the_tiles_are_left_to_pytorch(change):
    layer = pack(Layer(LayerShape(**{**PLAIN, **change})))
    assert layer.fused is None


def test_many_rows_and_batches_are_left_to_pytorch():
    shape = SHAPES["grouped"]
    _, packed, rotary = make(shape)
    rope = rotary(torch.arange(MOST_ROWS + 1), torch.float32)
    assert not packed.fused.takes(torch.randn(1, MOST_ROWS + 1, 96), rope, cache_for(shape, 0))
    assert not packed.fused.takes(torch.randn(2, 3, 96), rope, cache_for(shape, 0))
    assert not packed.fused.takes(torch.randn(1, 3, 96), rope, None)
