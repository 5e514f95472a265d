"""Sums over samples for a few modes at once, in Triton: statistics, and the modes' backward.

As statistics_kernel and modes_backward_kernel, which take one mode a program, but a block of
channels, with all samples, is read once for a group of modes, whose sums cross warps together. For
many modes and channels, where reading it for every mode again takes longer than the sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from modenorm.kernels.gpu.common import TINY, begin, load_rows
from modenorm.kernels.gpu.mixing_backward import store_mode_gradients
from modenorm.kernels.gpu.mixing_forward import moved_estimates

__all__ = ["group_backward_kernel", "group_statistics_kernel"]


@triton.jit
def group_statistics_kernel(
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
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,  # all samples
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Means and variances of a group of modes in a block of channels, and their running update."""
    begin(OVERLAPS and not CHAINED)
    channels, modes, mask_c, mask_k, offs, mask = _places(num_channels, num_modes, GROUP, BLOCK_C)
    samples = tl.arange(0, BLOCK_N)
    mask_n = samples < num_samples
    if UPDATE:
        old_mean = tl.load(running_mean_ptr + offs, mask=mask, other=0.0)
        old_var = tl.load(running_var_ptr + offs, mask=mask, other=0.0)
    mean = load_rows(mean_ptr, samples, channels, mask_n, mask_c, num_channels)
    var = load_rows(var_ptr, samples, channels, mask_n, mask_c, num_channels)
    begin(OVERLAPS and CHAINED)
    if UPDATE:
        finite = tl.min(tl.load(finite_ptr + samples, mask=mask_n, other=1.0), 0)
    gates = _of_modes(gates_ptr + samples * num_modes, mask_n, 1, num_modes, GROUP)
    masses = _over_samples(gates, GROUP)
    mode_means = _over(_over_samples(_weighted(gates, mean, GROUP), GROUP), masses, GROUP)
    sums = _weighted_spread(gates, mean, var, mode_means, GROUP)
    mode_mean = _side_by_side(mode_means, GROUP)
    mode_var = _side_by_side(_over(_over_samples(sums, GROUP), masses, GROUP), GROUP)
    tl.store(mode_mean_ptr + offs, mode_mean, mask=mask)
    tl.store(mode_var_ptr + offs, mode_var, mask=mask)
    mass = _in_row(masses, GROUP)
    tl.store(mass_ptr + modes, mass, mask=mask_k)
    if HAS_USAGE:
        tl.store(usage_ptr + modes, mass / num_samples, mask=mask_k)
    if UPDATE:
        rate = tl.full([GROUP], 1.0, tl.float32) * momentum
        if USAGE:
            rate = momentum * (mass / num_samples)
        new_mean, new_var = moved_estimates(old_mean, old_var, mode_mean, mode_var, rate[None, :])
        enough = mass * finite >= TINY
        tl.store(running_var_ptr + offs, new_var, mask=mask & enough[None, :])
        tl.store(running_mean_ptr + offs, new_mean, mask=mask & enough[None, :])
        if tl.program_id(0) == 0:
            if HAS_TRACKED and tl.program_id(1) == 0:
                tl.store(tracked_ptr, tl.load(tracked_ptr) + finite.to(tl.int64))
            if HAS_SHARE:
                share = tl.load(running_share_ptr + modes, mask=mask_k, other=0.0)
                share += mass / num_samples
                tl.store(running_share_ptr + modes, share, mask=mask_k & enough)


