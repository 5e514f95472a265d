"""Convolutions of few channels, up to 16, in float32 on a GPU.

cuDNN's convolutions are made for many channels: with three or six they take several times as long
as the arithmetic does. These have no padded channels and read a pixel once for several rows of
taps. Sums are float32, products too: there is no TF32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from modenorm.lab.layers.geometry import power_of_two, result_size
from modenorm.lab.layers.own_kernels import can_run, switched_on

if TYPE_CHECKING:
    from modenorm.kernels.gpu.launch import Launch

__all__ = ["CONV_TILES", "GRAD_TILES", "MOST_CHANNELS", "ConvTile", "GradTile", "SmallConv2d"]

ENABLED = switched_on("SMALL_CONV")
"""Whether `SmallConv2d` uses its own kernels where it can; else it is torch's Conv2d."""
MOST_CHANNELS = 16
LARGEST_KERNEL = 5
_MOST = 1 << 30  # numbers are counted in 32 bits, also those of a tile that are beyond the last
_LONGEST = 1 << 16  # a grid's second axis has fewer programs


class ConvTile(NamedTuple):
    """What a program of the forward pass, or of dx, works on."""

    columns: int
    """Columns of the result; one for each thread is best."""
    rows: int
    """Rows of the result, at most: programs have equal shares of the height."""
    channels: int
    """Channels of the result, at most: programs have equal shares."""
    warps: int


class GradTile(NamedTuple):
    """What a program of the weights' gradient works on: one channel of x."""

    columns: int
    """Columns of dy per step; one for each thread is best."""
    rows: int
    """Rows of dy, at most."""
    channels: int
    """Channels of dy, at most."""
    taps: int
    """Taps of a row of taps, of all rows."""
    warps: int
    programs: int
    """Programs, at most: the pixels have as many shares, each of which leaves a partial result."""


CONV_TILES = {
    8: ConvTile(columns=64, rows=7, channels=8, warps=2),
    12: ConvTile(columns=64, rows=4, channels=12, warps=2),
    16: ConvTile(columns=64, rows=5, channels=8, warps=2),
}
"""By channels of the result: the first that is no less."""
GRAD_TILES = {
    8: GradTile(columns=32, rows=4, channels=3, taps=5, warps=1, programs=1024),
    12: GradTile(columns=32, rows=5, channels=4, taps=3, warps=1, programs=1024),
    16: GradTile(columns=32, rows=5, channels=4, taps=5, warps=1, programs=1024),
}
"""By channels of dy: the first that is no less. The fastest of those tried while others compute."""


