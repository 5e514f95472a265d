"""The passes as plain differentiable operators.

For what the fused kernels don't serve: masks, double backward, `torch.func`, export, and
`torch.compile`, whose Inductor fuses them with their neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modenorm.kernels.layout import statistics_dtype

__all__ = ["apply", "masked_moments", "moments"]


def moments(x: Tensor, with_var: bool = True) -> tuple[Tensor, Tensor | None]:
    """Mean and biased variance over the positions, (N, C) each."""
    x = x.to(statistics_dtype(x))
    positions = tuple(range(2, x.ndim))
    if not positions:
        return x, torch.zeros_like(x) if with_var else None
    if not with_var:
        return x.mean(positions), None
    var, mean = torch.var_mean(x, positions, correction=0)
    return mean, var


def masked_moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance over the positions where mask, (N, 1, *positions), is True; their counts.

    A sample without such a position gets mean 0, variance 0 and count 0.
    """
    x = x.to(statistics_dtype(x))
    x = x.flatten(2) if x.ndim > 2 else x.unsqueeze(-1)
    mask = mask.flatten(1).unsqueeze(1)  # (N, 1, L)
    counts = mask.sum(-1).to(x.dtype)  # (N, 1)
    divisor = counts.clamp_min(1)
    mean = torch.where(mask, x, 0).sum(-1) / divisor
    var = torch.where(mask, x - mean[..., None], 0).square().sum(-1) / divisor
    return mean, var, counts.squeeze(1)


def apply(x: Tensor, centre: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Y = (x − centre) · scale + shift, in x's type."""
    shape = x.shape[:2] + (1,) * (x.ndim - 2)
    y = (x - centre.view(shape)) * scale.reshape(shape) + shift.view(shape)
    return y.to(x.dtype)
