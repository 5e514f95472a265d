"""The mixing in C (mixing.c), float32: the functions of torch_mixing.py, and the entropies."""

from __future__ import annotations

import torch
from torch import Tensor

from modenorm.kernels.c.library import call

__all__ = ["coefficients", "mode_gradients", "sample_gradients", "statistics"]


def statistics(mean: Tensor, var: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mass of the modes, (K,), and their μ and σ², (K, C)."""
    sizes = (*mean.shape, gates.shape[1])
    mass, mode_mean = mean.new_empty(sizes[2]), mean.new_empty((sizes[2], sizes[1]))
    mode_var = torch.empty_like(mode_mean)
    call("statistics", (mean, var, gates), (mass, mode_mean, mode_var), *sizes)
    return mass, mode_mean, mode_var


def coefficients(
    mean: Tensor,
    gates: Tensor,
    mode_mean: Tensor,
    mode_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Scale and shift, (N, C)."""
    scale, shift = _like(mean), _like(mean)
    inputs = (mean, gates, mode_mean, mode_var, weight, bias)
    outputs = (scale, shift, _like(mode_mean))
    steps = _step(weight), _step(bias)
    call("coefficients", inputs, outputs, float(eps), *steps, *mean.shape, gates.shape[1])
    return scale, shift


def mode_gradients(
    dscale: Tensor,
    dshift: Tensor,
    mean: Tensor,
    gates: Tensor,
    mode_mean: Tensor,
    mode_var: Tensor,
    mass: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of μ and σ² over the mass, the modes' α/σ, (K, C), gradients of weight and bias."""
    u, s, scaled = (_like(mode_mean) for _ in range(3))
    dweight, dbias = (
        None if parameter is None else _like(parameter) for parameter in (weight, bias)
    )
    inputs = (dscale, dshift, mean, gates, mode_mean, mode_var, mass, weight)
    outputs = (u, s, scaled, dweight, dbias)
    steps = _step(weight), _step(bias)
    call("mode_gradients", inputs, outputs, float(eps), *steps, *mean.shape, gates.shape[1])
    return u, s, scaled, dweight, dbias


def sample_gradients(
    dscale: Tensor,
    dshift: Tensor,
    mean: Tensor,
    var: Tensor,
    gates: Tensor,
    mode_mean: Tensor,
    mode_var: Tensor,
    u: Tensor,
    s: Tensor,
    scaled: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of mean and var, (N, C), and of the gates, from those of the modes, u and s."""
    dmean, dvar, dgates = _like(mean), _like(mean), _like(gates)
    modes = (mode_mean, mode_var, u, s, scaled, bias)
    inputs = (dscale, dshift, mean, var, gates, *modes)
    outputs = (dmean, dvar, dgates)
    call("sample_gradients", inputs, outputs, _step(bias), *mean.shape, gates.shape[1])
    return dmean, dvar, dgates


def _like(array: Tensor) -> Tensor:
    return torch.empty_like(array, memory_format=torch.contiguous_format)


def _step(parameter: Tensor | None) -> int:
    """From one mode's parameter to the next one's: 0 if they share it."""
    return 0 if parameter is None or parameter.ndim == 1 else parameter.shape[1]
