"""The four streaming passes on the GPU, in Triton. Same four functions as kernels/cpu.py.

A tensor is seen as O outer blocks of R rows with P positions each. Channels first, all N·C rows of
contiguous positions form one outer block; channels last, each sample is one, its rows are the
channels, and they lie side by side. One kernel serves both: only the strides differ.

Pass              reads    writes   of the tensor
moments           x                 mean, var: (N, C)
apply             x        y
reduce_backward   dy, x             two sums: (N, C)
apply_backward    dy, x    dx
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from modenorm.kernels.gpu_arrays import begin
from modenorm.kernels.gpu_flat_maps import flat_apply, flat_apply_backward
from modenorm.kernels.gpu_lines import line_moments, line_reduce_backward
from modenorm.kernels.launch import Launch, current_stream
from modenorm.kernels.layout import as_planes, planes_like
from modenorm.kernels.tiles import Geometry, Tile, lines_for, map_tile, moments_tile, reduce_tile

__all__ = ["Geometry", "Passes", "apply", "apply_backward", "moments", "reduce_backward"]


@triton.jit
def _moments_kernel(
    x_ptr,  # (O, R, P) by strides
    mean_ptr,  # (O, R)
    var_ptr,  # (O, R)
    num_rows,
    num_positions,
    stride_row,
    stride_position,
    WITH_VAR: tl.constexpr,
    SINGLE: tl.constexpr,  # one tile holds all positions
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
    outer, first = _first_row(num_rows, BLOCK_R)
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
def _apply_kernel(
    x_ptr,  # (O, R, P) by strides
    centre_ptr,  # (O, R)
    scale_ptr,  # (O, R)
    shift_ptr,  # (O, R)
    y_ptr,  # as x
    num_rows,
    num_positions,
    stride_row,
    stride_position,
    DIVIDES_R: tl.constexpr,
    DIVIDES_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    num_rows, num_positions, stride_row, stride_position = _hinted(
        num_rows, num_positions, stride_row, stride_position, DIVIDES_R, DIVIDES_P
    )
    start, out, offs, mask_rows, mask = _tile(
        num_rows, num_positions, stride_row, stride_position, BLOCK_R, BLOCK_P
    )
    x = tl.load(x_ptr + start + offs, mask=mask, other=0.0).to(tl.float32)
    centre = tl.load(centre_ptr + out, mask=mask_rows, other=0.0)[:, None]
    scale = tl.load(scale_ptr + out, mask=mask_rows, other=0.0)[:, None]
    shift = tl.load(shift_ptr + out, mask=mask_rows, other=0.0)[:, None]
    y = (x - centre) * scale + shift
    tl.store(y_ptr + start + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _reduce_backward_kernel(
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
    DIVIDES_R: tl.constexpr,
    DIVIDES_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    num_rows, num_positions, stride_row, stride_position = _hinted(
        num_rows, num_positions, stride_row, stride_position, DIVIDES_R, DIVIDES_P
    )
    outer, first = _first_row(num_rows, BLOCK_R)
    rows, slots = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    mask_rows = first + rows < num_rows
    out = outer * num_rows + first + rows
    centre = tl.load(centre_ptr + out, mask=mask_rows, other=0.0)[:, None]
    base = outer * num_rows * num_positions + first.to(tl.int64) * stride_row
    offs = rows[:, None] * stride_row + slots[None, :] * stride_position
    if SINGLE:
        mask = mask_rows[:, None] & (slots < num_positions)[None, :]
        total = tl.load(dy_ptr + base + offs, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + base + offs, mask=mask, other=0.0).to(tl.float32)
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
            total += dy
            product += dy * (x - centre)
    tl.store(total_ptr + out, tl.sum(total, 1), mask=mask_rows)
    tl.store(product_ptr + out, tl.sum(product, 1), mask=mask_rows)


@triton.jit
def _apply_backward_kernel(
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
    DIVIDES_R: tl.constexpr,
    DIVIDES_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    num_rows, num_positions, stride_row, stride_position = _hinted(
        num_rows, num_positions, stride_row, stride_position, DIVIDES_R, DIVIDES_P
    )
    start, out, offs, mask_rows, mask = _tile(
        num_rows, num_positions, stride_row, stride_position, BLOCK_R, BLOCK_P
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
def _first_row(num_rows, BLOCK_R: tl.constexpr):
    """The outer block of a program that sums along the positions, and its first row."""
    blocks = tl.cdiv(num_rows, BLOCK_R)
    outer = tl.program_id(0) // blocks
    return outer.to(tl.int64), (tl.program_id(0) - outer * blocks) * BLOCK_R


@triton.jit
def _tile(
    num_rows,
    num_positions,
    stride_row,
    stride_position,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Where this program's tile of a map starts, its rows, the offsets in it, and the masks.

    From the tensor's end to its begin: the pass before has left the end in the cache.
    """
    blocks_r, blocks_p = tl.cdiv(num_rows, BLOCK_R), tl.cdiv(num_positions, BLOCK_P)
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    rest = program // blocks_r
    outer = rest // blocks_p
    first_row, first = (program - rest * blocks_r) * BLOCK_R, (rest - outer * blocks_p) * BLOCK_P
    outer = outer.to(tl.int64)
    rows, slots = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    mask_rows = first_row + rows < num_rows
    mask = mask_rows[:, None] & (first + slots < num_positions)[None, :]
    start = outer * num_rows * num_positions + first_row.to(tl.int64) * stride_row
    start += first.to(tl.int64) * stride_position
    offs = rows[:, None] * stride_row + slots[None, :] * stride_position
    out = outer * num_rows + first_row + rows
    return start, out, offs, mask_rows, mask