class SmallConv2d(nn.Conv2d):
    """A convolution of up to 16 channels in and out, with taps of up to 5×5 and no bias.

    Where its kernels don't serve, it computes as torch's Conv2d: on a CPU, in other types than
    float32, under autocast, and for images that don't lie in torch's first order.
    """

    padding: tuple[int, int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
    ) -> None:
        if max(in_channels, out_channels) > MOST_CHANNELS or kernel_size > LARGEST_KERNEL:
            raise ValueError(
                f"a small convolution has up to {MOST_CHANNELS} channels and {LARGEST_KERNEL}×"
                f"{LARGEST_KERNEL} taps, not {in_channels} to {out_channels} by {kernel_size}×"
                f"{kernel_size}: take nn.Conv2d"
            )
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x (N, C, H, W)."""
        if not self._kernels_serve(x):
            return super().forward(x)
        return small_conv(x, self.weight, self.stride[0], self.padding[0])

    def _kernels_serve(self, x: Tensor) -> bool:
        weight = self.weight
        if not (ENABLED and can_run(x)) or torch.is_autocast_enabled(x.device.type):
            return False
        if x.ndim != 4 or x.shape[1] != weight.shape[1] or x.device != weight.device:
            return False
        if not x.dtype == weight.dtype == torch.float32:
            return False
        high, wide = result_size(x.shape[2:], weight.shape[2:], self.stride[0], self.padding[0])
        if not x.numel() or min(high, wide) < 1 or max(x.shape[2], high) >= _LONGEST:
            return False
        if max(x.numel(), x.shape[0] * weight.shape[0] * high * wide) >= _MOST:
            return False
        return x.is_contiguous() and weight.is_contiguous()


@torch.library.custom_op("modenorm::small_conv", mutates_args=())
def small_conv(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """Convolve x (N, C, H, W), with the same stride and padding down and across."""
    y = _empty_conv(x, weight, stride, padding)
    return _run_conv(x, weight, y, stride, padding, transposed=False)


@small_conv.register_fake
def _empty_conv(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    high, wide = result_size(x.shape[2:], weight.shape[2:], stride, padding)
    return torch.empty((x.shape[0], weight.shape[0], high, wide), device=x.device, dtype=x.dtype)


@torch.library.custom_op("modenorm::small_conv_input", mutates_args=())
def small_conv_input(
    dy: Tensor, weight: Tensor, height: int, width: int, stride: int, padding: int
) -> Tensor:
    """The gradient of x (N, C, height, width)."""
    dx = _empty_input(dy, weight, height, width, stride, padding)
    return _run_conv(dy, weight, dx, stride, padding, transposed=True)


@small_conv_input.register_fake
def _empty_input(
    dy: Tensor, weight: Tensor, height: int, width: int, stride: int, padding: int
) -> Tensor:
    shape = (dy.shape[0], weight.shape[1], height, width)
    return torch.empty(shape, device=dy.device, dtype=dy.dtype)


@torch.library.custom_op("modenorm::small_conv_weight", mutates_args=())
def small_conv_weight(
    x: Tensor, dy: Tensor, height: int, width: int, stride: int, padding: int
) -> Tensor:
    """The gradient of weights (COUT, CIN, height, width)."""
    from modenorm.kernels.gpu.device import on_device

    dweight = _empty_weight(x, dy, height, width, stride, padding)
    x, dy = x.contiguous(), dy.contiguous()
    with on_device(x) as stream:
        wgrad, add_up, parts = wgrad_launches(x.shape, dy.shape, (height, width), stride, padding)
        partial = torch.empty((parts, dweight.numel()), device=x.device, dtype=x.dtype)
        wgrad(stream, x, dy, partial)
        add_up(stream, partial, dweight)
    return dweight


@small_conv_weight.register_fake
def _empty_weight(
    x: Tensor, dy: Tensor, height: int, width: int, stride: int, padding: int
) -> Tensor:
    return torch.empty((dy.shape[1], x.shape[1], height, width), device=x.device, dtype=x.dtype)


def _run_conv(
    x: Tensor, weight: Tensor, y: Tensor, stride: int, padding: int, transposed: bool
) -> Tensor:
    from modenorm.kernels.gpu.device import on_device

    x, weight = x.contiguous(), weight.contiguous()
    with on_device(x) as stream:
        launch = conv_launch(x.shape, y.shape, weight.shape[2:], stride, padding, transposed)
        launch(stream, x, weight, y)
    return y


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Two tensors, and the stride and the padding at the end."""
    ctx.save_for_backward(*inputs[:2])
    ctx.steps = inputs[-2:]


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (x, weight), needs = ctx.saved_tensors, ctx.needs_input_grad
    dx = small_conv_input(dy, weight, *x.shape[2:], *ctx.steps) if needs[0] else None
    dweight = small_conv_weight(x, dy, *weight.shape[2:], *ctx.steps) if needs[1] else None
    return dx, dweight, None, None


def _backward_of_input(ctx: Any, ddx: Tensor) -> tuple[Tensor | None, ...]:
    (dy, weight), needs = ctx.saved_tensors, ctx.needs_input_grad
    ddy = small_conv(ddx, weight, *ctx.steps) if needs[0] else None
    dweight = small_conv_weight(ddx, dy, *weight.shape[2:], *ctx.steps) if needs[1] else None
    return ddy, dweight, None, None, None, None


