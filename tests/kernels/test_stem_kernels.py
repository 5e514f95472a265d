"""First convolutions against torch's own, in float64 of the same rounded numbers."""

import copy
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from modenorm.lab.layers import stem_conv as module
from modenorm.lab.layers.stem_conv import StemConv2d, stem_conv, stem_conv_weight
from modenorm.lab.models.blocks import he_conv


class Case(NamedTuple):
    size: tuple[int, int, int]
    c_out: int = 16
    taps: tuple[int, int] = (3, 3)
    stride: int = 1
    padding: int = 1
    c_in: int = 3


# One pixel; odd sizes; pixels beyond the last window; more padding than image; windows of one, two
# and three pieces; channels that no tile divides.
SMALL = [
    Case((1, 1, 1)),
    Case((3, 5, 7)),
    Case((2, 11, 13), stride=2),
    Case((2, 8, 9), padding=0, stride=3),
    Case((1, 2, 1), padding=3, stride=2),
    Case((2, 6, 5), 16, (5, 5), 1, 2),
    Case((2, 9, 8), 16, (7, 7), 2, 3),
    Case((1, 4, 5), 64, (7, 7), 1, 3),
    Case((1, 5, 4), 192, (5, 5), 1, 2),
    Case((1, 5, 4), 192, (5, 5), 2, 2),
    Case((2, 5, 4), 20, (2, 5)),
    Case((1, 5, 9), 70, (4, 9)),
    Case((2, 3, 4), 5, (1, 1), 1, 0, c_in=1),
]
REAL = [
    Case((128, 32, 32), 192, (5, 5), 1, 2),
    Case((256, 64, 64), 64, (7, 7), 2, 3),
    Case((128, 32, 32), 16),
    Case((128, 32, 32), 64),
    Case((127, 33, 31), 64, (7, 7), 2, 3),
]
PLAIN, STRIDED = Case((2, 5, 4)), Case((2, 6, 5), 16, (3, 3), 2, 1)
BF16, FP16 = torch.bfloat16, torch.float16


def numbers(*shape, device, dtype=BF16):
    """Of 8 bits, in the interpreter: it cuts where a GPU rounds."""
    x = torch.randn(shape, device=device)
    return (x.bfloat16() if device.type == "cpu" else x).to(dtype)


def data(case, device, dtype=BF16, given=torch.float32, last=True):
    """X and weights of a given type, and dy."""
    num_images, height, width = case.size
    x = numbers(num_images, case.c_in, height, width, device=device, dtype=given)
    weight = numbers(case.c_out, case.c_in, *case.taps, device=device, dtype=given)
    if last:
        weight = weight.contiguous(memory_format=torch.channels_last)
    x = x.contiguous(memory_format=torch.channels_last)
    dy = torch.randn_like(torch_conv(case)(x, weight), dtype=dtype)
    return x, weight, dy.contiguous(memory_format=torch.channels_last)


def torch_conv(case):
    return lambda x, w: F.conv2d(x, w, stride=case.stride, padding=case.padding)


def own_conv(case, dtype=BF16):
    return lambda x, w: stem_conv(x, w, case.stride, case.padding, dtype)


def gradients(function, x, weight, dy):
    """Y, dW and dx."""
    x, weight = (t.detach().requires_grad_() for t in (x, weight))
    y = function(x, weight)
    return [y.detach(), *torch.autograd.grad(y, (weight, x), dy.to(y.dtype))]


def exact(case, x, weight, dy):
    x, weight = x.to(dy.dtype).double(), weight.to(dy.dtype).double()
    return gradients(torch_conv(case), x, weight, dy.double())


def assert_near(found, wanted, rounding=None):
    """Up to the rounding of the result and the order of the sums in float32."""
    assert found.isfinite().all()
    rounding = rounding or torch.finfo(found.dtype).eps
    torch.testing.assert_close(
        found.double(), wanted, rtol=rounding, atol=1e-5 * float(wanted.abs().max())
    )


def assert_about(found, wanted, error=0.01):
    """What torch's own operators round to half precision on the way."""
    assert (found.double() - wanted).norm() <= error * wanted.norm()


