"""Network in Network for CIFAR."""

from torch import nn

from modenorm.lab.layers.avg_pool import HalvingAvgPool2d
from modenorm.lab.layers.dropout import SeededDropout
from modenorm.lab.layers.max_pool import HalvingMaxPool2d
from modenorm.lab.models.blocks import ConvNormReLU, he_conv, sequential
from modenorm.lab.models.norms import NormFactory


def nin(num_classes: int, norm: NormFactory, *, dropout: float = 0.25) -> nn.Sequential:
    """Network in Network (Lin et al. 2014), with a norm between each convolution and its ReLU.

    The original's CIFAR network otherwise: three blocks of a wide and two 1×1 convolutions, max and
    average pooling with dropout between them, and the global average of one map per class. As
    there, the last convolution too has a ReLU (and so, here, a norm). Weights start as in
    `he_conv`.
    """

    def block(in_channels: int, kernel_size: int, *widths: int) -> nn.Sequential:
        layers = []
        for width in widths:
            conv = he_conv(in_channels, width, kernel_size)
            layers.append(ConvNormReLU(conv, norm(width)))
            in_channels, kernel_size = width, 1
        return nn.Sequential(*layers)

    modules: dict[str, nn.Module] = {
        "block1": block(3, 5, 192, 160, 96),
        "pool1": HalvingMaxPool2d(),
        "dropout1": SeededDropout(dropout),
        "block2": block(96, 5, 192, 192, 192),
        "pool2": HalvingAvgPool2d(),
        "dropout2": SeededDropout(dropout),
        "block3": block(192, 3, 192, 192, num_classes),
        "pool3": nn.AdaptiveAvgPool2d(1),
        "flatten": nn.Flatten(),
    }
    return sequential(**modules)
