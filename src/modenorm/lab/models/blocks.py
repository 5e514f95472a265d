"""The parts that several models are made of."""

from collections import OrderedDict

from torch import Tensor, nn

from modenorm.lab.layers.batch_norm import StreamedBatchNorm2d
from modenorm.lab.layers.narrow_conv import NarrowConv2d, fits
from modenorm.lab.layers.padded_conv import PaddedConv2d
from modenorm.lab.layers.stem_conv import StemConv2d
from modenorm.layers import ModeNorm


def sequential(**modules: nn.Module) -> nn.Sequential:
    """Chain modules under the names of the arguments."""
    return nn.Sequential(OrderedDict(modules))


class ConvNormReLU(nn.Sequential):
    """A convolution, its norm and a ReLU under the names conv, norm and act, and what follows."""

    def __init__(self, conv: nn.Module, norm: nn.Module, **others: nn.Module) -> None:
        super().__init__(OrderedDict(conv=conv, norm=norm, act=nn.ReLU(), **others))

    def forward(self, x: Tensor) -> Tensor:
        """Apply all of them to x (N, C, H, W)."""
        conv, norm, _, *others = self
        x = norm_relu(norm, conv(x))
        for module in others:
            x = module(x)
        return x


def norm_relu(norm: nn.Module, x: Tensor) -> Tensor:
    """Normalise x and cut it off at zero; some norms do both at once."""
    at_once = isinstance(norm, (ModeNorm, StreamedBatchNorm2d))
    y: Tensor = norm(x, relu=True) if at_once else norm(x).relu()
    return y


def he_conv(in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> nn.Conv2d:
    """Make a padded convolution without bias, as a norm follows it.

    Weights are normal with variance 2 / fan_out (He et al. 2015, in the form of the published
    ResNet code).
    """
    if fits(in_channels, out_channels, kernel_size, stride):
        conv: nn.Conv2d = NarrowConv2d(in_channels, out_channels, stride)
    else:
        conv = _kind(in_channels, out_channels)(
            in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, bias=False
        )
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def _kind(in_channels: int, out_channels: int) -> type[nn.Conv2d]:
    if in_channels == 3:
        return StemConv2d
    return PaddedConv2d if out_channels % 8 else nn.Conv2d
