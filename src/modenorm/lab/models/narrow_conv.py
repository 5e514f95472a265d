"""3×3 convolutions of few channels, 16 to 64, in half precision on a GPU.

cuDNN's convolutions are made for many channels: with 16 or 32 they take several times as long as
memory does. These keep the weights of all taps at hand and read an image's row once per shift.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from modenorm.buffers import HALF_TYPES
from modenorm.lab.models.own_kernels import can_run, switched_on

if TYPE_CHECKING:
    from modenorm.kernels.launch import Launch

__all__ = ["CONV_TILES", "GRAD_TILES", "WIDTHS", "NarrowConv2d", "fits"]

ENABLED = switched_on("NARROW_CONV")
"""Whether `NarrowConv2d` uses its own kernels where it can; else it is torch's Conv2d."""
WIDTHS = (16, 32, 64)
_MOST_PIXELS = 1 << 30  # pixels are counted in 32 bits, numbers in 64
_LARGE = 16 * 16
"""Positions of an image from which on cuDNN is faster with 64 channels."""


class ConvTile(NamedTuple):
    """What a program of the forward pass, or of dx, works on."""

    columns: int
    """Columns of pixels; 64 and more with 4 warps take the wide matrix instructions of sm_90."""
    out: int
    """Channels of the result."""
    rows: int
    """Rows of the result; the program reads two more."""
    vector: int
    """Channels per copy from memory: 8 pass the L1 cache by, 4 go through it."""
    stages: int
    """Steps of which the rows are in shared memory at a time, with the one in use."""
    unroll: int
    """Rows of x per step; best a divisor of rows + 2."""
    warps: int


class GradTile(NamedTuple):
    """What a program of the weights' gradient works on."""

    pixels: int
    """Pixels per step."""
    rows: int
    """Rows of taps, 1 or 3."""
    taps: int
    """Taps of a row, 1 or 3."""
    vector: int
    stages: int
    warps: int
    programs: int
    """Shares of the pixels, at most: each leaves a partial result of all taps."""


CONV_TILES = {
    (16, 16): ConvTile(64, out=16, rows=8, vector=8, stages=3, unroll=1, warps=1),
    (32, 32): ConvTile(64, out=32, rows=8, vector=8, stages=3, unroll=1, warps=4),
    (64, 64): ConvTile(64, out=32, rows=8, vector=8, stages=3, unroll=1, warps=4),
}
"""By channels in and out; a pair that is not there takes the tile of the larger width.

The fastest of those tried while eight trainings share a GPU; alone, fewer rows take less time.
"""
GRAD_TILES = {
    (16, 16): GradTile(pixels=128, rows=3, taps=3, vector=8, stages=3, warps=4, programs=128),
    (32, 32): GradTile(pixels=64, rows=3, taps=3, vector=8, stages=3, warps=4, programs=44),
    (64, 64): GradTile(pixels=128, rows=1, taps=1, vector=8, stages=3, warps=4, programs=8),
}


def fits(in_channels: int, out_channels: int, kernel_size: int, stride: int) -> bool:
    """Whether there are kernels for a convolution with this shape."""
    narrow = in_channels in WIDTHS and out_channels in WIDTHS
    return narrow and kernel_size == 3 and stride == 1


class NarrowConv2d(nn.Conv2d):
    """A 3×3 convolution with stride 1, padding 1 and no bias, for which `fits` holds.

    Where its kernels don't serve, it computes as torch's Conv2d: on a CPU, in float32, and for
    images that don't lie channels last. Under autocast the gradient of the weights is not rounded
    to half precision.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        if not fits(in_channels, out_channels, 3, 1):
            raise ValueError(
                f"a narrow convolution has {WIDTHS} channels, not {in_channels} to {out_channels}:"
                " take nn.Conv2d"
            )
        super().__init__(in_channels, out_channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x (N, C, H, W)."""
        dtype = _kernels_type(x, self.weight)
        if dtype is None:
            return super().forward(x)
        return narrow_conv(x.to(dtype), self.weight, False)


