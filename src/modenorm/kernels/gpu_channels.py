"""Mode group normalization's mixing on the GPU, in Triton. One program per sample.

Letters and formulas as in docs/math.md: A and D are the gradients of scale and shift.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["MAX_CHANNELS", "channels_backward", "channels_forward"]

MAX_CHANNELS = 8192  # a program keeps all channels of its sample in registers


@triton.jit
def _load_channels(ptr, channels, mask, HAS: tl.constexpr, default):
    if HAS:
        values = tl.load(ptr + channels, mask=mask, other=0.0).to(tl.float32)
    else:
        values = tl.full(channels.shape, default, tl.float32)
    return values


@triton.jit
def _softmax_terms(mean, gate_weight_ptr, gate_bias_ptr, num_modes):
    """The largest logit of each channel and the sum of exponentials below it."""
    largest = tl.full(mean.shape, float("-inf"), tl.float32)
    total = tl.zeros(mean.shape, tl.float32)
    for k in range(num_modes):
        logit = _logit(mean, gate_weight_ptr, gate_bias_ptr, k)
        new = tl.maximum(largest, logit)
        total = total * tl.exp(largest - new) + tl.exp(logit - new)
        largest = new
    return largest, total


@triton.jit
def _logit(mean, gate_weight_ptr, gate_bias_ptr, k):
    weight = tl.load(gate_weight_ptr + k).to(tl.float32)
    return mean * weight + tl.load(gate_bias_ptr + k).to(tl.float32)


@triton.jit
def _forward_kernel(
    mean_ptr,  # (N, C)
    var_ptr,  # (N, C)
    gate_weight_ptr,  # (K,)
    gate_bias_ptr,  # (K,)
    weight_ptr,  # (C,)
    bias_ptr,  # (C,)
    scale_ptr,  # (N, C)
    shift_ptr,  # (N, C)
    gates_ptr,  # (N, C, K)
    mode_mean_ptr,  # (N, K)
    mode_var_ptr,  # (N, K)
    num_channels,
    num_modes,
    eps,
    PIXEL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    sample = tl.program_id(0)
    channels = tl.arange(0, BLOCK_C)
    mask = channels < num_channels
    offs = sample * num_channels + channels
    mean = tl.load(mean_ptr + offs, mask=mask, other=0.0)
    var = _load_channels(var_ptr + sample * num_channels, channels, mask, PIXEL, 0.0)
    largest, total = _softmax_terms(mean, gate_weight_ptr, gate_bias_ptr, num_modes)
    scale = tl.zeros([BLOCK_C], tl.float32)
    shift = tl.zeros([BLOCK_C], tl.float32)
    for k in range(num_modes):
        logit = _logit(mean, gate_weight_ptr, gate_bias_ptr, k)
        gates = tl.where(mask, tl.exp(logit - largest) / total, 0.0)
        mass = tl.sum(gates, 0)
        mode_mean = tl.sum(gates * mean, 0) / mass
        apart = mean - mode_mean
        mode_var = tl.sum(gates * (apart * apart + var), 0) / mass
        inverse = tl.rsqrt(mode_var + eps)
        scale += inverse
        shift += inverse * apart
        tl.store(gates_ptr + (sample * num_channels + channels) * num_modes + k, gates, mask=mask)
        tl.store(mode_mean_ptr + sample * num_modes + k, mode_mean)
        tl.store(mode_var_ptr + sample * num_modes + k, mode_var)
    weight = _load_channels(weight_ptr, channels, mask, HAS_WEIGHT, 1.0) / num_modes
    bias = _load_channels(bias_ptr, channels, mask, HAS_BIAS, 0.0)
    tl.store(scale_ptr + offs, weight * scale, mask=mask)
    tl.store(shift_ptr + offs, weight * shift + bias, mask=mask)


@triton.jit
def _backward_kernel(
    mean_ptr,  # (N, C)
    var_ptr,  # (N, C)
    gates_ptr,  # (N, C, K)
    mode_mean_ptr,  # (N, K)
    mode_var_ptr,  # (N, K)
    gate_weight_ptr,  # (K,)
    weight_ptr,  # (C,)
    dscale_ptr,  # A, (N, C)
    dshift_ptr,  # D, (N, C)
    extra_ptr,  # (N, C, K), the gradient of the gates as an output
    slope_ptr,  # (N, C), 2 dv / L
    offset_ptr,  # (N, C), dm / L
    dweight_ptr,  # (N, C), each sample's share
    dgate_ptr,  # (N, 2, K), each sample's share of the gradients of gate_weight and gate_bias
    num_channels,
    num_modes,
    num_positions,
    eps,
    PIXEL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    sample = tl.program_id(0)
    channels = tl.arange(0, BLOCK_C)
    mask = channels < num_channels
    offs = sample * num_channels + channels
    mean = tl.load(mean_ptr + offs, mask=mask, other=0.0)
    var = _load_channels(var_ptr + sample * num_channels, channels, mask, PIXEL, 0.0)
    weight = _load_channels(weight_ptr, channels, mask, HAS_WEIGHT, 1.0) / num_modes
    dscale = tl.load(dscale_ptr + offs, mask=mask, other=0.0)
    dshift = tl.load(dshift_ptr + offs, mask=mask, other=0.0)
    e = tl.sum(weight * dshift, 0)
    slope = tl.zeros([BLOCK_C], tl.float32)
    offset = tl.zeros([BLOCK_C], tl.float32)
    dweight = tl.zeros([BLOCK_C], tl.float32)
    dot = tl.zeros([BLOCK_C], tl.float32)
    for k in range(num_modes):
        gates = tl.load(gates_ptr + offs * num_modes + k, mask=mask, other=0.0)
        mode_mean = tl.load(mode_mean_ptr + sample * num_modes + k)
        mode_var = tl.load(mode_var_ptr + sample * num_modes + k)
        dgates, u, s, inverse = _mode_gradients(
            gates, mean, var, mode_mean, mode_var, weight, dscale, dshift, e, eps
        )
        if HAS_EXTRA:
            dgates += tl.load(extra_ptr + offs * num_modes + k, mask=mask, other=0.0)
        apart = mean - mode_mean
        dweight += inverse * (dscale + dshift * apart)
        slope += gates * s
        offset += gates * (u + 2.0 * s * apart)
        dot += gates * dgates
    for k in range(num_modes):
        gates = tl.load(gates_ptr + offs * num_modes + k, mask=mask, other=0.0)
        mode_mean = tl.load(mode_mean_ptr + sample * num_modes + k)
        mode_var = tl.load(mode_var_ptr + sample * num_modes + k)
        dgates, u, s, inverse = _mode_gradients(
            gates, mean, var, mode_mean, mode_var, weight, dscale, dshift, e, eps
        )
        if HAS_EXTRA:
            dgates += tl.load(extra_ptr + offs * num_modes + k, mask=mask, other=0.0)
        dlogits = gates * (dgates - dot)
        offset += dlogits * tl.load(gate_weight_ptr + k).to(tl.float32)
        tl.store(dgate_ptr + sample * 2 * num_modes + k, tl.sum(dlogits * mean, 0))
        tl.store(dgate_ptr + (sample * 2 + 1) * num_modes + k, tl.sum(dlogits, 0))
    if PIXEL:
        tl.store(slope_ptr + offs, slope * (2.0 / num_positions), mask=mask)
    else:
        tl.store(slope_ptr + offs, tl.zeros([BLOCK_C], tl.float32), mask=mask)
    tl.store(offset_ptr + offs, offset / num_positions, mask=mask)
    tl.store(dweight_ptr + offs, dweight / num_modes, mask=mask)


@triton.jit
def _mode_gradients(gates, mean, var, mode_mean, mode_var, weight, dscale, dshift, e, eps):
    """Gradient of one mode's gates, dL/dμ and dL/dσ² over the mode's mass, and 1/σ."""
    mass = tl.sum(gates, 0)
    inverse = tl.rsqrt(mode_var + eps)
    apart = mean - mode_mean
    r = tl.sum(weight * (dscale + dshift * apart), 0)
    u = -inverse * e / mass
    s = -0.5 * inverse * inverse * inverse * r / mass
    dgates = u * apart + s * (var + apart * apart - mode_var)
    return dgates, u, s, inverse


def channels_forward(
    mean: Tensor,
    var: Tensor | None,
    gate_weight: Tensor,
    gate_bias: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Scale and shift (N, C), gates (N, C, K), and the modes' mean and variance (N, K)."""
    (num_samples, num_channels), num_modes = mean.shape, gate_weight.shape[0]
    scale, shift = torch.empty_like(mean), torch.empty_like(mean)
    gates = mean.new_empty((num_samples, num_channels, num_modes))
    mode_mean = mean.new_empty((num_samples, num_modes))
    mode_var = torch.empty_like(mode_mean)
    _forward_kernel[(num_samples,)](
        mean,
        mean if var is None else var,
        gate_weight,
        gate_bias,
        mean if weight is None else weight,
        mean if bias is None else bias,
        scale,
        shift,
        gates,
        mode_mean,
        mode_var,
        num_channels=num_channels,
        num_modes=num_modes,
        eps=eps,
        PIXEL=var is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        BLOCK_C=triton.next_power_of_2(num_channels),
    )
    return scale, shift, gates, mode_mean, mode_var


