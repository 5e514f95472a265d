"""Average pooling by two on a CPU is torch's; which model has it. Kernel: tests/kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modenorm.lab.layers.avg_pool import HalvingAvgPool2d, avg_spread
from modenorm.lab.models import create_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(2, 5, 8, 8), (2, 3, 7, 5), (3, 1, 9)], ids=str)
def test_computes_as_torch_does(shape, dtype):
    x = torch.randn(shape, dtype=dtype)
    if len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    y = HalvingAvgPool2d()(x)
    wanted = F.avg_pool2d(x, 3, stride=2, padding=1)
    assert torch.equal(y, wanted)
    assert y.stride() == wanted.stride()


def test_where_the_models_have_it():
    model = create_model("nin", num_classes=10)
    pools = [name for name, part in model.named_modules() if isinstance(part, nn.AvgPool2d)]
    assert pools == ["pool2"]
    assert repr(model.pool2) == "HalvingAvgPool2d(kernel_size=3, stride=2, padding=1)"


@pytest.mark.parametrize(("height", "width"), [(8, 6), (7, 5), (1, 1)])
def test_shapes_without_data(height, width):
    """The operator as a compiler sees it: sizes, type and order in memory."""
    x = torch.empty(2, 3, height, width, device="meta", dtype=torch.bfloat16)
    y = F.avg_pool2d(x, 3, stride=2, padding=1)
    dx = avg_spread(y, height, width)
    assert (dx.shape, dx.dtype) == (x.shape, x.dtype)
    assert dx.is_contiguous(memory_format=torch.channels_last)
