"""Mode normalization's mixing on the GPU, in Triton: gates, statistics, coefficients, and backward.

All arrays are small, (N, C), (N, K) or (K, C), and live in the second-level cache. A program owns a
block of channels and walks over the samples, so sums over samples need no atomics and come out the
same in every run. Letters and formulas as in docs/math.md: A and D are the gradients of scale and
shift, T, E, U, S sums of them per mode.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from modenorm.mixing import RunningEstimates

__all__ = [
    "Mixed",
    "gate_backward",
    "gates_forward",
    "mix_backward",
    "mix_forward",
    "mix_inference",
]

TILE = 2048  # elements of a (samples, modes, channels) tile


@triton.jit
def _gates_kernel(
    mean_ptr,  # (N, C)
    var_ptr,  # (N, C)
    gate_weight_ptr,  # (K, C)
    gate_bias_ptr,  # (K,)
    gates_ptr,  # (N, K), written if HAS_GATE
    finite_ptr,  # (N,)
    num_samples,
    num_channels,
    num_modes,
    HAS_GATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """softmax(W m + b), and whether a sample's moments are all finite."""
    samples = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    modes = tl.arange(0, BLOCK_K)
    mask_n, mask_k = samples < num_samples, modes < num_modes
    logits = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    zeros = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, num_channels, BLOCK_C):
        channels = start + tl.arange(0, BLOCK_C)
        mask_c = channels < num_channels
        offs = samples[:, None] * num_channels + channels[None, :]
        mask = mask_n[:, None] & mask_c[None, :]
        mean = tl.load(mean_ptr + offs, mask=mask, other=0.0)
        var = tl.load(var_ptr + offs, mask=mask, other=0.0)
        zeros += tl.sum((mean - mean) + (var - var), 1)  # NaN if either is NaN or infinite
        if HAS_GATE:
            weight = tl.load(
                gate_weight_ptr + modes[:, None] * num_channels + channels[None, :],
                mask=mask_k[:, None] & mask_c[None, :],
                other=0.0,
            ).to(tl.float32)
            logits += tl.sum(mean[:, None, :] * weight[None, :, :], 2)
    tl.store(finite_ptr + samples, (zeros == 0.0).to(tl.int32), mask=mask_n)
    if HAS_GATE:
        bias = tl.load(gate_bias_ptr + modes, mask=mask_k, other=0.0).to(tl.float32)
        logits = tl.where(mask_k[None, :], logits + bias[None, :], float("-inf"))
        powers = tl.exp(logits - tl.max(logits, 1)[:, None])
        gates = powers / tl.sum(powers, 1)[:, None]
        offs = samples[:, None] * num_modes + modes[None, :]
        tl.store(gates_ptr + offs, gates, mask=mask_n[:, None] & mask_k[None, :])


