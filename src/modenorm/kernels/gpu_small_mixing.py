"""Mode normalization's mixing of small arrays on the GPU, in Triton: one program each way.

Where the arrays fit into one program's registers, a launch is what costs time, not what it does:
trainings side by side are limited by the number of kernels that the GPU can start. The formulas
are those of gpu_mixing.py and gpu_mixing_backward.py. What threads tell each other, between two
barriers, goes through the arrays in memory: they are in cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from modenorm.kernels.gpu_arrays import TINY, begin, load_rows
from modenorm.kernels.gpu_mixing import update_running
from modenorm.kernels.launch import Launch

__all__ = ["SmallMixing", "is_small"]

MOST_NUMBERS = 16384
"""Of N·C·K, sizes rounded up to powers of two."""
MOST_MODES = 8
NUMBERS_PER_THREAD = 16


@triton.jit
def _mix_kernel(
    mean_ptr,  # (N, C)
    var_ptr,  # (N, C)
    gate_weight_ptr,  # (K, C)
    gate_bias_ptr,  # (K,)
    gates_ptr,  # (N, K), written if HAS_GATE
    running_mean_ptr,  # (K, C)
    running_var_ptr,  # (K, C)
    tracked_ptr,  # ()
    running_share_ptr,  # (K,)
    mode_mean_ptr,  # (K, C)
    mode_var_ptr,  # (K, C)
    mass_ptr,  # (K,)
    weight_ptr,  # (C,) or (K, C)
    bias_ptr,  # (C,) or (K, C)
    scale_ptr,  # (N, C)
    shift_ptr,  # (N, C)
    num_samples,
    num_channels,
    momentum,
    eps,
    HAS_GATE: tl.constexpr,
    UPDATE: tl.constexpr,
    USAGE: tl.constexpr,
    HAS_TRACKED: tl.constexpr,
    HAS_SHARE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_MODE: tl.constexpr,
    NUM_MODES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Gates, the modes' statistics with their running update, scale and shift."""
    begin(OVERLAPS)
    samples, channels = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_C)
    modes = tl.arange(0, BLOCK_K)
    mask_n, mask_c = samples < num_samples, channels < num_channels
    mean = load_rows(mean_ptr, samples, channels, mask_n, mask_c, num_channels)
    var = load_rows(var_ptr, samples, channels, mask_n, mask_c, num_channels)
    offs_nk = samples[:, None] * NUM_MODES + modes[None, :]
    mask_nk = mask_n[:, None] & (modes < NUM_MODES)[None, :]
    if HAS_GATE:
        for mode in range(NUM_MODES):
            offs = mode * num_channels + channels
            weight = tl.load(gate_weight_ptr + offs, mask=mask_c, other=0.0)
            logit = tl.sum(mean * weight[None, :], 1) + tl.load(gate_bias_ptr + mode)
            tl.store(gates_ptr + samples * NUM_MODES + mode, logit, mask=mask_n)
        tl.debug_barrier()
        logits = tl.load(gates_ptr + offs_nk, mask=mask_nk, other=float("-inf"))
        logits = tl.where(mask_n[:, None], logits, 0.0)
        powers = tl.exp(logits - tl.max(logits, 1)[:, None])
        tl.debug_barrier()
        tl.store(gates_ptr + offs_nk, powers / tl.sum(powers, 1)[:, None], mask=mask_nk)
        tl.debug_barrier()
    finite = 1.0
    if UPDATE:
        zeros = tl.sum(tl.sum((mean - mean) + (var - var), 1), 0)  # NaN if any is not finite
        finite = tl.where(zeros == 0.0, 1.0, 0.0)
    scale = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    shift = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    if HAS_BIAS and not PER_MODE:
        shift += tl.load(bias_ptr + channels, mask=mask_c, other=0.0)[None, :]
    for mode in range(NUM_MODES):
        offs = mode * num_channels + channels
        affine = offs if PER_MODE else channels
        gate = tl.load(gates_ptr + samples * NUM_MODES + mode, mask=mask_n, other=0.0)
        mass = tl.sum(gate, 0)
        divisor = tl.maximum(mass, TINY)
        mode_mean = tl.sum(gate[:, None] * mean, 0) / divisor
        apart = mean - mode_mean[None, :]
        mode_var = tl.sum(gate[:, None] * (var + apart * apart), 0) / divisor
        tl.store(mode_mean_ptr + offs, mode_mean, mask=mask_c)
        tl.store(mode_var_ptr + offs, mode_var, mask=mask_c)
        tl.store(mass_ptr + mode, mass)
        if UPDATE:
            update_running(
                mode, offs, mask_c, mode_mean, mode_var, mass, finite, momentum, num_samples,
                running_mean_ptr, running_var_ptr, tracked_ptr, running_share_ptr,
                USAGE, HAS_TRACKED, HAS_SHARE, True,
            )  # fmt: skip
        inverse = tl.rsqrt(mode_var + eps)
        if HAS_WEIGHT:
            inverse *= tl.load(weight_ptr + affine, mask=mask_c, other=0.0)
        term = gate[:, None] * inverse[None, :]
        scale += term
        shift += term * apart
        if HAS_BIAS and PER_MODE:
            bias = tl.load(bias_ptr + affine, mask=mask_c, other=0.0)
            shift += gate[:, None] * bias[None, :]
    offs_nc = samples[:, None] * num_channels + channels[None, :]
    mask_nc = mask_n[:, None] & mask_c[None, :]
    tl.store(scale_ptr + offs_nc, scale, mask=mask_nc)
    tl.store(shift_ptr + offs_nc, shift, mask=mask_nc)


