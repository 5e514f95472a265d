"""The kernels of batch norms between the streaming passes of modenorm.kernels, in Triton.

Letters: N samples, C channels, L positions. One program has a block of channels and all samples.
"""

from __future__ import annotations

import triton
import triton.language as tl

from modenorm.kernels.gpu.common import begin, load_rows

__all__ = ["batch_gradients_kernel", "batch_statistics_kernel"]


@triton.jit
def batch_statistics_kernel(
    mean_ptr,  # (N, C), of each sample
    var_ptr,  # (N, C)
    weight_ptr,  # (C,)
    bias_ptr,  # (C,)
    running_mean_ptr,  # (C,)
    running_var_ptr,  # (C,)
    tracked_ptr,  # ()
    centre_ptr,  # (C,)
    scale_ptr,  # (C,)
    inverse_ptr,  # (C,)
    centres_ptr,  # (N, C): for the sums of the backward
    scales_ptr,  # (N, C), the same if CUT
    shifts_ptr,  # (N, C)
    num_samples,
    num_channels,
    eps,
    momentum,
    unbiased,  # N·L / (N·L − 1)
    CUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Mean, scale and 1/σ of the batch, and the running update, as torch has it."""
    begin(OVERLAPS)
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = channels < num_channels
    samples = tl.arange(0, BLOCK_N)
    sums = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    for start in range(0, num_samples, BLOCK_N):
        mask_n = start + samples < num_samples
        sums += load_rows(mean_ptr, start + samples, channels, mask_n, mask_c, num_channels)
    mean = tl.sum(sums, 0) / num_samples
    sums = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    for start in range(0, num_samples, BLOCK_N):
        mask_n = start + samples < num_samples
        means = load_rows(mean_ptr, start + samples, channels, mask_n, mask_c, num_channels)
        variances = load_rows(var_ptr, start + samples, channels, mask_n, mask_c, num_channels)
        apart = tl.where(mask_n[:, None], means - mean[None, :], 0.0)
        sums += variances + apart * apart
    var = tl.sum(sums, 0) / num_samples
    inverse = tl.rsqrt(var + eps)
    scale = inverse * tl.load(weight_ptr + channels, mask=mask_c, other=0.0)
    tl.store(centre_ptr + channels, mean, mask=mask_c)
    tl.store(scale_ptr + channels, scale, mask=mask_c)
    tl.store(inverse_ptr + channels, inverse, mask=mask_c)
    shift = tl.load(bias_ptr + channels, mask=mask_c, other=0.0)
    for start in range(0, num_samples, BLOCK_N):
        offs = (start + samples)[:, None] * num_channels + channels[None, :]
        mask = (start + samples < num_samples)[:, None] & mask_c[None, :]
        tl.store(centres_ptr + offs, _rows(mean, BLOCK_N), mask=mask)
        if CUT:
            tl.store(scales_ptr + offs, _rows(scale, BLOCK_N), mask=mask)
            tl.store(shifts_ptr + offs, _rows(shift, BLOCK_N), mask=mask)
    old = tl.load(running_mean_ptr + channels, mask=mask_c, other=0.0)
    tl.store(running_mean_ptr + channels, old + momentum * (mean - old), mask=mask_c)
    old = tl.load(running_var_ptr + channels, mask=mask_c, other=0.0)
    tl.store(running_var_ptr + channels, old + momentum * (var * unbiased - old), mask=mask_c)
    if tl.program_id(0) == 0:
        tl.store(tracked_ptr, tl.load(tracked_ptr) + 1)


@triton.jit
def _rows(values, COUNT: tl.constexpr):
    """The same values in every row of a tile."""
    return tl.broadcast_to(values[None, :], (COUNT, values.shape[0]))


@triton.jit
def batch_gradients_kernel(
    total_ptr,  # (N, C), of dy
    product_ptr,  # (N, C), of dy · (x − mean)
    scale_ptr,  # (C,)
    inverse_ptr,  # (C,)
    slope_ptr,  # (C,)
    offset_ptr,  # (C,)
    dweight_ptr,  # (C,)
    dbias_ptr,  # (C,)
    num_samples,
    num_channels,
    share,  # 1 / (N·L)
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Gradients of weight and bias, and dx = dy · scale + (x − mean) · slope + offset."""
    begin(OVERLAPS)
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = channels < num_channels
    samples = tl.arange(0, BLOCK_N)
    totals = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    products = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    for start in range(0, num_samples, BLOCK_N):
        mask_n = start + samples < num_samples
        totals += load_rows(total_ptr, start + samples, channels, mask_n, mask_c, num_channels)
        products += load_rows(product_ptr, start + samples, channels, mask_n, mask_c, num_channels)
    total, product = tl.sum(totals, 0), tl.sum(products, 0)
    scale = tl.load(scale_ptr + channels, mask=mask_c, other=0.0)
    inverse = tl.load(inverse_ptr + channels, mask=mask_c, other=0.0)
    normalised = product * inverse  # Σ dy · (x − mean) / σ
    tl.store(dweight_ptr + channels, normalised, mask=mask_c)
    tl.store(dbias_ptr + channels, total, mask=mask_c)
    tl.store(slope_ptr + channels, -scale * inverse * (normalised * share), mask=mask_c)
    tl.store(offset_ptr + channels, -scale * (total * share), mask=mask_c)
