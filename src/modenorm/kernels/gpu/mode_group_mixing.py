"""Mode group normalization's mixing on the GPU, in Triton. One program per sample.

Letters and formulas as in docs/math.md: A and D are the gradients of scale and shift.
"""

from __future__ import annotations

import triton
import triton.language as tl

from modenorm.kernels.gpu.common import begin
from modenorm.kernels.gpu.launch import Launch
from modenorm.kernels.gpu.plan import AffineKind

__all__ = ["ChannelMixing"]


@triton.jit
def _load_channels(ptr, channels, mask, HAS: tl.constexpr, default):
    if HAS:
        values = tl.load(ptr + channels, mask=mask, other=0.0)
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
    return mean * tl.load(gate_weight_ptr + k) + tl.load(gate_bias_ptr + k)


@triton.jit
def _log_gates(mean, gate_weight_ptr, gate_bias_ptr, k, largest, total, mask):
    """Logarithms of a mode's gates; gates themselves may all be zero in float32."""
    logit = _logit(mean, gate_weight_ptr, gate_bias_ptr, k)
    return tl.where(mask, logit - largest - tl.log(total), float("-inf"))


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
    log_mass_ptr,  # (N, K)
    num_channels,
    num_modes,
    eps,
    WITH_GATES: tl.constexpr,
    PIXEL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    sample = tl.program_id(0)
    channels = tl.arange(0, BLOCK_C)
    mask = channels < num_channels
    offs = sample * num_channels + channels
    begin(OVERLAPS)
    mean = tl.load(mean_ptr + offs, mask=mask, other=0.0)
    var = _load_channels(var_ptr + sample * num_channels, channels, mask, PIXEL, 0.0)
    largest, total = _softmax_terms(mean, gate_weight_ptr, gate_bias_ptr, num_modes)
    scale = tl.zeros([BLOCK_C], tl.float32)
    shift = tl.zeros([BLOCK_C], tl.float32)
    for k in range(num_modes):
        logs = _log_gates(mean, gate_weight_ptr, gate_bias_ptr, k, largest, total, mask)
        highest = tl.max(logs, 0)
        parts = tl.exp(logs - highest)
        mass = tl.sum(parts, 0)
        weights = parts / mass
        mode_mean = tl.sum(weights * mean, 0)
        apart = mean - mode_mean
        mode_var = tl.sum(weights * (apart * apart + var), 0)
        inverse = tl.rsqrt(mode_var + eps)
        scale += inverse
        shift += inverse * apart
        if WITH_GATES:
            tl.store(gates_ptr + offs * num_modes + k, tl.exp(logs), mask=mask)
        tl.store(mode_mean_ptr + sample * num_modes + k, mode_mean)
        tl.store(mode_var_ptr + sample * num_modes + k, mode_var)
        tl.store(log_mass_ptr + sample * num_modes + k, highest + tl.log(mass))
    weight = _load_channels(weight_ptr, channels, mask, HAS_WEIGHT, 1.0) / num_modes
    bias = _load_channels(bias_ptr, channels, mask, HAS_BIAS, 0.0)
    tl.store(scale_ptr + offs, weight * scale, mask=mask)
    tl.store(shift_ptr + offs, weight * shift + bias, mask=mask)


