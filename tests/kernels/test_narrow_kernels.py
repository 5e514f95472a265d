"""Narrow convolutions against torch's own, in float64 of the same rounded numbers."""

import copy

import pytest
import torch
import torch.nn.functional as F

from modenorm.lab.layers import narrow_conv as module
from modenorm.lab.layers import narrow_launches as launches
from modenorm.lab.layers.narrow_conv import (
    NarrowConv2d,
    narrow_conv,
    narrow_conv_input,
    narrow_conv_weight,
)
from modenorm.lab.models import create_model

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
SMALL = [(1, 1, 1), (3, 1, 1), (3, 5, 7), (1, 8, 8), (5, 9, 4), (2, 3, 70)]
WIDTHS = [(32, 32), (64, 64), (16, 32), (32, 64), (64, 16)]
REAL = [
    *((1, 128, 16, 16, 32), (1, 128, 32, 32, 16), (1, 128, 64, 64, 8), (1, 127, 16, 16, 33)),
    *((2, 128, 16, 32, 32), (2, 128, 32, 64, 16), (2, 127, 16, 32, 33), (2, 127, 64, 64, 17)),
]
TILES = {
    1: (launches.GRAD_TILES, launches.CONV_TILES),
    2: (launches.STRIDED_GRAD_TILES, launches.STRIDED_CONV_TILES, launches.STRIDED_INPUT_TILES),
}


@pytest.fixture(params=[1, 2], ids="stride{}".format)
def stride(request):
    return request.param


@pytest.fixture
def use_tile(monkeypatch):
    """A function that changes the tiles of 16 channels in a dictionary."""

    def use(tiles, **changes):
        tile = tiles[min(tiles)]._replace(**changes)
        monkeypatch.setitem(tiles, (16, 16), tile)

    return use


def images(size, channels, device, dtype=torch.bfloat16):
    num_images, height, width = size
    x = torch.randn(num_images, channels, height, width, device=device, dtype=dtype)
    return x.contiguous(memory_format=torch.channels_last)


def after(size, stride):
    num_images, height, width = size
    return num_images, (height - 1) // stride + 1, (width - 1) // stride + 1


def layer_for(c_in, c_out, stride, device, dtype=torch.bfloat16, last=True):
    """Weights that are numbers of 8 bits, in the interpreter: it cuts where a GPU rounds."""
    layer = NarrowConv2d(c_in, c_out, stride)
    if device.type == "cpu":
        layer.bfloat16()
    layer.to(device, dtype)
    return layer.to(memory_format=torch.channels_last) if last else layer


def gradients(function, x, weight, dy):
    """Y, dx and dW."""
    leaves = [t.detach().requires_grad_() for t in (x, weight)]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def torchs(stride):
    return lambda x, w: F.conv2d(x, w, padding=1, stride=stride)


def own(stride):
    return lambda x, w: narrow_conv(x, w, stride)


def exact(x, weight, dy, stride):
    return gradients(torchs(stride), x.double(), weight.double(), dy.double())


def assert_near(found, wanted, rounding):
    """Up to the rounding of the result and the order of the sums in float32."""
    assert found.isfinite().all()
    torch.testing.assert_close(
        found.double(), wanted, rtol=rounding, atol=1e-5 * float(wanted.abs().max())
    )


def check(size, c_in, c_out, stride, device, dtype=torch.bfloat16, weight_dtype=None, last=True):
    weight = layer_for(c_in, c_out, stride, device, weight_dtype or dtype, last).weight.detach()
    x, dy = images(size, c_in, device, dtype), images(after(size, stride), c_out, device, dtype)
    found = gradients(own(stride), x, weight, dy)
    assert [t.dtype for t in found] == [dtype, dtype, weight.dtype]
    assert found[2].stride() == weight.stride()
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in found[:2])
    for value, wanted in zip(found, exact(x, weight.to(dtype), dy, stride), strict=True):
        assert_near(value, wanted, torch.finfo(value.dtype).eps)


@pytest.mark.parametrize("size", SMALL, ids=str)
def test_sizes(device, size, stride):
    check(size, 16, 16, stride, device)


@pytest.mark.parametrize(("c_in", "c_out"), WIDTHS)
def test_widths(device, c_in, c_out, stride):
    check((3, 5, 7), c_in, c_out, stride, device)


@pytest.mark.parametrize("size", [(2, 4, 6), (2, 4, 5), (2, 5, 6)], ids=str)
def test_even_sizes_with_stride_2(device, size):
    """The last row and column of x belong to a window alone, or to none."""
    check(size, 16, 32, 2, device)


