"""Every formula of docs/math.md against automatic differentiation of the paper's sums."""

import pytest
import torch

from compare import assert_close, one_hot
from modenorm import reference

N, C, L, K, EPS = 5, 3, 4, 2, 1e-3


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64)


def sums(x, m, dy):
    """A and D."""
    return (dy * (x - m[..., None])).sum(2), dy.sum(2)


def mode_norm_backward(x, gate_weight, gate_bias, weight, bias, dy):
    """The chapter "Backward", formula by formula; weight and bias are (K, C) if per mode."""
    m, v = x.mean(2), x.var(2, correction=0)
    g = torch.softmax(m @ gate_weight.t() + gate_bias, 1)
    mass = g.sum(0)[:, None]  # (K, 1)
    mu = g.t() @ m / mass
    distance = m[:, None] - mu  # (N, K, C)
    var = torch.einsum("nk,nkc->kc", g, v[:, None] + distance**2) / mass
    r = torch.rsqrt(var + EPS)
    a, d = sums(x, m, dy)

    inner = a[:, None] + d[:, None] * distance  # (N, K, C)
    t = torch.einsum("nk,nkc->kc", g, inner)
    per_mode = weight.ndim == 2
    dweight = r * t if per_mode else (r * t).sum(0)
    dbias = g.t() @ d if per_mode else d.sum(0)
    u = -weight * r * (g.t() @ d)
    s = -0.5 * weight * r**3 * t
    dv = g @ (s / mass)
    dm = torch.einsum("nk,nkc->nc", g / mass.t(), u + 2 * s * distance)
    through_statistics = u * distance + s * (v[:, None] + distance**2 - var)
    dg = (weight * r * inner).sum(2) + through_statistics.sum(2) / mass.t()
    if per_mode:
        dg = dg + d @ bias.t()
    dz = g * (dg - (g * dg).sum(1, keepdim=True))
    dm = dm + dz @ gate_weight
    scale = g @ (weight * r)
    dx = scale[..., None] * dy + 2 * dv[..., None] / L * (x - m[..., None]) + dm[..., None] / L
    return dx, dz.t() @ m, dz.sum(0), dweight, dbias


@pytest.mark.parametrize("affine", [(C,), (K, C)], ids=["shared", "per_mode"])
def test_backward_of_mode_normalization(affine):
    shapes = [(N, C, L), (K, C), (K,), affine, affine]
    x, gate_weight, gate_bias, weight, bias = (draw(*shape).requires_grad_() for shape in shapes)
    gates = torch.softmax(x.mean(2) @ gate_weight.t() + gate_bias, 1)
    y = reference.mode_norm(x, gates, weight=weight, bias=bias, training=True, eps=EPS)
    dy, tensors = draw(N, C, L), (x, gate_weight, gate_bias, weight, bias)
    expected = torch.autograd.grad(y, tensors, dy)
    actual = mode_norm_backward(*(t.detach() for t in tensors), dy)
    for name, a, b in zip(("x", "W", "b", "weight", "bias"), actual, expected, strict=True):
        assert_close(a, b, 1e-11, name)


def mode_group_norm_backward(x, w, b, weight, bias, dy, variance):
    m, v = x.mean(2), x.var(2, correction=0)
    q = v if variance == "pixel" else torch.zeros_like(v)
    g = torch.softmax(m[..., None] * w + b, 2)  # (N, C, K)
    mass = g.sum(1, keepdim=True)  # (N, 1, K)
    mu = (g * m[..., None]).sum(1, keepdim=True) / mass
    distance = m[..., None] - mu
    spread = q[..., None] + distance**2
    var = (g * spread).sum(1, keepdim=True) / mass
    r = torch.rsqrt(var + EPS)
    a, d = sums(x, m, dy)

    t = (weight[:, None] * (a[..., None] + d[..., None] * distance)).sum(1, keepdim=True)
    u = -r / K * (weight * d).sum(1)[:, None, None]
    s = -(r**3) / (2 * K) * t
    dg = (u * distance + s * (spread - var)) / mass
    dz = g * (dg - (g * dg).sum(2, keepdim=True))
    dm = (g / mass * (u + 2 * s * distance)).sum(2) + dz @ w
    dq = (g / mass * s).sum(2)
    scale = weight * r.mean(2)
    dweight = (a * r.mean(2) + d * (r * distance).mean(2)).sum(0)
    dx = scale[..., None] * dy + dm[..., None] / L
    if variance == "pixel":
        dx = dx + 2 * dq[..., None] / L * (x - m[..., None])
    return dx, (dz * m[..., None]).sum((0, 1)), dz.sum((0, 1)), dweight, d.sum(0)