@triton.jit
def _backward_kernel(
    mean_ptr,  # (N, C)
    var_ptr,  # (N, C)
    mode_mean_ptr,  # (N, K)
    mode_var_ptr,  # (N, K)
    log_mass_ptr,  # (N, K)
    gate_weight_ptr,  # (K,)
    gate_bias_ptr,  # (K,)
    weight_ptr,  # (C,)
    extra_ptr,  # (N, C, K), the gradient of the gates as an output
    dscale_ptr,  # A, (N, C)
    dshift_ptr,  # D, (N, C)
    scale_ptr,  # (N, C), as in the forward
    slope_ptr,  # (N, C), 2 dv / L
    offset_ptr,  # (N, C), dm / L
    dgate_ptr,  # (N, 2, K), each sample's share of the gradients of gate_weight and gate_bias
    num_channels,
    num_modes,
    num_positions,
    eps,
    PIXEL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # after the launch that sums A and D
    sample = tl.program_id(0)
    channels = tl.arange(0, BLOCK_C)
    mask = channels < num_channels
    offs = sample * num_channels + channels
    mean = tl.load(mean_ptr + offs, mask=mask, other=0.0)
    var = _load_channels(var_ptr + sample * num_channels, channels, mask, PIXEL, 0.0)
    weight = _load_channels(weight_ptr, channels, mask, HAS_WEIGHT, 1.0) / num_modes
    largest, total = _softmax_terms(mean, gate_weight_ptr, gate_bias_ptr, num_modes)
    begin(OVERLAPS)
    dscale = tl.load(dscale_ptr + offs, mask=mask, other=0.0)
    dshift = tl.load(dshift_ptr + offs, mask=mask, other=0.0)
    e = tl.sum(weight * dshift, 0)
    scale = tl.zeros([BLOCK_C], tl.float32)
    slope = tl.zeros([BLOCK_C], tl.float32)
    offset = tl.zeros([BLOCK_C], tl.float32)
    dot = tl.zeros([BLOCK_C], tl.float32)
    for k in range(num_modes):
        logs = _log_gates(mean, gate_weight_ptr, gate_bias_ptr, k, largest, total, mask)
        mode_mean = tl.load(mode_mean_ptr + sample * num_modes + k)
        weights, dlogs, u, s, inverse = _mode_gradients(
            logs, mean, var, mode_mean, mode_var_ptr, log_mass_ptr, weight, dscale, dshift, e,
            sample * num_modes + k, eps,
        )  # fmt: skip
        if HAS_EXTRA:
            extra = tl.load(extra_ptr + offs * num_modes + k, mask=mask, other=0.0)
            dlogs += tl.exp(logs) * extra
        scale += weight * inverse
        slope += weights * s
        offset += weights * (u + 2.0 * s * (mean - mode_mean))
        dot += dlogs
    for k in range(num_modes):
        logs = _log_gates(mean, gate_weight_ptr, gate_bias_ptr, k, largest, total, mask)
        mode_mean = tl.load(mode_mean_ptr + sample * num_modes + k)
        weights, dlogs, u, s, inverse = _mode_gradients(
            logs, mean, var, mode_mean, mode_var_ptr, log_mass_ptr, weight, dscale, dshift, e,
            sample * num_modes + k, eps,
        )  # fmt: skip
        if HAS_EXTRA:
            extra = tl.load(extra_ptr + offs * num_modes + k, mask=mask, other=0.0)
            dlogs += tl.exp(logs) * extra
        dlogits = dlogs - tl.exp(logs) * dot
        offset += dlogits * tl.load(gate_weight_ptr + k)
        tl.store(dgate_ptr + sample * 2 * num_modes + k, tl.sum(dlogits * mean, 0))
        tl.store(dgate_ptr + (sample * 2 + 1) * num_modes + k, tl.sum(dlogits, 0))
    tl.store(scale_ptr + offs, scale, mask=mask)
    if PIXEL:
        tl.store(slope_ptr + offs, slope * (2.0 / num_positions), mask=mask)
    tl.store(offset_ptr + offs, offset / num_positions, mask=mask)


@triton.jit
def _mode_gradients(
    logs,
    mean,
    var,
    mode_mean,
    mode_var_ptr,
    log_mass_ptr,
    weight,
    dscale,
    dshift,
    e,
    place,
    eps,
):
    """One mode's weights g/C, the gradient of its gates' logarithms, dL/dμ, dL/dσ², and 1/σ."""
    mode_var = tl.load(mode_var_ptr + place)
    weights = tl.exp(logs - tl.load(log_mass_ptr + place))
    inverse = tl.rsqrt(mode_var + eps)
    apart = mean - mode_mean
    r = tl.sum(weight * (dscale + dshift * apart), 0)
    u = -inverse * e
    s = -0.5 * inverse * inverse * inverse * r
    dlogs = weights * (u * apart + s * (var + apart * apart - mode_var))
    return weights, dlogs, u, s, inverse


@triton.jit
def _parameters_kernel(
    mean_ptr,  # (N, C)
    mode_mean_ptr,  # (N, K)
    mode_var_ptr,  # (N, K)
    dscale_ptr,  # A, (N, C)
    dshift_ptr,  # D, (N, C)
    dgate_parts_ptr,  # (N, 2 K)
    dweight_ptr,  # (C,)
    dbias_ptr,  # (C,)
    dgate_weight_ptr,  # (K,)
    dgate_bias_ptr,  # (K,)
    num_samples,
    num_channels,
    num_modes,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Sums over the samples: of a block of channels or, in the last programs, of the gate's."""
    begin(OVERLAPS)
    num_blocks = tl.cdiv(num_channels, BLOCK_C)
    block = tl.program_id(0)
    columns = tl.arange(0, BLOCK_C)
    if block < num_blocks:
        channels = block * BLOCK_C + columns
        mask_c = channels < num_channels
        weights = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
        biases = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
        for start in range(0, num_samples, BLOCK_N):
            samples = start + tl.arange(0, BLOCK_N)
            mask_n = samples < num_samples
            mask = mask_n[:, None] & mask_c[None, :]
            offs = samples[:, None] * num_channels + channels[None, :]
            dshift = tl.load(dshift_ptr + offs, mask=mask, other=0.0)
            biases += dshift
            if HAS_WEIGHT:
                mean = tl.load(mean_ptr + offs, mask=mask, other=0.0)
                dscale = tl.load(dscale_ptr + offs, mask=mask, other=0.0)
                for k in range(num_modes):
                    at = samples * num_modes + k
                    mode_mean = tl.load(mode_mean_ptr + at, mask=mask_n, other=0.0)[:, None]
                    mode_var = tl.load(mode_var_ptr + at, mask=mask_n, other=1.0)[:, None]
                    weights += tl.rsqrt(mode_var + eps) * (dscale + dshift * (mean - mode_mean))
        if HAS_WEIGHT:
            tl.store(dweight_ptr + channels, tl.sum(weights, 0) / num_modes, mask=mask_c)
        if HAS_BIAS:
            tl.store(dbias_ptr + channels, tl.sum(biases, 0), mask=mask_c)
    else:
        gates = (block - num_blocks) * BLOCK_C + columns
        mask_g = gates < 2 * num_modes
        sums = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
        for start in range(0, num_samples, BLOCK_N):
            samples = start + tl.arange(0, BLOCK_N)
            mask = (samples < num_samples)[:, None] & mask_g[None, :]
            offs = samples[:, None] * 2 * num_modes + gates[None, :]
            sums += tl.load(dgate_parts_ptr + offs, mask=mask, other=0.0)
        found, later = tl.sum(sums, 0), gates - num_modes
        tl.store(dgate_weight_ptr + gates, found, mask=later < 0)
        tl.store(dgate_bias_ptr + later, found, mask=mask_g & (later >= 0))


class ChannelMixing:
    """The launches of the mixing for one set of sizes and options.

    Args:
        num_samples: N.
        num_channels: C.
        num_positions: L.
        num_modes: K.
        eps: added to the variances.
        pixel: take variances over all values, not over the channels' averages.
        affine: which affine parameters there are, none of them per mode.
        direct: see `Launch`.
    """

    def __init__(
        self,
        num_samples: int,
        num_channels: int,
        num_positions: int,
        num_modes: int,
        eps: float,
        pixel: bool,
        affine: AffineKind,
        direct: bool,
    ) -> None:
        channels = triton.next_power_of_2(num_channels)
        num_warps = min(8, max(1, channels // 128))
        sizes = (num_channels, num_modes)
        self.forward, self.forward_with_gates = (
            Launch(
                _forward_kernel,
                (num_samples,),
                (*sizes, eps),
                (with_gates, pixel, affine.weight, affine.bias, channels),
                num_warps,
                direct,
            )
            for with_gates in (False, True)
        )
        self.backward, self.backward_extra = (
            Launch(
                _backward_kernel,
                (num_samples,),
                (*sizes, num_positions, eps),
                (pixel, affine.weight, extra, channels),
                num_warps,
                direct,
            )
            for extra in (False, True)
        )
        block = min(channels, 16 if num_channels <= 1024 else 32)
        walk = min(triton.next_power_of_2(num_samples), 4096 // block)
        programs = triton.cdiv(num_channels, block) + triton.cdiv(2 * num_modes, block)
        self.parameters = Launch(
            _parameters_kernel,
            (programs,),
            (num_samples, *sizes, eps),
            (affine.weight, affine.bias, walk, block),
            8,
            direct,
        )
