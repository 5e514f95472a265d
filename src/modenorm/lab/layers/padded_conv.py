"""Convolutions into a number of channels that 8 does not divide, in half precision on a GPU.

cuDNN's fast kernels need pixels that begin at multiples of 16 bytes, in the result as elsewhere: a
convolution into ten classes takes several times as long as one into sixteen. So these compute some
channels more, of weights that are zero, and leave them out.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from modenorm.lab.layers.own_kernels import computing_type, switched_on

__all__ = ["PaddedConv2d"]

ENABLED = switched_on("PADDED_CONV")
"""Whether `PaddedConv2d` pads where that is faster; else it is torch's Conv2d."""
_DEVICE = "cuda"
_MULTIPLE = 16


class PaddedConv2d(nn.Conv2d):
    """torch's Conv2d without bias, which in half precision on a GPU computes channels by 16.

    Weights are the same either way, results up to the order of the sums.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x (N, C, H, W)."""
        return self._by_multiples(x) if self._padding_serves(x) else super().forward(x)

    def _padding_serves(self, x: Tensor) -> bool:
        if not ENABLED or x.device.type != _DEVICE or x.ndim != 4:
            return False
        plain = self.bias is None and self.groups == 1
        return plain and computing_type(x, self.weight) is not None

    def _by_multiples(self, x: Tensor) -> Tensor:
        missing = -self.out_channels % _MULTIPLE
        weight = functional.pad(self.weight, (0, 0, 0, 0, 0, 0, 0, missing))
        y = self._conv_forward(x, weight, None)
        last = y.is_contiguous(memory_format=torch.channels_last)
        order = torch.channels_last if last else torch.contiguous_format
        return y[:, : self.out_channels].contiguous(memory_format=order)