@triton.jit
def _mix_backward_kernel(
    mean_ptr,  # (N, C)
    var_ptr,  # (N, C)
    gates_ptr,  # (N, K)
    mode_mean_ptr,  # (K, C)
    mode_var_ptr,  # (K, C)
    mass_ptr,  # (K,)
    weight_ptr,  # (C,) or (K, C)
    bias_ptr,  # (C,) or (K, C)
    gate_weight_ptr,  # (K, C)
    extra_ptr,  # (N, K), the gradient of the gates as an output
    dscale_ptr,  # A, (N, C); becomes the slope, 2 dv / L
    dshift_ptr,  # D, (N, C); becomes the offset, dm / L
    scale_ptr,  # (N, C), as in the forward
    u_ptr,  # (K, C)
    s_ptr,  # (K, C)
    dlogits_ptr,  # (N, K); the gradient of the gates if they were given
    dgate_weight_ptr,  # (K, C)
    dgate_bias_ptr,  # (K,)
    dweight_ptr,  # (C,) or (K, C)
    dbias_ptr,  # (C,) or (K, C)
    num_samples,
    num_channels,
    num_positions,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_MODE: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    NUM_MODES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """All gradients of the mixing, from those of scale and shift."""
    begin(OVERLAPS)
    samples, channels = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_C)
    modes = tl.arange(0, BLOCK_K)
    mask_n, mask_c = samples < num_samples, channels < num_channels
    mean = load_rows(mean_ptr, samples, channels, mask_n, mask_c, num_channels)
    var = load_rows(var_ptr, samples, channels, mask_n, mask_c, num_channels)
    dscale = load_rows(dscale_ptr, samples, channels, mask_n, mask_c, num_channels)
    dshift = load_rows(dshift_ptr, samples, channels, mask_n, mask_c, num_channels)
    offs_nk = samples[:, None] * NUM_MODES + modes[None, :]
    mask_nk = mask_n[:, None] & (modes < NUM_MODES)[None, :]
    dweight = tl.zeros([BLOCK_C], tl.float32)
    if HAS_BIAS and not PER_MODE:
        tl.store(dbias_ptr + channels, tl.sum(dshift, 0), mask=mask_c)
    for mode in range(NUM_MODES):
        offs = mode * num_channels + channels
        affine = offs if PER_MODE else channels
        gate = tl.load(gates_ptr + samples * NUM_MODES + mode, mask=mask_n, other=0.0)[:, None]
        mode_var = tl.load(mode_var_ptr + offs, mask=mask_c, other=1.0)
        apart = mean - tl.load(mode_mean_ptr + offs, mask=mask_c, other=0.0)[None, :]
        direct = dscale + dshift * apart
        t, e = tl.sum(gate * direct, 0), tl.sum(gate * dshift, 0)
        inverse = tl.rsqrt(mode_var + eps)
        scaled = inverse
        if HAS_WEIGHT:
            scaled = inverse * tl.load(weight_ptr + affine, mask=mask_c, other=0.0)
            if PER_MODE:
                tl.store(dweight_ptr + offs, inverse * t, mask=mask_c)
            else:
                dweight += inverse * t
        if HAS_BIAS and PER_MODE:
            tl.store(dbias_ptr + offs, e, mask=mask_c)
        divisor = tl.maximum(tl.load(mass_ptr + mode), TINY)
        u = -scaled * e / divisor
        s = -0.5 * scaled * inverse * inverse * t / divisor
        tl.store(u_ptr + offs, u, mask=mask_c)
        tl.store(s_ptr + offs, s, mask=mask_c)
        pulls = scaled[None, :] * direct + u[None, :] * apart
        pulls += s[None, :] * (var + apart * apart - mode_var[None, :])
        if HAS_BIAS and PER_MODE:
            pulls += dshift * tl.load(bias_ptr + affine, mask=mask_c, other=0.0)[None, :]
        tl.store(dlogits_ptr + samples * NUM_MODES + mode, tl.sum(pulls, 1), mask=mask_n)
    if HAS_WEIGHT and not PER_MODE:
        tl.store(dweight_ptr + channels, dweight, mask=mask_c)

    tl.debug_barrier()
    if HAS_GATE or HAS_EXTRA:
        dlogits = tl.load(dlogits_ptr + offs_nk, mask=mask_nk, other=0.0)
        if HAS_EXTRA:
            dlogits += tl.load(extra_ptr + offs_nk, mask=mask_nk, other=0.0)
        if HAS_GATE:
            gates = tl.load(gates_ptr + offs_nk, mask=mask_nk, other=0.0)
            dlogits = gates * (dlogits - tl.sum(gates * dlogits, 1)[:, None])
        tl.debug_barrier()
        tl.store(dlogits_ptr + offs_nk, dlogits, mask=mask_nk)
        tl.debug_barrier()
    slope = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    offset = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    scale = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    for mode in range(NUM_MODES):
        offs = mode * num_channels + channels
        affine = offs if PER_MODE else channels
        gate = tl.load(gates_ptr + samples * NUM_MODES + mode, mask=mask_n, other=0.0)[:, None]
        apart = mean - tl.load(mode_mean_ptr + offs, mask=mask_c, other=0.0)[None, :]
        scaled = tl.rsqrt(tl.load(mode_var_ptr + offs, mask=mask_c, other=1.0) + eps)
        if HAS_WEIGHT:
            scaled *= tl.load(weight_ptr + affine, mask=mask_c, other=0.0)
        u = tl.load(u_ptr + offs, mask=mask_c, other=0.0)[None, :]
        s = tl.load(s_ptr + offs, mask=mask_c, other=0.0)[None, :]
        scale += gate * scaled[None, :]
        slope += gate * s
        offset += gate * (u + 2.0 * s * apart)
        if HAS_GATE:
            dlogit = tl.load(dlogits_ptr + samples * NUM_MODES + mode, mask=mask_n, other=0.0)
            weight = tl.load(gate_weight_ptr + offs, mask=mask_c, other=0.0)
            offset += dlogit[:, None] * weight[None, :]
            tl.store(dgate_weight_ptr + offs, tl.sum(dlogit[:, None] * mean, 0), mask=mask_c)
            tl.store(dgate_bias_ptr + mode, tl.sum(dlogit, 0))
    offs_nc = samples[:, None] * num_channels + channels[None, :]
    mask_nc = mask_n[:, None] & mask_c[None, :]
    tl.store(scale_ptr + offs_nc, scale, mask=mask_nc)
    tl.store(dscale_ptr + offs_nc, slope * (2.0 / num_positions), mask=mask_nc)
    tl.store(dshift_ptr + offs_nc, offset / num_positions, mask=mask_nc)


