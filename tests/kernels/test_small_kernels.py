"""Small convolutions against torch's own, in float64 of the same numbers."""

import copy
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from modenorm.lab.layers import small_conv as module
from modenorm.lab.layers.small_conv import (
    SmallConv2d,
    small_conv,
    small_conv_input,
    small_conv_weight,
)
from modenorm.lab.models import create_model


class Case(NamedTuple):
    size: tuple[int, int, int]
    c_in: int
    c_out: int
    taps: int
    stride: int = 1
    padding: int = 0


# One pixel; odd sizes; taps that no stride divides, fewer taps than the stride; pixels beyond the
# last window; more padding than image.
SMALL = [
    Case((1, 1, 1), 1, 1, 1),
    Case((1, 6, 7), 2, 3, 5),
    Case((3, 4, 9), 1, 2, 5, 1, 2),
    Case((2, 5, 4), 5, 1, 3, 1, 1),
    Case((2, 7, 6), 2, 1, 5, 2, 2),
    Case((1, 8, 9), 1, 2, 5, 2, 2),
    Case((2, 8, 6), 2, 2, 5, 2),
    Case((2, 8, 9), 2, 3, 2, 3, 1),
    Case((1, 2, 1), 1, 2, 3, 2, 3),
]
WIDE = [Case((1, 4, 3), 1, 12, 3, 2, 1), Case((1, 3, 4), 2, 16, 3), Case((1, 3, 3), 16, 1, 3)]
REAL = [
    Case((512, 32, 32), 3, 6, 5),
    Case((512, 14, 14), 6, 16, 5),
    Case((512, 32, 32), 3, 12, 5, 2, 2),
    Case((512, 16, 16), 12, 12, 5, 2, 2),
    Case((129, 31, 33), 5, 7, 5, 2, 1),
    Case((4, 32, 32), 3, 6, 5),
]
PLAIN, STRIDED = Case((2, 5, 4), 2, 3, 3), Case((2, 6, 5), 2, 3, 3, 2, 1)


def images(size, channels, device):
    num_images, height, width = size
    return torch.randn(num_images, channels, height, width, device=device)


def weights(case, device):
    return torch.randn(case.c_out, case.c_in, case.taps, case.taps, device=device)


def torch_conv(case):
    return lambda x, w: F.conv2d(x, w, stride=case.stride, padding=case.padding)


def own_conv(case):
    return lambda x, w: small_conv(x, w, case.stride, case.padding)


def data(case, device):
    x, weight = images(case.size, case.c_in, device), weights(case, device)
    return x, weight, torch.randn_like(torch_conv(case)(x, weight))


def gradients(function, x, weight, dy):
    """Y, dx and dW."""
    leaves = [t.detach().requires_grad_() for t in (x, weight)]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def assert_near(found, wanted):
    """Up to the order of the sums in float32."""
    assert found.isfinite().all()
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    scale = float(wanted.abs().max())
    torch.testing.assert_close(found.cpu().double(), wanted.cpu(), rtol=1e-5, atol=3e-6 * scale)


def check(case, device):
    x, weight, dy = data(case, device)
    found = gradients(own_conv(case), x, weight, dy)
    truth = gradients(torch_conv(case), x.double(), weight.double(), dy.double())
    for value, wanted in zip(found, truth, strict=True):
        assert_near(value, wanted)


@pytest.mark.parametrize("case", SMALL + WIDE, ids=str)
def test_sizes(device, case):
    check(case, device)


@pytest.mark.parametrize("case", [PLAIN, STRIDED], ids=str)
def test_several_programs(device, case, monkeypatch):
    """More columns, rows, channels, taps and shares of the pixels than one program takes."""
    tile = module.ConvTile(columns=8, rows=2, channels=1, warps=1)
    monkeypatch.setitem(module.CONV_TILES, 8, tile)
    tile = module.GradTile(columns=4, rows=3, channels=1, taps=2, warps=1, programs=30)
    monkeypatch.setitem(module.GRAD_TILES, 8, tile)
    check(case, device)


