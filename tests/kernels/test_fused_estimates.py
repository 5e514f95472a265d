"""What the fused norms do to running estimates, above all with batches that should leave them."""

import copy

import pytest
import torch
from test_fused import layer_for, tensor

import modenorm


def test_usage_update(device):
    shape = (6, 5, 3, 4)
    layer = layer_for(shape, 3, device, running_update="usage")
    twin = copy.deepcopy(layer)
    x = tensor(shape, device, torch.float32, False)
    layer(x)
    with modenorm.use_backend("eager"):
        twin(x)
    for value, wanted in zip(layer.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(value, wanted)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("given", [False, True], ids=["gate", "gates"])
def test_bad_batches_leave_the_estimates(device, bad, given):
    x = tensor((4, 20, 3, 3), device, torch.float32, False)
    x[1, 18, 0, 0] = bad
    gates = torch.full((4, 2), 0.5, device=device) if given else None
    assert torch.isnan(assert_estimates_stay(x, gates)).any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_variances_beyond_float32_leave_the_estimates(device):
    x = tensor((4, 20), device, torch.float32, False)
    x[1, 18] = 1e20
    assert_estimates_stay(x, None)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_bad_gates_leave_the_estimates(device):
    x = tensor((4, 20, 3, 3), device, torch.float32, False)
    gates = torch.full((4, 2), 0.5, device=device)
    gates[1, 0] = float("nan")
    assert torch.isnan(assert_estimates_stay(x, gates)).any()


def assert_estimates_stay(x, gates):
    layer = layer_for(x.shape, 2, x.device)
    before = [buffer.clone() for buffer in layer.buffers()]
    y = layer(x, gates=gates)
    for value, wanted in zip(layer.buffers(), before, strict=True):
        assert torch.equal(value, wanted)
    return y


def test_a_mode_without_samples(device):
    layer = layer_for((4, 5, 3, 3), 3, device)
    x = tensor((4, 5, 3, 3), device, torch.float32, False).requires_grad_()
    gates = torch.tensor([[1.0, 0, 0], [0, 1, 0], [1, 0, 0], [0, 1, 0]], device=device)
    y = layer(x, gates=gates)
    y.square().sum().backward()
    assert torch.isfinite(y).all()
    assert torch.isfinite(x.grad).all()
    assert torch.equal(layer.running_mean[2], torch.zeros(5, device=device))
    assert torch.equal(layer.running_var[2], torch.ones(5, device=device))


@pytest.mark.parametrize("update", ["paper", "usage"])
def test_a_mode_with_next_to_nothing_keeps_its_estimates(device, update):
    layer = modenorm.ModeNorm1d(3, 2, running_update=update).to(device)
    gates = torch.tensor([[1.0, 1e-40]], device=device).expand(8, 2)  # together below 2^-126
    layer(torch.randn(8, 3, device=device) + 50, gates=gates)
    assert layer.running_mean[0].min() > 1
    assert layer.running_mean[1].tolist() == [0, 0, 0]
    assert layer.running_var[1].tolist() == [1, 1, 1]
