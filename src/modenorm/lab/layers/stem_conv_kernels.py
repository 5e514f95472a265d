"""The kernels of first convolutions, in Triton. Images lie channels last: (N, H, W, C).

conv      y = x * w
wgrad     sums of x·dy over a share of the pixels, for every tap: partial results in float32

A window's numbers, KH·KW·CIN, are the depth of a product. With at least 32 pixels per warp a thread
gathers the windows of its own pixels: their places are found once, and the way from there to each
number is a constant of the code. Depths are powers of two, so a window comes in pieces, of which
PADDED, the numbers with zeros up to a multiple of 16, has the bits: 75 numbers come as 64 and 16.
"""

# mypy: disable-error-code="assignment"
# (tuples grow while the compiler unrolls loops)

from __future__ import annotations

import triton
import triton.language as tl

from modenorm.kernels.gpu.common import begin
from modenorm.lab.layers.narrow_conv_kernels import dot

__all__ = ["conv_kernel", "wgrad_kernel"]


@triton.jit
def _numbers(PADDED: tl.constexpr):
    """The numbers of a window, 0, 1, 2, …, in pieces of 16 to 256."""
    pieces = ()
    for bit in tl.static_range(4, 9):
        if PADDED >> bit & 1:
            pieces += ((PADDED >> (bit + 1) << (bit + 1)) + tl.arange(0, 1 << bit),)
    return pieces


