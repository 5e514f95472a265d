"""Max pooling by two against torch's own: equal values and places, gradients in float64."""

import pytest
import torch
import torch.nn.functional as F
from pooling import DTYPES, SMALL, gradient, images

from modenorm.lab.layers import max_pool as module
from modenorm.lab.layers.max_pool import HalvingMaxPool2d, max_pool, max_unpool

REAL = [(128, 96, 32, 32), (127, 64, 33, 31), (2, 64, 112, 112)]


def torch_pool(x):
    return F.max_pool2d(x, 3, stride=2, padding=1)


def places_of(x):
    """By torch's own, from the index of a pixel in its image."""
    width = x.shape[3]
    _, indices = F.max_pool2d(x.cpu().double(), 3, stride=2, padding=1, return_indices=True)
    i, j = (2 * torch.arange(size) - 1 for size in indices.shape[2:])
    places = (indices // width - i[:, None]) * 3 + indices % width - j
    return places.to(x.device, torch.uint8)


def check(x):
    """A pixel's gradient is a sum of up to four, in float32, rounded once."""
    y, places = max_pool(x)
    wanted = torch_pool(x)
    dy = torch.randn_like(wanted)
    again, dx = gradient(lambda x: max_pool(x)[0], x, dy)
    _, wanted_dx = gradient(torch_pool, x.cpu().double(), dy.cpu())
    assert [t.dtype for t in (y, places, dx)] == [x.dtype, torch.uint8, x.dtype]
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in (y, places, dx))
    for value in (y, again):
        torch.testing.assert_close(value, wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(places, places_of(x))
    torch.testing.assert_close(
        dx.cpu().double(), wanted_dx, rtol=torch.finfo(x.dtype).eps, atol=1e-6
    )


@pytest.mark.parametrize("shape", SMALL, ids=str)
@DTYPES
def test_sizes(device, shape, dtype):
    check(images(shape, device, dtype))


@pytest.mark.parametrize("channels", [3, 4, 6, 12, 96])
def test_widths(device, channels):
    """Channels that do not come by eight."""
    check(images((2, channels, 5, 6), device))


@DTYPES
def test_ties(device, dtype):
    """Numbers of which most windows have the largest more than once, zeros of both signs."""
    x = images((3, 8, 9, 10), device, dtype)
    check(x.sign())
    check(x.relu())
    check(torch.zeros_like(x) * x.sign())


@DTYPES
def test_not_a_number(device, dtype):
    """Also twice in a window, where torch takes the last."""
    x = images((3, 8, 9, 10), device, dtype)
    x[torch.rand_like(x, dtype=torch.float32) < 0.2] = torch.nan
    assert 0 < max_pool(x)[0].isnan().float().mean() < 1
    check(x)


def test_infinities(device):
    """Windows with nothing but the least number still have a maximum among their pixels."""
    x = images((3, 8, 9, 10), device)
    x[torch.rand_like(x, dtype=torch.float32) < 0.7] = -torch.inf
    x[torch.rand_like(x, dtype=torch.float32) < 0.1] = torch.inf
    x[0] = -torch.inf
    check(x)


def test_upstream_gradient_in_any_order(device):
    x = images((2, 8, 7, 6), device)
    dy = torch.randn_like(torch_pool(x)).contiguous()
    _, dx = gradient(lambda x: max_pool(x)[0], x, dy)
    _, wanted = gradient(lambda x: max_pool(x)[0], x, images(dy.shape, device).copy_(dy))
    assert torch.equal(dx, wanted)
    leaf = x.detach().requires_grad_()
    max_pool(leaf)[0].sum().backward()  # dy is one number, expanded
    _, wanted = gradient(torch_pool, x.cpu().double(), torch.ones(dy.shape))
    assert torch.equal(leaf.grad.cpu().double(), wanted)


def test_upstream_not_a_number(device):
    """It reaches the pixels that were the maximum and none else."""
    x = images((2, 8, 7, 6), device)
    dy = torch.zeros_like(torch_pool(x))
    dy[1, 3, 2, 1] = torch.nan
    _, dx = gradient(lambda x: max_pool(x)[0], x, dy)
    _, wanted = gradient(torch_pool, x.cpu().double(), dy.cpu())
    assert torch.equal(dx.isnan().cpu(), wanted.isnan())
    assert dx.isnan().sum() == 1


def test_second_derivative(device):
    """Of the sum of dx², by the upstream gradient."""
    x, found = images((2, 8, 7, 6), device), []
    dy = torch.randn_like(torch_pool(x))
    for function, kind in ((lambda x: max_pool(x)[0], x.dtype), (torch_pool, torch.float64)):
        leaves = [t.to(kind).detach().requires_grad_() for t in (x, dy)]
        (dx,) = torch.autograd.grad(function(leaves[0]), leaves[:1], leaves[1], create_graph=True)
        found.append(torch.autograd.grad((dx * dx).sum(), leaves[1])[0].double())
    assert (found[0] - found[1]).norm() / found[1].norm() < 0.01


def test_layer_where_kernels_do_not_serve(device, counted, monkeypatch):
    """Float32, torch's first order, no batch, an empty one, the switch: torch's own layer."""
    calls = counted(module, "max_pool")
    layer, x = HalvingMaxPool2d(), images((2, 8, 6, 5), device)
    layer(x.float())
    layer(x.contiguous())
    layer(x[0])
    with monkeypatch.context() as context:
        context.setattr(module, "ENABLED", False)
        layer(x)
    with pytest.raises(RuntimeError):
        layer(x[:, :, :0])
    assert layer(x[:0]).shape == (0, 8, 3, 3)
    assert not calls
    assert torch.equal(layer(x), torch_pool(x))
    assert len(calls) == 1


def test_traced_network(device, compare_traced):
    """As one graph, under autocast, behind a norm and an activation."""
    norm = torch.nn.BatchNorm2d(8)
    model = torch.nn.Sequential(norm, torch.nn.ReLU(), HalvingMaxPool2d()).to(device)
    x, dy = images((3, 8, 5, 6), device), images((3, 8, 3, 3), device)
    compare_traced(model, x, dy)


def test_registration(device):
    x = images((2, 8, 5, 6), device)
    y, places = max_pool(x)
    torch.library.opcheck(max_pool, (x,))
    torch.library.opcheck(max_unpool, (y, places, 5, 6))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    leaves = [t.detach().requires_grad_() for t in (x, y)]
    torch.library.opcheck(max_pool, (leaves[0],), test_utils=checks)
    torch.library.opcheck(max_unpool, (leaves[1], places, 5, 6), test_utils=checks)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="too large for the interpreter")
@pytest.mark.parametrize("shape", REAL, ids=str)
@DTYPES
def test_real_sizes(device, shape, dtype):
    check(images(shape, device, dtype))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_compiled_step_as_a_graph(device, capture):
    """An activation and the pooling, compiled, captured and run on other numbers."""
    model = torch.nn.Sequential(torch.nn.ReLU(), HalvingMaxPool2d())
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    shape = (16, 96, 32, 32)
    leaf = images(shape, device).requires_grad_()
    dy = images((16, 96, 16, 16), device)

    def step():
        y = compiled(leaf)
        return y, *torch.autograd.grad(y, leaf, dy)

    graph, (y, dx) = capture(step)
    with torch.no_grad():
        leaf.copy_(images(shape, device))
    graph.replay()
    torch.cuda.synchronize()
    wanted, wanted_dx = gradient(lambda x: torch_pool(x.relu()), leaf.cpu().double(), dy.cpu())
    assert torch.equal(y.detach().cpu().double(), wanted)
    torch.testing.assert_close(dx.cpu().double(), wanted_dx, rtol=2**-7, atol=1e-6)
