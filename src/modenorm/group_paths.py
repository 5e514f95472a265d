"""From a checked call of a mode group norm to the path that serves it, as paths.py for a mode norm.

Letters: N samples, C channels, K modes. What the layer and `functional` call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modenorm import mixing, reference
from modenorm.checks import check_input
from modenorm.kernels import mode_group_norm_arrays, plain
from modenorm.kernels.c import mode_group_norm as c_mode_group_norm
from modenorm.kernels.choice import FUSED, choose_path
from modenorm.kernels.gpu import mode_group_norm_operator
from modenorm.kernels.layout import statistics_dtype
from modenorm.kernels.mode_group_norm_arrays import Given
from modenorm.paths import moments_and_map

__all__ = ["normalize_channels"]


def normalize_channels(
    x: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    variance: str,
    gates_matter: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """`mode_group_norm` as the layer calls it: returns y and the gates, (N, C, K).

    Gates that don't matter may have no gradient, or be None.
    """
    check_input(x)
    dtype = statistics_dtype(x)
    gate_weight, gate_bias = gate_weight.to(dtype), gate_bias.to(dtype)
    weight, bias = plain.in_type(weight, dtype), plain.in_type(bias, dtype)
    given = Given(gate_weight, gate_bias, weight, bias, eps, variance == "pixel")
    with mixing.full_precision(x):
        if x.numel() == 0:
            gates = x.new_zeros((*x.shape[:2], len(gate_weight)))
            return plain.empty_output(x, *given[:4]), gates
        path = choose_path(x)
        if path == "reference":
            return _by_reference(x, given)
        found = _by_one(x, given, path, gates_matter)
        return found or _by_parts(x, given, path in FUSED)


def _by_one(
    x: Tensor, given: Given, path: str, gates_matter: bool
) -> tuple[Tensor, Tensor | None] | None:
    if not mode_group_norm_arrays.fits(x, given):
        return None
    if path == "gpu":
        from modenorm.kernels.gpu import mode_group_norm as gpu_mode_group_norm

        return gpu_mode_group_norm.mode_group_norm(x, given, gates_matter)
    if path == "c" and c_mode_group_norm.fits(x, given):
        return c_mode_group_norm.mode_group_norm(x, given, gates_matter)
    if path == "operators":
        return mode_group_norm_operator.mode_group_norm(x, given, gates_matter)
    return None


def _by_parts(x: Tensor, given: Given, fused: bool) -> tuple[Tensor, Tensor]:
    gate_weight, gate_bias, weight, bias, eps, pixel = given
    mean, var, _, affine = moments_and_map(x, fused, None, with_var=pixel)
    scale, shift, gates = mixing.channel_modes(mean, var, gate_weight, gate_bias, weight, bias, eps)
    return affine(mean, scale, shift), gates


def _by_reference(x: Tensor, given: Given) -> tuple[Tensor, Tensor]:
    gate_weight, gate_bias, weight, bias, eps, pixel = given
    weight, bias = mixing.written_out(weight, bias, 1, x.shape[1])
    values, variance = x.to(gate_weight.dtype), "pixel" if pixel else "pooled"
    y = reference.mode_group_norm(
        values, gate_weight, gate_bias, weight, bias, eps, variance=variance
    )
    pooled, _ = plain.moments(x, with_var=False)
    gates = torch.softmax(pooled[..., None] * gate_weight + gate_bias, -1)
    return torch.empty_like(x).copy_(y), gates
