"""The first convolution of a network, of images with three channels, in half precision on a GPU.

Three channels suit no convolution of half precision: cuDNN takes several times as long as memory
does, and pads the channels first. These gather windows of the images as they are, float32 or half,
and multiply matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from modenorm.lab.layers.geometry import channels_last, power_of_two, result_size
from modenorm.lab.layers.own_kernels import can_run, computing_type, switched_on

if TYPE_CHECKING:
    from modenorm.kernels.gpu.launch import Launch

__all__ = ["CONV_TILES", "GRAD_TILES", "ConvTile", "GradTile", "StemConv2d"]

ENABLED = switched_on("STEM_CONV")
"""Whether `StemConv2d` uses its own kernels where it can; else it is torch's Conv2d."""
_LONGEST = 256  # numbers of a window
_MOST_PIXELS = 1 << 30  # pixels are counted in 32 bits, numbers in 64


class ConvTile(NamedTuple):
    """What a program of the forward pass works on."""

    pixels: int
    """Pixels per step; best 32 for each warp."""
    out: int
    """Channels of the result per product, a power of two."""
    outs: int
    """Products per step, which share the windows."""
    steps: int
    """Steps, which share the weights."""
    stages: int
    """Steps of which the windows are on their way at a time; 1: they are not copied ahead."""
    warps: int


class GradTile(NamedTuple):
    """What a program of the weights' gradient works on."""

    pixels: int
    out: int
    outs: int
    stages: int
    warps: int
    programs: int
    """Shares of the pixels, at most: each leaves a partial result of all taps."""


CONV_TILES = {
    (16, 3): ConvTile(pixels=128, out=16, outs=1, steps=4, stages=1, warps=4),
    (64, 3): ConvTile(pixels=128, out=64, outs=1, steps=1, stages=1, warps=4),
    (192, 5): ConvTile(pixels=128, out=64, outs=3, steps=4, stages=1, warps=4),
    (64, 7): ConvTile(pixels=128, out=64, outs=1, steps=8, stages=1, warps=4),
}
"""By channels of the result and rows of taps; others take the tile of 64 and 7.

The fastest of those tried while eight streams share a GPU.
"""
GRAD_TILES = {
    (16, 3): GradTile(pixels=128, out=16, outs=1, stages=1, warps=4, programs=132),
    (64, 3): GradTile(pixels=128, out=64, outs=1, stages=1, warps=4, programs=132),
    (192, 5): GradTile(pixels=128, out=64, outs=3, stages=1, warps=4, programs=132),
    (64, 7): GradTile(pixels=128, out=32, outs=2, stages=1, warps=4, programs=132),
}
_OTHERS = (64, 7)


class StemConv2d(nn.Conv2d):
    """torch's Conv2d of few channels, which in half precision on a GPU has kernels of its own.

    Weights are the same either way, results up to the order of the sums. Under autocast the
    gradient of the weights is not rounded to half precision.
    """

    padding: tuple[int, int]

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x (N, C, H, W)."""
        dtype = self._kernels_type(x)
        if dtype is None:
            return super().forward(x)
        return stem_conv(x, self.weight, self.stride[0], self.padding[0], dtype)

    def _kernels_type(self, x: Tensor) -> torch.dtype | None:
        """The type that the kernels compute in; None where they don't serve."""
        weight = self.weight
        if not (ENABLED and can_run(x)) or x.device != weight.device or not self._plain():
            return None
        if x.ndim != 4 or x.shape[1] != weight.shape[1] or not x.numel():
            return None
        dtype = computing_type(x, weight)
        high, wide = result_size(x.shape[2:], weight.shape[2:], self.stride[0], self.padding[0])
        if dtype is None or min(high, wide) < 1:
            return None
        small = x.shape[0] * max(high * wide, x.shape[2] * x.shape[3]) < _MOST_PIXELS
        return dtype if small and x.is_contiguous(memory_format=torch.channels_last) else None

    def _plain(self) -> bool:
        """Whether it is a convolution as the kernels know it."""
        if (self.dilation, self.groups, self.padding_mode) != ((1, 1), 1, "zeros"):
            return False
        if isinstance(self.padding, str) or self.bias is not None:
            return False
        square = self.stride[0] == self.stride[1] and self.padding[0] == self.padding[1]
        return square and math.prod(self.weight.shape[1:]) <= _LONGEST


@torch.library.custom_op("modenorm::stem_conv", mutates_args=())
def stem_conv(x: Tensor, weight: Tensor, stride: int, padding: int, dtype: torch.dtype) -> Tensor:
    """Convolve x (N, C, H, W) in a half type, whatever the types of x and the weights."""
    from modenorm.kernels.gpu.device import on_device

    y, x = _empty_conv(x, weight, stride, padding, dtype), channels_last(x)
    with on_device(x) as stream:
        launch = conv_launch(x.shape, weight.shape, weight.stride(), stride, padding)
        launch(stream, x, weight, y)
    return y


@stem_conv.register_fake
def _empty_conv(x: Tensor, weight: Tensor, stride: int, padding: int, dtype: torch.dtype) -> Tensor:
    size = result_size(x.shape[2:], weight.shape[2:], stride, padding)
    shape = (x.shape[0], weight.shape[0], *size)
    return torch.empty(shape, device=x.device, dtype=dtype, memory_format=torch.channels_last)


