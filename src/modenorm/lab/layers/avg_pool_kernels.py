"""The kernel of average pooling's backward, in Triton: windows of 3×3, stride 2, padding 1.

A pixel of dx gathers from the windows that it is in, at most four. Images lie as in
max_pool_kernels.py, and threads follow columns of windows as there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from modenorm.kernels.gpu.common import begin
from modenorm.lab.layers.max_pool_kernels import windows

__all__ = ["spread_kernel"]


@triton.jit
def spread_kernel(
    dy_ptr,  # (N, H', W', C)
    dx_ptr,  # (N, H, W, C)
    num_columns,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    VECTOR: tl.constexpr,  # a divisor of C
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """BLOCK columns of windows, ROWS windows of each.

    With window (i, j) go pixels (2i, 2j) to (2i + 1, 2j + 1): its middle, and what it shares with
    the windows to its right and below it.
    """
    begin(OVERLAPS)
    high: tl.constexpr = (H + 1) // 2
    wide: tl.constexpr = (W + 1) // 2
    exists, image, first, across, channels = windows(num_columns, wide, C, VECTOR, BLOCK, ROWS)
    next_exists = exists & (across + 1 < wide)
    right = exists & (2 * across + 1 < W)
    dy_ptrs = dy_ptr + ((image * high + first) * wide + across) * C + channels
    dx_ptrs = dx_ptr + ((image * H + 2 * first) * W + 2 * across) * C + channels
    kind: tl.constexpr = dx_ptr.dtype.element_ty

    dy = _share(dy_ptrs, exists)
    both = dy + _share(dy_ptrs + C, next_exists)
    for i in tl.static_range(ROWS):
        row = 2 * (first + i)
        here, below, lower = row < H, row + 1 < H, row + 2 < H
        dy_ptrs += wide * C
        lower_dy = _share(dy_ptrs, exists & lower)
        lower_both = lower_dy + _share(dy_ptrs + C, next_exists & lower)
        tl.store(dx_ptrs, dy.to(kind), mask=exists & here)
        tl.store(dx_ptrs + C, both.to(kind), mask=right & here)
        tl.store(dx_ptrs + W * C, (dy + lower_dy).to(kind), mask=exists & below)
        tl.store(dx_ptrs + (W + 1) * C, (both + lower_both).to(kind), mask=right & below)
        dy, both = lower_dy, lower_both
        dx_ptrs += 2 * W * C


@triton.jit
def _share(dy_ptrs, mask):
    """What a window gives to each of its pixels."""
    return tl.load(dy_ptrs, mask=mask, other=0.0).to(tl.float32) * (1 / 9)
