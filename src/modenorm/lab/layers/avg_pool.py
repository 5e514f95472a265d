"""Average pooling by two, over windows of 3×3, in half precision on a GPU.

Inductor's backward takes several times as long as memory does. Here each pixel of dx gathers from
the windows that it is in; the forward pass stays torch's, and a compiled network fuses it with what
stands around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from modenorm.lab.layers.max_pool import PoolTile, kernels_serve, pooling_launch
from modenorm.lab.layers.own_kernels import switched_on

if TYPE_CHECKING:
    from modenorm.kernels.gpu.launch import Launch

__all__ = ["SPREAD_TILE", "HalvingAvgPool2d"]

ENABLED = switched_on("AVG_POOL")
"""Whether `HalvingAvgPool2d` uses its own kernel where it can; else it is torch's AvgPool2d."""
SPREAD_TILE = PoolTile(columns=64, rows=2, warps=2)


class HalvingAvgPool2d(nn.AvgPool2d):
    """Average pooling over windows of 3×3 with stride 2 and padding 1, which counts as zeros.

    Where its kernel doesn't serve, it computes as torch's AvgPool2d: on a CPU, in float32, and for
    images that don't lie channels last.
    """

    def __init__(self) -> None:
        super().__init__(3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Pool x (N, C, H, W)."""
        serves = ENABLED and kernels_serve(x)
        y: Tensor = _Pool.apply(x) if serves else super().forward(x)
        return y


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.height, ctx.width = x.shape[2:]
        return _average(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return avg_spread(dy, ctx.height, ctx.width)


def _average(x: Tensor) -> Tensor:
    return functional.avg_pool2d(x, 3, stride=2, padding=1)


@torch.library.custom_op("modenorm::avg_spread", mutates_args=())
def avg_spread(dy: Tensor, height: int, width: int) -> Tensor:
    """The gradient of x (N, C, height, width): a ninth of dy for each pixel of a window."""
    from modenorm.kernels.gpu.device import on_device

    dx = _empty_spread(dy, height, width)
    dy = dy.contiguous(memory_format=torch.channels_last)
    with on_device(dy) as stream:
        spread_launch(dx.shape)(stream, dy, dx)
    return dx


@avg_spread.register_fake
def _empty_spread(dy: Tensor, height: int, width: int) -> Tensor:
    shape, order = (*dy.shape[:2], height, width), torch.channels_last
    return torch.empty(shape, device=dy.device, dtype=dy.dtype, memory_format=order)


def _backward(ctx: Any, ddx: Tensor) -> tuple[Tensor, None, None]:
    """Pooling again: `avg_spread` is linear in dy."""
    return _average(ddx), None, None


avg_spread.register_autograd(_backward)


def spread_launch(shape: Sequence[int], tile: PoolTile = SPREAD_TILE) -> Launch:
    """The launch for dx of a shape, with dy and dx."""
    from modenorm.lab.layers.avg_pool_kernels import spread_kernel

    return pooling_launch(spread_kernel, shape, tile)