def _backward_of_weight(ctx: Any, ddweight: Tensor) -> tuple[Tensor | None, ...]:
    (x, dy), needs = ctx.saved_tensors, ctx.needs_input_grad
    dx = small_conv_input(dy, ddweight, *x.shape[2:], *ctx.steps) if needs[0] else None
    ddy = small_conv(x, ddweight, *ctx.steps) if needs[1] else None
    return dx, ddy, None, None, None, None


small_conv.register_autograd(_backward, setup_context=_remember)
small_conv_input.register_autograd(_backward_of_input, setup_context=_remember)
small_conv_weight.register_autograd(_backward_of_weight, setup_context=_remember)


def conv_launch(
    shape: Sequence[int],
    result: Sequence[int],
    taps: Sequence[int],
    stride: int,
    padding: int,
    transposed: bool,
    tile: ConvTile | None = None,
) -> Launch:
    """The launch from x of a shape to y; transposed, from dy of a shape to dx."""
    from modenorm.kernels.gpu.launch import Launch
    from modenorm.lab.layers.small_conv_kernels import conv_kernel

    num_images, c_out, height, width = result
    tile = tile or _of_width(CONV_TILES, c_out)
    apart = stride if transposed else 1
    high, wide = -(-height // apart), -(-width // apart)
    rows, channels = _even(high, tile.rows), _share(c_out, tile.channels)
    columns = -(-num_images * wide // tile.columns)
    grid = (columns, -(-high // rows), c_out // channels * apart**2)
    constants = (
        *shape[1:], *result[1:], *taps, stride, padding, transposed, tile.columns, rows, channels,
    )  # fmt: skip
    return Launch(conv_kernel, grid, (num_images,), constants, tile.warps, direct=False)


def wgrad_launches(
    shape: Sequence[int],
    result: Sequence[int],
    taps: Sequence[int],
    stride: int,
    padding: int,
    tile: GradTile | None = None,
) -> tuple[Launch, Launch, int]:
    """The launches for x and dy of these shapes, and the number of partial results between them."""
    from modenorm.kernels.gpu.launch import Launch
    from modenorm.lab.layers.small_conv_kernels import add_up_kernel, wgrad_kernel

    num_images, c_out, height, width = result
    c_in, num_weights = shape[1], c_out * shape[1] * taps[0] * taps[1]
    tile = tile or _of_width(GRAD_TILES, c_out)
    rows, channels = _even(height, tile.rows), _share(c_out, tile.channels)
    across = min(tile.taps, taps[1])
    others = (c_in * -(-taps[1] // across), c_out // channels)
    num_strips = num_images * -(-height // rows) * width
    blocks = -(-num_strips // tile.columns)
    steps = -(-blocks // max(1, tile.programs // (others[0] * others[1])))
    parts = -(-blocks // steps)
    constants = (
        *shape[1:], *result[1:], *taps, stride, padding, tile.columns, rows, channels, across,
    )  # fmt: skip
    sizes = (num_strips, steps)
    wgrad = Launch(wgrad_kernel, (parts, *others), sizes, constants, tile.warps, direct=False)
    together = min(power_of_two(parts), 256)
    block = min(2048 // together, 128)
    grid, sizes = (-(-num_weights // block),), (parts, num_weights)
    return wgrad, Launch(add_up_kernel, grid, sizes, (block, together), direct=False), parts


def _of_width(tiles: dict[int, Any], channels: int) -> Any:
    return tiles[min(width for width in tiles if width >= channels)]


def _even(rows: int, most: int) -> int:
    """Rows in each of the fewest parts that have up to `most`."""
    return -(-rows // -(-rows // most))


def _share(channels: int, most: int) -> int:
    """The largest number up to `most` that divides the channels."""
    return max(size for size in range(1, most + 1) if channels % size == 0)
