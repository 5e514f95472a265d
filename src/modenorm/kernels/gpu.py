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

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from modenorm.kernels.layout import Planes, as_planes, planes_like

__all__ = ["apply", "apply_backward", "moments", "reduce_backward"]


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
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Welford's recurrence in every slot of a (BLOCK_R, BLOCK_P) tile, then Chan's merge."""
    outer = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    slots = tl.arange(0, BLOCK_P)
    mask_rows = rows < num_rows
    base = x_ptr + outer * num_rows * num_positions + rows.to(tl.int64)[:, None] * stride_row
    offs = slots[None, :].to(tl.int64) * stride_position
    mean = tl.zeros([BLOCK_R, BLOCK_P], tl.float32)
    square = tl.zeros([BLOCK_R, BLOCK_P], tl.float32)

    stride_tile = tl.full((), BLOCK_P, tl.int64) * stride_position
    num_full = num_positions // BLOCK_P
    for i in range(num_full):
        x = tl.load(base + offs, mask=mask_rows[:, None], other=0.0).to(tl.float32)
        step = x - mean
        mean += step * (1.0 / (i + 1))
        if WITH_VAR:
            square += step * (x - mean)
        base += stride_tile
    rest = num_positions - num_full * BLOCK_P
    if rest > 0:
        mask = mask_rows[:, None] & (slots < rest)[None, :]
        x = tl.load(base + offs, mask=mask, other=0.0).to(tl.float32)
        step = tl.where(mask, x - mean, 0.0)
        mean += step * (1.0 / (num_full + 1))
        if WITH_VAR:
            square += step * (x - mean)

    counts = (num_full + (slots < rest).to(tl.int32)).to(tl.float32)[None, :]
    total = tl.sum(counts * mean, 1) / num_positions
    out = outer * num_rows + rows
    tl.store(mean_ptr + out, total, mask=mask_rows)
    if WITH_VAR:
        apart = mean - total[:, None]
        var = tl.sum(square + counts * apart * apart, 1) / num_positions
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
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    outer = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    positions = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    mask_rows = rows < num_rows
    mask = mask_rows[:, None] & (positions < num_positions)[None, :]
    start = outer * num_rows
    centre = tl.load(centre_ptr + start + rows, mask=mask_rows, other=0.0)[:, None]
    scale = tl.load(scale_ptr + start + rows, mask=mask_rows, other=0.0)[:, None]
    shift = tl.load(shift_ptr + start + rows, mask=mask_rows, other=0.0)[:, None]
    offs = start * num_positions + rows.to(tl.int64)[:, None] * stride_row
    offs += positions.to(tl.int64)[None, :] * stride_position
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    y = (x - centre) * scale + shift
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


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
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    outer = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    slots = tl.arange(0, BLOCK_P)
    mask_rows = rows < num_rows
    out = outer * num_rows + rows
    centre = tl.load(centre_ptr + out, mask=mask_rows, other=0.0)[:, None]
    base = outer * num_rows * num_positions + rows.to(tl.int64)[:, None] * stride_row
    base += slots[None, :].to(tl.int64) * stride_position
    total = tl.zeros([BLOCK_R, BLOCK_P], tl.float32)
    product = tl.zeros([BLOCK_R, BLOCK_P], tl.float32)

    stride_tile = tl.full((), BLOCK_P, tl.int64) * stride_position
    num_full = num_positions // BLOCK_P
    for _ in range(num_full):
        dy = tl.load(dy_ptr + base, mask=mask_rows[:, None], other=0.0).to(tl.float32)
        x = tl.load(x_ptr + base, mask=mask_rows[:, None], other=0.0).to(tl.float32)
        total += dy
        product += dy * (x - centre)
        base += stride_tile
    rest = num_positions - num_full * BLOCK_P
    if rest > 0:
        mask = mask_rows[:, None] & (slots < rest)[None, :]
        dy = tl.load(dy_ptr + base, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + base, mask=mask, other=0.0).to(tl.float32)
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
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    outer = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    positions = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    mask_rows = rows < num_rows
    mask = mask_rows[:, None] & (positions < num_positions)[None, :]
    start = outer * num_rows
    centre = tl.load(centre_ptr + start + rows, mask=mask_rows, other=0.0)[:, None]
    scale = tl.load(scale_ptr + start + rows, mask=mask_rows, other=0.0)[:, None]
    slope = tl.load(slope_ptr + start + rows, mask=mask_rows, other=0.0)[:, None]
    offset = tl.load(offset_ptr + start + rows, mask=mask_rows, other=0.0)[:, None]
    offs = start * num_positions + rows.to(tl.int64)[:, None] * stride_row
    offs += positions.to(tl.int64)[None, :] * stride_position
    dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    dx = scale * dy + (slope * (x - centre) + offset)
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)


class _Blocks(NamedTuple):
    """How a pass cuts its tensor into tiles."""

    num_outer: int
    num_rows: int
    num_positions: int
    stride_row: int
    stride_position: int
    block_rows: int
    block_positions: int
    num_warps: int

    def strides(self) -> dict[str, int]:
        return {
            "num_rows": self.num_rows,
            "num_positions": self.num_positions,
            "stride_row": self.stride_row,
            "stride_position": self.stride_position,
            "BLOCK_R": self.block_rows,
            "BLOCK_P": self.block_positions,
            "num_warps": self.num_warps,
        }

    def reduction_grid(self) -> tuple[int, int]:
        return triton.cdiv(self.num_rows, self.block_rows), self.num_outer

    def map_grid(self) -> tuple[int, int, int]:
        return (
            triton.cdiv(self.num_rows, self.block_rows),
            triton.cdiv(self.num_positions, self.block_positions),
            self.num_outer,
        )


def _blocks(planes: Planes, tile: int) -> _Blocks:
    """Tiles of about `tile` elements, whose fast side is as wide as memory transactions like."""
    if planes.axis == 2:
        num_samples, num_channels, num_positions = planes.view.shape
        positions = min(triton.next_power_of_2(num_positions), tile)
        rows = max(1, tile // positions)
        return _Blocks(
            1, num_samples * num_channels, num_positions, num_positions, 1, rows, positions, 8
        )
    num_samples, num_positions, num_channels = planes.view.shape
    wide = 256 // planes.view.element_size()
    rows = min(triton.next_power_of_2(num_channels), wide)
    positions = min(triton.next_power_of_2(num_positions), max(1, tile // rows))
    return _Blocks(num_samples, num_channels, num_positions, 1, num_channels, rows, positions, 8)


def moments(x: Tensor, with_var: bool = True) -> tuple[Tensor, Tensor | None]:
    """Mean and biased variance over the positions, (N, C) each. Reads x once."""
    planes = as_planes(x)
    blocks = _blocks(planes, tile=4096)
    mean = torch.empty(x.shape[:2], device=x.device, dtype=torch.float32)
    var = torch.empty_like(mean) if with_var else None
    _moments_kernel[blocks.reduction_grid()](
        planes.view, mean, mean if var is None else var, WITH_VAR=with_var, **blocks.strides()
    )
    return mean, var


def apply(x: Tensor, centre: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Y = (x − centre) · scale + shift. Reads x, writes y."""
    planes = as_planes(x)
    blocks = _blocks(planes, tile=4096)
    y = torch.empty_like(x)
    _apply_kernel[blocks.map_grid()](
        planes.view,
        centre.contiguous(),
        scale.contiguous(),
        shift.contiguous(),
        planes_like(y, planes).view,
        **blocks.strides(),
    )
    return y


def reduce_backward(dy: Tensor, x: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_l dy and Σ_l dy · (x − centre), (N, C) each. Reads dy and x."""
    planes = as_planes(x)
    blocks = _blocks(planes, tile=4096)
    total = torch.empty(x.shape[:2], device=x.device, dtype=torch.float32)
    product = torch.empty_like(total)
    _reduce_backward_kernel[blocks.reduction_grid()](
        planes_like(dy, planes).view,
        planes.view,
        centre.contiguous(),
        total,
        product,
        **blocks.strides(),
    )
    return total, product


def apply_backward(
    dy: Tensor, x: Tensor, centre: Tensor, scale: Tensor, slope: Tensor, offset: Tensor
) -> Tensor:
    """Dx = scale · dy + slope · (x − centre) + offset. Reads dy and x, writes dx."""
    planes = as_planes(x)
    blocks = _blocks(planes, tile=4096)
    dx = torch.empty_like(x)
    _apply_backward_kernel[blocks.map_grid()](
        planes_like(dy, planes).view,
        planes.view,
        centre.contiguous(),
        scale.contiguous(),
        slope.contiguous(),
        offset.contiguous(),
        planes_like(dx, planes).view,
        **blocks.strides(),
    )
    return dx