def channels_backward(
    dscale: Tensor,
    dshift: Tensor,
    extra: Tensor | None,
    mean: Tensor,
    var: Tensor | None,
    gates: Tensor,
    mode_mean: Tensor,
    mode_var: Tensor,
    gate_weight: Tensor,
    weight: Tensor | None,
    num_positions: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slope and offset of dx, each sample's dweight (N, C) and gate gradients (N, 2, K)."""
    (num_samples, num_channels), num_modes = mean.shape, gate_weight.shape[0]
    slope, offset, dweight = (torch.empty_like(mean) for _ in range(3))
    dgate = mean.new_empty((num_samples, 2, num_modes))
    _backward_kernel[(num_samples,)](
        mean,
        mean if var is None else var,
        gates,
        mode_mean,
        mode_var,
        gate_weight,
        mean if weight is None else weight,
        dscale,
        dshift,
        gates if extra is None else extra.contiguous(),
        slope,
        offset,
        dweight,
        dgate,
        num_channels=num_channels,
        num_modes=num_modes,
        num_positions=num_positions,
        eps=eps,
        PIXEL=var is not None,
        HAS_WEIGHT=weight is not None,
        HAS_EXTRA=extra is not None,
        BLOCK_C=triton.next_power_of_2(num_channels),
    )
    return slope, offset, dweight, dgate