def is_small(num_samples: int, num_channels: int, num_modes: int) -> bool:
    """Whether one program does the mixing of these sizes."""
    numbers = triton.next_power_of_2(num_samples) * triton.next_power_of_2(num_channels)
    return num_modes <= MOST_MODES and numbers * num_modes <= MOST_NUMBERS


class SmallMixing:
    """The two launches of the mixing for one set of small sizes; arguments as of `Mixing`."""

    def __init__(
        self,
        num_samples: int,
        num_channels: int,
        num_positions: int,
        num_modes: int,
        eps: float,
        momentum: float,
        has_gate: bool,
        affine: tuple[bool, bool, bool],
        running: tuple[bool, bool, bool, bool],
        direct: bool,
    ) -> None:
        sizes = (num_samples, num_channels, num_modes)
        samples, channels, modes = map(triton.next_power_of_2, sizes)
        warps = max(4, min(16, samples * channels // (32 * NUMBERS_PER_THREAD)))
        tile = (num_modes, modes, samples, channels)
        self.forward = Launch(
            _mix_kernel,
            (1,),
            (num_samples, num_channels, momentum, eps),
            (has_gate, *running, *affine, *tile),
            warps,
            direct,
        )
        self.backward, self.backward_extra = (
            Launch(
                _mix_backward_kernel,
                (1,),
                (num_samples, num_channels, num_positions, eps),
                (*affine, has_gate, extra, *tile),
                warps,
                direct,
            )
            for extra in (False, True)
        )
