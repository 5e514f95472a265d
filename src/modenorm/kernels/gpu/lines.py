"""The two sums, channels first, over rows that are short and no multiple of 16 bytes, in Triton.

Such rows begin anywhere, but every second, fourth or eighth begins at a multiple of 16 bytes. As
many rows are a line here, a sequence of pieces of 16 bytes that can be read at once. A piece has
numbers of one row, or of it and the next: two sums in each piece, which are summed by rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from modenorm.kernels.gpu.common import begin
from modenorm.kernels.gpu.launch import Launch
from modenorm.kernels.gpu.tiles import Geometry, Lines

__all__ = ["line_moments", "line_reduce_backward"]


@triton.jit
def _line_moments_kernel(
    x_ptr,  # (L, G, P)
    mean_ptr,  # (L, G)
    var_ptr,  # (L, G)
    num_lines,
    WITH_VAR: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,  # rows in a line
    WIDTH: tl.constexpr,  # numbers in a piece
    PIECES: tl.constexpr,
    LINES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    lines, mask_lines, offs, mask, rows, own = _pieces(num_lines, P, G, WIDTH, PIECES, LINES)
    x = tl.load(x_ptr + offs, mask=mask[:, :, None], other=0.0).to(tl.float32)
    first, second = _sums(x, own)
    mean_first = tl.zeros([LINES, PIECES], tl.float32)
    mean_second = tl.zeros([LINES, PIECES], tl.float32)
    for row in tl.static_range(G):
        mean = _of_row(first, second, rows, row) / P
        tl.store(mean_ptr + lines * G + row, mean, mask=mask_lines)
        mean_first = tl.where((rows == row)[None, :], mean[:, None], mean_first)
        mean_second = tl.where((rows == row - 1)[None, :], mean[:, None], mean_second)
    if WITH_VAR:
        apart = x - tl.where(own[None], mean_first[:, :, None], mean_second[:, :, None])
        first, second = _sums(tl.where(mask[:, :, None], apart * apart, 0.0), own)
        for row in tl.static_range(G):
            var = _of_row(first, second, rows, row) / P
            tl.store(var_ptr + lines * G + row, var, mask=mask_lines)


@triton.jit
def _line_reduce_backward_kernel(
    dy_ptr,  # (L, G, P)
    x_ptr,  # as dy
    centre_ptr,  # (L, G)
    total_ptr,  # (L, G)
    product_ptr,  # (L, G)
    num_lines,
    P: tl.constexpr,
    G: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    LINES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    lines, mask_lines, offs, mask, rows, own = _pieces(num_lines, P, G, WIDTH, PIECES, LINES)
    dy = tl.load(dy_ptr + offs, mask=mask[:, :, None], other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offs, mask=mask[:, :, None], other=0.0).to(tl.float32)
    centres = centre_ptr + lines[:, None] * G + rows[None, :]
    here = tl.load(centres, mask=mask, other=0.0)
    after = tl.load(centres + 1, mask=mask & (rows < G - 1)[None, :], other=0.0)
    centre = tl.where(own[None], here[:, :, None], after[:, :, None])
    total_first, total_second = _sums(dy, own)
    product_first, product_second = _sums(dy * (x - centre), own)
    for row in tl.static_range(G):
        total = _of_row(total_first, total_second, rows, row)
        product = _of_row(product_first, product_second, rows, row)
        tl.store(total_ptr + lines * G + row, total, mask=mask_lines)
        tl.store(product_ptr + lines * G + row, product, mask=mask_lines)


@triton.jit
def _pieces(
    num_lines,
    P: tl.constexpr,
    G: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    LINES: tl.constexpr,
):
    """A program's lines, which there are, offsets, which pieces there are, their rows, what is own.

    Own are the numbers of the row that a piece begins in.
    """
    lines = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    begins, slots = tl.arange(0, PIECES) * WIDTH, tl.arange(0, WIDTH)
    rows = begins // P
    own = slots[None, :] < ((rows + 1) * P - begins)[:, None]
    mask_lines = lines < num_lines
    mask = mask_lines[:, None] & (begins < G * P)[None, :]
    offs = (lines * (G * P))[:, None, None] + begins[None, :, None] + slots[None, None, :]
    return lines, mask_lines, offs, mask, rows, own


@triton.jit
def _sums(values, own):
    """Of each piece: of its own row, of the next."""
    return tl.sum(tl.where(own[None], values, 0.0), 2), tl.sum(tl.where(own[None], 0.0, values), 2)


@triton.jit
def _of_row(first, second, rows, ROW: tl.constexpr):
    """The sum over a row of every line."""
    begun = tl.where((rows == ROW)[None, :], first, 0.0)
    return tl.sum(begun + tl.where((rows == ROW - 1)[None, :], second, 0.0), 1)


def line_moments(geometry: Geometry, lines: Lines, with_var: bool, direct: bool) -> Launch:
    """As `Passes.moments`, or `Passes.mean`."""
    return _launch(_line_moments_kernel, geometry, lines, (with_var,), direct)


def line_reduce_backward(geometry: Geometry, lines: Lines, direct: bool) -> Launch:
    """As `Passes.reduce_backward`."""
    return _launch(_line_reduce_backward_kernel, geometry, lines, (), direct)


def _launch(
    kernel: triton.JITFunction,
    geometry: Geometry,
    lines: Lines,
    flags: tuple[bool, ...],
    direct: bool,
) -> Launch:
    number = geometry.rows[1] // lines.rows
    constants = (*flags, geometry.num_positions, *lines)
    return Launch(kernel, (triton.cdiv(number, lines.lines),), (number,), constants, 1, direct)
