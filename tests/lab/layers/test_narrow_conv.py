"""Narrow convolutions on a CPU are torch's; which models have them. Kernels: tests/kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modenorm.lab.layers.narrow_conv import NarrowConv2d
from modenorm.lab.models import create_model
from modenorm.lab.models.blocks import he_conv


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_computes_as_torch_does(dtype, stride):
    conv = NarrowConv2d(16, 32, stride).to(dtype)
    x = torch.randn(2, 16, 5, 4, dtype=dtype).contiguous(memory_format=torch.channels_last)
    assert torch.equal(conv(x), F.conv2d(x, conv.weight, padding=1, stride=stride))


def test_where_the_models_have_it():
    model = create_model("resnet20", num_classes=10)
    convs = {name: m for name, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    others = {name for name, conv in convs.items() if not isinstance(conv, NarrowConv2d)}
    assert others == {"stem.conv"}
    strided = {name for name, conv in convs.items() if conv.stride == (2, 2)}
    assert strided == {"stages.1.0.conv1", "stages.2.0.conv1"}


def test_state_is_that_of_a_convolution():
    conv, plain = NarrowConv2d(16, 32), nn.Conv2d(16, 32, 3, padding=1, bias=False)
    conv.load_state_dict(plain.state_dict())
    assert torch.equal(conv.weight, plain.weight)


@pytest.mark.parametrize("stride", [1, 2])
def test_starts_as_other_convolutions_do(stride):
    torch.manual_seed(0)
    conv = he_conv(16, 32, 3, stride)
    torch.manual_seed(0)
    plain = nn.Conv2d(16, 32, 3, stride, padding=1, bias=False)
    nn.init.kaiming_normal_(plain.weight, mode="fan_out", nonlinearity="relu")
    assert isinstance(conv, NarrowConv2d)
    assert conv.stride == plain.stride
    assert torch.equal(conv.weight, plain.weight)


def test_refuses_other_widths_and_strides():
    with pytest.raises(ValueError, match="24 to 16"):
        NarrowConv2d(24, 16)
    with pytest.raises(ValueError, match="stride 3"):
        NarrowConv2d(16, 16, 3)