def _kernels_type(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """The type that the kernels compute in; None where they don't serve."""
    device = x.device.type
    if not (ENABLED and can_run(x)) or x.ndim != 4 or not x.numel():
        return None
    dtype, alike = x.dtype, weight.dtype == x.dtype
    if torch.is_autocast_enabled(device):
        dtype, alike = (
            torch.get_autocast_dtype(device),
            torch.float64 not in (x.dtype, weight.dtype),
        )
    if not alike or dtype not in HALF_TYPES or x.shape[1] != weight.shape[1]:
        return None
    if max(weight.shape[:2]) == max(WIDTHS) and x.shape[2] * x.shape[3] >= _LARGE:
        return None
    small = x.numel() // x.shape[1] < _MOST_PIXELS
    return dtype if small and x.is_contiguous(memory_format=torch.channels_last) else None


@torch.library.custom_op("modenorm::narrow_conv", mutates_args=())
def narrow_conv(x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    """Convolve x (N, C, H, W) with 3×3 weights; transposed: from the result's gradient, x's."""
    from modenorm.kernels.device import on_device

    y, x = _empty_conv(x, weight, transposed), _channels_last(x)
    with on_device(x) as stream:
        launch = conv_launch(tuple(x.shape), tuple(weight.shape), weight.stride(), transposed)
        launch(stream, x, weight, y)
    return y


@narrow_conv.register_fake
def _empty_conv(x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    shape = (x.shape[0], weight.shape[1 if transposed else 0], *x.shape[2:])
    return torch.empty(shape, device=x.device, dtype=x.dtype, memory_format=torch.channels_last)


@torch.library.custom_op("modenorm::narrow_conv_weight", mutates_args=())
def narrow_conv_weight(x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the weights, which has their type and strides."""
    from modenorm.kernels.device import on_device

    x, dy, dweight = _channels_last(x), _channels_last(dy), torch.empty_like(weight)
    with on_device(x) as stream:
        wgrad, add_up, parts = wgrad_launches(tuple(x.shape), tuple(weight.shape), dweight.stride())
        partial = torch.empty((parts, weight.numel()), device=x.device, dtype=torch.float32)
        wgrad(stream, x, dy, partial)
        add_up(stream, partial, dweight)
    return dweight


@narrow_conv_weight.register_fake
def _(x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(weight)


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    x, weight, ctx.transposed = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight = ctx.saved_tensors
    dx = dweight = None
    if ctx.needs_input_grad[0]:
        dx = narrow_conv(dy, weight, not ctx.transposed)
    if ctx.needs_input_grad[1]:
        pair = (dy, x) if ctx.transposed else (x, dy)
        dweight = narrow_conv_weight(*pair, weight)
    return dx, dweight, None


narrow_conv.register_autograd(_backward, setup_context=_remember)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def conv_launch(
    shape: Sequence[int],
    weights: Sequence[int],
    strides: Sequence[int],
    transposed: bool,
    tile: ConvTile | None = None,
) -> Launch:
    """The launch for x of a shape; weights are (COUT, CIN, 3, 3), in any order in memory."""
    from modenorm.kernels.launch import Launch
    from modenorm.lab.models.narrow_conv_kernels import conv_kernel

    num_images, _, height, width = shape
    c_out, c_in = weights[:2]
    stride_out, stride_in, *steps = strides
    if transposed:
        c_out, c_in, stride_out, stride_in = c_in, c_out, stride_in, stride_out
    if tile is None:
        tile = CONV_TILES.get((c_in, c_out)) or CONV_TILES[(max(c_in, c_out),) * 2]
    out, rows = min(tile.out, c_out), min(tile.rows, height)
    grid = (-(-num_images * width // tile.columns), -(-height // rows), c_out // out)
    wide = tile.columns >= 64 and tile.warps >= 4
    constants = (
        height, width, c_in, c_out, stride_out, stride_in, *steps, transposed,
        tile.columns, out, rows, tile.vector, tile.stages, tile.unroll, wide,
    )  # fmt: skip
    return Launch(conv_kernel, grid, (num_images,), constants, tile.warps, direct=False)


def wgrad_launches(
    shape: Sequence[int],
    weights: Sequence[int],
    strides: Sequence[int],
    tile: GradTile | None = None,
) -> tuple[Launch, Launch, int]:
    """The launches for x of a shape and weights, and the number of partial results between them."""
    from modenorm.kernels.launch import Launch
    from modenorm.lab.models.narrow_conv_kernels import wgrad_kernel

    num_images, _, height, width = shape
    c_out, c_in = weights[:2]
    if tile is None:
        tile = GRAD_TILES.get((c_in, c_out)) or GRAD_TILES[(max(c_in, c_out),) * 2]
    num_pixels = num_images * height * width
    steps = -(-num_pixels // (tile.pixels * tile.programs))
    parts = -(-num_pixels // (tile.pixels * steps))
    constants = (
        height, width, c_in, c_out, tile.rows, tile.taps, _power(tile.taps * c_in),
        _power(tile.rows * c_out), tile.pixels, tile.vector, tile.stages,
    )  # fmt: skip
    grid = (parts, 9 // (tile.rows * tile.taps))
    wgrad = Launch(wgrad_kernel, grid, (num_pixels, steps), constants, tile.warps, direct=False)
    return wgrad, add_up_launch(weights, strides, parts), parts


def add_up_launch(weights: Sequence[int], strides: Sequence[int], parts: int) -> Launch:
    """The launch that adds partial results (parts, KH, KW, CIN, COUT) to weights of a shape."""
    from modenorm.kernels.launch import Launch
    from modenorm.lab.models.narrow_conv_kernels import add_up_kernel

    c_out, c_in, *taps = weights
    together = min(_power(parts), 256)
    block = min(4096 // together, 256)
    constants = (c_in, c_out, *taps, *strides, block, together)
    grid = (-(-math.prod(weights) // block),)
    return Launch(add_up_kernel, grid, (parts,), constants, direct=False)


def _power(number: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << (number - 1).bit_length()