def check(case, device, dtype=BF16, given=torch.float32, last=True):
    x, weight, dy = data(case, device, dtype, given, last)
    found = gradients(own_conv(case, dtype), x, weight, dy)
    assert [t.dtype for t in found] == [dtype, given, given]
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    assert found[1].stride() == weight.stride()
    truth = exact(case, x, weight, dy)
    for value, wanted in zip(found[:2], truth[:2], strict=True):
        assert_near(value, wanted)
    assert_about(found[2], truth[2])


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_sizes(device, case):
    check(case, device)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_types(device, dtype):
    """Images and weights in half precision, and in float32."""
    for given in (dtype, torch.float32):
        check(STRIDED, device, dtype, given)


def test_weights_in_any_order(device):
    check(STRIDED, device, last=False)
    x, weight, dy = data(PLAIN, device)
    apart = torch.stack((weight, weight), -1)[..., 0]
    found = [gradients(own_conv(PLAIN), x, w, dy)[:2] for w in (weight, apart)]
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("stages", [1, 2])
def test_several_programs(device, stages, monkeypatch):
    """More pixels, channels and shares of the pixels than one program takes, on odd sizes."""
    conv = module.ConvTile(pixels=16, out=16, outs=2, steps=3, stages=stages, warps=1)
    grad = module.GradTile(pixels=16, out=16, outs=2, stages=stages, warps=1, programs=3)
    monkeypatch.setattr(module, "CONV_TILES", {(64, 7): conv})
    monkeypatch.setattr(module, "GRAD_TILES", {(64, 7): grad})
    case = Case((5, 7, 5), 70)
    launch = module.conv_launch((5, 3, 7, 5), (70, 3, 3, 3), (27, 1, 9, 3), 1, 1)
    wgrad, _, parts = module.wgrad_launches((5, 3, 7, 5), (70, 3, 3, 3), (27, 1, 9, 3), 1, 1)
    assert launch.grid == (4, 3, 1)  # 175 pixels are 11 blocks
    assert wgrad.grid == (parts, 3, 1)
    assert parts == 3
    check(case, device)


def test_only_what_is_asked(device, counted):
    calls = counted(module, "stem_conv_weight"), counted(module, "_input_gradient")
    x, weight, dy = data(PLAIN, device)
    own_conv(PLAIN)(x.detach().requires_grad_(), weight).backward(dy)
    assert list(map(len, calls)) == [0, 1]
    own_conv(PLAIN)(x, weight.requires_grad_()).backward(dy)
    assert list(map(len, calls)) == [1, 1]


def test_upstream_gradient_in_any_order(device):
    """Expanded from one number, and channel by channel."""
    x, weight, dy = data(STRIDED, device)
    for given in (torch.ones_like(dy[:1, :1, :1, :1]).expand_as(dy), dy.contiguous()):
        found, wanted = (
            gradients(own_conv(STRIDED), x, weight, upstream)[1]
            for upstream in (given, given.contiguous(memory_format=torch.channels_last))
        )
        assert torch.equal(found, wanted)


def test_second_derivative(device):
    """Of sums of dx² and dW², by all that they depend on."""
    tensors, found = data(STRIDED, device), []
    for function, kind in ((own_conv(STRIDED), None), (torch_conv(STRIDED), torch.float64)):
        x, weight, dy = (t.to(kind or t.dtype).detach().requires_grad_() for t in tensors)
        first = torch.autograd.grad(function(x, weight), (x, weight), dy, create_graph=True)
        total = sum((gradient * gradient).sum() for gradient in first)
        found.append(torch.autograd.grad(total, (x, weight, dy)))
    for value, wanted in zip(*found, strict=True):
        assert_about(value, wanted, 0.02)


@pytest.mark.parametrize("stride", [1, 2])
def test_not_a_number(device, stride):
    """It reaches the windows that it is in and none else, in the next image neither."""
    x = torch.zeros(3, 3, 5, 5, device=device).contiguous(memory_format=torch.channels_last)
    x[1, 2, 4, 0] = torch.nan
    ones = torch.ones(16, 3, 3, 3, device=device)
    y = stem_conv(x, ones, stride, 1, BF16)
    wanted = F.conv2d(x.cpu(), ones.cpu(), stride=stride, padding=1).isnan()
    assert 0 < wanted.sum() < 5 * 16
    assert torch.equal(y.isnan().cpu(), wanted)


def test_equal_bits(device):
    case = REAL[0] if torch.cuda.is_available() else STRIDED
    x, weight, dy = data(case, device)
    first, second = (gradients(own_conv(case), x, weight, dy)[:2] for _ in range(2))
    assert all(map(torch.equal, first, second))


