"""Relations that must hold whatever the data: orders, splits, shifts and scales."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import modenorm
from compare import assert_close, make_layer

SEEDS = st.integers(0, 2**31 - 1)
SIZES = st.tuples(
    st.integers(2, 7), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4)
)  # N, C, H, W
MODES = st.integers(1, 4)
quick = settings(max_examples=15, deadline=None, derandomize=True)


def draw(seed, size):
    torch.manual_seed(seed)
    return torch.randn(size).double(), torch.randn(size).double()


@quick
@given(SEEDS, SIZES, MODES, st.booleans(), st.sampled_from(["eager", "fused"]))
def test_permuting_samples_permutes_outputs(seed, size, num_modes, training, backend):
    x, upstream = draw(seed, size)
    layer = make_layer(size[1], num_modes).train(training)
    order = torch.randperm(size[0])
    results = []
    with modenorm.use_backend(backend):
        for rows in (torch.arange(size[0]), order):
            part = x[rows].requires_grad_()
            y = layer(part)
            (gradient,) = torch.autograd.grad(y, part, upstream[rows])
            results.append((y, gradient))
    assert_close(results[1][0], results[0][0][order], 1e-10)
    assert_close(results[1][1], results[0][1][order], 1e-8)  # dx may be a small difference


@quick
@given(SEEDS, SIZES, st.floats(0.1, 10), st.floats(-100, 100), st.sampled_from(["eager", "fused"]))
def test_scale_and_shift_of_the_input_cancel(seed, size, scale, shift, backend):
    """With gates held fixed; eps is scaled along with the variance."""
    x, _ = draw(seed, size)
    gates = torch.softmax(torch.randn(size[0], 3), 1).double()
    with modenorm.use_backend(backend):
        norm = modenorm.functional.mode_norm
        expected = norm(x, gates, training=True, eps=1e-3)
        actual = norm(x * scale + shift, gates, training=True, eps=1e-3 * scale**2)
    assert_close(actual, expected, 1e-10)


@quick
@given(SEEDS, SIZES, st.floats(0.1, 10), st.sampled_from(["pooled", "pixel"]))
def test_mode_group_norm_treats_samples_alone(seed, size, scale, variance):
    x, _ = draw(seed, size)
    layer = modenorm.ModeGroupNorm(size[1], 3, variance=variance).double()
    assert_close(layer(x), torch.cat([layer(sample) for sample in x.split(1)]), 1e-12)
    order = torch.randperm(size[1])
    assert_close(layer(x[:, order]), layer(x)[:, order], 1e-10)


@quick
@given(SEEDS, st.sampled_from([1, 2, 3, 4, 6, 12]), MODES, st.sampled_from(["paper", "usage"]))
def test_recalibration_is_free_of_the_split(seed, num_batches, num_modes, update):
    """Batches of equal size give the statistics of all data at once.

    That is exact for "usage", whose averages weight a batch by its mass, and for one mode.
    """
    if update == "paper":
        num_modes = 1
    torch.manual_seed(seed)
    x = torch.randn(24, 3, 2, 2).double() * 3 + torch.randn(24, 1, 1, 1) * 5
    layer = make_layer(3, num_modes, running_update=update)
    modenorm.recalibrate(layer, x[torch.randperm(24)].chunk(num_batches))
    gates = torch.softmax(layer.gate(x.mean((2, 3))), 1).t()[..., None, None, None]  # (K, N, ...)
    mass = gates.sum(1).squeeze(-1).squeeze(-1) * 4
    mean = (gates * x).sum((1, 3, 4)) / mass
    var = (gates * (x - mean[:, None, :, None, None]) ** 2).sum((1, 3, 4)) / mass
    assert_close(layer.running_mean, mean, 1e-10)
    assert_close(layer.running_var, var, 1e-10)


@quick
@given(SEEDS, SIZES)
def test_eval_treats_samples_alone(seed, size):
    x, _ = draw(seed, size)
    layer = make_layer(size[1], 3).eval()
    assert_close(layer(x), torch.cat([layer(sample) for sample in x.split(1)]), 1e-12)


@pytest.mark.parametrize("num_modes", [2, 5])
def test_permuting_modes_changes_nothing(num_modes, backend):
    layer = make_layer(3, num_modes)
    x = torch.randn(6, 3, 4, 5).double()
    expected, order = layer(x), torch.randperm(num_modes)
    with torch.no_grad():
        layer.gate.weight.copy_(layer.gate.weight[order].clone())
        layer.gate.bias.copy_(layer.gate.bias[order].clone())
    assert_close(layer(x), expected, 1e-12)


def test_two_equal_modes_are_one(backend):
    """Splitting a mode into two halves leaves the map as it is."""
    x = torch.randn(6, 3, 4, 5).double()
    gates = torch.softmax(torch.randn(6, 2), 1).double()
    halves = torch.cat([gates / 2, gates / 2], 1)
    norm = modenorm.functional.mode_norm
    assert_close(norm(x, halves, training=True), norm(x, gates, training=True), 1e-12)


def test_a_small_training_follows_the_reference():
    losses = {}
    for backend in ("reference", "eager", "fused"):
        torch.manual_seed(3)
        model = nn.Sequential(
            nn.Conv2d(2, 6, 3), modenorm.ModeNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 1)
        ).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x, target = torch.randn(8, 8, 2, 6, 6).double(), torch.randn(8, 8, 1).double()
        with modenorm.use_backend(backend):
            for batch, goal in zip(x, target, strict=True):
                optimizer.zero_grad()
                loss = (model(batch) - goal).square().mean()
                loss.backward()
                optimizer.step()
        losses[backend] = loss.item(), model.eval()(x[0]).sum().item()
    assert losses["eager"] == pytest.approx(losses["reference"], rel=1e-9)
    assert losses["fused"] == pytest.approx(losses["reference"], rel=1e-9)