@pytest.mark.parametrize("variance", ["pooled", "pixel"])
def test_backward_of_mode_group_normalization(variance):
    shapes = [(N, C, L), (K,), (K,), (C,), (C,)]
    tensors = [draw(*shape).requires_grad_() for shape in shapes]
    y = reference.mode_group_norm(*tensors, EPS, variance=variance)
    dy = draw(N, C, L)
    expected = torch.autograd.grad(y, tensors, dy)
    actual = mode_group_norm_backward(*(t.detach() for t in tensors), dy, variance)
    for name, a, b in zip(("x", "w", "b", "weight", "bias"), actual, expected, strict=True):
        assert_close(a, b, 1e-10, name)


@pytest.mark.parametrize("centre", ["samples", "modes", "zero"])
def test_one_map_with_any_centre(centre):
    x, gates = draw(N, C, L), torch.softmax(draw(N, K), 1)
    mean, var, weight, bias = draw(K, C), draw(K, C).exp(), draw(C), draw(C)
    expected = reference.mode_norm(x, gates, mean, var, weight, bias)
    r = torch.rsqrt(var + 1e-5)
    c = {"samples": x.mean(2), "modes": gates @ mean, "zero": torch.zeros(N, C)}[centre]
    s = weight * (gates @ r)
    t = bias + weight * torch.einsum("nk,nkc->nc", gates, r * (c[:, None] - mean))
    assert_close((x - c[..., None]) * s[..., None] + t[..., None], expected, 1e-12)


def test_stable_running_update_is_the_average_of_moments():
    rate, mean, var, batch_mean, batch_var = (
        0.3,
        draw(K, C),
        draw(K, C).exp(),
        draw(K, C),
        draw(K, C).exp(),
    )
    second = (1 - rate) * (var + mean**2) + rate * (batch_var + batch_mean**2)
    d = batch_mean - mean
    new_mean = mean + rate * d
    new_var = (1 - rate) * var + rate * batch_var + rate * (1 - rate) * d**2
    assert_close(new_mean, (1 - rate) * mean + rate * batch_mean, 1e-14)
    assert_close(new_var, second - new_mean**2, 1e-12)


@pytest.mark.parametrize("per_mode", [False, True], ids=["shared", "per_mode"])
def test_equal_gates_get_no_gradient_unless_weights_differ(per_mode):
    x, dy = draw(N, C, L), draw(N, C, L)
    affine = (draw(K, C), draw(K, C)) if per_mode else (draw(C), draw(C))
    _, dw, db, *_ = mode_norm_backward(x, torch.zeros(K, C).double(), draw(K), *affine, dy)
    if per_mode:
        assert dw.abs().max() > 1e-3
    else:
        assert dw.abs().max() < 1e-12
        assert db.abs().max() < 1e-12


def test_batchnorm_leaves_out_the_distance_of_means():
    """The sentence on torch's running variance, for one mode."""
    norm = torch.nn.BatchNorm1d(C, momentum=0.3).double()
    mean, var = torch.zeros(1, C).double(), torch.ones(1, C).double()
    x = draw(N, C, L) + 2
    norm(x)
    reference.mode_norm(x, one_hot([0] * N, 1), mean, var, training=True, momentum=0.3)
    count, d = N * L, x.mean((0, 2))
    biased = (norm.running_var - 0.7) * (count - 1) / count + 0.7
    assert_close(var[0], biased + 0.3 * 0.7 * d**2, 1e-12)
