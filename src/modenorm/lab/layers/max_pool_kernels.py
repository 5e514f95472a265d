"""The kernels of max pooling, in Triton: windows of 3×3, stride 2, padding 1.

pool      y and the place of each maximum in its window, 0 to 8, row by row
unpool    dx from dy and the places: a pixel gathers from the windows that it is in, at most four

Images lie channels last: (N, H, W, C), and (N, H', W', C) after pooling. A thread follows one
column of windows for some channels that lie side by side, so that what two windows one below the
other share is read once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from modenorm.kernels.gpu.common import begin

__all__ = ["pool_kernel", "unpool_kernel", "windows"]

LEAST = tl.constexpr(float("-inf"))


@triton.jit
def pool_kernel(
    x_ptr,  # (N, H, W, C)
    y_ptr,  # (N, H', W', C)
    place_ptr,  # (N, H', W', C)
    num_columns,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    VECTOR: tl.constexpr,  # a divisor of C
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """BLOCK columns of windows, ROWS windows of each, by the maxima of their rows of pixels."""
    begin(OVERLAPS)
    high: tl.constexpr = (H + 1) // 2
    wide: tl.constexpr = (W + 1) // 2
    exists, image, first, across, channels = windows(num_columns, wide, C, VECTOR, BLOCK, ROWS)
    left = exists & (across > 0)
    right = exists & (2 * across + 1 < W)
    x_ptrs = x_ptr + ((image * H + 2 * first) * W + 2 * across) * C + channels
    offs = ((image * high + first) * wide + across) * C + channels

    upper, above = _largest_of_row(x_ptrs - W * C, left, exists, right, first > 0, C)
    above += tl.where(first > 0, 0, 3)  # only a pixel that exists may be the maximum
    for i in tl.static_range(ROWS):
        row = 2 * (first + i)
        middle, here = _largest_of_row(x_ptrs, left, exists, right, row < H, C)
        lower, below = _largest_of_row(x_ptrs + W * C, left, exists, right, row + 1 < H, C)
        y, place = _larger(upper, above, middle, here + 3)
        y, place = _larger(y, place, lower, below + 6)
        mask = exists & (row < H)
        tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(place_ptr + offs, place.to(tl.uint8), mask=mask)
        upper, above = lower, below
        x_ptrs += 2 * W * C
        offs += wide * C


@triton.jit
def unpool_kernel(
    dy_ptr,  # (N, H', W', C)
    place_ptr,  # (N, H', W', C)
    dx_ptr,  # (N, H, W, C)
    num_columns,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    VECTOR: tl.constexpr,
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
    offs = ((image * high + first) * wide + across) * C + channels
    dx_ptrs = dx_ptr + ((image * H + 2 * first) * W + 2 * across) * C + channels
    kind: tl.constexpr = dx_ptr.dtype.element_ty

    dy, place = _window(dy_ptr, place_ptr, offs, exists)
    next_dy, next_place = _window(dy_ptr, place_ptr, offs + C, next_exists)
    for i in tl.static_range(ROWS):
        row = 2 * (first + i)
        here, below, lower = row < H, row + 1 < H, row + 2 < H
        offs += wide * C
        lower_dy, lower_place = _window(dy_ptr, place_ptr, offs, exists & lower)
        last_dy, last_place = _window(dy_ptr, place_ptr, offs + C, next_exists & lower)
        dx = _at(4, dy, place)
        tl.store(dx_ptrs, dx.to(kind), mask=exists & here)
        dx = _at(5, dy, place) + _at(3, next_dy, next_place)
        tl.store(dx_ptrs + C, dx.to(kind), mask=right & here)
        dx = _at(7, dy, place) + _at(1, lower_dy, lower_place)
        tl.store(dx_ptrs + W * C, dx.to(kind), mask=exists & below)
        dx = _at(8, dy, place) + _at(6, next_dy, next_place)
        dx += _at(2, lower_dy, lower_place) + _at(0, last_dy, last_place)
        tl.store(dx_ptrs + (W + 1) * C, dx.to(kind), mask=right & below)
        dy, place, next_dy, next_place = lower_dy, lower_place, last_dy, last_place
        dx_ptrs += 2 * W * C


@triton.jit
def windows(
    num_columns,
    WIDE: tl.constexpr,
    C: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The columns that exist, their images, their first windows down and across, and channels."""
    vectors: tl.constexpr = C // VECTOR
    column = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[:, None]
    channels = column % vectors * VECTOR + tl.arange(0, VECTOR)[None, :]
    position = column // vectors
    first = tl.broadcast_to(tl.program_id(1) * ROWS, (BLOCK, 1))
    return column < num_columns, position // WIDE, first, position % WIDE, channels


@triton.jit
def _largest_of_row(x_ptrs, left, exists, right, inside, C: tl.constexpr):
    """The largest of a pixel and its neighbours to the left and right, and which of them it is."""
    a = tl.load(x_ptrs - C, mask=left & inside, other=LEAST).to(tl.float32)
    b = tl.load(x_ptrs, mask=exists & inside, other=LEAST).to(tl.float32)
    c = tl.load(x_ptrs + C, mask=right & inside, other=LEAST).to(tl.float32)
    most, place = _larger(a, tl.where(left, 0, 1), b, 1)
    return _larger(most, place, c, 2)


@triton.jit
def _larger(a, place_a, b, place_b):
    """As in torch: of equals the first, of those that are not a number the last."""
    second = (b > a) | (b != b)
    return tl.where(second, b, a), tl.where(second, place_b, place_a)


@triton.jit
def _window(dy_ptr, place_ptr, offs, mask):
    dy = tl.load(dy_ptr + offs, mask=mask, other=0.0)
    return dy.to(tl.float32), tl.load(place_ptr + offs, mask=mask, other=0)


@triton.jit
def _at(place, dy, place_of_dy):
    return tl.where(place_of_dy == place, dy, 0.0)
