"""A layer and the paper's sums on the same data: values, all gradients, running estimates."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import modenorm
from modenorm import reference

LAYERS = {
    2: modenorm.ModeNorm1d,
    3: modenorm.ModeNorm1d,
    4: modenorm.ModeNorm2d,
    5: modenorm.ModeNorm3d,
}

# Relative to the largest entry. float32: about a hundred roundings, for sums of up to a few hundred
# terms divided by standard deviations of order one. float64: what ⟨x²⟩ − ⟨x⟩² in the reference
# leaves of sixteen digits, where means are up to a hundred standard deviations. Half types:
# statistics are float32, so only the rounding to the type is left, half a unit of the last place.
TOLERANCES = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    torch.float16: 2**-11 + 2e-5,
    torch.bfloat16: 2**-8 + 2e-5,
}


def data(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Two clusters of samples, and channels with means and spreads of their own."""
    clusters = torch.randint(2, (shape[0], *[1] * (len(shape) - 1))) * 3.0
    channels = torch.randn(1, shape[1], *[1] * (len(shape) - 2)).double()
    return (torch.randn(shape).double() * channels.exp() + channels + clusters).to(dtype)


@dataclass
class Run:
    """Everything that one forward and backward gave."""

    y: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def make_layer(
    num_features: int,
    num_modes: int,
    rank: int = 4,
    dtype: torch.dtype = torch.float64,
    **options: object,
) -> modenorm.ModeNorm2d:
    """A layer in the middle of training: sharp gates, and no parameter or buffer at its start."""
    layer = LAYERS[rank](num_features, num_modes, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape))
        if layer.running_mean is not None:
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
    return layer


def run(
    layer: nn.Module, x: Tensor, upstream: Tensor, gates: Tensor | None = None, **kwargs
) -> Run:
    """The layer itself, on a copy."""
    layer, x, gates = _fresh(layer, x, gates)
    y = layer(x, gates=gates, **kwargs)
    return _collect(layer, x, gates, y, upstream)


def run_reference(
    layer: nn.Module, x: Tensor, upstream: Tensor, gates: Tensor | None = None, mask=None
) -> Run:
    """The paper's sums in float64, with the layer's parameters."""
    layer, x, gates = _fresh(layer.double(), x.double(), gates)
    used = gates
    if used is None:
        used = torch.softmax(layer.gate(_pool(x, mask)), 1)
    momentum = layer.momentum
    if momentum is None:
        momentum = 1 / (int(layer.num_batches_tracked) + 1)
    y = reference.mode_norm(
        x,
        used.double(),
        layer.running_mean,
        layer.running_var,
        layer.weight,
        layer.bias,
        layer.training,
        momentum,
        layer.eps,
        mask=mask,
        running_update=layer.running_update,
    )
    return _collect(layer, x, gates, y, upstream.double())


def _fresh(layer: nn.Module, x: Tensor, gates: Tensor | None):
    gates = None if gates is None else gates.detach().clone().requires_grad_()
    return copy.deepcopy(layer), x.detach().requires_grad_(), gates


def _pool(x: Tensor, mask: Tensor | None) -> Tensor:
    if x.ndim == 2:
        return x
    if mask is None:
        return x.flatten(2).mean(2)
    counts = mask.flatten(1).sum(1, keepdim=True)
    return (x * mask[:, None]).flatten(2).sum(2) / counts


def _collect(layer: nn.Module, x: Tensor, gates: Tensor | None, y: Tensor, upstream: Tensor) -> Run:
    y.backward(upstream)
    gradients = {"x": x.grad}
    if gates is not None:
        gradients["gates"] = gates.grad
    for name, parameter in layer.named_parameters():
        if gates is None or not name.startswith("gate."):
            gradients[name] = parameter.grad
    assert all(gradient is not None for gradient in gradients.values()), gradients
    buffers = {name: b for name, b in layer.named_buffers() if b.is_floating_point()}
    return Run(y.detach(), gradients, buffers)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, name: str = "value") -> None:
    """No entry is off by more than the tolerance times the largest entry."""
    assert actual.shape == expected.shape, f"{name}: {actual.shape} and {expected.shape}"
    if expected.numel() == 0:
        return
    error = (actual.double() - expected.double()).abs().max().item()
    scale = max(expected.double().abs().max().item(), 1e-3)
    assert error <= tolerance * scale, f"{name}: off by {error / scale:.1e} > {tolerance:.1e}"


def assert_same(actual: Run, expected: Run, dtype: torch.dtype) -> None:
    """Values and x's gradient are of the input's type, everything else at least float32."""
    rest = TOLERANCES[torch.float64 if dtype == torch.float64 else torch.float32]
    tolerance = TOLERANCES[dtype]
    assert actual.y.dtype == dtype
    assert_close(actual.y, expected.y, tolerance, "output")
    assert actual.gradients.keys() == expected.gradients.keys()
    for name, gradient in actual.gradients.items():
        limit = tolerance if name == "x" else max(rest, TOLERANCES[gradient.dtype])
        assert_close(gradient, expected.gradients[name], limit, f"gradient of {name}")
    for name, buffer in expected.buffers.items():
        if name in ("running_mean", "running_var"):
            assert_close(actual.buffers[name], buffer, rest, name)


def one_hot(domains: list[int], num_modes: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return nn.functional.one_hot(torch.tensor(domains), num_modes).to(dtype)


def double(*shape: int) -> Tensor:
    return torch.randn(shape).double()
