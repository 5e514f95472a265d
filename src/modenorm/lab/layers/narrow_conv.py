"""3×3 convolutions of few channels, 16 to 64, with stride 1 or 2, in half precision on a GPU.

cuDNN's convolutions are made for many channels: with 16 or 32 they take several times as long as
memory does. These keep the weights of all taps at hand and read an image's row once per shift.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from modenorm.lab.layers.geometry import channels_last, result_size
from modenorm.lab.layers.narrow_launches import (
    conv_launch,
    strided_conv_launch,
    strided_input_launch,
    strided_wgrad_launches,
    wgrad_launches,
)
from modenorm.lab.layers.own_kernels import can_run, computing_type, switched_on

__all__ = ["WIDTHS", "NarrowConv2d", "fits"]

ENABLED = switched_on("NARROW_CONV")
"""Whether `NarrowConv2d` uses its own kernels where it can; else it is torch's Conv2d."""
WIDTHS = (16, 32, 64)
_MOST_PIXELS = 1 << 30  # pixels are counted in 32 bits, numbers in 64
_LARGE = 16 * 16
"""Positions of the result from which on cuDNN is faster with 64 channels."""


def fits(in_channels: int, out_channels: int, kernel_size: int, stride: int) -> bool:
    """Whether there are kernels for a convolution with this shape."""
    narrow = in_channels in WIDTHS and out_channels in WIDTHS
    return narrow and kernel_size == 3 and stride in (1, 2)


class NarrowConv2d(nn.Conv2d):
    """A 3×3 convolution with padding 1 and no bias, for which `fits` holds.

    Where its kernels don't serve, it computes as torch's Conv2d: on a CPU, in float32, and for
    images that don't lie channels last. Under autocast the gradient of the weights is not rounded
    to half precision.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        if not fits(in_channels, out_channels, 3, stride):
            raise ValueError(
                f"a narrow convolution has {WIDTHS} channels and stride 1 or 2, not {in_channels}"
                f" to {out_channels} with stride {stride}: take nn.Conv2d"
            )
        super().__init__(in_channels, out_channels, 3, stride, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x (N, C, H, W)."""
        dtype = _kernels_type(x, self.weight, self.stride[0])
        if dtype is None:
            return super().forward(x)
        return narrow_conv(x.to(dtype), self.weight, self.stride[0])


def _kernels_type(x: Tensor, weight: Tensor, stride: int) -> torch.dtype | None:
    """The type that the kernels compute in; None where they don't serve."""
    if not (ENABLED and can_run(x)) or x.ndim != 4 or not x.numel():
        return None
    dtype = computing_type(x, weight)
    if dtype is None or x.shape[1] != weight.shape[1]:
        return None
    high, wide = _size(x, stride)
    if max(weight.shape[:2]) == max(WIDTHS) and high * wide >= _LARGE:
        return None
    small = x.numel() // x.shape[1] < _MOST_PIXELS
    return dtype if small and x.is_contiguous(memory_format=torch.channels_last) else None


@torch.library.custom_op("modenorm::narrow_conv", mutates_args=())
def narrow_conv(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Convolve x (N, C, H, W) with 3×3 weights."""
    from modenorm.kernels.gpu.device import on_device

    y, x = _empty_conv(x, weight, stride), channels_last(x)
    plan = (x.shape, weight.shape, weight.stride())
    with on_device(x) as stream:
        launch = conv_launch(*plan, False) if stride == 1 else strided_conv_launch(*plan)
        launch(stream, x, weight, y)
    return y


@narrow_conv.register_fake
def _empty_conv(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    return _images(x, weight.shape[0], *_size(x, stride))


@torch.library.custom_op("modenorm::narrow_conv_input", mutates_args=())
def narrow_conv_input(dy: Tensor, weight: Tensor, height: int, width: int, stride: int) -> Tensor:
    """The gradient of x (N, C, height, width)."""
    from modenorm.kernels.gpu.device import on_device

    dx, dy = _empty_input(dy, weight, height, width, stride), channels_last(dy)
    plan = (dx.shape, weight.shape, weight.stride())
    with on_device(dy) as stream:
        launch = conv_launch(*plan, True) if stride == 1 else strided_input_launch(*plan)
        launch(stream, dy, weight, dx)
    return dx


@narrow_conv_input.register_fake
def _empty_input(dy: Tensor, weight: Tensor, height: int, width: int, stride: int) -> Tensor:
    return _images(dy, weight.shape[1], height, width)


@torch.library.custom_op("modenorm::narrow_conv_weight", mutates_args=())
def narrow_conv_weight(x: Tensor, dy: Tensor, weight: Tensor, stride: int) -> Tensor:
    """The gradient of the weights, which has their type and strides."""
    from modenorm.kernels.gpu.device import on_device

    x, dy, dweight = channels_last(x), channels_last(dy), torch.empty_like(weight)
    launches = wgrad_launches if stride == 1 else strided_wgrad_launches
    with on_device(x) as stream:
        wgrad, add_up, parts = launches(x.shape, weight.shape, dweight.stride())
        partial = torch.empty((parts, weight.numel()), device=x.device, dtype=torch.float32)
        wgrad(stream, x, dy, partial)
        add_up(stream, partial, dweight)
    return dweight


@narrow_conv_weight.register_fake
def _(x: Tensor, dy: Tensor, weight: Tensor, stride: int) -> Tensor:
    return torch.empty_like(weight)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Images, weights, and the stride at the end."""
    ctx.save_for_backward(*inputs[:2])
    ctx.stride = inputs[-1]


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (x, weight), needs = ctx.saved_tensors, ctx.needs_input_grad
    dx = narrow_conv_input(dy, weight, *x.shape[2:], ctx.stride) if needs[0] else None
    dweight = narrow_conv_weight(x, dy, weight, ctx.stride) if needs[1] else None
    return dx, dweight, None


def _backward_of_input(ctx: Any, ddx: Tensor) -> tuple[Tensor | None, ...]:
    (dy, weight), needs = ctx.saved_tensors, ctx.needs_input_grad
    ddy = narrow_conv(ddx, weight, ctx.stride) if needs[0] else None
    dweight = narrow_conv_weight(ddx, dy, weight, ctx.stride) if needs[1] else None
    return ddy, dweight, None, None, None


narrow_conv.register_autograd(_backward, setup_context=_remember)
narrow_conv_input.register_autograd(_backward_of_input, setup_context=_remember)


def _size(x: Tensor, stride: int) -> list[int]:
    return result_size(x.shape[2:], (3, 3), stride, padding=1)


def _images(like: Tensor, channels: int, height: int, width: int) -> Tensor:
    shape = (like.shape[0], channels, height, width)
    return torch.empty(
        shape, device=like.device, dtype=like.dtype, memory_format=torch.channels_last
    )
