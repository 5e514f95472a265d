"""More samples, channels or positions than a grid's second axis has programs (65535)."""

import copy

import pytest
import torch
from test_fused import layer_for

import modenorm
from modenorm.kernels import layout, mode_group_norm_arrays
from modenorm.kernels.gpu import mode_norm_plan
from modenorm.kernels.gpu import passes as gpu_passes
from modenorm.kernels.gpu.launch import Launch
from modenorm.kernels.layout import interpreting

large = pytest.mark.skipif(interpreting(), reason="too large for the interpreter")
MANY = 65536 + 3
SHAPES = [(MANY, 3), (MANY, 2, 3), (MANY, 5, 1, 2), (2, MANY, 2, 2), (2, 1, MANY, 4096)]


def outcome(layer, x, dy):
    x = x.detach().requires_grad_()
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy)]


def assert_near(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 1e-3 * max(b.abs().max(), 1)


@large
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


@large
@pytest.mark.parametrize("shape", [(MANY, 8, 3), (MANY, 8, 1, 2)], ids=str)
def test_mode_group_norm(shape, device):
    torch.manual_seed(0)
    x = torch.randn(shape, device=device)
    layer, dy = modenorm.ModeGroupNorm(shape[1], 2).to(device), torch.randn_like(x)
    found = outcome(layer, x, dy)
    with modenorm.use_backend("eager"):
        expected = outcome(copy.deepcopy(layer).double(), x.double(), dy.double())
    assert_near(found, expected)


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("shape", [(5, 3, 40, 30), (3, 70, 6, 6)], ids=str)
def test_one_axis(shape, last, device, monkeypatch):
    """The same numbers, bit for bit, however programs are numbered."""
    x, dy = (torch.randn(shape, device=device) for _ in range(2))
    if last:
        x, dy = (t.to(memory_format=torch.channels_last) for t in (x, dy))
    rows = [torch.randn(shape[:2], device=device) for _ in range(4)]

    def passes():
        gpu_passes._passes.cache_clear()
        moments, sums = gpu_passes.moments(x), gpu_passes.reduce_backward(dy, x, rows[0])
        maps = gpu_passes.apply(x, *rows[:3]), gpu_passes.apply_backward(dy, x, *rows)
        return *moments, *sums, *maps

    expected = passes()
    monkeypatch.setattr(gpu_passes, "LONGEST_AXIS", 1)
    assert gpu_passes._axes(3, 2, 5) == ((30,), True)
    assert all(map(torch.equal, passes(), expected))
    gpu_passes._passes.cache_clear()


@pytest.fixture
def launched(monkeypatch):
    """Names of kernels."""
    names, launch = [], Launch.__call__

    def listening(this, *given):
        names.append(this.kernel.__name__)
        launch(this, *given)

    monkeypatch.setattr(Launch, "__call__", listening)
    mode_norm_plan._plans.clear()
    yield names
    mode_norm_plan._plans.clear()


def outcome_with_at_most(rows, layer, x, dy, monkeypatch):
    """Of kernels that count so many rows."""
    for module in (layout, mode_group_norm_arrays):
        monkeypatch.setattr(module, "MOST_ROWS", rows)
    return outcome(layer, x, dy)


@pytest.mark.parametrize("gate", [None, modenorm.StandardizedGate])
@pytest.mark.parametrize("rows", [30, 31, 50, 51])
def test_more_rows_than_kernels_count(rows, gate, device, monkeypatch, launched):
    """Beyond 32 bits torch's operators run: a kernel would write anywhere."""
    torch.manual_seed(0)
    shape, num_modes = (10, 3, 2, 2), 5
    x, layer = torch.randn(shape, device=device), layer_for(shape, num_modes, device, gate=gate)
    dy, same = torch.randn_like(x), copy.deepcopy(layer)
    found = outcome_with_at_most(rows, layer, x, dy, monkeypatch)
    with modenorm.use_backend("eager"):
        assert_near(found, outcome(same, x, dy))
    assert ("statistics_kernel" in launched) == (rows > 50)
    assert gate is None or ("moments_kernel" in launched) == (rows > 30)


def test_more_gates_than_kernels_count(device, monkeypatch, launched):
    x = torch.randn(10, 3, 2, 2, device=device)
    layer, dy = modenorm.ModeGroupNorm(3, 5).to(device), torch.randn_like(x)
    assert outcome_with_at_most(2 * 10 * 3 * 5 + 1, layer, x, dy, monkeypatch)
    assert "_forward_kernel" in launched
    launched.clear()
    outcome_with_at_most(2 * 10 * 3 * 5, layer, x, dy, monkeypatch)
    assert "_forward_kernel" not in launched
