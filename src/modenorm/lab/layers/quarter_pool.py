"""Max pooling over windows of 2×2 that a compiled network fuses with what stands around it.

Inductor's backward of max pooling looks for each pixel through all windows that it might be in, and
takes several times as long as memory does. Windows that don't overlap need no search: here a pixel
asks its one window whether the maximum was there.
"""

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["QuarterMaxPool2d"]


class QuarterMaxPool2d(nn.MaxPool2d):
    """Max pooling over windows of 2×2 with stride 2: torch's, unless it is being compiled."""

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        """Pool x (N, C, H, W)."""
        whole = x.ndim == 4 and x.shape[2] % 2 == 0 and x.shape[3] % 2 == 0
        if whole and torch.compiler.is_compiling():
            y: Tensor = _Pool.apply(x)
        else:
            y = super().forward(x)
        return y


class _Pool(torch.autograd.Function):
    """Of equal numbers the first is the maximum, and a NaN is larger than all: as torch has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y, *others = (x[:, :, i::2, j::2] for i in range(2) for j in range(2))
        place = torch.zeros_like(y, dtype=torch.uint8)
        for number, other in enumerate(others, start=1):
            larger = (other > y) | other.isnan()
            y, place = torch.where(larger, other, y), place.masked_fill(larger, number)
        last = x.is_contiguous(memory_format=torch.channels_last)
        ctx.order = torch.channels_last if last else torch.contiguous_format
        ctx.save_for_backward(place)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (place,) = ctx.saved_tensors
        number = torch.arange(4, device=dy.device, dtype=place.dtype).view(2, 1, 2)
        here = place[:, :, :, None, :, None] == number
        dx = torch.where(here, dy[:, :, :, None, :, None], 0)
        return dx.flatten(4, 5).flatten(2, 3).contiguous(memory_format=ctx.order)
