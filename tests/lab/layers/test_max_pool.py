"""Max pooling by two on a CPU is torch's; which model has it. Kernels: tests/kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modenorm.lab.layers.max_pool import HalvingMaxPool2d, max_pool, max_unpool
from modenorm.lab.models import create_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(2, 5, 8, 8), (2, 3, 7, 5), (3, 1, 9)], ids=str)
def test_computes_as_torch_does(shape, dtype):
    x = torch.randn(shape, dtype=dtype)
    if len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    y = HalvingMaxPool2d()(x)
    wanted = F.max_pool2d(x, 3, stride=2, padding=1)
    assert torch.equal(y, wanted)
    assert y.stride() == wanted.stride()


def test_where_the_models_have_it():
    model = create_model("nin", num_classes=10)
    pools = [name for name, part in model.named_modules() if isinstance(part, nn.MaxPool2d)]
    assert pools == ["pool1"]
    assert isinstance(model.pool1, HalvingMaxPool2d)
    assert repr(model.pool1).startswith("HalvingMaxPool2d(kernel_size=3, stride=2, padding=1")
    assert isinstance(create_model("resnet18", num_classes=10).stem.pool, HalvingMaxPool2d)


def test_traced():
    pool = torch.compile(HalvingMaxPool2d(), fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 7, 5, requires_grad=True)
    y, wanted = pool(x), F.max_pool2d(x, 3, stride=2, padding=1)
    assert torch.equal(y, wanted)
    dy = torch.randn_like(y)
    assert torch.equal(*(torch.autograd.grad(result, x, dy)[0] for result in (y, wanted)))


@pytest.mark.parametrize(("height", "width"), [(8, 6), (7, 5), (1, 1)])
def test_shapes_without_data(height, width):
    """The operators as a compiler sees them: sizes, types and order in memory."""
    x = torch.empty(2, 3, height, width, device="meta", dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last)
    y, places = max_pool(x)
    assert y.shape == F.max_pool2d(x, 3, stride=2, padding=1).shape == places.shape
    assert (y.dtype, places.dtype) == (torch.bfloat16, torch.uint8)
    dx = max_unpool(y, places, height, width)
    assert (dx.shape, dx.dtype) == (x.shape, x.dtype)
    for result in (y, places, dx):
        assert result.is_contiguous(memory_format=torch.channels_last)
