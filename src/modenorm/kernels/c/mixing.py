"""The parts of the mixing in C (mixing.c), float32: the functions of torch_mixing.py."""

from __future__ import annotations

import torch
from torch import Tensor

from modenorm.kernels.c.library import call
from modenorm.kernels.mixing_arrays import Affine, Modes, Samples

__all__ = ["coefficients", "mode_gradients", "sample_gradients", "statistics"]


def statistics(samples: Samples) -> Modes:
    """Mean, variance and mass of the modes."""
    mean, sizes = samples.mean, _sizes(samples)
    mass, mode_mean = mean.new_empty(sizes[2]), mean.new_empty((sizes[2], sizes[1]))
    mode_var = torch.empty_like(mode_mean)
    call("statistics", samples, (mass, mode_mean, mode_var), *sizes)
    return Modes(mode_mean, mode_var, mass)


def coefficients(samples: Samples, modes: Modes, affine: Affine) -> tuple[Tensor, Tensor]:
    """Scale and shift, (N, C)."""
    weight, bias, eps = affine
    scale, shift = _like(samples.mean), _like(samples.mean)
    inputs = (samples.mean, samples.gates, modes.mean, modes.var, weight, bias)
    outputs = (scale, shift, _like(modes.mean))
    numbers = (float(eps), _step(weight), _step(bias), *_sizes(samples))
    call("coefficients", inputs, outputs, *numbers)
    return scale, shift


def mode_gradients(
    dscale: Tensor, dshift: Tensor, samples: Samples, modes: Modes, affine: Affine
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of μ and σ² over the mass, the modes' α/σ, (K, C), gradients of weight and bias."""
    weight, bias, eps = affine
    u, s, scaled = (_like(modes.mean) for _ in range(3))
    dweight, dbias = (None if p is None else _like(p) for p in (weight, bias))
    inputs = (dscale, dshift, samples.mean, samples.gates, *modes, weight)
    outputs = (u, s, scaled, dweight, dbias)
    numbers = (float(eps), _step(weight), _step(bias), *_sizes(samples))
    call("mode_gradients", inputs, outputs, *numbers)
    return u, s, scaled, dweight, dbias


def sample_gradients(
    dscale: Tensor,
    dshift: Tensor,
    samples: Samples,
    modes: Modes,
    affine: Affine,
    u: Tensor,
    s: Tensor,
    scaled: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of mean and var, (N, C), and of the gates, from those of the modes, u and s."""
    found = _like(samples.mean), _like(samples.mean), _like(samples.gates)
    inputs = (dscale, dshift, *samples, modes.mean, modes.var, u, s, scaled, affine.bias)
    call("sample_gradients", inputs, found, _step(affine.bias), *_sizes(samples))
    return found


def _sizes(samples: Samples) -> tuple[int, int, int]:
    """N, C and K."""
    return samples.mean.shape[0], samples.mean.shape[1], samples.gates.shape[1]


def _like(array: Tensor) -> Tensor:
    return torch.empty_like(array, memory_format=torch.contiguous_format)


def _step(parameter: Tensor | None) -> int:
    """From one mode's parameter to the next one's: 0 if they share it."""
    return 0 if parameter is None or parameter.ndim == 1 else parameter.shape[1]
