"""Average pooling by two against torch's own, in float64 of the same rounded numbers."""

import pytest
import torch
import torch.nn.functional as F
from pooling import DTYPES, SMALL, gradient, images

from modenorm.lab.layers import avg_pool as module
from modenorm.lab.layers.avg_pool import HalvingAvgPool2d, avg_spread

REAL = [(128, 192, 16, 16), (127, 64, 33, 31)]


def torch_pool(x):
    return F.avg_pool2d(x, 3, stride=2, padding=1)


def check(x, dy=None):
    """Sums of up to nine and of up to four, in float32, rounded once."""
    dy = torch.randn_like(torch_pool(x)) if dy is None else dy
    found = gradient(HalvingAvgPool2d(), x, dy)
    wanted = gradient(torch_pool, x.cpu().double(), dy.cpu())
    for value, truth in zip(found, wanted, strict=True):
        assert value.dtype == x.dtype
        assert value.is_contiguous(memory_format=torch.channels_last)
        tolerance = {"rtol": torch.finfo(x.dtype).eps, "atol": 1e-6}
        torch.testing.assert_close(value.cpu().double(), truth, **tolerance, equal_nan=True)


@pytest.mark.parametrize("shape", SMALL, ids=str)
@DTYPES
def test_sizes(device, shape, dtype):
    check(images(shape, device, dtype))


@pytest.mark.parametrize("channels", [3, 4, 6, 12, 96])
def test_widths(device, channels):
    """Channels that do not come by eight."""
    check(images((2, channels, 5, 6), device))


def test_upstream_gradient_in_any_order(device):
    x = images((2, 8, 7, 6), device)
    check(x, torch.randn_like(torch_pool(x)).contiguous())
    check(x, torch.ones((), device=device, dtype=x.dtype).expand(2, 8, 4, 3))


def test_upstream_not_a_number(device):
    """It reaches the nine pixels of its window and none else."""
    x = images((2, 8, 7, 6), device)
    dy = torch.zeros_like(torch_pool(x))
    dy[1, 3, 2, 1] = torch.nan
    check(x, dy)
    assert gradient(HalvingAvgPool2d(), x, dy)[1].isnan().sum() == 9


def test_second_derivative(device):
    """Of the sum of dx², by the upstream gradient."""
    x, found = images((2, 8, 7, 6), device), []
    dy = torch.randn_like(torch_pool(x))
    exact = (x.cpu().double(), dy.cpu().double())
    for function, given in ((HalvingAvgPool2d(), (x, dy)), (torch_pool, exact)):
        leaves = [t.detach().requires_grad_() for t in given]
        (dx,) = torch.autograd.grad(function(leaves[0]), leaves[:1], leaves[1], create_graph=True)
        found.append(torch.autograd.grad((dx * dx).sum(), leaves[1])[0].cpu().double())
    assert (found[0] - found[1]).norm() / found[1].norm() < 0.01


def test_layer_where_the_kernel_does_not_serve(device, counted, monkeypatch):
    """Float32, torch's first order, no batch, the switch: torch's own layer."""
    calls = counted(module, "avg_spread")
    layer, x = HalvingAvgPool2d(), images((2, 8, 6, 5), device)

    def learn(x):
        layer(x.requires_grad_()).sum().backward()

    for other in (x.float(), x.contiguous(), x[0].clone()):
        learn(other)
    with monkeypatch.context() as context:
        context.setattr(module, "ENABLED", False)
        learn(x.clone())
    assert not calls
    learn(x)
    assert len(calls) == 1


def test_traced_network(device, compare_traced):
    """As one graph, under autocast, behind a norm and an activation."""
    norm = torch.nn.BatchNorm2d(8)
    model = torch.nn.Sequential(norm, torch.nn.ReLU(), HalvingAvgPool2d()).to(device)
    x, dy = images((3, 8, 5, 6), device), images((3, 8, 3, 3), device)
    compare_traced(model, x, dy)


def test_registration(device):
    dy = images((2, 8, 3, 3), device)
    torch.library.opcheck(avg_spread, (dy, 5, 6))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(avg_spread, (dy.requires_grad_(), 5, 6), test_utils=checks)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="too large for the interpreter")
@pytest.mark.parametrize("shape", REAL, ids=str)
@DTYPES
def test_real_sizes(device, shape, dtype):
    check(images(shape, device, dtype))
