"""Max pooling by two, over windows of 3×3, in half precision on a GPU.

torch's backward adds into dx from every window, and so takes several times as long as memory does.
Here the forward pass notes in one byte where in its window a maximum is, and each pixel of dx
gathers from the windows that it is in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from modenorm.buffers import HALF_TYPES
from modenorm.lab.layers.geometry import channels_last
from modenorm.lab.layers.own_kernels import can_run, switched_on

if TYPE_CHECKING:
    from modenorm.kernels.gpu.launch import Launch

__all__ = ["POOL_TILE", "UNPOOL_TILE", "HalvingMaxPool2d", "PoolTile"]

ENABLED = switched_on("MAX_POOL")
"""Whether `HalvingMaxPool2d` uses its own kernels where it can; else it is torch's MaxPool2d."""
_MOST = 1 << 31  # numbers are counted in 32 bits
_LONGEST = 1 << 16  # a grid's second axis has fewer programs


class PoolTile(NamedTuple):
    """What a program works on."""

    columns: int
    """Columns of windows, each for up to eight channels: 16 bytes of a pixel."""
    rows: int
    """Windows of a column."""
    warps: int


POOL_TILE = PoolTile(columns=64, rows=2, warps=2)
UNPOOL_TILE = PoolTile(columns=64, rows=2, warps=2)


class HalvingMaxPool2d(nn.MaxPool2d):
    """Max pooling over windows of 3×3 with stride 2 and padding 1.

    Where its kernels don't serve, it computes as torch's MaxPool2d: on a CPU, in float32, and for
    images that don't lie channels last.
    """

    def __init__(self) -> None:
        super().__init__(3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Pool x (N, C, H, W)."""
        if not (ENABLED and kernels_serve(x)):
            y: Tensor = super().forward(x)
            return y
        return max_pool(x)[0]


def kernels_serve(x: Tensor) -> bool:
    """Whether x is as kernels of pooling know it: half precision, channels last, not too large."""
    if not can_run(x) or x.dtype not in HALF_TYPES:
        return False
    if x.ndim != 4 or not 0 < x.numel() < _MOST or x.shape[2] >= _LONGEST:
        return False
    return x.is_contiguous(memory_format=torch.channels_last)


@torch.library.custom_op("modenorm::max_pool", mutates_args=())
def max_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """Pool x (N, C, H, W); the second result is where in its window each maximum is, 0 to 8."""
    from modenorm.kernels.gpu.device import on_device

    (y, places), x = _empty_pool(x), channels_last(x)
    with on_device(x) as stream:
        pool_launch(x.shape)(stream, x, y, places)
    return y, places


@max_pool.register_fake
def _empty_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:2], (x.shape[2] + 1) // 2, (x.shape[3] + 1) // 2)
    return _empty(x, shape, x.dtype), _empty(x, shape, torch.uint8)


@torch.library.custom_op("modenorm::max_unpool", mutates_args=())
def max_unpool(dy: Tensor, places: Tensor, height: int, width: int) -> Tensor:
    """The gradient of x (N, C, height, width): each of dy at its place, added up."""
    from modenorm.kernels.gpu.device import on_device

    dx = _empty_unpool(dy, places, height, width)
    dy, places = channels_last(dy), channels_last(places)
    with on_device(dy) as stream:
        unpool_launch(dx.shape)(stream, dy, places, dx)
    return dx


@max_unpool.register_fake
def _empty_unpool(dy: Tensor, places: Tensor, height: int, width: int) -> Tensor:
    return _empty(dy, (*dy.shape[:2], height, width), dy.dtype)


def _remember(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.height, ctx.width = inputs[0].shape[2:]
    ctx.save_for_backward(output[1])
    ctx.set_materialize_grads(False)  # places have none


def _backward(ctx: Any, dy: Tensor, _: None) -> Tensor:
    return max_unpool(dy, *ctx.saved_tensors, ctx.height, ctx.width)


def _remember_places(ctx: Any, inputs: tuple[Tensor, Tensor, int, int], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _take(ctx: Any, ddx: Tensor) -> tuple[Tensor, None, None, None]:
    """What lies at the places: `max_unpool` is linear in dy."""
    (places,) = ctx.saved_tensors
    width = ddx.shape[3]
    i, j = (2 * torch.arange(size, device=ddx.device) - 1 for size in places.shape[2:])
    pixels = (i[:, None] + places // 3) * width + j + places % 3
    return ddx.flatten(2).gather(2, pixels.flatten(2)).view(places.shape), None, None, None


max_pool.register_autograd(_backward, setup_context=_remember)
max_unpool.register_autograd(_take, setup_context=_remember_places)


def _empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, device=like.device, dtype=dtype, memory_format=torch.channels_last)


def pool_launch(shape: Sequence[int], tile: PoolTile = POOL_TILE) -> Launch:
    """The launch for x of a shape, with x, y and the places."""
    from modenorm.lab.layers.max_pool_kernels import pool_kernel

    return pooling_launch(pool_kernel, shape, tile)


def unpool_launch(shape: Sequence[int], tile: PoolTile = UNPOOL_TILE) -> Launch:
    """The launch for dx of a shape, with dy, the places and dx."""
    from modenorm.lab.layers.max_pool_kernels import unpool_kernel

    return pooling_launch(unpool_kernel, shape, tile)


def pooling_launch(kernel: Any, shape: Sequence[int], tile: PoolTile) -> Launch:
    """The launch of a kernel that follows columns of windows, for images of a shape."""
    from modenorm.kernels.gpu.launch import Launch

    num_images, num_channels, height, width = shape
    high, wide = (height + 1) // 2, (width + 1) // 2
    vector = math.gcd(num_channels, 8)
    num_columns = num_images * wide * num_channels // vector
    rows = min(tile.rows, high)
    grid = (-(-num_columns // tile.columns), -(-high // rows))
    constants = (height, width, num_channels, vector, tile.columns, rows)
    return Launch(kernel, grid, (num_columns,), constants, tile.warps, direct=False)
