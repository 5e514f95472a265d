"""Backward of mode normalization's mixing on the GPU, in Triton: modes, samples, parameters.

Letters and formulas as in docs/math.md: A and D are the gradients of scale and shift, T, E, U, S
their sums per mode.
"""

from __future__ import annotations

import triton
import triton.language as tl

from modenorm.kernels.gpu.common import (
    TINY,
    begin,
    load_rows,
)

__all__ = [
    "modes_backward_kernel",
    "parameters_backward_kernel",
    "samples_backward_kernel",
    "store_mode_gradients",
]


@triton.jit
def modes_backward_kernel(
    mean_ptr,  # (N, C)
    gates_ptr,  # (N, K)
    mode_mean_ptr,  # (K, C)
    mode_var_ptr,  # (K, C)
    mass_ptr,  # (K,)
    weight_ptr,  # (C,) or (K, C)
    dscale_ptr,  # A, (N, C)
    dshift_ptr,  # D, (N, C)
    u_ptr,  # (K, C), dL/dμ over N_k
    s_ptr,  # (K, C), dL/dσ² over N_k
    dweights_ptr,  # (K, C), each mode's share of the weight's gradient
    dbias_ptr,  # (C,) or (K, C)
    num_samples,
    num_channels,
    num_modes,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_MODE: tl.constexpr,
    CHAINED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Gradients of one mode's statistics in a block of channels.

    If CHAINED, after the launch that sums A and D.
    """
    begin(OVERLAPS and not CHAINED)
    mode = tl.program_id(1)
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = channels < num_channels
    offs_kc = mode * num_channels + channels
    mode_mean = tl.load(mode_mean_ptr + offs_kc, mask=mask_c, other=0.0)
    mode_var = tl.load(mode_var_ptr + offs_kc, mask=mask_c, other=1.0)
    divisor = tl.maximum(tl.load(mass_ptr + mode), TINY)
    weight = 1.0
    if HAS_WEIGHT:
        offs = offs_kc if PER_MODE else channels
        weight = tl.load(weight_ptr + offs, mask=mask_c, other=0.0)
    # the first tile is often the only one
    samples = tl.arange(0, BLOCK_N)
    mask_n = samples < num_samples
    mean = load_rows(mean_ptr, samples, channels, mask_n, mask_c, num_channels)
    gates = tl.load(gates_ptr + samples * num_modes + mode, mask=mask_n, other=0.0)[:, None]
    begin(OVERLAPS and CHAINED)
    dscale = load_rows(dscale_ptr, samples, channels, mask_n, mask_c, num_channels)
    sums_d = load_rows(dshift_ptr, samples, channels, mask_n, mask_c, num_channels)
    sums_t = gates * (dscale + sums_d * (mean - mode_mean[None, :]))
    sums_e = gates * sums_d
    for start in range(BLOCK_N, num_samples, BLOCK_N):
        samples = start + tl.arange(0, BLOCK_N)
        mask_n = samples < num_samples
        mean = load_rows(mean_ptr, samples, channels, mask_n, mask_c, num_channels)
        dscale = load_rows(dscale_ptr, samples, channels, mask_n, mask_c, num_channels)
        dshift = load_rows(dshift_ptr, samples, channels, mask_n, mask_c, num_channels)
        gates = tl.load(gates_ptr + samples * num_modes + mode, mask=mask_n, other=0.0)[:, None]
        sums_t += gates * (dscale + dshift * (mean - mode_mean[None, :]))
        sums_e += gates * dshift
        sums_d += dshift
    t, e = tl.sum(sums_t, 0), tl.sum(sums_e, 0)
    store_mode_gradients(
        u_ptr, s_ptr, dweights_ptr, offs_kc, mask_c, t, e,
        tl.rsqrt(mode_var + eps), weight, divisor, HAS_WEIGHT,
    )  # fmt: skip
    if HAS_BIAS:
        if PER_MODE:
            tl.store(dbias_ptr + offs_kc, e, mask=mask_c)
        elif mode == 0:
            tl.store(dbias_ptr + channels, tl.sum(sums_d, 0), mask=mask_c)


@triton.jit
def store_mode_gradients(
    u_ptr,
    s_ptr,
    dweights_ptr,
    offs,
    mask,
    t,
    e,
    inverse,
    weight,
    divisor,
    HAS_WEIGHT: tl.constexpr,
):
    """What follows from T and E."""
    scaled = inverse
    if HAS_WEIGHT:
        tl.store(dweights_ptr + offs, inverse * t, mask=mask)
        scaled = inverse * weight
    tl.store(u_ptr + offs, -scaled * e / divisor, mask=mask)
    tl.store(s_ptr + offs, -0.5 * scaled * inverse * inverse * t / divisor, mask=mask)


@triton.jit
def samples_backward_kernel(
    mean_ptr,  # (N, C)
    var_ptr,  # (N, C)
    gates_ptr,  # (N, K)
    mode_mean_ptr,  # (K, C)
    mode_var_ptr,  # (K, C)
    u_ptr,  # (K, C)
    s_ptr,  # (K, C)
    weight_ptr,  # (C,) or (K, C)
    bias_ptr,  # (C,) or (K, C)
    gate_weight_ptr,  # (K, C)
    dused_ptr,  # (N, K), the gradient of the gates as an output
    dusage_ptr,  # (K,), the gradient of the usage as an output
    dscale_ptr,  # A, (N, C); becomes the slope, 2 dv / L
    dshift_ptr,  # D, (N, C); becomes the offset, dm / L
    scale_ptr,  # (N, C), as in the forward
    dlogits_ptr,  # (N, K); the gradient of the gates if they were given
    num_channels,
    num_modes,
    num_positions,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_MODE: tl.constexpr,
    HAS_GATE: tl.constexpr,
    OF_GATES: tl.constexpr,
    OF_USAGE: tl.constexpr,
    CHAINED: tl.constexpr,
    SINGLE: tl.constexpr,  # one tile holds all channels
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One sample's gate gradients, then its moments' gradients as the coefficients of dx.

    If CHAINED, after the launch of the modes' gradients.
    """
    begin(OVERLAPS and not CHAINED)
    sample = tl.program_id(0)
    modes = tl.arange(0, BLOCK_K)
    mask_k = modes < num_modes
    gates = tl.load(gates_ptr + sample * num_modes + modes, mask=mask_k, other=0.0)
    if OF_USAGE:
        dusage = tl.load(dusage_ptr + modes, mask=mask_k, other=0.0)
    mean_ptr += sample * num_channels
    var_ptr += sample * num_channels
    dscale_ptr += sample * num_channels
    dshift_ptr += sample * num_channels
    scale_ptr += sample * num_channels
    channels = tl.arange(0, BLOCK_C)
    terms, scale, slope, pull = _of_tile(
        channels, modes, mask_k, gates, mean_ptr, var_ptr, mode_mean_ptr, mode_var_ptr, u_ptr,
        s_ptr, weight_ptr, bias_ptr, dscale_ptr, dshift_ptr, num_channels, eps,
        HAS_WEIGHT, HAS_BIAS, PER_MODE, OVERLAPS and CHAINED,
    )  # fmt: skip
    if not SINGLE:
        tl.debug_barrier()  # A and D have been read
        _store_lines(
            channels, scale, slope, pull, scale_ptr, dscale_ptr, dshift_ptr, num_channels,
            num_positions,
        )  # fmt: skip
        for start in range(BLOCK_C, num_channels, BLOCK_C):
            found, scale, slope, pull = _of_tile(
                start + channels, modes, mask_k, gates, mean_ptr, var_ptr, mode_mean_ptr,
                mode_var_ptr, u_ptr, s_ptr, weight_ptr, bias_ptr, dscale_ptr, dshift_ptr,
                num_channels, eps, HAS_WEIGHT, HAS_BIAS, PER_MODE, False,
            )  # fmt: skip
            terms += found
            tl.debug_barrier()
            _store_lines(
                start + channels, scale, slope, pull, scale_ptr, dscale_ptr, dshift_ptr,
                num_channels, num_positions,
            )  # fmt: skip
    dgates = tl.sum(terms, 1)
    if OF_GATES:
        dgates += tl.load(dused_ptr + sample * num_modes + modes, mask=mask_k, other=0.0)
    if OF_USAGE:
        dgates += dusage / tl.num_programs(0)
    dlogits = dgates
    if HAS_GATE:
        dlogits = gates * (dgates - tl.sum(gates * dgates, 0))
    tl.store(dlogits_ptr + sample * num_modes + modes, dlogits, mask=mask_k)
    if SINGLE:
        if HAS_GATE:
            pull += _by_gate(channels, modes, mask_k, dlogits, gate_weight_ptr, num_channels)
        _store_lines(
            channels, scale, slope, pull, scale_ptr, dscale_ptr, dshift_ptr, num_channels,
            num_positions,
        )  # fmt: skip
    elif HAS_GATE:
        for start in range(0, num_channels, BLOCK_C):
            more = start + channels
            pull = _by_gate(more, modes, mask_k, dlogits, gate_weight_ptr, num_channels)
            offset = tl.load(dshift_ptr + more, mask=more < num_channels, other=0.0)
            tl.store(dshift_ptr + more, offset + pull / num_positions, mask=more < num_channels)


@triton.jit
def _store_lines(
    channels,
    scale,
    slope,
    pull,
    scale_ptr,
    dscale_ptr,
    dshift_ptr,
    num_channels,
    num_positions,
):
    """The coefficients of dx in some channels, two of them in place of A and D."""
    tl.store(scale_ptr + channels, scale, mask=channels < num_channels)
    tl.store(dscale_ptr + channels, slope * (2.0 / num_positions), mask=channels < num_channels)
    tl.store(dshift_ptr + channels, pull / num_positions, mask=channels < num_channels)


@triton.jit
def _of_tile(
    channels,
    modes,
    mask_k,
    gates,
    mean_ptr,
    var_ptr,
    mode_mean_ptr,
    mode_var_ptr,
    u_ptr,
    s_ptr,
    weight_ptr,
    bias_ptr,
    dscale_ptr,
    dshift_ptr,
    num_channels,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_MODE: tl.constexpr,
    WAITS: tl.constexpr,
):
    """Of some channels: terms of the gates' gradients (K, C), scale, dv, and dm but for the gate's.

    What comes to the mean through the gate is known only when all channels are summed.
    """
    mask_c = channels < num_channels
    offs = modes[:, None] * num_channels + channels[None, :]
    mask = mask_k[:, None] & mask_c[None, :]
    mode_mean = tl.load(mode_mean_ptr + offs, mask=mask, other=0.0)
    mode_var = tl.load(mode_var_ptr + offs, mask=mask, other=0.0)
    inverse = tl.rsqrt(mode_var + eps)
    if HAS_WEIGHT:
        if PER_MODE:
            inverse *= tl.load(weight_ptr + offs, mask=mask, other=0.0)
        else:
            inverse *= tl.load(weight_ptr + channels, mask=mask_c, other=0.0)[None, :]
    row, mask_row = channels[None, :], mask_c[None, :]
    apart = tl.load(mean_ptr + row, mask=mask_row, other=0.0) - mode_mean
    var = tl.load(var_ptr + row, mask=mask_row, other=0.0)
    dscale = tl.load(dscale_ptr + row, mask=mask_row, other=0.0)
    dshift = tl.load(dshift_ptr + row, mask=mask_row, other=0.0)
    begin(WAITS)
    u = tl.load(u_ptr + offs, mask=mask, other=0.0)
    s = tl.load(s_ptr + offs, mask=mask, other=0.0)
    terms = inverse * (dscale + dshift * apart) + u * apart + s * (var + apart * apart - mode_var)
    if HAS_BIAS and PER_MODE:
        terms += dshift * tl.load(bias_ptr + offs, mask=mask, other=0.0)
    scale = tl.sum(gates[:, None] * inverse, 0)
    slope = tl.sum(gates[:, None] * s, 0)
    return terms, scale, slope, tl.sum(gates[:, None] * (u + 2.0 * s * apart), 0)


@triton.jit
def _by_gate(channels, modes, mask_k, dlogits, gate_weight_ptr, num_channels):
    """What comes to the means of some channels through the gate."""
    offs = modes[:, None] * num_channels + channels[None, :]
    mask = mask_k[:, None] & (channels < num_channels)[None, :]
    weight = tl.load(gate_weight_ptr + offs, mask=mask, other=0.0)
    return tl.sum(dlogits[:, None] * weight, 0)


@triton.jit
def parameters_backward_kernel(
    mean_ptr,  # (N, C)
    dlogits_ptr,  # (N, K)
    dweights_ptr,  # (K, C)
    dgate_weight_ptr,  # (K, C)
    dgate_bias_ptr,  # (K,)
    dweight_ptr,  # (C,)
    num_samples,
    num_channels,
    num_modes,
    HAS_GATE: tl.constexpr,
    SUM_WEIGHTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The gate's parameters, one mode and a block of channels; the weight, summed over modes."""
    begin(OVERLAPS)
    mode = tl.program_id(1)
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = channels < num_channels
    if HAS_GATE:
        sums = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
        sums_b = tl.zeros([BLOCK_N], tl.float32)
        for start in range(0, num_samples, BLOCK_N):
            samples = start + tl.arange(0, BLOCK_N)
            mask_n = samples < num_samples
            mean = load_rows(mean_ptr, samples, channels, mask_n, mask_c, num_channels)
            dlogits = tl.load(dlogits_ptr + samples * num_modes + mode, mask=mask_n, other=0.0)
            sums += dlogits[:, None] * mean
            sums_b += dlogits
        offs_kc = mode * num_channels + channels
        tl.store(dgate_weight_ptr + offs_kc, tl.sum(sums, 0), mask=mask_c)
        tl.store(dgate_bias_ptr + mode, tl.sum(sums_b, 0))
    if SUM_WEIGHTS and mode == 0:
        modes = tl.arange(0, BLOCK_K)
        mask_k = modes < num_modes
        shares = load_rows(dweights_ptr, modes, channels, mask_k, mask_c, num_channels)
        tl.store(dweight_ptr + channels, tl.sum(shares, 0), mask=mask_c)
