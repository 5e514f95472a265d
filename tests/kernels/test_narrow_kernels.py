"""Narrow convolutions against torch's own, in float64 of the same rounded numbers."""

import copy

import pytest
import torch
import torch.nn.functional as F

from modenorm.lab.models import narrow_conv as module
from modenorm.lab.models.narrow_conv import NarrowConv2d, narrow_conv, narrow_conv_weight

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
SMALL = [(1, 1, 1), (3, 1, 1), (3, 5, 7), (1, 8, 8), (5, 9, 4), (2, 3, 70)]
WIDTHS = [(32, 32), (64, 64), (16, 32), (64, 16)]
REAL = [(128, 16, 32), (128, 32, 16), (128, 64, 8), (127, 16, 33)]


def images(size, channels, device, dtype=torch.bfloat16):
    num_images, height, width = size
    x = torch.randn(num_images, channels, height, width, device=device, dtype=dtype)
    return x.contiguous(memory_format=torch.channels_last)


def layer_for(c_in, c_out, device, dtype=torch.bfloat16, last=True):
    """Weights that are numbers of 8 bits, in the interpreter: it cuts where a GPU rounds."""
    layer = NarrowConv2d(c_in, c_out)
    if device.type == "cpu":
        layer.bfloat16()
    layer.to(device, dtype)
    return layer.to(memory_format=torch.channels_last) if last else layer


def gradients(function, x, weight, dy):
    """Y, dx and dW."""
    leaves = [t.detach().requires_grad_() for t in (x, weight)]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def exact(x, weight, dy):
    return gradients(
        lambda x, w: F.conv2d(x, w, padding=1), x.double(), weight.double(), dy.double()
    )


def assert_near(found, wanted, rounding):
    """Up to the rounding of the result and the order of the sums in float32."""
    assert found.isfinite().all()
    torch.testing.assert_close(
        found.double(), wanted, rtol=rounding, atol=1e-5 * float(wanted.abs().max())
    )


def check(size, c_in, c_out, device, dtype=torch.bfloat16, weight_dtype=None, last=True):
    weight = layer_for(c_in, c_out, device, weight_dtype or dtype, last).weight.detach()
    x, dy = images(size, c_in, device, dtype), images(size, c_out, device, dtype)
    found = gradients(lambda x, w: narrow_conv(x, w, False), x, weight, dy)
    assert [t.dtype for t in found] == [dtype, dtype, weight.dtype]
    assert found[2].stride() == weight.stride()
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in found[:2])
    for value, wanted in zip(found, exact(x, weight.to(dtype), dy), strict=True):
        assert_near(value, wanted, torch.finfo(value.dtype).eps)
    return found


@pytest.mark.parametrize("size", SMALL, ids=str)
def test_sizes(device, size):
    check(size, 16, 16, device)


@pytest.mark.parametrize(("c_in", "c_out"), WIDTHS)
def test_widths(device, c_in, c_out):
    check((3, 5, 7), c_in, c_out, device)


def test_other_types(device):
    check((3, 5, 7), 16, 32, device, torch.float16)
    check((3, 5, 7), 16, 32, device, torch.bfloat16, torch.float32)


def test_weights_in_any_order(device):
    check((3, 5, 7), 16, 32, device, last=False)


def test_several_programs(device, monkeypatch):
    """More columns, rows and shares of the pixels than one program takes, on sizes that are odd."""
    tile = module.GRAD_TILES[16, 16]._replace(pixels=32, programs=3)
    monkeypatch.setitem(module.GRAD_TILES, (16, 16), tile)
    tile = module.CONV_TILES[16, 16]._replace(columns=16, rows=2)
    monkeypatch.setitem(module.CONV_TILES, (16, 16), tile)
    check((5, 11, 5), 16, 16, device)


@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize("rows", [1, 3])
def test_taps_per_program(device, rows, taps, monkeypatch):
    tile = module.GRAD_TILES[16, 16]._replace(rows=rows, taps=taps)
    monkeypatch.setitem(module.GRAD_TILES, (16, 16), tile)
    check((3, 7, 6), 16, 16, device)


def test_only_what_is_asked(device, monkeypatch):
    calls = []
    monkeypatch.setattr(
        module, "narrow_conv_weight", lambda x, dy, w: calls.append("dW") or torch.zeros_like(w)
    )
    x, weight = images((2, 3, 3), 16, device), layer_for(16, 16, device).weight
    leaf = x.detach().requires_grad_()
    narrow_conv(leaf, weight.detach(), False).sum().backward()  # dy is one number, expanded
    wanted = torch.autograd.grad(
        F.conv2d(leaf.double(), weight.detach().double(), padding=1).sum(), leaf
    )[0]
    assert_near(leaf.grad, wanted.double(), 2**-7)
    assert not calls
    narrow_conv(x, weight, False).sum().backward()
    assert calls == ["dW"]


