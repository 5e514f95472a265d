"""First convolutions on a CPU are torch's; which models have them. Kernels: tests/kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modenorm.lab.layers.stem_conv import StemConv2d, stem_conv, stem_conv_weight
from modenorm.lab.models import MODELS, create_model
from modenorm.lab.models.blocks import he_conv

SHAPES = pytest.mark.parametrize(
    ("width", "kernel_size", "stride"), [(192, 5, 1), (16, 3, 1), (64, 7, 2)]
)


@SHAPES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_computes_as_torch_does(width, kernel_size, stride, dtype):
    conv = he_conv(3, width, kernel_size, stride).to(dtype)
    x = torch.randn(2, 3, 9, 8, dtype=dtype)
    for given in (x, x.contiguous(memory_format=torch.channels_last), x[0]):
        wanted = F.conv2d(given, conv.weight, stride=stride, padding=kernel_size // 2)
        assert torch.equal(conv(given), wanted)


@SHAPES
def test_shapes_without_data(width, kernel_size, stride):
    """The operators as a compiler sees them: sizes, types and order in memory."""
    x = torch.empty(2, 3, 9, 8, device="meta")
    weight = torch.empty(width, 3, kernel_size, kernel_size, device="meta")
    steps = (stride, kernel_size // 2)
    y = stem_conv(x, weight, *steps, torch.bfloat16)
    assert y.shape == F.conv2d(x, weight, None, *steps).shape
    assert y.dtype == torch.bfloat16
    assert y.is_contiguous(memory_format=torch.channels_last)
    dweight = stem_conv_weight(x, y, weight, *steps)
    assert (dweight.shape, dweight.dtype) == (weight.shape, torch.float32)


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
