"""The kernels of narrow convolutions, in Triton. Images lie channels last: (N, H, W, C).

conv      y = x * w, and dx = dy * w with the taps turned around and the channels exchanged
wgrad     sums of x·dy over a share of the pixels, for every tap: partial results in float32
add_up    adds the partial results, always in the same order

Copies of 16 bytes from memory pass the L1 cache by, smaller ones go through it. VECTOR is the
number of channels per copy: 8, or 4, by masks of which Triton knows no more than that 4 channels
in a row share them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from modenorm.kernels.gpu.common import begin
from modenorm.kernels.layout import interpreting

__all__ = ["add_up_kernel", "conv_kernel", "dot", "wgrad_kernel"]

WIDENS = tl.constexpr(interpreting())  # the interpreter would multiply the bits of bfloat16


@triton.jit
def conv_kernel(
    x_ptr,  # (N, H, W, CIN)
    w_ptr,  # (COUT, CIN, 3, 3) by strides
    y_ptr,  # (N, H, W, COUT)
    num_images,
    H: tl.constexpr,
    W: tl.constexpr,
    CIN: tl.constexpr,
    COUT: tl.constexpr,
    STRIDE_OUT: tl.constexpr,
    STRIDE_IN: tl.constexpr,
    STRIDE_I: tl.constexpr,
    STRIDE_J: tl.constexpr,
    FLIP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
    SETTLES: tl.constexpr,  # sums stay where they are until sm_90's wide products are done
    OVERLAPS: tl.constexpr,
):
    """BLOCK columns of pixels, from as many images as it takes; ROWS rows of the output.

    A row of x, read at three shifts, adds to three rows of y: the one below it begins with it, the
    one above it is complete. So x comes from memory three times, not nine, and the weights once.
    Two of the shifts are one product of twice the depth, as their channels lie side by side.
    """
    begin(OVERLAPS)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(1) * ROWS
    image, across = column // W, column % W
    exists = image < num_images
    above = (image.to(tl.int64) * (H * W) + across + (first - 1) * W)[:, None]
    two, one = tl.arange(0, 2 * CIN), tl.arange(0, CIN)
    c_out = tl.program_id(2) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    xx_ptrs = x_ptr + above * CIN + (two - CIN)[None, :]
    x_ptrs = x_ptr + above * CIN + (one + CIN)[None, :]
    y_ptrs = y_ptr + (above - W) * COUT + c_out[None, :]
    mask_xx = exists[:, None] & ((across > 0)[:, None] | (two >= CIN)[None, :])
    mask_xx &= (two // VECTOR < 2 * CIN // VECTOR)[None, :]
    mask_x = (exists & (across < W - 1))[:, None] & (one // VECTOR < CIN // VECTOR)[None, :]

    di: tl.constexpr = -STRIDE_I if FLIP else STRIDE_I
    dj: tl.constexpr = -STRIDE_J if FLIP else STRIDE_J
    start: tl.constexpr = 2 * (STRIDE_I + STRIDE_J) if FLIP else 0
    kind: tl.constexpr = x_ptr.dtype.element_ty
    w_ptr += start
    ww_ptrs = w_ptr + (two % CIN * STRIDE_IN + two // CIN * dj)[:, None]
    ww_ptrs += c_out[None, :] * STRIDE_OUT
    w_ptrs = w_ptr + (one * STRIDE_IN + 2 * dj)[:, None] + c_out[None, :] * STRIDE_OUT
    ww0, w0 = tl.load(ww_ptrs).to(kind), tl.load(w_ptrs).to(kind)
    ww1, w1 = tl.load(ww_ptrs + di).to(kind), tl.load(w_ptrs + di).to(kind)
    ww2, w2 = tl.load(ww_ptrs + 2 * di).to(kind), tl.load(w_ptrs + 2 * di).to(kind)

    nothing = tl.zeros((BLOCK, BLOCK_OUT), tl.float32)
    upper, lower = nothing, nothing
    for step in tl.range(0, ROWS + 2, num_stages=STAGES, loop_unroll_factor=UNROLL):
        row = tl.broadcast_to(first - 1 + step, (BLOCK,))
        inside = ((row >= 0) & (row < H))[:, None]
        xx = tl.load(xx_ptrs, mask=mask_xx & inside, other=0.0)
        x = tl.load(x_ptrs, mask=mask_x & inside, other=0.0)
        y = dot(x, w2, dot(xx, ww2, upper))
        upper = dot(x, w1, dot(xx, ww1, lower))
        lower = dot(x, w0, dot(xx, ww0, nothing))
        if SETTLES:
            upper, lower = upper + nothing, lower + nothing
        done = exists & (row > first) & (row <= H)
        tl.store(y_ptrs, y.to(kind), mask=done[:, None])
        xx_ptrs += W * CIN
        x_ptrs += W * CIN
        y_ptrs += W * COUT


@triton.jit
def dot(a, b, total):
    """The sum of a total in float32 and a product of matrices in half precision."""
    if WIDENS:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total)


@triton.jit
def wgrad_kernel(
    x_ptr,  # (N, H, W, CIN)
    dy_ptr,  # (N, H, W, COUT)
    part_ptr,  # (programs along axis 0, 3, 3, CIN, COUT)
    num_pixels,
    num_steps,
    H: tl.constexpr,
    W: tl.constexpr,
    CIN: tl.constexpr,
    COUT: tl.constexpr,
    TAPS_I: tl.constexpr,  # rows of taps per program: 1 or 3
    TAPS_J: tl.constexpr,  # taps of a row per program: 1 or 3
    WIDTH_X: tl.constexpr,  # a power of two from TAPS_J·CIN
    WIDTH_DY: tl.constexpr,  # a power of two from TAPS_I·COUT
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """For a pixel p, tap (i, j) pairs x[p + j - 1] with dy[p - (i - 1)·W].

    So the taps of a row are a wider slice of x, which is contiguous, and the rows of taps are three
    slices of dy: one product of the two gives all nine.
    """
    begin(OVERLAPS)
    m, n = tl.arange(0, WIDTH_X), tl.arange(0, WIDTH_DY)
    j = tl.program_id(1) % (3 // TAPS_J) * TAPS_J + m // CIN
    i = tl.program_id(1) // (3 // TAPS_J) * TAPS_I + n // COUT
    offs_x = (j - 1) * CIN + m % CIN
    offs_dy = n % COUT - (i - 1) * (W * COUT)
    mask_m = m // VECTOR < TAPS_J * CIN // VECTOR
    mask_n = n // VECTOR < TAPS_I * COUT // VECTOR
    begins = tl.program_id(0) * num_steps * BLOCK
    total = tl.zeros((WIDTH_X, WIDTH_DY), tl.float32)
    for step in tl.range(0, num_steps, num_stages=STAGES):
        pixel = begins + step * BLOCK + tl.arange(0, BLOCK)
        across = (pixel % W)[:, None] + (j - 1)[None, :]
        down = (pixel // W % H)[:, None] - (i - 1)[None, :]
        exists = (pixel < num_pixels)[:, None]
        mask_x = exists & mask_m[None, :] & (across >= 0) & (across < W)
        mask_dy = exists & mask_n[None, :] & (down >= 0) & (down < H)
        far = pixel.to(tl.int64)[:, None]
        x = tl.load(x_ptr + far * CIN + offs_x[None, :], mask=mask_x, other=0.0)
        dy = tl.load(dy_ptr + far * COUT + offs_dy[None, :], mask=mask_dy, other=0.0)
        total = dot(tl.trans(x), dy, total)
    tap = i[None, :] * 3 + j[:, None]
    offs = (tap * CIN + (m % CIN)[:, None]) * COUT + (n % COUT)[None, :]
    offs += tl.program_id(0) * (9 * CIN * COUT)
    tl.store(part_ptr + offs, total, mask=mask_m[:, None] & mask_n[None, :])


@triton.jit
def add_up_kernel(
    part_ptr,  # (P, KH, KW, CIN, COUT)
    dw_ptr,  # (COUT, CIN, KH, KW) by strides
    num_parts,
    CIN: tl.constexpr,
    COUT: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE_OUT: tl.constexpr,
    STRIDE_IN: tl.constexpr,
    STRIDE_I: tl.constexpr,
    STRIDE_J: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The sum of the partial results for BLOCK weights."""
    begin(OVERLAPS)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = e < KH * KW * CIN * COUT
    total = tl.zeros((PARTS, BLOCK), tl.float32)
    for start in tl.range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        offs = part[:, None] * (KH * KW * CIN * COUT) + e[None, :]
        mask = (part < num_parts)[:, None] & exists[None, :]
        total += tl.load(part_ptr + offs, mask=mask, other=0.0)
    tap, c_in, c_out = e // (CIN * COUT), e // COUT % CIN, e % COUT
    offs = c_out * STRIDE_OUT + c_in * STRIDE_IN + tap // KW * STRIDE_I + tap % KW * STRIDE_J
    tl.store(dw_ptr + offs, tl.sum(total, 0).to(dw_ptr.dtype.element_ty), mask=exists)
