"""The parts of mode normalization's mixing in torch operators: two forward, two backward.

Between the parts of a direction, ranks exchange what they have. Modes are taken one after the
other, so nothing is as large as (N, K, C). Letters and formulas as in docs/math.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modenorm.kernels.mixing_arrays import Affine, Modes, Samples

__all__ = ["coefficients", "mode_gradients", "sample_gradients", "statistics"]


def statistics(samples: Samples) -> Modes:
    """Mean, variance and mass of the modes."""
    mean, var, gates = samples
    mass = gates.sum(0)
    weights = (gates / mass.clamp_min(torch.finfo(gates.dtype).tiny)).t()  # (K, N)
    mode_mean = weights @ mean
    mode_var = weights @ var
    for k, row in enumerate(weights):
        mode_var[k] += row @ (mean - mode_mean[k]).square_()
    return Modes(mode_mean, mode_var, mass)


def coefficients(samples: Samples, modes: Modes, affine: Affine) -> tuple[Tensor, Tensor]:
    """Scale and shift, (N, C)."""
    mean, _, gates = samples
    bias = affine.bias
    scaled = _scaled(torch.rsqrt(modes.var + affine.eps), affine)
    shift = torch.zeros_like(mean)
    for k in range(gates.shape[1]):
        shift += (mean - modes.mean[k]).mul_(scaled[k]).mul_(gates[:, k, None])
    if bias is not None:
        # not in place, which torch skips where one of the two is on the meta device
        shift = shift + (gates @ bias if bias.ndim == 2 else bias)
    return gates @ scaled, shift


def mode_gradients(
    dscale: Tensor, dshift: Tensor, samples: Samples, modes: Modes, affine: Affine
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of μ and σ² over the mass, the modes' α/σ, (K, C), gradients of weight and bias."""
    mean, _, gates = samples
    weight, bias, eps = affine
    inverse = torch.rsqrt(modes.var + eps)
    scaled = _scaled(inverse, affine)
    t, e = gates.t() @ dscale, gates.t() @ dshift  # (K, C)
    for k in range(gates.shape[1]):
        t[k] += gates[:, k] @ (mean - modes.mean[k]).mul_(dshift)
    dweight = dbias = None
    if weight is not None:
        dweight = inverse * t if weight.ndim == 2 else (inverse * t).sum(0)
    if bias is not None:
        dbias = e if bias.ndim == 2 else dshift.sum(0)
    divisor = modes.mass.clamp_min(torch.finfo(modes.mass.dtype).tiny)[:, None]
    u, s = -scaled * e / divisor, -0.5 * scaled * inverse**2 * t / divisor
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
    mean, var, gates = samples
    dmean, dgates = gates @ u, torch.empty_like(gates)
    for k in range(gates.shape[1]):
        apart = mean - modes.mean[k]
        dmean += (apart * (2 * s[k])).mul_(gates[:, k, None])
        direct = torch.addcmul(dscale, dshift, apart) @ scaled[k]
        spread = torch.addcmul(var, apart, apart).sub_(modes.var[k]) @ s[k]
        dgates[:, k] = direct + apart @ u[k] + spread
    if affine.bias is not None and affine.bias.ndim == 2:
        dgates += dshift @ affine.bias.t()
    return dmean, gates @ s, dgates


def _scaled(inverse: Tensor, affine: Affine) -> Tensor:
    """α/σ of every mode, (K, C)."""
    return inverse if affine.weight is None else inverse * affine.weight