@triton.jit
def _mix_kernel(
    mean_ptr,  # (N, C)
    var_ptr,  # (N, C)
    gates_ptr,  # (N, K)
    finite_ptr,  # (N,)
    weight_ptr,  # (C,) or (K, C)
    bias_ptr,  # (C,) or (K, C)
    running_mean_ptr,  # (K, C)
    running_var_ptr,  # (K, C)
    tracked_ptr,  # ()
    running_share_ptr,  # (K,)
    mode_mean_ptr,  # (K, C)
    mode_var_ptr,  # (K, C)
    mass_ptr,  # (K,)
    scale_ptr,  # (N, C)
    shift_ptr,  # (N, C)
    num_samples,
    num_channels,
    num_modes,
    eps,
    momentum,
    FROM_BATCH: tl.constexpr,
    UPDATE: tl.constexpr,
    USAGE: tl.constexpr,
    HAS_TRACKED: tl.constexpr,
    HAS_SHARE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_MODE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Statistics of the modes, the running update, and scale and shift of every sample."""
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    modes = tl.arange(0, BLOCK_K)
    mask_c, mask_k = channels < num_channels, modes < num_modes
    offs_kc = modes[:, None] * num_channels + channels[None, :]
    mask_kc = mask_k[:, None] & mask_c[None, :]
    if FROM_BATCH:
        mass = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        sums = tl.zeros([BLOCK_N, BLOCK_K, BLOCK_C], tl.float32)
        for start in range(0, num_samples, BLOCK_N):
            samples = start + tl.arange(0, BLOCK_N)
            gates = _load_gates(gates_ptr, samples, modes, num_samples, num_modes)
            mean = _load_rows(mean_ptr, samples, channels, num_samples, num_channels)
            mass += gates
            sums += gates[:, :, None] * mean[:, None, :]
        mass_k = tl.sum(mass, 0)
        divisor = tl.maximum(mass_k, 1.1754943508222875e-38)[:, None]
        mode_mean = tl.sum(sums, 0) / divisor
        sums = tl.zeros([BLOCK_N, BLOCK_K, BLOCK_C], tl.float32)
        for start in range(0, num_samples, BLOCK_N):
            samples = start + tl.arange(0, BLOCK_N)
            gates = _load_gates(gates_ptr, samples, modes, num_samples, num_modes)
            mean = _load_rows(mean_ptr, samples, channels, num_samples, num_channels)
            var = _load_rows(var_ptr, samples, channels, num_samples, num_channels)
            apart = mean[:, None, :] - mode_mean[None, :, :]
            sums += gates[:, :, None] * (var[:, None, :] + apart * apart)
        mode_var = tl.sum(sums, 0) / divisor
        tl.store(mode_mean_ptr + offs_kc, mode_mean, mask=mask_kc)
        tl.store(mode_var_ptr + offs_kc, mode_var, mask=mask_kc)
        if tl.program_id(0) == 0:
            tl.store(mass_ptr + modes, mass_k, mask=mask_k)
        if UPDATE:
            finite = tl.full([], 1, tl.int32)
            for start in range(0, num_samples, BLOCK_N):
                samples = start + tl.arange(0, BLOCK_N)
                flags = tl.load(finite_ptr + samples, mask=samples < num_samples, other=1)
                finite = tl.minimum(finite, tl.min(flags, 0))
            rate = tl.full([BLOCK_K, 1], 1.0, tl.float32) * momentum
            if USAGE:
                rate = rate * (mass_k / num_samples)[:, None]
            moves = mask_kc & (tl.where(finite > 0, mass_k, 0.0) > 0.0)[:, None]
            old_mean = tl.load(running_mean_ptr + offs_kc, mask=moves, other=0.0)
            old_var = tl.load(running_var_ptr + offs_kc, mask=moves, other=0.0)
            step = mode_mean - old_mean
            new_var = (1 - rate) * old_var + rate * mode_var + rate * (1 - rate) * step * step
            tl.store(running_var_ptr + offs_kc, new_var, mask=moves)
            tl.store(running_mean_ptr + offs_kc, old_mean + rate * step, mask=moves)
            if tl.program_id(0) == 0:
                if HAS_TRACKED:
                    tl.store(tracked_ptr, tl.load(tracked_ptr) + finite)
                if HAS_SHARE:
                    mask_share = mask_k & (tl.where(finite > 0, mass_k, 0.0) > 0.0)
                    share = tl.load(running_share_ptr + modes, mask=mask_share, other=0.0)
                    share += mass_k / num_samples
                    tl.store(running_share_ptr + modes, share, mask=mask_share)
    else:
        mode_mean = tl.load(running_mean_ptr + offs_kc, mask=mask_kc, other=0.0)
        mode_var = tl.load(running_var_ptr + offs_kc, mask=mask_kc, other=0.0)

    inverse = tl.rsqrt(mode_var + eps)
    if HAS_WEIGHT:
        inverse *= _load_affine(weight_ptr, channels, mask_c, offs_kc, mask_kc, PER_MODE)
    for start in range(0, num_samples, BLOCK_N):
        samples = start + tl.arange(0, BLOCK_N)
        gates = _load_gates(gates_ptr, samples, modes, num_samples, num_modes)
        mean = _load_rows(mean_ptr, samples, channels, num_samples, num_channels)
        terms = gates[:, :, None] * inverse[None, :, :]
        scale = tl.sum(terms, 1)
        shifts = terms * (mean[:, None, :] - mode_mean[None, :, :])
        if HAS_BIAS and PER_MODE:
            bias = tl.load(bias_ptr + offs_kc, mask=mask_kc, other=0.0).to(tl.float32)
            shifts += gates[:, :, None] * bias[None, :, :]
        shift = tl.sum(shifts, 1)
        if HAS_BIAS and not PER_MODE:
            bias_c = tl.load(bias_ptr + channels, mask=mask_c, other=0.0).to(tl.float32)
            shift += bias_c[None, :]
        offs = samples[:, None] * num_channels + channels[None, :]
        mask = (samples < num_samples)[:, None] & mask_c[None, :]
        tl.store(scale_ptr + offs, scale, mask=mask)
        tl.store(shift_ptr + offs, shift, mask=mask)


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
    dscale_ptr,  # A, (N, C)
    dshift_ptr,  # D, (N, C)
    dweight_ptr,  # as weight
    dbias_ptr,  # as bias
    slope_ptr,  # (N, C), 2 dv / L
    offset_ptr,  # (N, C), dm / L
    dgates_ptr,  # (programs, N, K), each program's share of the sum over channels
    num_samples,
    num_channels,
    num_modes,
    num_positions,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_MODE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """From A and D to the affine parameters' gradients, dm and dv without the gate, and dgates."""
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    modes = tl.arange(0, BLOCK_K)
    mask_c, mask_k = channels < num_channels, modes < num_modes
    offs_kc = modes[:, None] * num_channels + channels[None, :]
    mask_kc = mask_k[:, None] & mask_c[None, :]
    mode_mean = tl.load(mode_mean_ptr + offs_kc, mask=mask_kc, other=0.0)
    mode_var = tl.load(mode_var_ptr + offs_kc, mask=mask_kc, other=0.0)
    mass = tl.load(mass_ptr + modes, mask=mask_k, other=1.0)
    divisor = tl.maximum(mass, 1.1754943508222875e-38)[:, None]
    weight = tl.full([BLOCK_K, BLOCK_C], 1.0, tl.float32)
    if HAS_WEIGHT:
        weight *= _load_affine(weight_ptr, channels, mask_c, offs_kc, mask_kc, PER_MODE)

    sums_t = tl.zeros([BLOCK_N, BLOCK_K, BLOCK_C], tl.float32)
    sums_e = tl.zeros([BLOCK_N, BLOCK_K, BLOCK_C], tl.float32)
    sums_d = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    for start in range(0, num_samples, BLOCK_N):
        samples = start + tl.arange(0, BLOCK_N)
        gates = _load_gates(gates_ptr, samples, modes, num_samples, num_modes)
        mean = _load_rows(mean_ptr, samples, channels, num_samples, num_channels)
        dscale = _load_rows(dscale_ptr, samples, channels, num_samples, num_channels)
        dshift = _load_rows(dshift_ptr, samples, channels, num_samples, num_channels)
        apart = mean[:, None, :] - mode_mean[None, :, :]
        sums_t += gates[:, :, None] * (dscale[:, None, :] + dshift[:, None, :] * apart)
        sums_e += gates[:, :, None] * dshift[:, None, :]
        sums_d += dshift
    t = tl.sum(sums_t, 0)  # (K, C)
    e = tl.sum(sums_e, 0)
    inverse = tl.rsqrt(mode_var + eps)
    if HAS_WEIGHT:
        if PER_MODE:
            tl.store(dweight_ptr + offs_kc, inverse * t, mask=mask_kc)
        else:
            dweight = tl.sum(tl.where(mask_kc, inverse * t, 0.0), 0)
            tl.store(dweight_ptr + channels, dweight, mask=mask_c)
    if HAS_BIAS:
        if PER_MODE:
            tl.store(dbias_ptr + offs_kc, e, mask=mask_kc)
        else:
            tl.store(dbias_ptr + channels, tl.sum(sums_d, 0), mask=mask_c)
    scaled = weight * inverse
    u = -scaled * e / divisor  # dL/dμ over N_k
    s = -0.5 * scaled * inverse * inverse * t / divisor  # dL/dσ² over N_k

    bias = tl.zeros([BLOCK_K, BLOCK_C], tl.float32)
    if HAS_BIAS and PER_MODE:
        bias += tl.load(bias_ptr + offs_kc, mask=mask_kc, other=0.0).to(tl.float32)
    partial = dgates_ptr + tl.program_id(0) * num_samples * num_modes
    for start in range(0, num_samples, BLOCK_N):
        samples = start + tl.arange(0, BLOCK_N)
        gates = _load_gates(gates_ptr, samples, modes, num_samples, num_modes)
        mean = _load_rows(mean_ptr, samples, channels, num_samples, num_channels)
        var = _load_rows(var_ptr, samples, channels, num_samples, num_channels)
        dscale = _load_rows(dscale_ptr, samples, channels, num_samples, num_channels)
        dshift = _load_rows(dshift_ptr, samples, channels, num_samples, num_channels)
        apart = mean[:, None, :] - mode_mean[None, :, :]
        slope = tl.sum(gates[:, :, None] * s[None, :, :], 1) * (2.0 / num_positions)
        pulls = u[None, :, :] + 2.0 * s[None, :, :] * apart
        offset = tl.sum(gates[:, :, None] * pulls, 1) / num_positions
        offs = samples[:, None] * num_channels + channels[None, :]
        mask_n = samples < num_samples
        mask = mask_n[:, None] & mask_c[None, :]
        tl.store(slope_ptr + offs, slope, mask=mask)
        tl.store(offset_ptr + offs, offset, mask=mask)
        direct = scaled[None, :, :] * (dscale[:, None, :] + dshift[:, None, :] * apart)
        direct += dshift[:, None, :] * bias[None, :, :]
        spread = var[:, None, :] + apart * apart - mode_var[None, :, :]
        through = u[None, :, :] * apart + s[None, :, :] * spread
        dgates = tl.sum(tl.where(mask_c[None, None, :], direct + through, 0.0), 2)
        offs_nk = samples[:, None] * num_modes + modes[None, :]
        tl.store(partial + offs_nk, dgates, mask=mask_n[:, None] & mask_k[None, :])


@triton.jit
def _gate_backward_kernel(
    dgates_ptr,  # (parts, N, K)
    extra_ptr,  # (N, K), the gradient of the gates as an output
    gates_ptr,  # (N, K)
    mean_ptr,  # (N, C)
    gate_weight_ptr,  # (K, C)
    offset_ptr,  # (N, C), changed in place
    dgate_weight_ptr,  # (K, C)
    dgate_bias_ptr,  # (K,)
    num_samples,
    num_channels,
    num_modes,
    num_parts,
    num_positions,
    HAS_EXTRA: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Back through the softmax and the linear gate; adds W^T dlogits / L to the offset."""
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    modes = tl.arange(0, BLOCK_K)
    mask_c, mask_k = channels < num_channels, modes < num_modes
    offs_kc = modes[:, None] * num_channels + channels[None, :]
    mask_kc = mask_k[:, None] & mask_c[None, :]
    weight = tl.load(gate_weight_ptr + offs_kc, mask=mask_kc, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK_N, BLOCK_K, BLOCK_C], tl.float32)
    dbias = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, num_samples, BLOCK_N):
        samples = start + tl.arange(0, BLOCK_N)
        mask_n = samples < num_samples
        offs_nk = samples[:, None] * num_modes + modes[None, :]
        mask_nk = mask_n[:, None] & mask_k[None, :]
        dgates = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for part in range(num_parts):
            offs_part = part * num_samples * num_modes + offs_nk
            dgates += tl.load(dgates_ptr + offs_part, mask=mask_nk, other=0.0)
        if HAS_EXTRA:
            dgates += tl.load(extra_ptr + offs_nk, mask=mask_nk, other=0.0)
        gates = tl.load(gates_ptr + offs_nk, mask=mask_nk, other=0.0)
        dlogits = gates * (dgates - tl.sum(gates * dgates, 1)[:, None])
        mean = _load_rows(mean_ptr, samples, channels, num_samples, num_channels)
        dweight += dlogits[:, :, None] * mean[:, None, :]
        dbias += dlogits
        offs = samples[:, None] * num_channels + channels[None, :]
        mask = mask_n[:, None] & mask_c[None, :]
        offset = tl.load(offset_ptr + offs, mask=mask, other=0.0)
        offset += tl.sum(dlogits[:, :, None] * weight[None, :, :], 1) / num_positions
        tl.store(offset_ptr + offs, offset, mask=mask)
    tl.store(dgate_weight_ptr + offs_kc, tl.sum(dweight, 0), mask=mask_kc)
    if tl.program_id(0) == 0:
        tl.store(dgate_bias_ptr + modes, tl.sum(dbias, 0), mask=mask_k)


@triton.jit
def _load_gates(gates_ptr, samples, modes, num_samples, num_modes):
    mask = (samples < num_samples)[:, None] & (modes < num_modes)[None, :]
    return tl.load(gates_ptr + samples[:, None] * num_modes + modes[None, :], mask=mask, other=0.0)


@triton.jit
def _load_rows(values_ptr, samples, channels, num_samples, num_channels):
    mask = (samples < num_samples)[:, None] & (channels < num_channels)[None, :]
    offs = samples[:, None] * num_channels + channels[None, :]
    return tl.load(values_ptr + offs, mask=mask, other=0.0)


@triton.jit
def _load_affine(weight_ptr, channels, mask_c, offs_kc, mask_kc, PER_MODE: tl.constexpr):
    if PER_MODE:
        weight = tl.load(weight_ptr + offs_kc, mask=mask_kc, other=0.0).to(tl.float32)
    else:
        weight = tl.load(weight_ptr + channels, mask=mask_c, other=0.0).to(tl.float32)[None, :]
    return weight


class Mixed(NamedTuple):
    """What the forward mixing leaves for the backward."""

    scale: Tensor  # (N, C)
    shift: Tensor  # (N, C)
    mode_mean: Tensor  # (K, C)
    mode_var: Tensor  # (K, C)
    mass: Tensor  # (K,)


class _Blocks(NamedTuple):
    """How the mixing cuts (samples, modes, channels) into tiles; a program owns `channels`."""

    samples: int
    modes: int
    channels: int

    def constants(self) -> dict[str, int]:
        return {"BLOCK_N": self.samples, "BLOCK_K": self.modes, "BLOCK_C": self.channels}


def _blocks(num_samples: int, num_modes: int, num_channels: int) -> _Blocks:
    modes = triton.next_power_of_2(num_modes)
    channels = min(triton.next_power_of_2(num_channels), 16 if num_channels <= 512 else 32)
    samples = max(1, TILE // (modes * channels))
    return _Blocks(min(samples, triton.next_power_of_2(num_samples)), modes, channels)


def gates_forward(
    mean: Tensor,
    var: Tensor,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    gates: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The gates (N, K), from the linear gate or as given, and which samples are finite (N,)."""
    num_samples, num_channels = mean.shape
    if gates is None:
        assert gate_weight is not None
        gates = mean.new_empty((num_samples, gate_weight.shape[0]))
    finite = torch.empty(num_samples, device=mean.device, dtype=torch.int32)
    modes = triton.next_power_of_2(gates.shape[1])
    samples = 4
    channels = min(triton.next_power_of_2(num_channels), max(16, 2 * TILE // (modes * samples)))
    _gates_kernel[(triton.cdiv(num_samples, samples),)](
        mean,
        var,
        mean if gate_weight is None else gate_weight,
        mean if gate_bias is None else gate_bias,
        gates,
        finite,
        num_samples=num_samples,
        num_channels=num_channels,
        num_modes=gates.shape[1],
        HAS_GATE=gate_weight is not None,
        BLOCK_N=samples,
        BLOCK_K=modes,
        BLOCK_C=channels,
    )
    return gates, finite


def _launch_mix(
    mean: Tensor,
    var: Tensor,
    gates: Tensor,
    finite: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: RunningEstimates,
    out: Mixed,
    eps: float,
    momentum: float = 0.0,
    *,
    from_batch: bool,
    update: bool = False,
    usage: bool = False,
) -> Mixed:
    (num_samples, num_channels), num_modes = mean.shape, gates.shape[1]
    blocks = _blocks(num_samples, num_modes, num_channels)
    _mix_kernel[(triton.cdiv(num_channels, blocks.channels),)](
        mean,
        var,
        gates,
        finite,
        mean if weight is None else weight,
        mean if bias is None else bias,
        running.mean,
        running.var,
        finite if running.num_batches_tracked is None else running.num_batches_tracked,
        mean if running.share is None else running.share,
        out.mode_mean,
        out.mode_var,
        out.mass,
        out.scale,
        out.shift,
        num_samples=num_samples,
        num_channels=num_channels,
        num_modes=num_modes,
        eps=eps,
        momentum=momentum,
        FROM_BATCH=from_batch,
        UPDATE=update,
        USAGE=usage,
        HAS_TRACKED=running.num_batches_tracked is not None,
        HAS_SHARE=running.share is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        PER_MODE=weight is not None and weight.ndim == 2,
        **blocks.constants(),
    )
    return out


def mix_forward(
    mean: Tensor,
    var: Tensor,
    gates: Tensor,
    finite: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: RunningEstimates | None,
    eps: float,
    momentum: float,
    usage: bool,
) -> Mixed:
    """Statistics and coefficients; updates the running estimates in place, if there are any."""
    mode_mean = mean.new_empty((gates.shape[1], mean.shape[1]))
    mode_var = torch.empty_like(mode_mean)
    mass = mean.new_empty(gates.shape[1])
    out = Mixed(torch.empty_like(mean), torch.empty_like(mean), mode_mean, mode_var, mass)
    return _launch_mix(
        mean,
        var,
        gates,
        finite,
        weight,
        bias,
        running or RunningEstimates(mode_mean, mode_var),
        out,
        eps,
        momentum,
        from_batch=True,
        update=running is not None,
        usage=usage,
    )


def mix_inference(
    mean: Tensor,
    gates: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Scale and shift, (N, C), from the running estimates."""
    out = Mixed(torch.empty_like(mean), torch.empty_like(mean), mean, mean, mean)
    running = RunningEstimates(running_mean, running_var)
    _launch_mix(mean, mean, gates, mean, weight, bias, running, out, eps, from_batch=False)
    return out.scale, out.shift


def mix_backward(
    dscale: Tensor,
    dshift: Tensor,
    mean: Tensor,
    var: Tensor,
    gates: Tensor,
    mode_mean: Tensor,
    mode_var: Tensor,
    mass: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_positions: int,
    eps: float,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor]:
    """Dweight, dbias, slope and offset of dx without the gate, and dgates as (parts, N, K)."""
    (num_samples, num_channels), num_modes = mean.shape, gates.shape[1]
    blocks = _blocks(num_samples, num_modes, num_channels)
    programs = triton.cdiv(num_channels, blocks.channels)
    dweight = None if weight is None else torch.empty_like(weight)
    dbias = None if bias is None else torch.empty_like(bias)
    slope, offset = torch.empty_like(mean), torch.empty_like(mean)
    dgates = mean.new_empty((programs, num_samples, num_modes))
    _mix_backward_kernel[(programs,)](
        mean,
        var,
        gates,
        mode_mean,
        mode_var,
        mass,
        mean if weight is None else weight,
        mean if bias is None else bias,
        dscale,
        dshift,
        mean if dweight is None else dweight,
        mean if dbias is None else dbias,
        slope,
        offset,
        dgates,
        num_samples=num_samples,
        num_channels=num_channels,
        num_modes=num_modes,
        num_positions=num_positions,
        eps=eps,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        PER_MODE=weight is not None and weight.ndim == 2,
        **blocks.constants(),
    )
    return dweight, dbias, slope, offset, dgates


def gate_backward(
    dgates: Tensor,
    extra: Tensor | None,
    gates: Tensor,
    mean: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    offset: Tensor,
    num_positions: int,
) -> tuple[Tensor, Tensor]:
    """Gradients of the linear gate's parameters; adds the gate's part to the offset of dx."""
    (num_samples, num_channels), num_modes = mean.shape, gates.shape[1]
    if dgates.shape[0] > 8:
        dgates = dgates.sum(0, keepdim=True)
    blocks = _blocks(num_samples, num_modes, num_channels)
    dgate_weight, dgate_bias = torch.empty_like(gate_weight), torch.empty_like(gate_bias)
    _gate_backward_kernel[(triton.cdiv(num_channels, blocks.channels),)](
        dgates,
        gates if extra is None else extra,
        gates,
        mean,
        gate_weight,
        offset,
        dgate_weight,
        dgate_bias,
        num_samples=num_samples,
        num_channels=num_channels,
        num_modes=num_modes,
        num_parts=dgates.shape[0],
        num_positions=num_positions,
        HAS_EXTRA=extra is not None,
        **blocks.constants(),
    )
    return dgate_weight, dgate_bias
