"""Packed products: right for every shape, the same for a row alone and among others, and replaceable."""

import subprocess

import pytest
import torch
import torch.nn.functional as F

from whiflash.nn import kernel
from whiflash.nn.linear import Linear

WIDTHS = [(1, 1), (7, 5), (32, 16), (33, 576), (960, 577), (100, 64)]


def kinds() -> list:
    library = kernel.load()
    return [
        pytest.param(lambda w: kernel.PanelWeight(w, library), id="panels", marks=[] if library else pytest.mark.skip),
        pytest.param(kernel.OneDnnWeight, id="onednn", marks=[] if kernel.ONEDNN else pytest.mark.skip),
    ]


@pytest.mark.parametrize("pack", kinds())
@pytest.mark.parametrize(("outputs", "inputs"), WIDTHS)
def test_products_are_right(pack, outputs, inputs):
    torch.manual_seed(0)
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    packed = pack(weight)
    assert torch.equal(packed.dense(), weight)
    for rows in (*range(1, 15), 33):
        x = torch.randn(2, rows, inputs)
        exact = x.double() @ weight.double().T
        scale = x.double().abs() @ weight.double().abs().T
        assert ((packed(x, None) - exact).abs() <= 1e-6 * scale).all()
        torch.testing.assert_close(packed(x, bias), packed(x, None) + bias)


@pytest.mark.skipif(kernel.load() is None, reason="no C compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs"), WIDTHS)
def test_weights_of_a_16_bit_checkpoint_are_kept_so_and_give_the_same_bits(dtype, outputs, inputs, monkeypatch):
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs).to(dtype)
    weight.view(-1)[0] = 2.0**-24 if dtype == torch.float16 else 2.0**-100  # subnormal in one, only in the other
    narrow = kernel.PanelWeight(weight.float(), kernel.load())
    assert narrow.panels.dtype in (dtype, torch.bfloat16) and torch.equal(narrow.dense(), weight.float())
    monkeypatch.setattr(kernel, "narrowest", lambda weight, library: weight)
    wide = kernel.PanelWeight(weight.float(), kernel.load())
    for rows in (*range(1, 15), 33):
        x = torch.randn(rows, inputs)
        assert torch.equal(narrow(x, None), wide(x, None))


@pytest.mark.skipif(kernel.load() is None, reason="no C compiler")
@pytest.mark.parametrize("odd", [1 / 3, 1e30, float("nan")])
def test_one_number_that_needs_more_keeps_the_weight_wide(odd):
    for place in (0, -1):
        weight = torch.randn(40, 16).half().float()
        weight.view(-1)[place] = odd
        assert kernel.narrowest(weight, kernel.load()).dtype == torch.float32


@pytest.mark.skipif(kernel.load() is None, reason="no C compiler")
def test_a_row_is_the_same_alone_and_among_others():
    torch.manual_seed(0)
    packed = kernel.PanelWeight(torch.randn(200, 576), kernel.load())
    x = torch.randn(40, 576)
    alone = torch.cat([packed(row[None], None) for row in x])
    for rows in range(1, 41):
        assert torch.equal(packed(x[:rows], None), alone[:rows])


@pytest.mark.skipif(kernel.load() is None, reason="no C compiler")
def test_inputs_need_not_be_contiguous_and_threads_do_not_matter():
    packed, x = kernel.PanelWeight(torch.randn(500, 64), kernel.load()), torch.randn(64, 3).T
    before, threads = packed(x, None), torch.get_num_threads()
    assert torch.equal(before, packed(x.contiguous(), None))
    try:
        torch.set_num_threads(3)
        assert torch.equal(before, packed(x, None))
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def fresh():
    kernel.load.cache_clear()
    yield
    kernel.load.cache_clear()


def broken_compiler(*args, **kwargs):
    raise subprocess.CalledProcessError(1, "cc")


@pytest.mark.parametrize("trouble", ["switched off", "no compiler", "compiler fails", "cache not writable"])
def test_without_the_kernel_products_stay_right(trouble, fresh, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WHIFLASH_HOME", str(tmp_path / ("file" if trouble == "cache not writable" else "home")))
    if trouble == "switched off":
        monkeypatch.setenv("WHIFLASH_KERNEL", "0")
    if trouble == "no compiler":
        monkeypatch.setattr(kernel.shutil, "which", lambda name: None)
    if trouble == "compiler fails":
        monkeypatch.setattr(kernel.subprocess, "run", broken_compiler)
    assert kernel.load() is None
    layer, x = Linear(48, 20), torch.randn(3, 48)
    expected = F.linear(x, layer.weight, layer.bias)
    layer.pack()
    assert not isinstance(layer.packed, kernel.PanelWeight)
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)