def layer_for(device, case=PLAIN):
    """A layer as models have it."""
    layer = he_conv(3, case.c_out, case.taps[0], case.stride).to(device)
    assert isinstance(layer, StemConv2d)
    layer.weight.data = numbers(*layer.weight.shape, device=device, dtype=torch.float32)
    return layer.to(memory_format=torch.channels_last)


def test_layer_under_autocast(device, counted):
    """Images and weights come to the kernels as they are."""
    calls, layer = counted(module, "stem_conv"), layer_for(device)
    x, _, dy = data(PLAIN, device)
    with torch.autocast(device.type, BF16):
        y = layer(x)
    y.backward(dy)
    assert calls[0][0] is x
    assert calls[0][1] is layer.weight
    truth = exact(PLAIN, x, layer.weight.detach(), dy)
    assert_near(y.detach(), truth[0])
    assert_near(layer.weight.grad, truth[1])
    assert layer.weight.grad.stride() == layer.weight.stride()


def test_layer_where_kernels_do_not_serve(device, counted, monkeypatch):
    """Other types, orders and convolutions, no batch, an empty one: torch's own layer."""
    calls, layer = counted(module, "stem_conv"), layer_for(device)
    x = data(PLAIN, device)[0]
    half, xh = copy.deepcopy(layer).bfloat16(), x.bfloat16()
    assert layer(x).dtype == torch.float32
    half(xh.contiguous())
    half(xh[0])
    assert half(xh[:0]).shape == (0, 16, 5, 4)
    for options in (
        {"dilation": 2}, {"groups": 3}, {"padding_mode": "circular"}, {"bias": True},
        {"padding": "same"}, {"padding": (1, 2)}, {"stride": (1, 2)}, {"kernel_size": (4, 22)},
    ):  # fmt: skip
        usual = {"kernel_size": 3, "padding": 2, "bias": False}
        if "kernel_size" in options:
            usual["padding"] = 10
        StemConv2d(3, 18, **usual | options).to(device, BF16)(xh)
    narrow = xh[..., :3].contiguous(memory_format=torch.channels_last)
    for wrong in (narrow, xh[:, :2], x):
        with pytest.raises(RuntimeError):
            StemConv2d(3, 16, 5, bias=False).to(device, BF16)(wrong)
    for name, value in (("ENABLED", False), ("_MOST_PIXELS", 2 * 5 * 4)):
        with monkeypatch.context() as context:
            context.setattr(module, name, value)
            half(xh)
    with torch.autocast(device.type, BF16), pytest.raises(RuntimeError):
        layer(x.to(torch.uint8))
    assert not calls
    half(xh)
    assert len(calls) == 1


def test_traced_network(device, compare_traced):
    """As one graph, under autocast, with a norm and an activation behind it."""
    parts = [layer_for(device), torch.nn.BatchNorm2d(16), torch.nn.ReLU()]
    model = torch.nn.Sequential(*parts).to(device)
    x, _, dy = data(PLAIN, device)
    compare_traced(model, x, dy)


def test_registration(device):
    x, weight, dy = data(STRIDED, device)
    leaves = [t.detach().requires_grad_() for t in (x, weight, dy)]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(stem_conv, (x, weight, 2, 1, BF16))
    torch.library.opcheck(stem_conv_weight, (x, dy, weight, 2, 1))
    torch.library.opcheck(stem_conv, (*leaves[:2], 2, 1, BF16), test_utils=checks)
    torch.library.opcheck(stem_conv_weight, (leaves[0], leaves[2], weight, 2, 1), test_utils=checks)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="too large for the interpreter")
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", REAL, ids=str)
def test_real_sizes(device, case, dtype):
    check(case, device, dtype)
    check(case, device, dtype, given=dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("case", REAL[:2], ids=str)
def test_compiled_step_as_a_graph(device, capture, case):
    """A compiled layer, forward and backward, captured and run on other numbers."""
    layer = layer_for(device, case)
    compiled = torch.compile(layer, fullgraph=True, dynamic=False)
    x, _, dy = data(case, device)

    def step():
        with torch.autocast("cuda", BF16):
            y = compiled(x)
        return y, *torch.autograd.grad(y, [layer.weight], dy)

    graph, found = capture(step)
    x.copy_(data(case, device)[0])
    graph.replay()
    torch.cuda.synchronize()
    truth = exact(case, x, layer.weight.detach(), dy)
    for value, wanted in zip(found, truth[:2], strict=True):
        assert_near(value.detach(), wanted)
