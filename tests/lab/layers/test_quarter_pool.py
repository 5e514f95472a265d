"""Max pooling over windows of 2×2 as plain operators, and which model has it."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modenorm.lab.layers.quarter_pool import QuarterMaxPool2d
from modenorm.lab.models import create_model


def pooled(function, x, dy):
    leaf = x.detach().requires_grad_()
    y = function(leaf)
    return y.detach(), torch.autograd.grad(y, leaf, dy)[0]


@pytest.fixture
def compiled():
    torch.compiler.reset()
    return torch.compile(QuarterMaxPool2d(), fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("shape", [(2, 5, 8, 6), (1, 1, 2, 2), (3, 4, 7, 6), (2, 3, 4, 5)], ids=str)
def test_computes_as_torch_does(compiled, shape, last):
    """Also where numbers are equal: there are but five of them."""
    x = torch.randint(-2, 3, shape).to(torch.bfloat16)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    wanted = F.max_pool2d(x, 2)
    dy = torch.randn_like(wanted)
    for function in (compiled, QuarterMaxPool2d()):
        for found, truth in zip(
            pooled(function, x, dy), pooled(lambda x: F.max_pool2d(x, 2), x, dy), strict=True
        ):
            assert torch.equal(found, truth)
            assert found.dtype == truth.dtype
            assert found.stride() == truth.stride()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite(compiled, number):
    x = torch.randn(1, 1, 4, 4)
    x[0, 0, 1, 1] = x[0, 0, 2, 0] = x[0, 0, 2, 1] = number
    dy = torch.randn(1, 1, 2, 2)
    found, wanted = pooled(compiled, x, dy), pooled(QuarterMaxPool2d(), x, dy)
    assert torch.equal(found[0].nan_to_num(7.0), wanted[0].nan_to_num(7.0))
    if not math.isnan(number):
        assert torch.equal(found[1], wanted[1])


def test_where_the_models_have_it():
    parts = create_model("vgg13", num_classes=10).modules()
    pools = [part for part in parts if isinstance(part, nn.MaxPool2d)]
    assert len(pools) == 5
    assert all(isinstance(part, QuarterMaxPool2d) for part in pools)
    assert repr(pools[0]).startswith("QuarterMaxPool2d(kernel_size=2, stride=2")