@triton.jit
def conv_kernel(
    x_ptr,  # (N, HX, WX, CIN)
    w_ptr,  # (COUT, CIN, KH, KW) by strides
    y_ptr,  # (N, HY, WY, COUT)
    num_pixels,  # of y
    num_steps,
    CIN: tl.constexpr,
    HX: tl.constexpr,
    WX: tl.constexpr,
    COUT: tl.constexpr,
    HY: tl.constexpr,
    WY: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    STRIDE_OUT: tl.constexpr,
    STRIDE_IN: tl.constexpr,
    STRIDE_I: tl.constexpr,
    STRIDE_J: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    OUTS: tl.constexpr,  # blocks of channels per program
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """BLOCK pixels per step; the weights of OUTS · BLOCK_OUT channels stay at hand."""
    begin(OVERLAPS)
    kind: tl.constexpr = y_ptr.dtype.element_ty
    first = tl.program_id(1) * (OUTS * BLOCK_OUT)
    numbers, weights = _numbers(PADDED), ()
    for block in tl.static_range(OUTS):
        weights += _weights(
            w_ptr, numbers, first + block * BLOCK_OUT + tl.arange(0, BLOCK_OUT), CIN, COUT, KH, KW,
            STRIDE_OUT, STRIDE_IN, STRIDE_I, STRIDE_J, kind,
        )  # fmt: skip
    begins = tl.program_id(0) * num_steps * BLOCK
    for step in tl.range(0, num_steps, num_stages=STAGES):
        pixel = begins + step * BLOCK + tl.arange(0, BLOCK)
        windows = _windows(
            x_ptr, numbers, pixel, num_pixels, CIN, HX, WX, HY, WY, KH, KW, STRIDE, PADDING, kind
        )
        for o in tl.static_range(OUTS):
            total = tl.zeros((BLOCK, BLOCK_OUT), tl.float32)
            for piece in tl.static_range(len(numbers)):
                window = tl.trans(windows[piece])
                total = dot(window, weights[o * len(numbers) + piece], total)
            c_out = first + o * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
            ptrs = y_ptr + pixel.to(tl.int64)[:, None] * COUT + c_out[None, :]
            mask = (pixel < num_pixels)[:, None] & (c_out < COUT)[None, :]
            tl.store(ptrs, total.to(kind), mask=mask)


@triton.jit
def _weights(
    w_ptr,
    numbers,
    c_out,
    CIN: tl.constexpr,
    COUT: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE_OUT: tl.constexpr,
    STRIDE_IN: tl.constexpr,
    STRIDE_I: tl.constexpr,
    STRIDE_J: tl.constexpr,
    KIND: tl.constexpr,
):
    """The weights of some channels of y, in pieces (numbers, channels)."""
    pieces = ()
    for piece in tl.static_range(len(numbers)):
        k = numbers[piece]
        offs = k // (KW * CIN) * STRIDE_I + k // CIN % KW * STRIDE_J + k % CIN * STRIDE_IN
        ptrs = w_ptr + offs[:, None] + c_out[None, :] * STRIDE_OUT
        mask = (k < KH * KW * CIN)[:, None] & (c_out < COUT)[None, :]
        pieces += (tl.load(ptrs, mask=mask, other=0.0).to(KIND),)
    return pieces


@triton.jit
def _windows(
    x_ptr,
    numbers,
    pixel,
    num_pixels,
    CIN: tl.constexpr,
    HX: tl.constexpr,
    WX: tl.constexpr,
    HY: tl.constexpr,
    WY: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    KIND: tl.constexpr,
):
    """What the kernel sees at each pixel of y, in pieces (numbers, pixels)."""
    row = pixel // WY % HY * STRIDE - PADDING
    column = pixel % WY * STRIDE - PADDING
    corner = ((pixel // (HY * WY)).to(tl.int64) * HX + row) * WX + column
    corners = (x_ptr + corner * CIN)[None, :]
    exists = (pixel < num_pixels)[None, :]
    pieces = ()
    for piece in tl.static_range(len(numbers)):
        k = numbers[piece][:, None]
        down, across = row[None, :] + k // (KW * CIN), column[None, :] + k // CIN % KW
        mask = exists & (k < KH * KW * CIN)
        mask &= (down >= 0) & (down < HX) & (across >= 0) & (across < WX)
        ptrs = corners + (k // (KW * CIN) * (WX * CIN) + k % (KW * CIN))
        pieces += (tl.load(ptrs, mask=mask, other=0.0).to(KIND),)
    return pieces


@triton.jit
def wgrad_kernel(
    x_ptr,  # (N, HX, WX, CIN)
    dy_ptr,  # (N, HY, WY, COUT)
    part_ptr,  # (programs along axis 0, KH, KW, CIN, COUT)
    num_pixels,  # of dy
    num_steps,
    CIN: tl.constexpr,
    HX: tl.constexpr,
    WX: tl.constexpr,
    COUT: tl.constexpr,
    HY: tl.constexpr,
    WY: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    OUTS: tl.constexpr,  # blocks of channels per program
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """BLOCK pixels per step, all taps, OUTS · BLOCK_OUT channels.

    The channels are the rows of the products: they are the 64 that wide matrix instructions want.
    """
    begin(OVERLAPS)
    kind: tl.constexpr = dy_ptr.dtype.element_ty
    first = tl.program_id(1) * (OUTS * BLOCK_OUT)
    numbers, sums = _numbers(PADDED), ()
    for _ in tl.static_range(OUTS):
        for n in tl.static_range(len(numbers)):
            sums += (tl.zeros((BLOCK_OUT, numbers[n].shape[0]), tl.float32),)

    begins = tl.program_id(0) * num_steps * BLOCK
    for step in tl.range(0, num_steps, num_stages=STAGES):
        pixel = begins + step * BLOCK + tl.arange(0, BLOCK)
        windows = _windows(
            x_ptr, numbers, pixel, num_pixels, CIN, HX, WX, HY, WY, KH, KW, STRIDE, PADDING, kind
        )
        added = ()
        for o in tl.static_range(OUTS):
            c_out = first + o * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
            ptrs = dy_ptr + pixel.to(tl.int64)[:, None] * COUT + c_out[None, :]
            mask = (pixel < num_pixels)[:, None] & (c_out < COUT)[None, :]
            dy = tl.load(ptrs, mask=mask, other=0.0)
            for piece in tl.static_range(len(numbers)):
                window = tl.trans(windows[piece])
                added += (dot(tl.trans(dy), window, sums[o * len(numbers) + piece]),)
        sums = added

    part_ptr += tl.program_id(0) * (KH * KW * CIN * COUT)
    for o in tl.static_range(OUTS):
        c_out = first + o * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        for piece in tl.static_range(len(numbers)):
            k = numbers[piece]
            mask = (k < KH * KW * CIN)[:, None] & (c_out < COUT)[None, :]
            ptrs = part_ptr + k[:, None] * COUT + c_out[None, :]
            tl.store(ptrs, tl.trans(sums[o * len(numbers) + piece]), mask=mask)
