"""The first convolution of a network, of images with three channels, on a GPU.

Three channels suit no convolution of half precision: cuDNN takes several times as long as memory
does. So the windows are copied into the rows of a matrix, by operators that a compiled step fuses
into one kernel, and the convolution and its gradient are matrix products.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modenorm.buffers import HALF_TYPES
from modenorm.lab.models.own_kernels import switched_on

__all__ = ["StemConv2d"]

ENABLED = switched_on("STEM_CONV")
"""Whether `StemConv2d` multiplies matrices where it can; else it is torch's Conv2d."""
_MULTIPLE = 8  # rows of a matrix begin at multiples of 16 bytes
_MOST = 1 << 25  # numbers of a matrix of windows: 64 MiB


class StemConv2d(nn.Conv2d):
    """torch's Conv2d of few channels, which in half precision on a GPU multiplies matrices.

    Weights are the same either way, results up to the order of the sums. Images for which the
    matrix of windows is large are left to torch.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x (N, C, H, W)."""
        return self.by_windows(x) if self._gains(x) else super().forward(x)

    def by_windows(self, x: Tensor) -> Tensor:
        """Convolve x (N, C, H, W) as a product of matrices; the result lies channels last."""
        weight = self.weight.permute(0, 2, 3, 1).flatten(1)
        zeros = (0, -weight.shape[1] % _MULTIPLE)
        y = F.linear(F.pad(self.windows(x), zeros), F.pad(weight, zeros), self.bias)
        return y.permute(0, 3, 1, 2)

    def windows(self, x: Tensor) -> Tensor:
        """What the kernel sees at each position: (N, H', W', height · width · C).

        The channels of a row's pixels are one axis: where images lie channels last, a row of a
        window is one piece of memory.
        """
        (height, width), (down, right) = self.kernel_size, self.stride
        channels = x.shape[1]
        before, after, above, below = self._reversed_padding_repeated_twice
        rows = x.permute(0, 2, 3, 1).flatten(2)
        rows = F.pad(rows, (before * channels, after * channels, above, below))
        views = rows.unfold(1, height, down).unfold(2, width * channels, right * channels)
        return views.flatten(3)

    def _gains(self, x: Tensor) -> bool:
        if not ENABLED or x.device.type != "cuda" or x.ndim != 4:
            return False
        if (self.dilation, self.groups, self.padding_mode) != ((1, 1), 1, "zeros"):
            return False
        if x.numel() * self.weight[0, 0].numel() // (self.stride[0] * self.stride[1]) > _MOST:
            return False
        autocast = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda") if autocast else x.dtype
        return dtype in HALF_TYPES and x.is_contiguous(memory_format=torch.channels_last)
