"""Narrow convolutions on a CPU are torch's; which models have them. Kernels: tests/kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modenorm.lab.models import create_model
from modenorm.lab.models.blocks import he_conv
from modenorm.lab.models.narrow_conv import NarrowConv2d


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_computes_as_torch_does(dtype):
    conv = NarrowConv2d(16, 32).to(dtype)
    x = torch.randn(2, 16, 5, 4, dtype=dtype).contiguous(memory_format=torch.channels_last)
    assert torch.equal(conv(x), F.conv2d(x, conv.weight, padding=1))


def test_where_the_models_have_it():
    model = create_model("resnet20", num_classes=10)
    found = {
        name: (conv.in_channels, conv.stride[0])
        for name, conv in model.named_modules()
        if isinstance(conv, nn.Conv2d) and not isinstance(conv, NarrowConv2d)
    }
    others = {"stages.1.0.conv1": (16, 2), "stages.2.0.conv1": (32, 2)}
    assert found == {"stem.conv": (3, 1), **others}


def test_state_is_that_of_a_convolution():
    conv, plain = NarrowConv2d(16, 32), nn.Conv2d(16, 32, 3, padding=1, bias=False)
    conv.load_state_dict(plain.state_dict())
    assert torch.equal(conv.weight, plain.weight)


def test_starts_as_other_convolutions_do():
    torch.manual_seed(0)
    conv = he_conv(16, 32, 3)
    torch.manual_seed(0)
    plain = nn.Conv2d(16, 32, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(plain.weight, mode="fan_out", nonlinearity="relu")
    assert isinstance(conv, NarrowConv2d)
    assert torch.equal(conv.weight, plain.weight)


def test_refuses_other_widths():
    with pytest.raises(ValueError, match="24 to 16"):
        NarrowConv2d(24, 16)
