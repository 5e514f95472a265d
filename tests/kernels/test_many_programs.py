"""More samples, channels or positions than a grid's second axis has programs (65535)."""

import copy

import pytest
import torch
from test_fused import layer_for

import modenorm
from modenorm.kernels.layout import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="too large for the interpreter")
MANY = 65536 + 3
SHAPES = [(MANY, 3), (MANY, 2, 3), (MANY, 5, 1, 2), (2, MANY, 2, 2), (2, 1, MANY, 4096)]


def outcome(layer, x, dy):
    x = x.detach().requires_grad_()
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy)]


def assert_near(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 1e-3 * max(b.abs().max(), 1)


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mode_norm(shape, last, device):
    torch.manual_seed(0)
    x = torch.randn(shape, device=device)
    if last and len(shape) > 2:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    layer, dy = layer_for(shape, 2, device), torch.randn_like(x)
    found = outcome(layer, x, dy)
    with modenorm.use_backend("eager"):
        expected = outcome(copy.deepcopy(layer).double(), x.double(), dy.double())
    assert_near(found, expected)
    with torch.no_grad():
        layer.eval()
        evaluated = layer(x)
        with modenorm.use_backend("eager"):
            assert (evaluated - layer(x)).abs().max() <= 1e-3


@pytest.mark.parametrize("shape", [(MANY, 8, 3), (MANY, 8, 1, 2)], ids=str)
def test_mode_group_norm(shape, device):
    torch.manual_seed(0)
    x = torch.randn(shape, device=device)
    layer, dy = modenorm.ModeGroupNorm(shape[1], 2).to(device), torch.randn_like(x)
    found = outcome(layer, x, dy)
    with modenorm.use_backend("eager"):
        expected = outcome(copy.deepcopy(layer).double(), x.double(), dy.double())
    assert_near(found, expected)
