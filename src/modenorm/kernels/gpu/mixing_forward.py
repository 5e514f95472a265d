"""Forward of mode normalization's mixing on the GPU, in Triton: gates, statistics, coefficients."""

from __future__ import annotations

import triton
import triton.language as tl

from modenorm.kernels.gpu.common import TINY, begin, load_rows

__all__ = ["coefficients_kernel", "gates_kernel", "moved_estimates", "statistics_kernel"]


@triton.jit
def gates_kernel(
    mean_ptr,  # (N, C)
    var_ptr,  # (N, C)
    gate_weight_ptr,  # (K, C)
    gate_bias_ptr,  # (K,)
    gates_ptr,  # (N, K), written if HAS_GATE, else read
    finite_ptr,  # (N,), 1.0 or 0.0
    num_channels,
    num_modes,
    HAS_GATE: tl.constexpr,
    SINGLE: tl.constexpr,  # one tile holds all channels
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """softmax(W m + b) of one sample, and whether gates and its part of variances are finite.

    After the launch of the moments.
    """
    sample = tl.program_id(0)
    modes = tl.arange(0, BLOCK_K)
    mask_k = modes < num_modes
    gates_ptrs = gates_ptr + sample * num_modes + modes
    if HAS_GATE and SINGLE:
        channels = tl.arange(0, BLOCK_C)
        mask_c = channels < num_channels
        weight = load_rows(gate_weight_ptr, modes, channels, mask_k, mask_c, num_channels)
    begin(OVERLAPS)
    if HAS_GATE:
        bias = tl.load(gate_bias_ptr + modes, mask=mask_k, other=0.0)
    else:
        gates = tl.load(gates_ptrs, mask=mask_k, other=0.0)
    sums = tl.zeros([BLOCK_K, BLOCK_C], tl.float32)
    bad = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, num_channels, BLOCK_C):
        channels = start + tl.arange(0, BLOCK_C)
        mask_c = channels < num_channels
        mean = tl.load(mean_ptr + sample * num_channels + channels, mask=mask_c, other=0.0)
        var = tl.load(var_ptr + sample * num_channels + channels, mask=mask_c, other=0.0)
        most = (4.0 * mean * mean + var) * tl.num_programs(0)  # of the sums in statistics_kernel
        bad += tl.where(most < float("inf"), 0.0, 1.0)
        if HAS_GATE:
            if not SINGLE:
                offs = modes[:, None] * num_channels + channels[None, :]
                mask = mask_k[:, None] & mask_c[None, :]
                weight = tl.load(gate_weight_ptr + offs, mask=mask, other=0.0)
            sums += weight * mean[None, :]
    if HAS_GATE:
        logits = tl.sum(sums, 1) + bias
        logits = tl.where(mask_k, logits, float("-inf"))
        powers = tl.exp(logits - tl.max(logits, 0))
        gates = powers / tl.sum(powers, 0)
        tl.store(gates_ptrs, gates, mask=mask_k)
    bad_gates = tl.where(tl.abs(gates) < float("inf"), 0.0, 1.0)
    finite = tl.sum(bad, 0) + tl.sum(bad_gates, 0) == 0.0
    tl.store(finite_ptr + sample, tl.where(finite, 1.0, 0.0))