def test_second_derivative(device):
    """Of the sum of dx², by the upstream gradient and by the weights."""
    weight = layer_for(16, 32, device).weight.detach()
    x, dy = images((2, 4, 3), 16, device), images((2, 4, 3), 32, device)
    found = []
    for function, kind in (
        (lambda x, w: narrow_conv(x, w, False), torch.bfloat16),
        (lambda x, w: F.conv2d(x, w, padding=1), torch.float64),
    ):
        leaves = [t.to(kind).detach().requires_grad_() for t in (x, weight, dy)]
        (dx,) = torch.autograd.grad(function(*leaves[:2]), leaves[:1], leaves[2], create_graph=True)
        found.append(torch.autograd.grad((dx * dx).sum(), leaves[1:]))
    for value, wanted in zip(*found, strict=True):
        error = (value.double() - wanted).norm() / wanted.norm()
        assert error < 0.01


def test_not_a_number(device):
    """It reaches its neighbours and none else, in the next image neither."""
    x = torch.zeros(3, 16, 4, 4, device=device, dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last)
    x[1, 2, 3, 0] = torch.nan
    y = narrow_conv(x, torch.ones(16, 16, 3, 3, device=device), False)
    wanted = torch.zeros(3, 4, 4, dtype=torch.bool)
    wanted[1, 2:, :2] = True
    assert torch.equal(y.isnan().any(1).cpu(), wanted)


def test_layer_under_autocast(device):
    layer = layer_for(16, 32, device, torch.float32)
    x = images((3, 5, 7), 16, device, torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    weight = layer.weight.detach()
    wanted = F.conv2d(x.bfloat16().double(), weight.bfloat16().double(), padding=1)
    assert_near(y, wanted, 2**-7)
    y.float().square().sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert layer.weight.grad.stride() == layer.weight.stride()


def test_layer_where_kernels_do_not_serve(device, counted, monkeypatch):
    """Float32, images in torch's first order, an empty batch, the switch: torch's own layer."""
    calls = counted(module, "narrow_conv")
    layer = layer_for(16, 16, device, torch.float32)
    x = images((2, 3, 3), 16, device, torch.float32)
    half = copy.deepcopy(layer).bfloat16()
    layer(x)
    half(x.bfloat16().contiguous())
    half(x[:0].bfloat16())
    with pytest.raises(RuntimeError):
        layer(x.bfloat16())
    with monkeypatch.context() as context:
        context.setattr(module, "ENABLED", False)
        half(x.bfloat16())
    assert not calls
    half(x.bfloat16())
    assert len(calls) == 1


def test_traced_network(device):
    """As one graph, under autocast, with a norm and an activation behind it."""
    parts = [(layer_for(16, 16, device, torch.float32), torch.nn.BatchNorm2d(16)) for _ in "ab"]
    layers = [layer for conv, norm in parts for layer in (conv, norm, torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).to(device)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    x, dy = images((3, 5, 4), 16, device), images((3, 5, 4), 16, device)
    found = []
    for function, owner in ((compiled, model), (twin, twin)):
        leaf = x.detach().requires_grad_()
        with torch.autocast(device.type, torch.bfloat16):
            y = function(leaf)
        found.append([y, *torch.autograd.grad(y, [leaf, *owner.parameters()], dy)])
    for value, wanted in zip(*found, strict=True):
        torch.testing.assert_close(value, wanted, rtol=2e-2, atol=2e-2)


def test_registration(device):
    x, dy = images((2, 3, 4), 16, device), images((2, 3, 4), 32, device)
    weight = layer_for(16, 32, device, torch.float32).weight
    torch.library.opcheck(narrow_conv, (x, weight.detach(), False))
    torch.library.opcheck(narrow_conv, (dy, weight.detach(), True))
    torch.library.opcheck(narrow_conv_weight, (x, dy, weight.detach()))
    leaf = x.detach().requires_grad_()
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(narrow_conv, (leaf, weight, False), test_utils=checks)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="too large for the interpreter")
@pytest.mark.parametrize(("num_images", "channels", "side"), REAL)
@DTYPES
def test_real_sizes(device, num_images, channels, side, dtype):
    size = (num_images, side, side)
    check(size, channels, channels, device, dtype, torch.float32)


def test_equal_bits(device):
    size = (64, 32, 32) if torch.cuda.is_available() else (3, 9, 8)
    weight = layer_for(16, 16, device).weight.detach()
    x, dy = images(size, 16, device), images(size, 16, device)
    first, second = (
        gradients(lambda x, w: narrow_conv(x, w, False), x, weight, dy) for _ in range(2)
    )
    for value, again in zip(first, second, strict=True):
        assert torch.equal(value, again)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_compiled_step_as_a_graph(device, capture):
    """A compiled layer, forward and backward, captured and run on other numbers."""
    layer = layer_for(16, 16, device, torch.float32)
    compiled = torch.compile(layer, fullgraph=True, dynamic=False)
    x, dy = images((16, 32, 32), 16, device), images((16, 32, 32), 16, device)
    leaf = x.detach().requires_grad_()

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            y = compiled(leaf)
        return y, *torch.autograd.grad(y, [leaf, layer.weight], dy)

    graph, found = capture(step)
    with torch.no_grad():
        leaf.copy_(images((16, 32, 32), 16, device))
    graph.replay()
    torch.cuda.synchronize()
    wanted = exact(leaf, layer.weight.bfloat16(), dy)
    for value, truth in zip(found, wanted, strict=True):
        assert_near(value.detach(), truth, torch.finfo(value.dtype).eps)
