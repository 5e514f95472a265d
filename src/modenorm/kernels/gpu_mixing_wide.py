"""`samples_backward_kernel` in two launches, for more modes and channels than one tile holds.

There a program reads all modes' lines twice, for one sample. Here it reads those of a block of
channels, for several samples: sums over the channels are parts first, and added up by whoever needs
them. Letters and formulas as in docs/math.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from modenorm.kernels.gpu_arrays import begin

__all__ = ["gate_parts_kernel", "sample_lines_kernel"]


@triton.jit
def gate_parts_kernel(
    mean_ptr,  # (N, C)
    var_ptr,  # (N, C)
    mode_mean_ptr,  # (K, C)
    mode_var_ptr,  # (K, C)
    u_ptr,  # (K, C)
    s_ptr,  # (K, C)
    weight_ptr,  # (C,) or (K, C)
    bias_ptr,  # (C,) or (K, C)
    dscale_ptr,  # A, (N, C)
    dshift_ptr,  # D, (N, C)
    parts_ptr,  # (N, K, blocks of channels)
    num_samples,
    num_channels,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_MODE: tl.constexpr,
    NUM_MODES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """A block of channels' part of the gradients of some samples' gates."""
    begin(OVERLAPS)
    samples = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    mask_n, mask_c = samples < num_samples, channels < num_channels
    offs, mask = samples[:, None] * num_channels + channels, mask_n[:, None] & mask_c
    mean = tl.load(mean_ptr + offs, mask=mask, other=0.0)
    var = tl.load(var_ptr + offs, mask=mask, other=0.0)
    dscale = tl.load(dscale_ptr + offs, mask=mask, other=0.0)
    dshift = tl.load(dshift_ptr + offs, mask=mask, other=0.0)
    for mode in tl.static_range(NUM_MODES):
        lines = mode * num_channels + channels
        affine = lines if PER_MODE else channels
        mode_mean = tl.load(mode_mean_ptr + lines, mask=mask_c, other=0.0)
        mode_var = tl.load(mode_var_ptr + lines, mask=mask_c, other=0.0)
        u = tl.load(u_ptr + lines, mask=mask_c, other=0.0)
        s = tl.load(s_ptr + lines, mask=mask_c, other=0.0)
        inverse = tl.rsqrt(mode_var + eps)
        if HAS_WEIGHT:
            inverse *= tl.load(weight_ptr + affine, mask=mask_c, other=0.0)
        apart = mean - mode_mean
        terms = inverse * (dscale + dshift * apart) + u * apart
        terms += s * (var + apart * apart - mode_var)
        if HAS_BIAS and PER_MODE:
            terms += dshift * tl.load(bias_ptr + affine, mask=mask_c, other=0.0)
        places = (samples * NUM_MODES + mode) * tl.num_programs(1) + tl.program_id(1)
        tl.store(parts_ptr + places, tl.sum(terms, 1), mask=mask_n)


@triton.jit
def sample_lines_kernel(
    mean_ptr,  # (N, C)
    gates_ptr,  # (N, K)
    mode_mean_ptr,  # (K, C)
    mode_var_ptr,  # (K, C)
    u_ptr,  # (K, C)
    s_ptr,  # (K, C)
    weight_ptr,  # (C,) or (K, C)
    gate_weight_ptr,  # (K, C)
    dused_ptr,  # (N, K), the gradient of the gates as an output
    dusage_ptr,  # (K,), the gradient of the usage as an output
    parts_ptr,  # (N, K, blocks of channels)
    slope_ptr,  # (N, C), 2 dv / L
    offset_ptr,  # (N, C), dm / L
    scale_ptr,  # (N, C), as in the forward
    dlogits_ptr,  # (N, K); the gradient of the gates if they were given
    num_samples,
    num_channels,
    num_positions,
    eps,
    HAS_WEIGHT: tl.constexpr,
    PER_MODE: tl.constexpr,
    HAS_GATE: tl.constexpr,
    OF_GATES: tl.constexpr,
    OF_USAGE: tl.constexpr,
    NUM_MODES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The gates' gradients of some samples, then their moments' as the coefficients of dx."""
    begin(OVERLAPS)
    samples = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    mask_n, mask_c = samples < num_samples, channels < num_channels
    offs, mask = samples[:, None] * num_channels + channels, mask_n[:, None] & mask_c
    mean = tl.load(mean_ptr + offs, mask=mask, other=0.0)
    dlogits = _dlogits(
        samples, mask_n, gates_ptr, dused_ptr, dusage_ptr, parts_ptr, num_samples, HAS_GATE,
        OF_GATES, OF_USAGE, NUM_MODES, BLOCK_K, BLOCK_PARTS, BLOCK_N,
    )  # fmt: skip
    modes = tl.arange(0, BLOCK_K)[None, :]
    if tl.program_id(1) == 0:
        places = dlogits_ptr + samples[:, None] * NUM_MODES + modes
        tl.store(places, dlogits, mask=mask_n[:, None] & (modes < NUM_MODES))
    scale = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    slope = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    offset = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    for mode in tl.static_range(NUM_MODES):
        lines = mode * num_channels + channels
        gates = tl.load(gates_ptr + samples * NUM_MODES + mode, mask=mask_n, other=0.0)[:, None]
        mode_mean = tl.load(mode_mean_ptr + lines, mask=mask_c, other=0.0)
        inverse = tl.rsqrt(tl.load(mode_var_ptr + lines, mask=mask_c, other=0.0) + eps)
        u = tl.load(u_ptr + lines, mask=mask_c, other=0.0)
        s = tl.load(s_ptr + lines, mask=mask_c, other=0.0)
        if HAS_WEIGHT:
            affine = lines if PER_MODE else channels
            inverse *= tl.load(weight_ptr + affine, mask=mask_c, other=0.0)
        scale += gates * inverse
        slope += gates * s
        offset += gates * (u + 2.0 * s * (mean - mode_mean))
        if HAS_GATE:
            dlogit = tl.sum(tl.where(modes == mode, dlogits, 0.0), 1)[:, None]
            offset += dlogit * tl.load(gate_weight_ptr + lines, mask=mask_c, other=0.0)
    tl.store(scale_ptr + offs, scale, mask=mask)
    tl.store(slope_ptr + offs, slope * (2.0 / num_positions), mask=mask)
    tl.store(offset_ptr + offs, offset / num_positions, mask=mask)


