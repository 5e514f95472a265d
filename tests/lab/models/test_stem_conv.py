"""First convolutions as products of matrices, which on a CPU they are not."""

import pytest
import torch
from torch import nn

from modenorm.lab.models import MODELS, create_model
from modenorm.lab.models import stem_conv as module
from modenorm.lab.models.blocks import he_conv
from modenorm.lab.models.stem_conv import StemConv2d

SHAPES = pytest.mark.parametrize(
    ("width", "kernel_size", "stride"), [(192, 5, 1), (16, 3, 1), (64, 7, 2)]
)


def whole(*shape, dtype=torch.float32):
    """Whole numbers, so small that no order of the sums rounds."""
    return torch.randint(-4, 5, shape).to(dtype)


def gradients(function, conv, x, dy):
    leaf = x.detach().requires_grad_()
    y = function(leaf)
    return [y.detach(), *torch.autograd.grad(y, [leaf, conv.weight], dy)]


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@SHAPES
def test_by_windows(width, kernel_size, stride, dtype, last):
    conv = he_conv(3, width, kernel_size, stride).to(dtype)
    conv.weight.data = whole(*conv.weight.shape, dtype=dtype)
    x = whole(2, 3, 9, 8, dtype=dtype)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
        conv.to(memory_format=torch.channels_last)
    dy = whole(*conv(x).shape, dtype=dtype)
    found, wanted = (gradients(f, conv, x, dy) for f in (conv.by_windows, conv))
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    rtol = 0 if dtype == torch.float32 else 2**-7
    for value, truth in zip(found, wanted, strict=True):
        error = (value - truth).float().norm()  # in half precision dx adds up what is rounded
        assert error <= rtol * truth.float().norm()


def test_by_windows_under_autocast():
    conv = he_conv(3, 16, 3)
    conv.weight.data = whole(*conv.weight.shape)
    x = whole(2, 3, 9, 8).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        y = conv.by_windows(x)
        wanted = conv(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, wanted)
    y.float().square().sum().backward()
    assert conv.weight.grad.dtype == torch.float32
    assert conv.weight.grad.shape == (16, 3, 3, 3)


def test_only_where_it_gains(monkeypatch):
    """Of tensors that say that they are on a GPU."""
    monkeypatch.setattr(StemConv2d, "by_windows", lambda self, x: "matrices")
    monkeypatch.setattr(nn.Conv2d, "forward", lambda self, x: "as torch does")
    conv = he_conv(3, 16, 3)

    class OnGpu(torch.Tensor):
        device = torch.device("cuda")

    def images(dtype, order=torch.channels_last):
        return torch.zeros(2, 3, 5, 4, dtype=dtype).contiguous(memory_format=order)

    half = images(torch.bfloat16)
    assert conv(half) == "as torch does"
    assert conv(half.as_subclass(OnGpu)) == "matrices"
    assert conv(images(torch.float16).as_subclass(OnGpu)) == "matrices"
    for x in (images(torch.float32), images(torch.bfloat16, torch.contiguous_format), half[0]):
        assert conv(x.as_subclass(OnGpu)) == "as torch does"
    dilated = StemConv2d(3, 16, 3, dilation=2)
    assert dilated(half.as_subclass(OnGpu)) == "as torch does"
    large = torch.empty(1, device="meta", dtype=torch.bfloat16).expand(512, 3, 64, 64)
    assert conv(large.as_subclass(OnGpu)) == "as torch does"
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
    assert conv(images(torch.float32).as_subclass(OnGpu)) == "matrices"
    monkeypatch.setattr(module, "ENABLED", False)
    assert conv(half.as_subclass(OnGpu)) == "as torch does"


@pytest.mark.parametrize("name", MODELS)
def test_which_models_have_it(name):
    """The first convolution and no other; LeNets, which train in float32, none."""
    model = create_model(name, num_classes=10)
    convs = [part for part in model.modules() if isinstance(part, nn.Conv2d)]
    assert isinstance(convs[0], StemConv2d) != name.startswith("lenet")
    assert not any(isinstance(conv, StemConv2d) for conv in convs[1:])


@SHAPES
def test_starts_as_other_convolutions_do(width, kernel_size, stride):
    torch.manual_seed(0)
    conv = he_conv(3, width, kernel_size, stride)
    torch.manual_seed(0)
    plain = nn.Conv2d(3, width, kernel_size, stride, padding=kernel_size // 2, bias=False)
    nn.init.kaiming_normal_(plain.weight, mode="fan_out", nonlinearity="relu")
    assert torch.equal(conv.weight, plain.weight)
    assert list(conv.state_dict()) == list(plain.state_dict())


def test_traced():
    """The matrices, with their gradients, as one graph."""
    conv = he_conv(3, 16, 3)
    conv.weight.data = whole(*conv.weight.shape)
    x, dy = whole(2, 3, 5, 4), whole(2, 16, 5, 4)
    compiled = torch.compile(conv.by_windows, fullgraph=True, backend="aot_eager")
    found, wanted = (gradients(f, conv, x, dy) for f in (compiled, conv))
    for value, truth in zip(found, wanted, strict=True):
        assert torch.equal(value, truth)
