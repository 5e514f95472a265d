"""Small convolutions on a CPU are torch's; which models have them. Kernels: tests/kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modenorm.lab.layers.small_conv import (
    SmallConv2d,
    small_conv,
    small_conv_input,
    small_conv_weight,
)
from modenorm.lab.models import MODELS, create_model

STEPS = pytest.mark.parametrize(("stride", "padding"), [(1, 0), (2, 2)])


@STEPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_computes_as_torch_does(dtype, stride, padding):
    conv = SmallConv2d(3, 6, 5, stride, padding).to(dtype)
    x = torch.randn(2, 3, 9, 8, dtype=dtype)
    for given in (x, x.contiguous(memory_format=torch.channels_last), x[0]):
        wanted = F.conv2d(given, conv.weight, stride=stride, padding=padding)
        assert torch.equal(conv(given), wanted)


@pytest.mark.parametrize("name", MODELS)
def test_where_the_models_have_it(name):
    """All convolutions of LeNets, and no others."""
    model = create_model(name, num_classes=10)
    convs = [part for part in model.modules() if isinstance(part, nn.Conv2d)]
    assert {isinstance(conv, SmallConv2d) for conv in convs} == {name.startswith("lenet")}


def test_geometry_of_the_models():
    found = {
        name: [
            (conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding)
            for conv in create_model(name, num_classes=10).modules()
            if isinstance(conv, SmallConv2d)
        ]
        for name in ("lenet", "lenet1989")
    }
    plain, strided = ((5, 5), (1, 1), (0, 0)), ((5, 5), (2, 2), (2, 2))
    assert found["lenet"] == [(3, 6, *plain), (6, 16, *plain)]
    assert found["lenet1989"] == [(3, 12, *strided), (12, 12, *strided)]


@STEPS
def test_starts_as_other_convolutions_do(stride, padding):
    torch.manual_seed(0)
    conv = SmallConv2d(3, 12, 5, stride, padding)
    after = torch.rand(1)
    torch.manual_seed(0)
    plain = nn.Conv2d(3, 12, 5, stride, padding, bias=False)
    assert torch.equal(conv.weight, plain.weight)
    assert torch.equal(after, torch.rand(1))
    assert list(conv.state_dict()) == list(plain.state_dict()) == ["weight"]
    assert repr(conv) == repr(plain).replace("Conv2d", "SmallConv2d")


@STEPS
def test_shapes_without_data(stride, padding):
    """The operators as a compiler sees them: sizes, types and order in memory."""
    x = torch.empty(2, 3, 9, 8, device="meta")
    weight = torch.empty(6, 3, 5, 5, device="meta")
    y = small_conv(x, weight, stride, padding)
    assert y.shape == F.conv2d(x, weight, stride=stride, padding=padding).shape
    dx = small_conv_input(y, weight, 9, 8, stride, padding)
    dweight = small_conv_weight(x, y, 5, 5, stride, padding)
    assert (dx.shape, dweight.shape) == (x.shape, weight.shape)
    for result in (y, dx, dweight):
        assert result.dtype == torch.float32
        assert result.is_contiguous()


@pytest.mark.parametrize(
    ("sizes", "words"), [((3, 32, 5), "3 to 32"), ((17, 6, 3), "17 to 6"), ((3, 6, 7), "7×7")]
)
def test_refuses_what_is_not_small(sizes, words):
    with pytest.raises(ValueError, match=words):
        SmallConv2d(*sizes)