def test_as_many_programs_as_there_is_work():
    """A few images are enough for many programs, many images take no more than allowed."""
    tile = module.GRAD_TILES[8]
    for num_images, least in ((1, 40), (4, 140), (512, tile.programs // 2)):
        shape, result = (num_images, 3, 32, 32), (num_images, 6, 28, 28)
        wgrad, _, parts = module.wgrad_launches(shape, result, (5, 5), 1, 0)
        assert wgrad.grid[0] == parts
        assert least < parts * wgrad.grid[1] * wgrad.grid[2] <= tile.programs


def test_only_what_is_asked(device, monkeypatch):
    calls = []
    for name in ("small_conv_input", "small_conv_weight"):
        original = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, f=original, n=name: calls.append(n) or f(*args)
        )
    x, weight, dy = data(PLAIN, device)
    small_conv(x, weight.detach().requires_grad_(), 1, 0).backward(dy)
    assert calls == ["small_conv_weight"]
    small_conv(x.detach().requires_grad_(), weight, 1, 0).backward(dy)
    assert calls == ["small_conv_weight", "small_conv_input"]


def test_upstream_gradient_in_any_order(device):
    """Expanded from one number, and with its channels last."""
    x, weight, dy = data(STRIDED, device)
    ones, last = torch.ones(1, 1, 1, 1, device=device).expand_as(dy), dy.clone()
    for given in (ones, last.contiguous(memory_format=torch.channels_last)):
        found = gradients(own_conv(STRIDED), x, weight, given)
        wanted = gradients(own_conv(STRIDED), x, weight, given.contiguous())
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("case", [PLAIN, STRIDED], ids=str)
def test_second_derivative(device, case):
    """Of sums of dx² and dW², by all that they depend on."""
    found = []
    for function, kind in ((own_conv(case), torch.float32), (torch_conv(case), torch.float64)):
        torch.manual_seed(1)
        x, weight, dy = (t.to(kind).requires_grad_() for t in data(case, device))
        y = function(x, weight)
        first = torch.autograd.grad(y, (x, weight), dy, create_graph=True)
        total = sum((gradient * gradient).sum() for gradient in first)
        found.append(torch.autograd.grad(total, (x, weight, dy)))
    for value, wanted in zip(*found, strict=True):
        assert_near(value, wanted)


@pytest.mark.parametrize(("stride", "rows", "columns"), [(1, (1, 4), (0, 3)), (2, (1, 2), (0, 2))])
def test_not_a_number(device, stride, rows, columns):
    """It reaches the windows that it is in and none else, in the next image neither."""
    x = torch.zeros(3, 2, 5, 5, device=device)
    x[1, 1, 3, 2] = torch.nan
    y = small_conv(x, torch.ones(2, 2, 3, 3, device=device), stride, 0)
    wanted = F.conv2d(x.cpu(), torch.ones(2, 2, 3, 3), stride=stride).isnan()
    assert torch.equal(y.isnan().cpu(), wanted)
    inside = y[1, :, slice(*rows), slice(*columns)].isnan()
    assert inside.all()
    assert inside.sum() == y.isnan().sum()


def test_equal_bits(device):
    case = REAL[0] if torch.cuda.is_available() else STRIDED
    x, weight, dy = data(case, device)
    first, second = (gradients(own_conv(case), x, weight, dy) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_layer(device):
    layer = SmallConv2d(2, 3, 3, stride=2, padding=1).to(device)
    x, _, dy = data(STRIDED, device)
    y = layer(x)
    y.backward(dy)
    truth = gradients(torch_conv(STRIDED), x.double(), layer.weight.double(), dy.double())
    assert_near(y.detach(), truth[0])
    assert_near(layer.weight.grad, truth[2])


def test_layer_where_kernels_do_not_serve(device, counted, monkeypatch):
    """Other types and orders, autocast, no batch, an empty one, the switch: torch's own layer."""
    calls = counted(module, "small_conv")
    layer, x = SmallConv2d(2, 3, 3).to(device), images((2, 4, 5), 2, device)
    copy.deepcopy(layer).double()(x.double())
    copy.deepcopy(layer).bfloat16()(x.bfloat16())
    layer(x.contiguous(memory_format=torch.channels_last))
    copy.deepcopy(layer).to(memory_format=torch.channels_last)(x)
    layer(x[0])
    assert layer(x[:0]).shape == (0, 3, 2, 3)
    with torch.autocast(device.type, torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    for wrong in (x[:, :, :2], x[:, :1], x.double()):
        with pytest.raises(RuntimeError):
            layer(wrong.contiguous())
    with monkeypatch.context() as context:
        context.setattr(module, "ENABLED", False)
        layer(x)
    with monkeypatch.context() as context:
        context.setattr(module, "_MOST", x.numel())
        layer(x)
    assert not calls
    layer(x)
    assert len(calls) == 1


def test_traced_network(device):
    """As one graph, with a norm and an activation behind it."""
    model = torch.nn.Sequential(
        SmallConv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.ReLU(), SmallConv2d(3, 2, 3, 2, 1)
    ).to(device)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    x, dy = images((2, 5, 6), 2, device), images((2, 2, 2), 2, device)
    found = []
    for function in (compiled, model):
        leaf = x.detach().requires_grad_()
        y = function(leaf)
        found.append([y, *torch.autograd.grad(y, [leaf, *model.parameters()], dy)])
    for value, wanted in zip(*found, strict=True):
        torch.testing.assert_close(value, wanted)


def test_registration(device):
    (x, weight, dy), steps = data(STRIDED, device), (2, 1)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for operator, tensors, sizes in (
        (small_conv, (x, weight), ()),
        (small_conv_input, (dy, weight), x.shape[2:]),
        (small_conv_weight, (x, dy), (3, 3)),
    ):
        torch.library.opcheck(operator, (*tensors, *sizes, *steps))
        leaves = [t.detach().requires_grad_() for t in tensors]
        torch.library.opcheck(operator, (*leaves, *sizes, *steps), test_utils=checks)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="too large for the interpreter")
@pytest.mark.parametrize("case", REAL, ids=str)
def test_real_sizes(device, case):
    check(case, device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("name", ["lenet", "lenet1989"])
def test_captured_step(device, capture, name):
    """A model's step, forward and backward, captured and run on other numbers."""
    model = create_model(name, num_classes=10).to(device)
    x, parameters = images((64, 32, 32), 3, device), list(model.parameters())

    def step():
        y = model(x)
        return y, *torch.autograd.grad(y.square().sum(), parameters)

    graph, found = capture(step)
    x.copy_(images((64, 32, 32), 3, device))
    graph.replay()
    torch.cuda.synchronize()
    model.double()
    y = model(x.double())
    wanted = y, *torch.autograd.grad(y.square().sum(), list(model.parameters()))
    for value, truth in zip(found, wanted, strict=True):
        assert (value.double() - truth).norm() <= 1e-3 * truth.norm()