def test_other_types(device, stride):
    check((3, 5, 7), 16, 32, stride, device, torch.float16)
    check((3, 5, 7), 16, 32, stride, device, torch.bfloat16, torch.float32)


def test_weights_in_any_order(device, stride):
    check((3, 5, 7), 16, 32, stride, device, last=False)


@pytest.mark.parametrize("size", [(5, 11, 5), (5, 12, 10)], ids=str)
def test_several_programs(device, stride, size, use_tile):
    """More columns, rows and shares of the pixels than one program takes."""
    grads, *convs = TILES[stride]
    use_tile(grads, pixels=32, programs=3)
    for tiles in convs:
        use_tile(tiles, columns=16, rows=2)
    check(size, 16, 16, stride, device)


@pytest.mark.parametrize("tiles", TILES[2][1:], ids=["y", "dx"])
def test_channels_in_several_programs(device, tiles, monkeypatch):
    monkeypatch.setitem(tiles, (32, 64), tiles[32, 64]._replace(out=16))
    check((3, 5, 7), 32, 64, 2, device)


@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize("rows", [1, 3])
def test_taps_per_program(device, stride, rows, taps, use_tile):
    use_tile(TILES[stride][0], rows=rows, taps=taps)
    check((3, 7, 6), 16, 16, stride, device)


def test_only_what_is_asked(device, stride, monkeypatch):
    calls = []
    monkeypatch.setattr(
        module, "narrow_conv_weight", lambda x, dy, w, s: calls.append("dW") or torch.zeros_like(w)
    )
    x, weight = images((2, 3, 3), 16, device), layer_for(16, 16, stride, device).weight
    leaf = x.detach().requires_grad_()
    narrow_conv(leaf, weight.detach(), stride).sum().backward()  # dy is one number, expanded
    wanted = torch.autograd.grad(
        torchs(stride)(leaf.double(), weight.detach().double()).sum(), leaf
    )[0]
    assert_near(leaf.grad, wanted.double(), 2**-7)
    assert not calls
    monkeypatch.setattr(module, "narrow_conv_input", None)
    narrow_conv(x, weight, stride).sum().backward()
    assert calls == ["dW"]


@pytest.mark.parametrize("size", [(2, 4, 3), (2, 5, 6)], ids=str)
def test_second_derivative(device, stride, size):
    """Of the sum of dx², by the upstream gradient and by the weights."""
    weight = layer_for(16, 32, stride, device).weight.detach()
    x, dy = images(size, 16, device), images(after(size, stride), 32, device)
    found = []
    for function, kind in ((own(stride), torch.bfloat16), (torchs(stride), torch.float64)):
        leaves = [t.to(kind).detach().requires_grad_() for t in (x, weight, dy)]
        (dx,) = torch.autograd.grad(function(*leaves[:2]), leaves[:1], leaves[2], create_graph=True)
        found.append(torch.autograd.grad((dx * dx).sum(), leaves[1:]))
    for value, wanted in zip(*found, strict=True):
        error = (value.double() - wanted).norm() / wanted.norm()
        assert error < 0.01


def test_not_a_number(device, stride):
    """It reaches its neighbours and none else, in the next image neither."""
    x = torch.zeros(3, 16, 4, 4, device=device, dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last)
    x[1, 2, 3, 0] = torch.nan
    y = narrow_conv(x, torch.ones(16, 16, 3, 3, device=device), stride)
    wanted = torch.zeros(3, 4, 4, dtype=torch.bool)
    wanted[1, 2:, :2] = True
    assert torch.equal(y.isnan().any(1).cpu(), wanted[:, ::stride, ::stride])


def test_not_a_number_upstream_with_stride_2(device):
    dy = images((3, 2, 3), 16, device).zero_()
    dy[1, 2, 1, 1] = torch.nan
    dx = narrow_conv_input(dy, torch.ones(16, 16, 3, 3, device=device), 4, 6, 2)
    wanted = torch.zeros(3, 4, 6, dtype=torch.bool)
    wanted[1, 1:, 1:4] = True
    assert torch.equal(dx.isnan().any(1).cpu(), wanted)