@triton.jit
def statistics_kernel(
    mean_ptr,  # (N, C)
    var_ptr,  # (N, C)
    gates_ptr,  # (N, K)
    finite_ptr,  # (N,)
    running_mean_ptr,  # (K, C)
    running_var_ptr,  # (K, C)
    tracked_ptr,  # ()
    running_share_ptr,  # (K,)
    mode_mean_ptr,  # (K, C)
    mode_var_ptr,  # (K, C)
    mass_ptr,  # (K,)
    usage_ptr,  # (K,), the mass over N
    num_samples,
    num_channels,
    num_modes,
    momentum,
    UPDATE: tl.constexpr,
    USAGE: tl.constexpr,
    HAS_TRACKED: tl.constexpr,
    HAS_SHARE: tl.constexpr,
    HAS_USAGE: tl.constexpr,
    CHAINED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Mean and variance of one mode in a block of channels, and its running update.

    If CHAINED, after the launch of the gates.
    """
    begin(OVERLAPS and not CHAINED)
    mode = tl.program_id(1)
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = channels < num_channels
    samples = tl.arange(0, BLOCK_N)
    offs = mode * num_channels + channels
    if UPDATE:
        old_mean = tl.load(running_mean_ptr + offs, mask=mask_c, other=0.0)
        old_var = tl.load(running_var_ptr + offs, mask=mask_c, other=0.0)
    # the first tile, often the only one, is kept for the second sum
    mask_n = samples < num_samples
    mean = load_rows(mean_ptr, samples, channels, mask_n, mask_c, num_channels)
    var = load_rows(var_ptr, samples, channels, mask_n, mask_c, num_channels)
    begin(OVERLAPS and CHAINED)
    gates, finites = _of_samples(
        samples, mode, gates_ptr, finite_ptr, num_samples, num_modes, UPDATE
    )
    masses = gates
    sums = gates[:, None] * mean
    for start in range(BLOCK_N, num_samples, BLOCK_N):
        mask_n = start + samples < num_samples
        means = load_rows(mean_ptr, start + samples, channels, mask_n, mask_c, num_channels)
        more, flags = _of_samples(
            start + samples, mode, gates_ptr, finite_ptr, num_samples, num_modes, UPDATE
        )
        masses += more
        sums += more[:, None] * means
        finites = tl.minimum(finites, flags)
    mass = tl.sum(masses, 0)
    divisor = tl.maximum(mass, TINY)
    mode_mean = tl.sum(sums, 0) / divisor
    apart = mean - mode_mean[None, :]
    sums = gates[:, None] * (var + apart * apart)
    for start in range(BLOCK_N, num_samples, BLOCK_N):
        mask_n = start + samples < num_samples
        means = load_rows(mean_ptr, start + samples, channels, mask_n, mask_c, num_channels)
        more, _ = _of_samples(
            start + samples, mode, gates_ptr, finite_ptr, num_samples, num_modes, False
        )
        variances = load_rows(var_ptr, start + samples, channels, mask_n, mask_c, num_channels)
        apart = means - mode_mean[None, :]
        sums += more[:, None] * (variances + apart * apart)
    mode_var = tl.sum(sums, 0) / divisor
    tl.store(mode_mean_ptr + offs, mode_mean, mask=mask_c)
    tl.store(mode_var_ptr + offs, mode_var, mask=mask_c)
    tl.store(mass_ptr + mode, mass)
    if HAS_USAGE:
        tl.store(usage_ptr + mode, mass / num_samples)
    if UPDATE:
        finite = tl.min(finites, 0)
        rate = momentum
        if USAGE:
            rate = momentum * (mass / num_samples)
        moves = mask_c & (tl.full([BLOCK_C], 1.0, tl.float32) * (mass * finite) >= TINY)
        new_mean, new_var = moved_estimates(old_mean, old_var, mode_mean, mode_var, rate)
        tl.store(running_var_ptr + offs, new_var, mask=moves)
        tl.store(running_mean_ptr + offs, new_mean, mask=moves)
        if tl.program_id(0) == 0:
            if HAS_TRACKED and mode == 0:
                tl.store(tracked_ptr, tl.load(tracked_ptr) + finite.to(tl.int64))
            if HAS_SHARE and mass * finite >= TINY:
                share = tl.load(running_share_ptr + mode) + mass / num_samples
                tl.store(running_share_ptr + mode, share)


@triton.jit
def moved_estimates(old_mean, old_var, mode_mean, mode_var, rate):
    """Running estimates that have moved to a batch's statistics by so much of the way."""
    step = mode_mean - old_mean
    new_var = (1.0 - rate) * old_var + rate * mode_var + rate * (1.0 - rate) * step * step
    return old_mean + rate * step, new_var


@triton.jit
def _of_samples(samples, mode, gates_ptr, finite_ptr, num_samples, num_modes, FLAGS: tl.constexpr):
    """Gates of a mode, and flags of finite samples."""
    mask_n = samples < num_samples
    gates = tl.load(gates_ptr + samples * num_modes + mode, mask=mask_n, other=0.0)
    flags = tl.full(samples.shape, 1.0, tl.float32)
    if FLAGS:
        flags = tl.load(finite_ptr + samples, mask=mask_n, other=1.0)
    return gates, flags


@triton.jit
def _add_mode(
    scale,
    shift,
    mean,
    samples,
    channels,
    mask_n,
    mask_c,
    mode,
    gates_ptr,
    mode_mean_ptr,
    mode_var_ptr,
    weight_ptr,
    bias_ptr,
    num_channels,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_MODE: tl.constexpr,
    NUM_MODES: tl.constexpr,
):
    """Scale and shift with one more mode's part."""
    offs = mode * num_channels + channels
    affine = offs if PER_MODE else channels
    gates = tl.load(gates_ptr + samples * NUM_MODES + mode, mask=mask_n, other=0.0)[:, None]
    mode_mean = tl.load(mode_mean_ptr + offs, mask=mask_c, other=0.0)
    inverse = tl.rsqrt(tl.load(mode_var_ptr + offs, mask=mask_c, other=1.0) + eps)
    if HAS_WEIGHT:
        inverse *= tl.load(weight_ptr + affine, mask=mask_c, other=0.0)
    term = gates * inverse
    shift += term * (mean - mode_mean)
    if HAS_BIAS and PER_MODE:
        shift += gates * tl.load(bias_ptr + affine, mask=mask_c, other=0.0)
    return scale + term, shift


@triton.jit
def coefficients_kernel(
    mean_ptr,  # (N, C)
    gates_ptr,  # (N, K)
    mode_mean_ptr,  # (K, C)
    mode_var_ptr,  # (K, C)
    weight_ptr,  # (C,) or (K, C)
    bias_ptr,  # (C,) or (K, C)
    scale_ptr,  # (N, C)
    shift_ptr,  # (N, C)
    num_samples,
    num_channels,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_MODE: tl.constexpr,
    CHAINED: tl.constexpr,
    NUM_MODES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Scale and shift of a block of samples and channels.

    If CHAINED, after the launch of the statistics, or of the gates of an evaluation.
    """
    begin(OVERLAPS and not CHAINED)
    samples = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    mask_n, mask_c = samples < num_samples, channels < num_channels
    offs, mask = samples[:, None] * num_channels + channels, mask_n[:, None] & mask_c
    mean = tl.load(mean_ptr + offs, mask=mask, other=0.0)
    scale = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    shift = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    if HAS_BIAS and not PER_MODE:
        shift += tl.load(bias_ptr + channels, mask=mask_c, other=0.0)
    begin(OVERLAPS and CHAINED)
    if NUM_MODES <= 8:
        for mode in tl.static_range(NUM_MODES):
            scale, shift = _add_mode(
                scale, shift, mean, samples, channels, mask_n, mask_c, mode,
                gates_ptr, mode_mean_ptr, mode_var_ptr, weight_ptr, bias_ptr,
                num_channels, eps, HAS_WEIGHT, HAS_BIAS, PER_MODE, NUM_MODES,
            )  # fmt: skip
    else:
        for mode in range(NUM_MODES):
            scale, shift = _add_mode(
                scale, shift, mean, samples, channels, mask_n, mask_c, mode,
                gates_ptr, mode_mean_ptr, mode_var_ptr, weight_ptr, bias_ptr,
                num_channels, eps, HAS_WEIGHT, HAS_BIAS, PER_MODE, NUM_MODES,
            )  # fmt: skip
    tl.store(scale_ptr + offs, scale, mask=mask)
    tl.store(shift_ptr + offs, shift, mask=mask)