@triton.jit
def _dlogits(
    samples,
    mask_n,
    gates_ptr,
    dused_ptr,
    dusage_ptr,
    parts_ptr,
    num_samples,
    HAS_GATE: tl.constexpr,
    OF_GATES: tl.constexpr,
    OF_USAGE: tl.constexpr,
    NUM_MODES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The gradients of the logits, (samples, K); of the gates if they were given."""
    modes = tl.arange(0, BLOCK_K)[None, :]
    offs, mask = samples[:, None] * NUM_MODES + modes, mask_n[:, None] & (modes < NUM_MODES)
    rows = tl.reshape(offs, [BLOCK_N * BLOCK_K])[:, None]
    known = tl.reshape(mask, [BLOCK_N * BLOCK_K])[:, None]
    blocks, count = tl.arange(0, BLOCK_PARTS)[None, :], tl.num_programs(1)
    parts = tl.load(parts_ptr + rows * count + blocks, mask=known & (blocks < count), other=0.0)
    gates = tl.load(gates_ptr + offs, mask=mask, other=0.0)
    dgates = tl.reshape(tl.sum(parts, 1), [BLOCK_N, BLOCK_K])
    if OF_GATES:
        dgates += tl.load(dused_ptr + offs, mask=mask, other=0.0)
    if OF_USAGE:
        dusage = tl.load(dusage_ptr + modes, mask=modes < NUM_MODES, other=0.0)
        dgates += dusage / num_samples
    if HAS_GATE:
        dgates = gates * (dgates - tl.sum(gates * dgates, 1)[:, None])
    return dgates