class Passes:
    """The launches of the four passes for tensors of one geometry.

    `mean` is `moments` without the variances, but may write over their array too.
    """

    def __init__(self, geometry: Geometry, direct: bool = True) -> None:
        self.geometry, self.direct = geometry, direct
        lines = lines_for(geometry)
        if lines is not None:
            self.moments = line_moments(geometry, lines, True, direct)
            self.mean = line_moments(geometry, lines, False, direct)
            self.reduce_backward = line_reduce_backward(geometry, lines, direct)
        else:
            tile, kernel = moments_tile(geometry), _reduce_backward_kernel
            self.moments = self._reduction(_moments_kernel, tile, (True,))
            # channels last, both take less time than the mean alone
            last = geometry.channels_last
            self.mean = self.moments if last else self._reduction(_moments_kernel, tile, (False,))
            self.reduce_backward = self._reduction(kernel, reduce_tile(geometry), ())
        if geometry.is_ragged:
            self.apply = flat_apply(geometry, direct)
            self.apply_backward = flat_apply_backward(geometry, True, direct)
            self.apply_backward_without_x = flat_apply_backward(geometry, False, direct)
        else:
            self.apply = self._map(_apply_kernel, map_tile(geometry, False), ())
            tile = map_tile(geometry, True)
            self.apply_backward = self._map(_apply_backward_kernel, tile, (True,))
            self.apply_backward_without_x = self._map(_apply_backward_kernel, tile, (False,))

    def _reduction(self, kernel: Any, tile: Tile, flags: tuple[bool, ...]) -> Launch:
        """A pass whose programs walk along the positions of their rows."""
        geometry = self.geometry
        outer, rows = geometry.rows
        single = tile.positions >= geometry.num_positions
        constants = (*flags, single, *geometry.divisors, tile.rows, tile.positions)
        grid = (triton.cdiv(rows, tile.rows) * outer,)
        return Launch(kernel, grid, geometry.sizes, constants, tile.num_warps, self.direct)

    def _map(self, kernel: Any, tile: Tile, flags: tuple[bool, ...]) -> Launch:
        """A pass with a program for every tile."""
        geometry = self.geometry
        outer, rows = geometry.rows
        columns = triton.cdiv(geometry.num_positions, tile.positions)
        constants = (*flags, *geometry.divisors, tile.rows, tile.positions)
        grid = (triton.cdiv(rows, tile.rows) * columns * outer,)
        return Launch(kernel, grid, geometry.sizes, constants, tile.num_warps, self.direct)


@functools.lru_cache(maxsize=4096)
def _passes(geometry: Geometry, device: int, aligned: bool) -> Passes:
    return Passes(geometry, direct=aligned)


def _passes_for(tensors: list[Tensor], rows: list[Tensor]) -> tuple[Passes, list[Tensor]]:
    """The launches for tensors of one geometry, their dense views, and (N, C) rows made dense."""
    planes = as_planes(tensors[0])
    first = planes.view
    num_channels, num_positions = first.shape[3 - planes.axis], first.shape[planes.axis]
    geometry = Geometry(first.shape[0], num_channels, num_positions, planes.axis == 1, first.dtype)
    views = [first, *(planes_like(t, planes).view for t in tensors[1:])]
    views += [row.contiguous() for row in rows]
    aligned = all(view.data_ptr() % 16 == 0 for view in views)
    return _passes(geometry, first.get_device(), aligned), views


def moments(x: Tensor, with_var: bool = True) -> tuple[Tensor, Tensor | None]:
    """Mean and biased variance over the positions, (N, C) each. Reads x once."""
    passes, (view,) = _passes_for([x], [])
    mean = torch.empty(x.shape[:2], device=x.device, dtype=torch.float32)
    var = torch.empty_like(mean)
    if not with_var:
        passes.mean(current_stream(x), view, mean, var)
        return mean, None
    passes.moments(current_stream(x), view, mean, var)
    return mean, var


def apply(x: Tensor, centre: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Y = (x − centre) · scale + shift. Reads x, writes y."""
    y = torch.empty_like(x)
    passes, (view, out, *rows) = _passes_for([x, y], [centre, scale, shift])
    passes.apply(current_stream(x), view, *rows, out)
    return y


def reduce_backward(dy: Tensor, x: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_l dy and Σ_l dy · (x − centre), (N, C) each. Reads dy and x."""
    passes, (view, upstream, rows) = _passes_for([x, dy], [centre])
    total = torch.empty(x.shape[:2], device=x.device, dtype=torch.float32)
    product = torch.empty_like(total)
    passes.reduce_backward(current_stream(x), upstream, view, rows, total, product)
    return total, product


def apply_backward(
    dy: Tensor, x: Tensor, centre: Tensor, scale: Tensor, slope: Tensor, offset: Tensor
) -> Tensor:
    """Dx = scale · dy + slope · (x − centre) + offset. Reads dy and x, writes dx."""
    dx = torch.empty_like(x)
    passes, (view, upstream, out, *rows) = _passes_for([x, dy, dx], [centre, scale, slope, offset])
    passes.apply_backward(current_stream(x), upstream, view, *rows, out)
    return dx