def test_layer_under_autocast(device, stride):
    layer = layer_for(16, 32, stride, device, torch.float32)
    x = images((3, 5, 7), 16, device, torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    weight = layer.weight.detach()
    wanted = torchs(stride)(x.bfloat16().double(), weight.bfloat16().double())
    assert_near(y, wanted, 2**-7)
    y.float().square().sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert layer.weight.grad.stride() == layer.weight.stride()


def test_layer_where_kernels_do_not_serve(device, stride, counted, monkeypatch):
    """Float32, images in torch's first order, an empty batch, the switch: torch's own layer."""
    calls = counted(module, "narrow_conv")
    layer = layer_for(16, 16, stride, device, torch.float32)
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


def test_large_results_of_64_channels_are_left_to_torch(device, counted, monkeypatch):
    calls = counted(module, "narrow_conv")
    monkeypatch.setattr(module, "_LARGE", 4 * 4)
    for c_in, stride, side in ((64, 1, 4), (32, 2, 7), (32, 2, 8)):
        layer_for(c_in, 64, stride, device)(images((1, side, side), c_in, device))
    assert not calls
    for c_in, stride, side in ((64, 1, 3), (32, 2, 6)):
        layer_for(c_in, 64, stride, device)(images((1, side, side), c_in, device))
    assert len(calls) == 2


def test_resnet(device, counted, monkeypatch):
    """Its strided convolutions too: as torch's own, up to the roundings of 20 layers."""
    model = create_model("resnet20", num_classes=10).to(device).eval()
    model.to(memory_format=torch.channels_last)
    first, second = (model.get_parameter(f"stages.{n}.0.conv1.weight") for n in (1, 2))
    x = torch.randn(2, 3, 9, 8, device=device).contiguous(memory_format=torch.channels_last)
    calls = counted(module, "narrow_conv")

    def step():
        with torch.autocast(device.type, torch.float16):
            y = model(x)
        return y, *torch.autograd.grad(y.float().square().sum(), (first, second))

    found = step()
    assert [stride for *_, stride in calls] == [1] * 6 + [2] + [1] * 5 + [2] + [1] * 5
    monkeypatch.setattr(module, "ENABLED", False)
    for value, wanted in zip(found, step(), strict=True):
        assert (value - wanted).norm() / wanted.norm() < 0.05  # a ReLU may open for one of them
    assert len(calls) == 18


def test_traced_network(device, compare_traced):
    """As one graph, under autocast, with a norm and an activation behind it."""
    convs = [layer_for(16, 16, stride, device, torch.float32) for stride in (1, 2)]
    parts = [(conv, torch.nn.BatchNorm2d(16)) for conv in convs]
    layers = [layer for conv, norm in parts for layer in (conv, norm, torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).to(device)
    x, dy = images((3, 5, 4), 16, device), images((3, 3, 2), 16, device)
    compare_traced(model, x, dy)


def test_registration(device, stride):
    x, dy = images((2, 3, 4), 16, device), images(after((2, 3, 4), stride), 32, device)
    weight = layer_for(16, 32, stride, device, torch.float32).weight
    torch.library.opcheck(narrow_conv, (x, weight.detach(), stride))
    torch.library.opcheck(narrow_conv_input, (dy, weight.detach(), 3, 4, stride))
    torch.library.opcheck(narrow_conv_weight, (x, dy, weight.detach(), stride))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for operator, tensor, others in ((narrow_conv, x, ()), (narrow_conv_input, dy, (3, 4))):
        leaf = tensor.detach().requires_grad_()
        torch.library.opcheck(operator, (leaf, weight, *others, stride), test_utils=checks)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="too large for the interpreter")
@pytest.mark.parametrize(("stride", "num_images", "c_in", "c_out", "side"), REAL)
@DTYPES
def test_real_sizes(device, stride, num_images, c_in, c_out, side, dtype):
    size = (num_images, side, side)
    check(size, c_in, c_out, stride, device, dtype, torch.float32)


def test_equal_bits(device, stride):
    size = (64, 32, 32) if torch.cuda.is_available() else (3, 9, 8)
    weight = layer_for(16, 16, stride, device).weight.detach()
    x, dy = images(size, 16, device), images(after(size, stride), 16, device)
    first, second = (gradients(own(stride), x, weight, dy) for _ in range(2))
    for value, again in zip(first, second, strict=True):
        assert torch.equal(value, again)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_compiled_step_as_a_graph(device, stride, capture):
    """A compiled layer, forward and backward, captured and run on other numbers."""
    layer = layer_for(16, 16, stride, device, torch.float32)
    compiled = torch.compile(layer, fullgraph=True, dynamic=False)
    x, dy = images((16, 32, 32), 16, device), images(after((16, 32, 32), stride), 16, device)
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
    wanted = exact(leaf, layer.weight.bfloat16(), dy, stride)
    for value, truth in zip(found, wanted, strict=True):
        assert_near(value.detach(), truth, torch.finfo(value.dtype).eps)