@triton.jit
def group_backward_kernel(
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
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,  # all samples
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Gradients of the statistics of a group of modes in a block of channels."""
    begin(OVERLAPS and not CHAINED)
    channels, modes, mask_c, mask_k, offs, mask = _places(num_channels, num_modes, GROUP, BLOCK_C)
    mode_var = tl.load(mode_var_ptr + offs, mask=mask, other=1.0)
    divisor = tl.maximum(tl.load(mass_ptr + modes, mask=mask_k, other=1.0), TINY)[None, :]
    weight = 1.0
    if HAS_WEIGHT:
        if PER_MODE:
            weight = tl.load(weight_ptr + offs, mask=mask, other=0.0)
        else:
            weight = tl.load(weight_ptr + channels, mask=mask_c, other=0.0)[:, None]
    mode_means = _of_modes(mode_mean_ptr + channels, mask_c, num_channels, num_modes, GROUP)
    samples = tl.arange(0, BLOCK_N)
    mask_n = samples < num_samples
    mean = load_rows(mean_ptr, samples, channels, mask_n, mask_c, num_channels)
    gates = _of_modes(gates_ptr + samples * num_modes, mask_n, 1, num_modes, GROUP)
    begin(OVERLAPS and CHAINED)
    dscale = load_rows(dscale_ptr, samples, channels, mask_n, mask_c, num_channels)
    dshift = load_rows(dshift_ptr, samples, channels, mask_n, mask_c, num_channels)
    t = _weighted_pull(gates, mean, dscale, dshift, mode_means, GROUP)
    t, e = _pairs_over_samples(t, _weighted(gates, dshift, GROUP), GROUP)
    store_mode_gradients(
        u_ptr, s_ptr, dweights_ptr, offs, mask, _side_by_side(t, GROUP), _side_by_side(e, GROUP),
        tl.rsqrt(mode_var + eps), weight, divisor, HAS_WEIGHT,
    )  # fmt: skip
    if HAS_BIAS:
        if PER_MODE:
            tl.store(dbias_ptr + offs, _side_by_side(e, GROUP), mask=mask)
        elif tl.program_id(1) == 0:
            tl.store(dbias_ptr + channels, tl.sum(dshift, 0), mask=mask_c)


@triton.jit
def _places(num_channels, num_modes, GROUP: tl.constexpr, BLOCK_C: tl.constexpr):
    """This program's channels and modes, and their places in a (K, C) array, channels × modes."""
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    modes = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    mask_c, mask_k = channels < num_channels, modes < num_modes
    offs = modes[None, :] * num_channels + channels[:, None]
    return channels, modes, mask_c, mask_k, offs, mask_c[:, None] & mask_k[None, :]


@triton.jit
def _of_modes(ptrs, mask, step, num_modes, GROUP: tl.constexpr):
    """A vector for each mode of a group, so far apart; the last one's where there are fewer."""
    found = ()
    for i in tl.static_range(GROUP):
        mode = tl.minimum(tl.program_id(1) * GROUP + i, num_modes - 1)
        found = found + (tl.load(ptrs + mode * step, mask=mask, other=0.0),)
    return found


@triton.jit
def _weighted(gates, values, GROUP: tl.constexpr):
    """A tile times each mode's gates."""
    found = ()
    for i in tl.static_range(GROUP):
        found = found + (gates[i][:, None] * values,)
    return found


@triton.jit
def _weighted_spread(gates, mean, var, mode_means, GROUP: tl.constexpr):
    """Variances around each mode's mean, times its gates."""
    found = ()
    for i in tl.static_range(GROUP):
        apart = mean - mode_means[i][None, :]
        found = found + (gates[i][:, None] * (var + apart * apart),)
    return found


@triton.jit
def _weighted_pull(gates, mean, dscale, dshift, mode_means, GROUP: tl.constexpr):
    """The terms of T, for each mode."""
    found = ()
    for i in tl.static_range(GROUP):
        pull = dscale + dshift * (mean - mode_means[i][None, :])
        found = found + (gates[i][:, None] * pull,)
    return found


@triton.jit
def _over(sums, masses, GROUP: tl.constexpr):
    """Each mode's sums over its mass."""
    found = ()
    for i in tl.static_range(GROUP):
        found = found + (sums[i] / tl.maximum(masses[i], TINY),)
    return found


@triton.jit
def _in_row(numbers, GROUP: tl.constexpr):
    """One number for each mode as a vector."""
    places = tl.arange(0, GROUP)
    row = tl.zeros([GROUP], tl.float32)
    for i in tl.static_range(GROUP):
        row = tl.where(places == i, numbers[i], row)
    return row


@triton.jit
def _side_by_side(rows, GROUP: tl.constexpr):
    """One vector for each mode as the columns of a tile."""
    if GROUP == 2:
        tile = tl.join(rows[0], rows[1])
    else:
        tile = tl.join(tl.join(rows[0], rows[2]), tl.join(rows[1], rows[3]))
    return tl.reshape(tile, [rows[0].shape[0], GROUP])


@triton.jit
def _over_samples(tiles, COUNT: tl.constexpr):
    """Sums of so many tiles over their samples, which cross warps together."""
    if COUNT == 2:
        found = tl.reduce(tiles, 0, _add_two)
    elif COUNT == 4:
        found = tl.reduce(tiles, 0, _add_four)
    else:
        found = tl.reduce(tiles, 0, _add_eight)
    return found


@triton.jit
def _pairs_over_samples(some, others, GROUP: tl.constexpr):
    """The same of twice as many tiles."""
    found = _over_samples(some + others, 2 * GROUP)
    first = ()
    second = ()
    for i in tl.static_range(GROUP):
        first = first + (found[i],)
        second = second + (found[GROUP + i],)
    return first, second


@triton.jit
def _add_two(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add_four(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _add_eight(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7