@torch.library.custom_op("modenorm::stem_conv_weight", mutates_args=())
def stem_conv_weight(x: Tensor, dy: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """The gradient of the weights, which has their type and strides."""
    from modenorm.kernels.gpu.device import on_device

    x, dy, dweight = channels_last(x), channels_last(dy), torch.empty_like(weight)
    with on_device(x) as stream:
        wgrad, add_up, parts = wgrad_launches(
            x.shape, weight.shape, dweight.stride(), stride, padding
        )
        partial = torch.empty((parts, weight.numel()), device=x.device, dtype=torch.float32)
        wgrad(stream, x, dy, partial)
        add_up(stream, partial, dweight)
    return dweight


@stem_conv_weight.register_fake
def _(x: Tensor, dy: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    return torch.empty_like(weight)


def _input_gradient(x: Tensor, dy: Tensor, weight: Tensor, *steps: int) -> Tensor:
    """By torch's own operators: images rarely need one."""
    dx: Tensor = conv2d_input(x.shape, weight.to(dy.dtype), dy, *steps)
    return dx.to(x.dtype)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, *ctx.steps, _ = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (x, weight), needs = ctx.saved_tensors, ctx.needs_input_grad
    dx = _input_gradient(x, dy, weight, *ctx.steps) if needs[0] else None
    dweight = stem_conv_weight(x, dy, weight, *ctx.steps) if needs[1] else None
    return dx, dweight, None, None, None


def _remember_weight(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, dy, _, *ctx.steps = inputs
    ctx.save_for_backward(x, dy)


def _backward_of_weight(ctx: Any, ddweight: Tensor) -> tuple[Tensor | None, ...]:
    (x, dy), needs = ctx.saved_tensors, ctx.needs_input_grad
    dx = _input_gradient(x, dy, ddweight, *ctx.steps) if needs[0] else None
    ddy = stem_conv(x, ddweight, *ctx.steps, dy.dtype) if needs[1] else None
    return dx, ddy, None, None, None


stem_conv.register_autograd(_backward, setup_context=_remember)
stem_conv_weight.register_autograd(_backward_of_weight, setup_context=_remember_weight)


def conv_launch(
    shape: Sequence[int],
    weights: Sequence[int],
    strides: Sequence[int],
    stride: int,
    padding: int,
    tile: ConvTile | None = None,
) -> Launch:
    """The launch for x of a shape; weights are (COUT, CIN, KH, KW), in any order in memory."""
    from modenorm.kernels.gpu.launch import Launch
    from modenorm.lab.layers.stem_conv_kernels import conv_kernel

    tile = tile or CONV_TILES.get((weights[0], weights[2])) or CONV_TILES[_OTHERS]
    geometry, num_pixels = _geometry(shape, weights, stride, padding)
    out, outs = _shares(weights[0], tile)
    constants = (*geometry, *strides, _padded(weights), tile.pixels, out, outs, tile.stages)
    blocks = -(-num_pixels // tile.pixels)
    grid = (-(-blocks // tile.steps), -(-weights[0] // (out * outs)))
    sizes = (num_pixels, tile.steps)
    return Launch(conv_kernel, grid, sizes, constants, tile.warps, direct=False)


def wgrad_launches(
    shape: Sequence[int],
    weights: Sequence[int],
    strides: Sequence[int],
    stride: int,
    padding: int,
    tile: GradTile | None = None,
) -> tuple[Launch, Launch, int]:
    """The launches for x of a shape and weights, and the number of partial results between them."""
    from modenorm.kernels.gpu.launch import Launch
    from modenorm.lab.layers.narrow_launches import add_up_launch
    from modenorm.lab.layers.stem_conv_kernels import wgrad_kernel

    tile = tile or GRAD_TILES.get((weights[0], weights[2])) or GRAD_TILES[_OTHERS]
    geometry, num_pixels = _geometry(shape, weights, stride, padding)
    out, outs = _shares(weights[0], tile)
    constants = (*geometry, _padded(weights), tile.pixels, out, outs, tile.stages)
    blocks = -(-num_pixels // tile.pixels)
    steps = -(-blocks // tile.programs)
    parts = -(-blocks // steps)
    grid, sizes = (parts, -(-weights[0] // (out * outs))), (num_pixels, steps)
    wgrad = Launch(wgrad_kernel, grid, sizes, constants, tile.warps, direct=False)
    return wgrad, add_up_launch(weights, strides, parts), parts


def _geometry(
    shape: Sequence[int], weights: Sequence[int], stride: int, padding: int
) -> tuple[tuple[int, ...], int]:
    """The kernels' first constants, and the number of the result's pixels."""
    high, wide = result_size(shape[2:], weights[2:], stride, padding)
    constants = (*shape[1:], weights[0], high, wide, *weights[2:], stride, padding)
    return constants, shape[0] * high * wide


def _shares(channels: int, tile: ConvTile | GradTile) -> tuple[int, int]:
    """Channels per product, no fewer than the 16 of the matrix instructions, and products."""
    out = min(tile.out, max(16, power_of_two(channels)))
    return out, min(tile.outs, -(-channels // out))


def _padded(weights: Sequence[int]) -> int:
    """Numbers of a window with zeros up to a multiple of 16."""
    return -(-math.prod(weights[1:]) // 16) * 16
