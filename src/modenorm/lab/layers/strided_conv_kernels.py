"""The kernels of narrow convolutions with stride 2, in Triton. Images lie channels last.

strided_conv      y[r, c] is the sum of x[2r - 1 + i, 2c - 1 + j] * w[i, j]
strided_input     dx from dy and w
strided_wgrad     sums of x·dy over a share of dy's pixels, for every tap: partial results

An image of H rows gives (H + 1) // 2, so that rows 2r and 2r + 1 belong to r, and so do columns.
VECTOR and SETTLES are as in narrow_conv_kernels; to settle, sums are chosen by a mask, as Triton
makes one product of a product and a zero that is added.
"""

# mypy: disable-error-code="assignment"
# (tuples grow while the compiler unrolls loops)

from __future__ import annotations

import triton
import triton.language as tl

from modenorm.kernels.gpu.common import begin
from modenorm.lab.layers.narrow_conv_kernels import dot

__all__ = ["strided_conv_kernel", "strided_input_kernel", "strided_wgrad_kernel"]


@triton.jit
def strided_conv_kernel(
    x_ptr,  # (N, H, W, CIN)
    w_ptr,  # (COUT, CIN, 3, 3) by strides
    y_ptr,  # (N, (H + 1) // 2, (W + 1) // 2, COUT)
    num_images,
    H: tl.constexpr,
    W: tl.constexpr,
    CIN: tl.constexpr,
    COUT: tl.constexpr,
    STRIDE_OUT: tl.constexpr,
    STRIDE_IN: tl.constexpr,
    STRIDE_I: tl.constexpr,
    STRIDE_J: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
    SETTLES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """BLOCK columns of y, from as many images as it takes; ROWS rows of y.

    Rows 2r and 2r + 1 of x complete row r of y, and the latter begins row r + 1: every row of x is
    read once. Pixels 2c and 2c + 1 are one product, as their channels lie side by side.
    """
    begin(OVERLAPS)
    high: tl.constexpr = (H + 1) // 2
    wide: tl.constexpr = (W + 1) // 2
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(1) * ROWS
    image, across = column // wide, column % wide
    exists = image < num_images
    far = image.to(tl.int64)
    pixel = (far * (H * W) + 2 * first * W + 2 * across)[:, None]
    two, one = tl.arange(0, 2 * CIN), tl.arange(0, CIN)
    c_out = tl.program_id(2) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    xx_ptrs = x_ptr + pixel * CIN + two[None, :]
    x_ptrs = x_ptr + pixel * CIN + (one - CIN)[None, :]
    y_ptrs = y_ptr + (far * (high * wide) + first * wide + across)[:, None] * COUT + c_out[None, :]
    mask_xx = exists[:, None] & (two // VECTOR < 2 * CIN // VECTOR)[None, :]
    if W % 2:
        mask_xx &= (across < wide - 1)[:, None] | (two < CIN)[None, :]
    mask_x = (exists & (across > 0))[:, None] & (one // VECTOR < CIN // VECTOR)[None, :]

    above = (tl.broadcast_to(first, (BLOCK,)) > 0)[:, None]
    xx = tl.load(xx_ptrs - W * CIN, mask=mask_xx & above, other=0.0)
    x = tl.load(x_ptrs - W * CIN, mask=mask_x & above, other=0.0)
    kind: tl.constexpr = x_ptr.dtype.element_ty
    ww_ptrs = w_ptr + (two % CIN * STRIDE_IN + (1 + two // CIN) * STRIDE_J)[:, None]
    ww_ptrs += c_out[None, :] * STRIDE_OUT
    w_ptrs = w_ptr + one[:, None] * STRIDE_IN + c_out[None, :] * STRIDE_OUT
    ww0, w0 = tl.load(ww_ptrs).to(kind), tl.load(w_ptrs).to(kind)
    ww1, w1 = tl.load(ww_ptrs + STRIDE_I).to(kind), tl.load(w_ptrs + STRIDE_I).to(kind)
    ww2, w2 = tl.load(ww_ptrs + 2 * STRIDE_I).to(kind), tl.load(w_ptrs + 2 * STRIDE_I).to(kind)

    nothing = tl.zeros((BLOCK, BLOCK_OUT), tl.float32)
    begun = dot(x, w0, dot(xx, ww0, nothing))
    for step in tl.range(0, ROWS, num_stages=STAGES, loop_unroll_factor=UNROLL):
        row = tl.broadcast_to(2 * (first + step), (BLOCK,))
        inside, below = (row < H)[:, None], (row + 1 < H)[:, None]
        xx = tl.load(xx_ptrs, mask=mask_xx & inside, other=0.0)
        x = tl.load(x_ptrs, mask=mask_x & inside, other=0.0)
        xx_below = tl.load(xx_ptrs + W * CIN, mask=mask_xx & below, other=0.0)
        x_below = tl.load(x_ptrs + W * CIN, mask=mask_x & below, other=0.0)
        y = dot(x, w1, dot(xx, ww1, begun))
        y = dot(x_below, w2, dot(xx_below, ww2, y))
        begun = dot(x_below, w0, dot(xx_below, ww0, nothing))
        if SETTLES:
            begun = tl.where(exists[:, None], begun, 0.0)
        tl.store(y_ptrs, y.to(kind), mask=exists[:, None] & inside)
        xx_ptrs += 2 * W * CIN
        x_ptrs += 2 * W * CIN
        y_ptrs += wide * COUT


@triton.jit
def strided_input_kernel(
    dy_ptr,  # (N, (H + 1) // 2, (W + 1) // 2, COUT)
    w_ptr,  # (COUT, CIN, 3, 3) by strides
    dx_ptr,  # (N, H, W, CIN)
    num_images,
    H: tl.constexpr,
    W: tl.constexpr,
    CIN: tl.constexpr,
    COUT: tl.constexpr,
    STRIDE_OUT: tl.constexpr,
    STRIDE_IN: tl.constexpr,
    STRIDE_I: tl.constexpr,
    STRIDE_J: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
    SETTLES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """BLOCK columns of dy, from as many images as it takes, ROWS rows; twice as many of dx.

    Row r of dy completes row 2r - 1 of dx, is all of row 2r and begins row 2r + 1; so do columns.
    Pixel 2c has its weights from the middle tap of a row, pixel 2c + 1 from the last one, and
    from the first one with dy's next pixel.
    """
    begin(OVERLAPS)
    high: tl.constexpr = (H + 1) // 2
    wide: tl.constexpr = (W + 1) // 2
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(1) * ROWS
    image, across = column // wide, column % wide
    exists = (image < num_images)[:, None]
    far, c_out = image.to(tl.int64), tl.arange(0, COUT)
    c_in = tl.program_id(2) * BLOCK_IN + tl.arange(0, BLOCK_IN)
    pixel = (far * (H * W) + 2 * first * W + 2 * across)[:, None]
    dx_ptrs = dx_ptr + pixel * CIN + c_in[None, :]
    pixel = (far * (high * wide) + first * wide + across)[:, None]
    dy_ptrs = dy_ptr + pixel * COUT + c_out[None, :]
    mask_dy = exists & (c_out // VECTOR < COUT // VECTOR)[None, :]
    mask_next = mask_dy & (across < wide - 1)[:, None]
    mask_odd = exists
    if W % 2:
        mask_odd = exists & (across < wide - 1)[:, None]

    kind: tl.constexpr = dy_ptr.dtype.element_ty
    w_ptrs = w_ptr + (c_out * STRIDE_OUT)[:, None] + (c_in * STRIDE_IN)[None, :]
    w00, w01, w02 = _row_of_taps(w_ptrs, STRIDE_J, kind)
    w10, w11, w12 = _row_of_taps(w_ptrs + STRIDE_I, STRIDE_J, kind)
    w20, w21, w22 = _row_of_taps(w_ptrs + 2 * STRIDE_I, STRIDE_J, kind)

    nothing = tl.zeros((BLOCK, BLOCK_IN), tl.float32)
    begun_even, begun_odd = nothing, nothing
    for step in tl.range(0, ROWS + 1, num_stages=STAGES, loop_unroll_factor=UNROLL):
        row = tl.broadcast_to(first + step, (BLOCK,))[:, None]
        inside = row < high
        dy = tl.load(dy_ptrs, mask=mask_dy & inside, other=0.0)
        dy_next = tl.load(dy_ptrs + COUT, mask=mask_next & inside, other=0.0)
        above_even = dot(dy, w01, begun_even)
        above_odd = dot(dy_next, w00, dot(dy, w02, begun_odd))
        even = dot(dy, w11, nothing)
        odd = dot(dy_next, w10, dot(dy, w12, nothing))
        begun_even = dot(dy, w21, nothing)
        begun_odd = dot(dy_next, w20, dot(dy, w22, nothing))
        if SETTLES:
            begun_even = tl.where(exists, begun_even, 0.0)
            begun_odd = tl.where(exists, begun_odd, 0.0)
        above = (row > first) & (2 * row <= H)
        here = (row < first + ROWS) & inside
        tl.store(dx_ptrs - W * CIN, above_even.to(kind), mask=exists & above)
        tl.store(dx_ptrs - W * CIN + CIN, above_odd.to(kind), mask=mask_odd & above)
        tl.store(dx_ptrs, even.to(kind), mask=exists & here)
        tl.store(dx_ptrs + CIN, odd.to(kind), mask=mask_odd & here)
        dy_ptrs += wide * COUT
        dx_ptrs += 2 * W * CIN


@triton.jit
def _row_of_taps(w_ptrs, STRIDE_J: tl.constexpr, kind: tl.constexpr):
    w0 = tl.load(w_ptrs).to(kind)
    w1 = tl.load(w_ptrs + STRIDE_J).to(kind)
    w2 = tl.load(w_ptrs + 2 * STRIDE_J).to(kind)
    return w0, w1, w2


@triton.jit
def strided_wgrad_kernel(
    x_ptr,  # (N, H, W, CIN)
    dy_ptr,  # (N, (H + 1) // 2, (W + 1) // 2, COUT)
    part_ptr,  # (programs along axis 0, 3, 3, CIN, COUT)
    num_pixels,  # of dy
    num_steps,
    H: tl.constexpr,
    W: tl.constexpr,
    CIN: tl.constexpr,
    COUT: tl.constexpr,
    TAPS_I: tl.constexpr,  # rows of taps per program: 1 or 3
    TAPS_J: tl.constexpr,  # taps of a row per program: 1 or 3
    WIDTH_X: tl.constexpr,  # a power of two from TAPS_J·CIN
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The taps of a row are a wider slice of x, which is contiguous; a product for each row."""
    begin(OVERLAPS)
    high: tl.constexpr = (H + 1) // 2
    wide: tl.constexpr = (W + 1) // 2
    m, n = tl.arange(0, WIDTH_X), tl.arange(0, COUT)
    j = tl.program_id(1) % (3 // TAPS_J) * TAPS_J + m // CIN
    first = tl.program_id(1) // (3 // TAPS_J) * TAPS_I
    offs_x = (j - 1) * CIN + m % CIN
    mask_m = m // VECTOR < TAPS_J * CIN // VECTOR
    mask_n = n // VECTOR < COUT // VECTOR
    begins = tl.program_id(0) * num_steps * BLOCK
    totals = (tl.zeros((WIDTH_X, COUT), tl.float32),) * TAPS_I
    for step in tl.range(0, num_steps, num_stages=STAGES):
        pixel = begins + step * BLOCK + tl.arange(0, BLOCK)
        exists = (pixel < num_pixels)[:, None]
        image, row, across = pixel // (high * wide), pixel // wide % high * 2, pixel % wide * 2
        place = across[:, None] + (j - 1)[None, :]
        mask_x = exists & mask_m[None, :] & (place >= 0) & (place < W)
        dy_ptrs = dy_ptr + pixel.to(tl.int64)[:, None] * COUT + n[None, :]
        dy = tl.load(dy_ptrs, mask=exists & mask_n[None, :], other=0.0)
        centre = (image.to(tl.int64) * (H * W) + row * W + across)[:, None]
        x_ptrs = x_ptr + centre * CIN + offs_x[None, :]
        added = ()
        for i in tl.static_range(TAPS_I):
            down = first + i - 1
            inside = ((row + down >= 0) & (row + down < H))[:, None]
            x = tl.load(x_ptrs + down * (W * CIN), mask=mask_x & inside, other=0.0)
            added += (dot(tl.trans(x), dy, totals[i]),)
        totals = added
    part_ptr += tl.program_id(0) * (9 * CIN * COUT)
    for i in tl.static_range(TAPS_I):
        tap = (first + i) * 3 + j[:, None]
        offs = (tap * CIN + (m % CIN)[:, None]) * COUT + n[None, :]
        tl.store(part_ptr + offs, totals[i], mask=mask_m[:, None])
