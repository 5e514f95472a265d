"""The parts that several models are made of."""

from collections import OrderedDict

from torch import nn

from modenorm.lab.models.narrow_conv import NarrowConv2d, fits
from modenorm.lab.models.stem_conv import StemConv2d


def sequential(**modules: nn.Module) -> nn.Sequential:
    """Chain modules under the names of the arguments."""
    return nn.Sequential(OrderedDict(modules))


def he_conv(in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> nn.Conv2d:
    """Make a padded convolution without bias, as a norm follows it.

    Weights are normal with variance 2 / fan_out (He et al. 2015, in the form of the published
    ResNet code).
    """
    if fits(in_channels, out_channels, kernel_size, stride):
        conv: nn.Conv2d = NarrowConv2d(in_channels, out_channels, stride)
    else:
        kind = StemConv2d if in_channels == 3 else nn.Conv2d
        conv = kind(
            in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, bias=False
        )
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv
