"""The kernels of the four streaming passes, in Triton; kernels/gpu/passes.py launches them.

A tensor is seen as O outer blocks of R rows with P positions each. Channels first, all N·C rows of
contiguous positions form one outer block; channels last, each sample is one, its rows are the
channels, and they lie side by side. One kernel serves both: only the strides differ.
"""

from __future__ import annotations

import triton
import triton.language as tl

from modenorm.kernels.gpu.common import begin, begin_beside, end_beside, from_end

__all__ = [
    "apply_backward_kernel",
    "apply_kernel",
    "moments_kernel",
    "reduce_backward_kernel",
    "reduce_cut_backward_kernel",
]


@triton.jit
def moments_kernel(
    x_ptr,  # (O, R, P) by strides
    mean_ptr,  # (O, R)
    var_ptr,  # (O, R)
    num_rows,
    num_positions,
    stride_row,
    stride_position,
    WITH_VAR: tl.constexpr,
    SINGLE: tl.constexpr,  # one tile holds all positions
    ONE_AXIS: tl.constexpr,  # see _first_row
    DIVIDES_R: tl.constexpr,
    DIVIDES_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One read: sums around the first tile's mean, which is close enough to the whole one.

    That mean is an average over a share BLOCK_P/P of the row, so its distance from the row's mean,
    squared, is at most P/BLOCK_P variances: the subtraction at the end costs no more digits.
    """
    begin(OVERLAPS)
    num_rows, num_positions, stride_row, stride_position = _hinted(
        num_rows, num_positions, stride_row, stride_position, DIVIDES_R, DIVIDES_P
    )
    outer, first = _first_row(num_rows, ONE_AXIS, BLOCK_R)
    rows, slots = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    mask_rows = first + rows < num_rows
    base = x_ptr + outer * num_rows * num_positions + first.to(tl.int64) * stride_row
    offs = rows[:, None] * stride_row + slots[None, :] * stride_position
    mask = mask_rows[:, None] & (slots < num_positions)[None, :]
    x = tl.load(base + offs, mask=mask, other=0.0).to(tl.float32)
    out = outer * num_rows + first + rows
    if SINGLE:
        mean = tl.sum(x, 1) / num_positions
        tl.store(mean_ptr + out, mean, mask=mask_rows)
        if WITH_VAR:
            apart = tl.where(mask, x - mean[:, None], 0.0)
            tl.store(var_ptr + out, tl.sum(apart * apart, 1) / num_positions, mask=mask_rows)
    else:
        near = tl.sum(x, 1) / BLOCK_P
        apart = x - near[:, None]
        sums = apart
        squares = apart * apart
        step = tl.full((), BLOCK_P, tl.int64) * stride_position
        num_full = num_positions // BLOCK_P
        for _ in range(1, num_full):
            base += step
            x = tl.load(base + offs, mask=mask_rows[:, None], other=0.0).to(tl.float32)
            apart = x - near[:, None]
            sums += apart
            if WITH_VAR:
                squares += apart * apart
        rest = num_positions - num_full * BLOCK_P
        if rest > 0:
            mask = mask_rows[:, None] & (slots < rest)[None, :]
            x = tl.load(base + step + offs, mask=mask, other=0.0).to(tl.float32)
            apart = tl.where(mask, x - near[:, None], 0.0)
            sums += apart
            if WITH_VAR:
                squares += apart * apart
        away = tl.sum(sums, 1) / num_positions
        tl.store(mean_ptr + out, near + away, mask=mask_rows)
        if WITH_VAR:
            var = tl.sum(squares, 1) / num_positions - away * away
            var = tl.where(var < 0.0, 0.0, var)  # keeps NaN, which a maximum may drop
            tl.store(var_ptr + out, var, mask=mask_rows)


@triton.jit
def apply_kernel(
    x_ptr,  # (O, R, P) by strides
    centre_ptr,  # (O, R)
    scale_ptr,  # (O, R)
    shift_ptr,  # (O, R)
    y_ptr,  # as x
    num_rows,
    num_positions,
    stride_row,
    stride_position,
    ONE_AXIS: tl.constexpr,
    DIVIDES_R: tl.constexpr,
    DIVIDES_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """y = (x − centre) · scale + shift."""
    begin(OVERLAPS)
    num_rows, num_positions, stride_row, stride_position = _hinted(
        num_rows, num_positions, stride_row, stride_position, DIVIDES_R, DIVIDES_P
    )
    start, out, offs, mask_rows, mask = _tile(
        num_rows, num_positions, stride_row, stride_position, ONE_AXIS, BLOCK_R, BLOCK_P
    )
    x = tl.load(x_ptr + start + offs, mask=mask, other=0.0).to(tl.float32)
    centre = tl.load(centre_ptr + out, mask=mask_rows, other=0.0)[:, None]
    scale = tl.load(scale_ptr + out, mask=mask_rows, other=0.0)[:, None]
    shift = tl.load(shift_ptr + out, mask=mask_rows, other=0.0)[:, None]
    y = (x - centre) * scale + shift
    tl.store(y_ptr + start + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def reduce_backward_kernel(
    dy_ptr,  # (O, R, P) by strides
    x_ptr,  # as dy
    centre_ptr,  # (O, R)
    total_ptr,  # (O, R)
    product_ptr,  # (O, R)
    num_rows,
    num_positions,
    stride_row,
    stride_position,
    SINGLE: tl.constexpr,
    ONE_AXIS: tl.constexpr,
    DIVIDES_R: tl.constexpr,
    DIVIDES_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Sums of dy and of dy · (x − centre) over the positions."""
    begin(OVERLAPS)
    _sum_backward(
        dy_ptr, x_ptr, centre_ptr, centre_ptr, centre_ptr, total_ptr, product_ptr,
        num_rows, num_positions, stride_row, stride_position,
        False, SINGLE, ONE_AXIS, DIVIDES_R, DIVIDES_P, BLOCK_R, BLOCK_P,
    )  # fmt: skip


@triton.jit
def reduce_cut_backward_kernel(
    dy_ptr,  # (O, R, P) by strides
    x_ptr,  # as dy
    centre_ptr,  # (O, R)
    scale_ptr,  # (O, R)
    shift_ptr,  # (O, R)
    total_ptr,  # (O, R)
    product_ptr,  # (O, R)
    num_rows,
    num_positions,
    stride_row,
    stride_position,
    SINGLE: tl.constexpr,
    ONE_AXIS: tl.constexpr,
    DIVIDES_R: tl.constexpr,
    DIVIDES_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The same sums where (x − centre) · scale + shift is above zero: a ReLU cut off the rest."""
    begin(OVERLAPS)
    _sum_backward(
        dy_ptr, x_ptr, centre_ptr, scale_ptr, shift_ptr, total_ptr, product_ptr,
        num_rows, num_positions, stride_row, stride_position,
        True, SINGLE, ONE_AXIS, DIVIDES_R, DIVIDES_P, BLOCK_R, BLOCK_P,
    )  # fmt: skip


@triton.jit
def _sum_backward(
    dy_ptr,
    x_ptr,
    centre_ptr,
    scale_ptr,
    shift_ptr,
    total_ptr,
    product_ptr,
    num_rows,
    num_positions,
    stride_row,
    stride_position,
    CUT: tl.constexpr,
    SINGLE: tl.constexpr,
    ONE_AXIS: tl.constexpr,
    DIVIDES_R: tl.constexpr,
    DIVIDES_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    num_rows, num_positions, stride_row, stride_position = _hinted(
        num_rows, num_positions, stride_row, stride_position, DIVIDES_R, DIVIDES_P
    )
    outer, first = _first_row(num_rows, ONE_AXIS, BLOCK_R)
    rows, slots = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    mask_rows = first + rows < num_rows
    out = outer * num_rows + first + rows
    centre = tl.load(centre_ptr + out, mask=mask_rows, other=0.0)[:, None]
    scale, shift = centre, centre
    if CUT:
        scale = tl.load(scale_ptr + out, mask=mask_rows, other=0.0)[:, None]
        shift = tl.load(shift_ptr + out, mask=mask_rows, other=0.0)[:, None]
    base = outer * num_rows * num_positions + first.to(tl.int64) * stride_row
    offs = rows[:, None] * stride_row + slots[None, :] * stride_position
    if SINGLE:
        mask = mask_rows[:, None] & (slots < num_positions)[None, :]
        dy = tl.load(dy_ptr + base + offs, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + base + offs, mask=mask, other=0.0).to(tl.float32)
        total = _cut(dy, x - centre, scale, shift, CUT)
        product = total * (x - centre)
    else:
        # a tile is read ahead: compilers let loads wait for the sums before them
        step = tl.full((), BLOCK_P, tl.int64) * stride_position
        dy_ahead = tl.load(dy_ptr + base + offs, mask=mask_rows[:, None], other=0.0)
        x_ahead = tl.load(x_ptr + base + offs, mask=mask_rows[:, None], other=0.0)
        total = tl.zeros([BLOCK_R, BLOCK_P], tl.float32)
        product = tl.zeros([BLOCK_R, BLOCK_P], tl.float32)
        for done in range(0, num_positions, BLOCK_P):
            dy, x = dy_ahead.to(tl.float32), x_ahead.to(tl.float32)
            base += step
            mask = mask_rows[:, None] & (slots < num_positions - done - BLOCK_P)[None, :]
            dy_ahead = tl.load(dy_ptr + base + offs, mask=mask, other=0.0)
            x_ahead = tl.load(x_ptr + base + offs, mask=mask, other=0.0)
            dy = _cut(dy, x - centre, scale, shift, CUT)
            total += dy
            product += dy * (x - centre)
    tl.store(total_ptr + out, tl.sum(total, 1), mask=mask_rows)
    tl.store(product_ptr + out, tl.sum(product, 1), mask=mask_rows)


@triton.jit
def _cut(dy, apart, scale, shift, CUT: tl.constexpr):
    """As torch's ReLU: where the output is NaN, the gradient passes."""
    if CUT:
        dy = tl.where(apart * scale + shift <= 0.0, 0.0, dy)
    return dy


@triton.jit
def apply_backward_kernel(
    dy_ptr,  # (O, R, P) by strides
    x_ptr,  # as dy
    centre_ptr,  # (O, R)
    scale_ptr,  # (O, R)
    slope_ptr,  # (O, R)
    offset_ptr,  # (O, R)
    dx_ptr,  # as dy
    num_rows,
    num_positions,
    stride_row,
    stride_position,
    WITH_SLOPE: tl.constexpr,  # without, x is not read
    BESIDE: tl.constexpr,  # after a launch that has waited for all that is read here
    ONE_AXIS: tl.constexpr,
    DIVIDES_R: tl.constexpr,
    DIVIDES_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """dx = scale · dy + slope · (x − centre) + offset."""
    begin(OVERLAPS and not BESIDE)
    begin_beside(OVERLAPS and BESIDE)
    num_rows, num_positions, stride_row, stride_position = _hinted(
        num_rows, num_positions, stride_row, stride_position, DIVIDES_R, DIVIDES_P
    )
    start, out, offs, mask_rows, mask = _tile(
        num_rows, num_positions, stride_row, stride_position, ONE_AXIS, BLOCK_R, BLOCK_P
    )
    dy = tl.load(dy_ptr + start + offs, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + out, mask=mask_rows, other=0.0)[:, None]
    offset = tl.load(offset_ptr + out, mask=mask_rows, other=0.0)[:, None]
    dx = scale * dy + offset
    if WITH_SLOPE:
        x = tl.load(x_ptr + start + offs, mask=mask, other=0.0).to(tl.float32)
        centre = tl.load(centre_ptr + out, mask=mask_rows, other=0.0)[:, None]
        slope = tl.load(slope_ptr + out, mask=mask_rows, other=0.0)[:, None]
        dx += slope * (x - centre)
    tl.store(dx_ptr + start + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    end_beside(OVERLAPS and BESIDE)


@triton.jit
def _hinted(
    num_rows,
    num_positions,
    stride_row,
    stride_position,
    DIVIDES_R: tl.constexpr,
    DIVIDES_P: tl.constexpr,
):
    """The same numbers, as the compiler sees that they are multiples: this widens the loads."""
    if DIVIDES_P > 1:
        num_positions = num_positions // DIVIDES_P * DIVIDES_P
        stride_row = stride_row // DIVIDES_P * DIVIDES_P
    if DIVIDES_R > 1:
        num_rows = num_rows // DIVIDES_R * DIVIDES_R
        stride_position = stride_position // DIVIDES_R * DIVIDES_R
    return num_rows, num_positions, stride_row, stride_position


@triton.jit
def _first_row(num_rows, ONE_AXIS: tl.constexpr, BLOCK_R: tl.constexpr):
    """The outer block of a program that sums along the positions, and its first row.

    Programs have one axis where there are more than others can have.
    """
    block, outer = tl.program_id(0), tl.program_id(1)
    if ONE_AXIS:
        blocks = tl.cdiv(num_rows, BLOCK_R)
        outer = block // blocks
        block -= outer * blocks
    return outer.to(tl.int64), block * BLOCK_R


@triton.jit
def _tile(
    num_rows,
    num_positions,
    stride_row,
    stride_position,
    ONE_AXIS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Where this program's tile of a map starts, its rows, the offsets in it, and the masks.

    From the tensor's end to its begin: the pass before has left the end in the cache.
    """
    block, column, outer = from_end(0), from_end(1), from_end(2)
    if ONE_AXIS:
        blocks, columns = tl.cdiv(num_rows, BLOCK_R), tl.cdiv(num_positions, BLOCK_P)
        line = block // blocks
        block -= line * blocks
        outer = line // columns
        column = line - outer * columns
    outer = outer.to(tl.int64)
    first_row, first = block * BLOCK_R, column * BLOCK_P
    rows, slots = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    mask_rows = first_row + rows < num_rows
    mask = mask_rows[:, None] & (first + slots < num_positions)[None, :]
    start = outer * num_rows * num_positions + first_row.to(tl.int64) * stride_row
    start += first.to(tl.int64) * stride_position
    offs = rows[:, None] * stride_row + slots[None, :] * stride_position
    out = outer * num_rows + first_row + rows
    return start, out, offs, mask_rows, mask
