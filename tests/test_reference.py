"""The reference against sums over plain Python numbers: the paper's algorithms, index by index."""

import math

import pytest
import torch

from compare import assert_close, one_hot
from modenorm import reference

N, C, L, K, EPS = 4, 3, 5, 2, 1e-3
SAMPLES, CHANNELS, POSITIONS, MODES = range(N), range(C), range(L), range(K)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def draw_gates(num_modes: int = K) -> torch.Tensor:
    return torch.softmax(2 * draw(N, num_modes), 1)


def mode_moments(x, g, c, k):
    """N_k, ⟨x⟩_k and ⟨x²⟩_k of one channel."""
    mass = sum(g[n][k] for n in SAMPLES)
    mean = sum(g[n][k] * x[n][c][l] for n in SAMPLES for l in POSITIONS) / (mass * L)
    second = sum(g[n][k] * x[n][c][l] ** 2 for n in SAMPLES for l in POSITIONS) / (mass * L)
    return mass, mean, second


def test_training_is_algorithm_1():
    x, gates, weight, bias = draw(N, C, L), draw_gates(), draw(C), draw(C)
    y = reference.mode_norm(x, gates, weight=weight, bias=bias, training=True, eps=EPS)
    values, g = x.tolist(), gates.tolist()
    for n, c, l in [(0, 0, 0), (1, 2, 4), (3, 1, 2)]:
        total = 0.0
        for k in MODES:
            _, mean, second = mode_moments(values, g, c, k)
            total += g[n][k] * (values[n][c][l] - mean) / math.sqrt(second - mean**2 + EPS)
        expected = weight[c].item() * total + bias[c].item()
        assert y[n, c, l].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("update", ["paper", "usage"])
def test_running_estimates_average_the_moments(update):
    x, gates = draw(N, C, L), draw_gates()
    mean, var = draw(K, C), draw(K, C).exp()
    old_mean, old_var = mean.tolist(), var.tolist()
    reference.mode_norm(x, gates, mean, var, training=True, momentum=0.3, running_update=update)
    for k in MODES:
        for c in CHANNELS:
            mass, first, second = mode_moments(x.tolist(), gates.tolist(), c, k)
            rate = 0.3 * (mass / N if update == "usage" else 1)
            old_second = old_var[k][c] + old_mean[k][c] ** 2
            new_mean = rate * first + (1 - rate) * old_mean[k][c]
            new_second = rate * second + (1 - rate) * old_second
            assert mean[k, c].item() == pytest.approx(new_mean, rel=1e-12)
            assert var[k, c].item() == pytest.approx(new_second - new_mean**2, rel=1e-12)


def test_inference_is_algorithm_2():
    x, gates, mean, var = draw(N, C, L), draw_gates(), draw(K, C), draw(K, C).exp()
    before = mean.clone(), var.clone()
    y = reference.mode_norm(x, gates, mean, var, eps=EPS)
    n, c, l = 2, 1, 3
    expected = sum(
        gates[n, k] * (x[n, c, l] - mean[k, c]) / math.sqrt(var[k, c] + EPS) for k in MODES
    )
    assert y[n, c, l].item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.equal(mean, before[0])
    assert torch.equal(var, before[1])


def test_a_mode_without_samples_adds_nothing_and_keeps_its_estimates():
    x, mean, var = draw(N, C, L), draw(2, C), draw(2, C).exp()
    first, before = one_hot([0] * N, 1), (mean.clone(), var.clone())
    y = reference.mode_norm(x, one_hot([0] * N, 2), mean, var, training=True)
    assert torch.equal(y, reference.mode_norm(x, first, training=True))
    assert torch.equal(mean[1], before[0][1])
    assert torch.equal(var[1], before[1][1])
    assert not torch.equal(mean[0], before[0][0])


def test_per_mode_affine_is_inside_the_sum():
    x, gates, weight, bias = draw(N, C, L), draw_gates(), draw(K, C), draw(K, C)
    y = reference.mode_norm(x, gates, weight=weight, bias=bias, training=True)
    expected = 0
    for k in MODES:
        share = gates[:, k, None, None]
        mean = (share * x).sum((0, 2), keepdim=True) / (share.sum() * L)
        var = (share * (x - mean) ** 2).sum((0, 2), keepdim=True) / (share.sum() * L)
        normed = (x - mean) / torch.sqrt(var + 1e-5)
        expected = expected + share * (weight[k, :, None] * normed + bias[k, :, None])
    assert_close(y, expected, 1e-12)


def test_mask_drops_positions_from_the_sums():
    x, gates = draw(N, C, L), one_hot([0] * N, 1)
    mask = torch.arange(L) < torch.tensor([5, 3, 1, 2])[:, None]
    y = reference.mode_norm(x, gates, mask=mask, training=True)
    values = x.movedim(1, -1)[mask]  # (positions that count, C)
    mean, var = values.mean(0)[:, None], values.var(0, correction=0)[:, None]
    assert_close(y, (x - mean) / torch.sqrt(var + 1e-5), 1e-12)


@pytest.mark.parametrize("variance", ["pooled", "pixel"])
@pytest.mark.parametrize("num_modes", [1, 3])
def test_mode_group_norm_is_algorithm_3(variance, num_modes):
    x, w, b, weight, bias = draw(N, C, L), draw(num_modes), draw(num_modes), draw(C), draw(C)
    y = reference.mode_group_norm(x, w, b, weight, bias, EPS, variance=variance)
    n, c, l = 1, 2, 3
    pooled = [sum(x[n, j].tolist()) / L for j in CHANNELS]
    logits = [[w[k].item() * m + b[k].item() for k in range(num_modes)] for m in pooled]
    gates = [[math.exp(v) / sum(map(math.exp, row)) for v in row] for row in logits]
    total = 0.0
    for k in range(num_modes):
        mass = sum(gates[j][k] for j in CHANNELS)
        mean = sum(gates[j][k] * pooled[j] for j in CHANNELS) / mass
        squares = [m**2 for m in pooled]
        if variance == "pixel":
            squares = [sum(v**2 for v in x[n, j].tolist()) / L for j in CHANNELS]
        second = sum(gates[j][k] * squares[j] for j in CHANNELS) / mass
        total += (x[n, c, l].item() - mean) / math.sqrt(second - mean**2 + EPS)
    expected = weight[c].item() * total / num_modes + bias[c].item()
    assert y[n, c, l].item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_type(dtype):
    x, gates = draw(N, C, L).to(dtype), draw_gates().to(dtype)
    assert reference.mode_norm(x, gates, training=True).dtype == dtype
    assert reference.mode_group_norm(x, gates[0], gates[1]).dtype == dtype
