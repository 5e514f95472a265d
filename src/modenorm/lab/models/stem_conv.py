"""The first convolution of a network, of images with three channels, on a GPU.

cuDNN's fast convolutions in half precision take channels by eight. So images and weights get
channels of zeros, by operators that a compiled step fuses with their conversion to half precision.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["StemConv2d"]

ENABLED = os.environ.get("MODENORM_STEM_CONV") != "0"
"""Whether `StemConv2d` adds channels of zeros on a GPU; else it is torch's Conv2d."""
MULTIPLE = 8
"""Channels are added up to a multiple of this."""
_HALF = (torch.bfloat16, torch.float16)


class StemConv2d(nn.Conv2d):
    """torch's Conv2d, which in half precision on a GPU, channels last, adds channels of zeros.

    Weights and results are the same with and without them.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x (N, C, H, W)."""
        return self.padded(x) if _gains(x) else super().forward(x)

    def padded(self, x: Tensor) -> Tensor:
        """Convolve x (N, C, H, W) with channels of zeros added to x and to the weights."""
        zeros = (0, 0, 0, 0, 0, -self.in_channels % MULTIPLE)
        return self._conv_forward(F.pad(x, zeros), F.pad(self.weight, zeros), self.bias)


def _gains(x: Tensor) -> bool:
    if not ENABLED or x.device.type != "cuda" or x.ndim != 4:
        return False
    autocast = torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if autocast else x.dtype
    return dtype in _HALF and x.is_contiguous(memory_format=torch.channels_last)
