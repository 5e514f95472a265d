"""The two maps, channels first, of rows that are short and no multiple of 16 bytes, in Triton.

Such rows begin anywhere, so tiles of rows are read a number at a time. A map needs no rows: here a
tensor is one long row of pieces of 16 bytes. A piece has numbers of one row, or of it and the next.
"""

from __future__ import annotations

import triton
import triton.language as tl

from modenorm.kernels.gpu.common import begin, begin_beside, end_beside, from_end
from modenorm.kernels.gpu.launch import Launch
from modenorm.kernels.gpu.tiles import Geometry, power_of_two_in

__all__ = ["flat_apply", "flat_apply_backward"]

BLOCK, NUM_WARPS = 1024, 4


@triton.jit
def _flat_apply_kernel(
    x_ptr,  # (R, P)
    centre_ptr,  # (R,)
    scale_ptr,  # (R,)
    shift_ptr,  # (R,)
    y_ptr,  # as x
    num_rows,
    size,
    DIVIDES: tl.constexpr,  # the size
    P: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    first, offs, mask, rows, own = _pieces(num_rows, size, DIVIDES, P, WIDTH, BLOCK)
    x = tl.load(x_ptr + first + offs, mask=mask, other=0.0).to(tl.float32)
    centre = _of_rows(centre_ptr, rows, own, num_rows)
    scale = _of_rows(scale_ptr, rows, own, num_rows)
    y = (x - centre) * scale + _of_rows(shift_ptr, rows, own, num_rows)
    tl.store(y_ptr + first + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _flat_apply_backward_kernel(
    dy_ptr,  # (R, P)
    x_ptr,  # as dy
    centre_ptr,  # (R,)
    scale_ptr,  # (R,)
    slope_ptr,  # (R,)
    offset_ptr,  # (R,)
    dx_ptr,  # as dy
    num_rows,
    size,
    WITH_SLOPE: tl.constexpr,  # without, x is not read
    BESIDE: tl.constexpr,  # after a launch that has waited for all that is read here
    DIVIDES: tl.constexpr,
    P: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS and not BESIDE)
    begin_beside(OVERLAPS and BESIDE)
    first, offs, mask, rows, own = _pieces(num_rows, size, DIVIDES, P, WIDTH, BLOCK)
    dy = tl.load(dy_ptr + first + offs, mask=mask, other=0.0).to(tl.float32)
    scale = _of_rows(scale_ptr, rows, own, num_rows)
    dx = scale * dy + _of_rows(offset_ptr, rows, own, num_rows)
    if WITH_SLOPE:
        x = tl.load(x_ptr + first + offs, mask=mask, other=0.0).to(tl.float32)
        centre = _of_rows(centre_ptr, rows, own, num_rows)
        dx += _of_rows(slope_ptr, rows, own, num_rows) * (x - centre)
    tl.store(dx_ptr + first + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    end_beside(OVERLAPS and BESIDE)


@triton.jit
def _pieces(
    num_rows,
    size,
    DIVIDES: tl.constexpr,
    P: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Where a program begins, its offsets, which there are, pieces' rows, what is of that row."""
    size = size // DIVIDES * DIVIDES  # see _hinted in pass_kernels.py
    first = from_end(0).to(tl.int64) * BLOCK  # see _tile in pass_kernels.py
    row = first // P
    begins = tl.arange(0, BLOCK // WIDTH) * WIDTH
    slots = tl.arange(0, WIDTH)
    offs = begins[:, None] + slots[None, :]
    places = (first - row * P).to(tl.int32) + begins  # counted from the first row's begin
    later = places // P
    own = slots[None, :] < ((later + 1) * P - places)[:, None]
    return first, offs, first + offs < size, tl.minimum(row + later, num_rows - 1), own


@triton.jit
def _of_rows(ptr, rows, own, num_rows):
    """The numbers of the pieces' rows, and of the rows after them."""
    after = tl.load(ptr + tl.minimum(rows + 1, num_rows - 1))
    return tl.where(own, tl.load(ptr + rows)[:, None], after[:, None])


def flat_apply(geometry: Geometry, direct: bool) -> Launch:
    """As `Passes.apply`."""
    return _launch(_flat_apply_kernel, geometry, (), direct)


def flat_apply_backward(geometry: Geometry, with_slope: bool, beside: bool, direct: bool) -> Launch:
    """As `Passes.apply_backward`."""
    return _launch(_flat_apply_backward_kernel, geometry, (with_slope, beside), direct)


def _launch(
    kernel: triton.JITFunction, geometry: Geometry, flags: tuple[bool, ...], direct: bool
) -> Launch:
    rows = geometry.num_samples * geometry.num_channels
    size = rows * geometry.num_positions
    width = 16 // geometry.dtype.itemsize
    constants = (*flags, power_of_two_in(size), geometry.num_positions, width, BLOCK)
    grid = (triton.cdiv(size, BLOCK),)
    return Launch(kernel, grid, (rows, size), constants, NUM_WARPS, direct)
