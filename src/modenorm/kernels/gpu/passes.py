"""The four streaming passes on the GPU, in Triton. Same four functions as kernels/torch_passes.py.

Pass              reads    writes   of the tensor
moments           x                 mean, var: (N, C)
apply             x        y
reduce_backward   dy, x             two sums: (N, C)
apply_backward    dy, x    dx
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
from torch import Tensor

from modenorm.kernels.gpu.device import on_device
from modenorm.kernels.gpu.flat_maps import flat_apply, flat_apply_backward
from modenorm.kernels.gpu.launch import Launch
from modenorm.kernels.gpu.lines import line_moments, line_reduce_backward
from modenorm.kernels.gpu.pass_kernels import (
    apply_backward_kernel,
    apply_kernel,
    moments_kernel,
    reduce_backward_kernel,
    reduce_cut_backward_kernel,
)
from modenorm.kernels.gpu.tiles import (
    Geometry,
    Tile,
    lines_for,
    map_tile,
    moments_tile,
    reduce_tile,
)
from modenorm.kernels.layout import as_planes, planes_like

__all__ = ["Geometry", "Passes", "apply", "apply_backward", "moments", "reduce_backward"]

LONGEST_AXIS = 1 << 16
"""A grid's second and third axis have fewer programs."""


class Passes:
    """The launches of the four passes for tensors of one geometry.

    `mean` is `moments` without the variances, but may write over their array too.
    `reduce_cut_backward` is `reduce_backward` of an output that a ReLU follows. `apply_backward`
    comes with x and without, and to run beside a launch that has waited for what it reads.
    """

    def __init__(self, geometry: Geometry, direct: bool = True) -> None:
        self.geometry, self.direct = geometry, direct
        lines = lines_for(geometry)
        if lines is not None:
            self.moments = line_moments(geometry, lines, True, direct)
            self.mean = line_moments(geometry, lines, False, direct)
            self.reduce_backward = line_reduce_backward(geometry, lines, direct)
        else:
            tile, kernel = moments_tile(geometry), reduce_backward_kernel
            self.moments = self._reduction(moments_kernel, tile, (True,))
            # channels last, both take less time than the mean alone
            last = geometry.channels_last
            self.mean = self.moments if last else self._reduction(moments_kernel, tile, (False,))
            self.reduce_backward = self._reduction(kernel, reduce_tile(geometry), ())
        cut, tile = reduce_cut_backward_kernel, reduce_tile(geometry)
        self.reduce_cut_backward = self._reduction(cut, tile, ())
        if geometry.is_ragged:
            self.apply = flat_apply(geometry, direct)
        else:
            self.apply = self._map(apply_kernel, map_tile(geometry, False), ())
        self.apply_backward = {
            (with_x, beside): self._backward_map(with_x, beside)
            for with_x in (False, True)
            for beside in (False, True)
        }

    def _reduction(self, kernel: Any, tile: Tile, flags: tuple[bool, ...]) -> Launch:
        """A pass whose programs walk along the positions of their rows."""
        geometry = self.geometry
        outer, rows = geometry.rows
        single = tile.positions >= geometry.num_positions
        grid, one_axis = _axes(triton.cdiv(rows, tile.rows), outer)
        constants = (*flags, single, one_axis, *geometry.divisors, tile.rows, tile.positions)
        return Launch(kernel, grid, geometry.sizes, constants, tile.num_warps, self.direct)

    def _backward_map(self, with_x: bool, beside: bool) -> Launch:
        if self.geometry.is_ragged:
            return flat_apply_backward(self.geometry, with_x, beside, self.direct)
        return self._map(apply_backward_kernel, map_tile(self.geometry, True), (with_x, beside))

    def _map(self, kernel: Any, tile: Tile, flags: tuple[bool, ...]) -> Launch:
        """A pass with a program for every tile."""
        geometry = self.geometry
        outer, rows = geometry.rows
        columns = triton.cdiv(geometry.num_positions, tile.positions)
        grid, one_axis = _axes(triton.cdiv(rows, tile.rows), columns, outer)
        constants = (*flags, one_axis, *geometry.divisors, tile.rows, tile.positions)
        return Launch(kernel, grid, geometry.sizes, constants, tile.num_warps, self.direct)


def _axes(*numbers: int) -> tuple[tuple[int, ...], bool]:
    """A grid of so many programs, and whether they have to be numbered along one axis."""
    if max(numbers[1:]) < LONGEST_AXIS:
        return numbers, False
    return (math.prod(numbers),), True


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
    with on_device(x) as stream:
        (passes.moments if with_var else passes.mean)(stream, view, mean, var)
    return mean, var if with_var else None


def apply(x: Tensor, centre: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """y = (x − centre) · scale + shift. Reads x, writes y."""
    y = torch.empty_like(x)
    passes, (view, out, *rows) = _passes_for([x, y], [centre, scale, shift])
    with on_device(x) as stream:
        passes.apply(stream, view, *rows, out)
    return y


def reduce_backward(dy: Tensor, x: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_l dy and Σ_l dy · (x − centre), (N, C) each. Reads dy and x."""
    passes, (view, upstream, rows) = _passes_for([x, dy], [centre])
    total = torch.empty(x.shape[:2], device=x.device, dtype=torch.float32)
    product = torch.empty_like(total)
    with on_device(x) as stream:
        passes.reduce_backward(stream, upstream, view, rows, total, product)
    return total, product


def apply_backward(
    dy: Tensor, x: Tensor, centre: Tensor, scale: Tensor, slope: Tensor, offset: Tensor
) -> Tensor:
    """dx = scale · dy + slope · (x − centre) + offset. Reads dy and x, writes dx."""
    dx = torch.empty_like(x)
    passes, (view, upstream, out, *rows) = _passes_for([x, dy, dx], [centre, scale, slope, offset])
    with on_device(x) as stream:
        passes.apply_backward[True, False](stream, upstream, view, *rows, out)
    return dx
