"""Convolutions that pad their channels against torch's own, and which model has them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modenorm.lab.layers import padded_conv as module
from modenorm.lab.layers.padded_conv import PaddedConv2d
from modenorm.lab.models import MODELS, create_model
from modenorm.lab.models.blocks import he_conv


def whole(*shape):
    """Whole numbers, of which every sum here is exact in float32."""
    return torch.randint(-4, 5, shape).float()


def results(function, x, weight, dy):
    """Y and the gradients of x and the weights."""
    leaf = x.detach().requires_grad_()
    y = function(leaf)
    return [y.detach(), *torch.autograd.grad(y, [leaf, weight], dy.to(y.dtype))]


def last(x):
    return x.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("width", "kernel_size", "stride"), [(10, 1, 1), (100, 1, 1), (3, 3, 2)])
def test_padded_is_exact(width, kernel_size, stride, order):
    conv = he_conv(24, width, kernel_size, stride).to(memory_format=order)
    with torch.no_grad():
        conv.weight.copy_(whole(*conv.weight.shape))
    x = whole(3, 24, 6, 5).contiguous(memory_format=order)
    wanted = F.conv2d(x, conv.weight, stride=stride, padding=kernel_size // 2)
    given = (x, conv.weight, whole(*wanted.shape))
    truth = results(lambda x: F.conv2d(x, conv.weight, None, stride, kernel_size // 2), *given)
    for found, expected in zip(results(conv._by_multiples, *given), truth, strict=True):
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_on_a_cpu_it_is_torch_s(dtype, monkeypatch):
    monkeypatch.setattr(PaddedConv2d, "_by_multiples", None)
    conv, x = he_conv(8, 10, 1).to(dtype), torch.randn(2, 8, 4, 4, dtype=dtype)
    for given in (x, last(x), x[0]):
        assert torch.equal(conv(given), F.conv2d(given, conv.weight))


def test_where_it_pads(monkeypatch):
    """In half precision, or under autocast to it; on a CPU as if it were a GPU."""
    monkeypatch.setattr(module, "_DEVICE", "cpu")
    conv, x = PaddedConv2d(8, 10, 1, bias=False), torch.randn(2, 8, 4, 4)
    assert not conv._padding_serves(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert conv._padding_serves(x)
        assert not conv._padding_serves(x[0])
    conv.half()
    assert conv._padding_serves(x.half())
    assert not PaddedConv2d(8, 10, 1).half()._padding_serves(x.half())
    monkeypatch.setattr(module, "ENABLED", False)
    assert not conv._padding_serves(x.half())


def test_traced(monkeypatch):
    """As one graph, under autocast."""
    monkeypatch.setattr(PaddedConv2d, "_padding_serves", lambda *_: True)
    conv = he_conv(16, 10, 1)
    compiled = torch.compile(conv, fullgraph=True, dynamic=False, backend="aot_eager")
    x, dy = last(torch.randn(2, 16, 4, 4)), torch.randn(2, 10, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        found, plain = (results(f, x, conv.weight, dy) for f in (compiled, conv))
    assert found[0].dtype == torch.bfloat16
    truth = results(lambda x: F.conv2d(x, conv.weight), x, conv.weight, dy)
    for value, same, wanted in zip(found, plain, truth, strict=True):
        assert torch.equal(value, same)
        # x, weights and dy are rounded to 8 bits, sums to 8 again
        assert (value - wanted).norm() / wanted.norm() < 0.01


@pytest.mark.parametrize("name", MODELS)
def test_which_models_have_it(name):
    """NIN's last convolution, unless its classes come by eight."""
    for classes in (10, 100, 16):
        parts = create_model(name, num_classes=classes).named_modules()
        found = [name for name, part in parts if isinstance(part, PaddedConv2d)]
        assert found == (["block3.2.conv"] if name == "nin" and classes % 8 else [])


def test_starts_as_other_convolutions_do():
    torch.manual_seed(0)
    conv = he_conv(192, 10, 1)
    torch.manual_seed(0)
    plain = nn.Conv2d(192, 10, 1, bias=False)
    nn.init.kaiming_normal_(plain.weight, mode="fan_out", nonlinearity="relu")
    assert torch.equal(conv.weight, plain.weight)
    assert list(conv.state_dict()) == list(plain.state_dict())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("classes", [10, 100])
def test_on_a_gpu(classes):
    """Sums of 192 products, each rounded to 8 bits once."""
    conv = he_conv(192, classes, 1).to("cuda", memory_format=torch.channels_last)
    x = last(torch.randn(8, 192, 8, 8, device="cuda", dtype=torch.bfloat16))
    dy = last(torch.randn(8, classes, 8, 8, device="cuda", dtype=torch.bfloat16))
    with torch.autocast("cuda", torch.bfloat16):
        found = results(conv, x, conv.weight, dy)
    rounded = conv.weight.detach().bfloat16().double().requires_grad_()
    truth = results(lambda x: F.conv2d(x, rounded), x.double(), rounded, dy)
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    for value, wanted in zip(found, truth, strict=True):
        assert (value - wanted).norm() / wanted.norm() < 0.01
