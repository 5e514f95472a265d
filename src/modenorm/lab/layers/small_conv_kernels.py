"""The kernels of small convolutions, in Triton. Images lie channel by channel: (N, C, H, W).

conv      y = x * w, and dx from dy and w
wgrad     sums of x·dy over a share of the pixels, for every tap: partial results
add_up    adds the partial results, always in the same order

A thread has ROWS pixels of a column and CHANNELS channels, one sum for each. What it reads of x
serves several rows of taps, and a weight, which all threads share, serves all its pixels.
"""

# mypy: disable-error-code="assignment"
# (tuples grow while the compiler unrolls loops)

from __future__ import annotations

import triton
import triton.language as tl

from modenorm.kernels.gpu.common import begin

__all__ = ["add_up_kernel", "conv_kernel", "wgrad_kernel"]


@triton.jit
def conv_kernel(
    x_ptr,  # (N, CIN, HX, WX); transposed: dy
    w_ptr,  # (COUT, CIN, KH, KW); transposed: (CIN, COUT, KH, KW)
    y_ptr,  # (N, COUT, HY, WY); transposed: dx
    num_images,
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
    TRANSPOSED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """BLOCK columns of y, from as many images as it takes; ROWS rows, CHANNELS channels.

    Transposed, the taps that reach a pixel are every STRIDE-th, from one that depends on where the
    pixel lies. So a program has pixels STRIDE apart, which share their taps, and for them it is
    a convolution with stride 1 and the taps turned round. The first of the taps may be absent.
    """
    begin(OVERLAPS)
    apart: tl.constexpr = STRIDE if TRANSPOSED else 1
    step: tl.constexpr = 1 if TRANSPOSED else STRIDE
    turn: tl.constexpr = -STRIDE if TRANSPOSED else 1
    taps_i: tl.constexpr = (KH + apart - 1) // apart
    taps_j: tl.constexpr = (KW + apart - 1) // apart
    wide: tl.constexpr = (WY + apart - 1) // apart
    checks: tl.constexpr = TRANSPOSED or PADDING > 0 or HY % ROWS > 0
    stride_out: tl.constexpr = KH * KW if TRANSPOSED else CIN * KH * KW
    stride_in: tl.constexpr = COUT * KH * KW if TRANSPOSED else KH * KW

    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    image, across = column // wide, column % wide
    exists = image < num_images
    first = tl.broadcast_to(tl.program_id(1) * ROWS, (BLOCK,))
    phase = tl.program_id(2) % (apart * apart)
    up, tap_i = _first_tap(phase // apart, taps_i, STRIDE, PADDING, TRANSPOSED)
    left, tap_j = _first_tap(phase % apart, taps_j, STRIDE, PADDING, TRANSPOSED)
    absent_j = (tap_j >= KW).to(tl.int32) if apart > 1 else 0
    row, place = first * step - up, across * step - left
    c_out = tl.program_id(2) // (apart * apart) * CHANNELS

    x_ptrs = x_ptr + (image * (CIN * HX) + row) * WX + place
    w_ptr += c_out * stride_out + tap_i * KW + tap_j
    sums = (tl.zeros((BLOCK,), tl.float32),) * (ROWS * CHANNELS)
    for c in tl.range(0, CIN):
        for j in tl.range(absent_j, taps_j):
            inside = exists
            if checks:
                inside = exists & (place + j >= 0) & (place + j < WX)
            x = _column(
                x_ptrs + c * (HX * WX) + j, row, inside, (ROWS - 1) * step + taps_i, HX, WX, checks
            )
            w = ()
            for i in tl.static_range(taps_i):
                for o in tl.static_range(CHANNELS):
                    ptr = w_ptr + c * stride_in + o * stride_out + (i * KW + j) * turn
                    if apart > 1 and i == 0:
                        w += (tl.load(ptr, mask=tap_i < KH, other=0.0),)
                    else:
                        w += (tl.load(ptr),)
            added = ()
            for r in tl.static_range(ROWS):
                for o in tl.static_range(CHANNELS):
                    total = sums[r * CHANNELS + o]
                    for i in tl.static_range(taps_i):
                        total += x[r * step + i] * w[i * CHANNELS + o]
                    added += (total,)
            sums = added

    across = across * apart + phase % apart
    for r in tl.static_range(ROWS):
        down = (first + r) * apart + phase // apart
        mask = exists & (down < HY) & (across < WY)
        for o in tl.static_range(CHANNELS):
            offs = ((image * COUT + c_out + o) * HY + down) * WY + across
            tl.store(y_ptr + offs, sums[r * CHANNELS + o], mask=mask)


@triton.jit
def _first_tap(
    phase,
    TAPS: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """How far before a pixel what its first tap meets lies, and which tap that is."""
    if TRANSPOSED:
        reach = phase + PADDING
        before, tap = TAPS - 1 - reach // STRIDE, reach % STRIDE + (TAPS - 1) * STRIDE
    else:
        before, tap = phase + PADDING, phase
    return before, tap


@triton.jit
def _column(
    ptrs,
    row,
    inside,
    NUMBER: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHECKS: tl.constexpr,
):
    """NUMBER pixels from a row on, one below the other; outside of the image they are zero."""
    pixels = ()
    for k in tl.static_range(NUMBER):
        mask = inside
        if CHECKS:
            mask = inside & (row + k >= 0) & (row + k < HEIGHT)
        pixels += (tl.load(ptrs + k * WIDTH, mask=mask, other=0.0),)
    return pixels


@triton.jit
def wgrad_kernel(
    x_ptr,  # (N, CIN, HX, WX)
    dy_ptr,  # (N, COUT, HY, WY)
    part_ptr,  # (programs along axis 0, COUT, CIN, KH, KW)
    num_strips,  # columns of ROWS pixels of dy
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
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,  # of a row of taps, per program
    OVERLAPS: tl.constexpr,
):
    """One channel of x, TAPS taps of every row of taps, CHANNELS channels of dy."""
    begin(OVERLAPS)
    high: tl.constexpr = (HY + ROWS - 1) // ROWS
    pieces: tl.constexpr = (KW + TAPS - 1) // TAPS
    checks: tl.constexpr = PADDING > 0 or HY % ROWS > 0
    tap = tl.program_id(1) % pieces * TAPS
    c_in = tl.program_id(1) // pieces
    c_out = tl.program_id(2) * CHANNELS
    begins = tl.program_id(0) * num_steps * BLOCK
    sums = (tl.zeros((BLOCK,), tl.float32),) * (TAPS * KH * CHANNELS)
    for n in tl.range(0, num_steps):
        strip = begins + n * BLOCK + tl.arange(0, BLOCK)
        exists = strip < num_strips
        image, first, across = strip // (WY * high), strip // WY % high * ROWS, strip % WY
        row, place = first * STRIDE - PADDING, across * STRIDE - PADDING + tap
        dy_ptrs = dy_ptr + ((image * COUT + c_out) * HY + first) * WY + across
        x_ptrs = x_ptr + ((image * CIN + c_in) * HX + row) * WX + place
        dy = ()
        for o in tl.static_range(CHANNELS):
            dy += _column(dy_ptrs + o * (HY * WY), first, exists, ROWS, HY, WY, HY % ROWS > 0)
        added = ()
        for j in tl.static_range(TAPS):
            inside = exists
            if PADDING or KW % TAPS:
                inside = exists & (place + j >= 0) & (place + j < WX)
            x = _column(x_ptrs + j, row, inside, (ROWS - 1) * STRIDE + KH, HX, WX, checks)
            for i in tl.static_range(KH):
                for o in tl.static_range(CHANNELS):
                    total = sums[(j * KH + i) * CHANNELS + o]
                    for r in tl.static_range(ROWS):
                        total += x[r * STRIDE + i] * dy[o * ROWS + r]
                    added += (total,)
        sums = added
    part_ptr += tl.program_id(0) * (COUT * CIN * KH * KW)
    for j in tl.static_range(TAPS):
        for i in tl.static_range(KH):
            for o in tl.static_range(CHANNELS):
                total = tl.sum(sums[(j * KH + i) * CHANNELS + o], 0)
                offs = (((c_out + o) * CIN + c_in) * KH + i) * KW + tap + j
                tl.store(part_ptr + offs, total, mask=tap + j < KW)


@triton.jit
def add_up_kernel(
    part_ptr,  # (P, COUT, CIN, KH, KW)
    dw_ptr,  # (COUT, CIN, KH, KW)
    num_parts,
    num_weights,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The sum of the partial results for BLOCK weights."""
    begin(OVERLAPS)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = e < num_weights
    total = tl.zeros((PARTS, BLOCK), tl.float32)
    for start in tl.range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        offs = part[:, None] * num_weights + e[None, :]
        mask = (part < num_parts)[:, None] & exists[None, :]
        total += tl.load(part_ptr + offs, mask=mask, other=0.0)
    tl.store(dw_ptr + e, tl.sum(total, 0), mask=exists)
