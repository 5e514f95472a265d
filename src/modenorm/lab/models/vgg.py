"""VGG13 for CIFAR."""

from collections import Counter

from torch import nn

from modenorm.lab.layers.quarter_pool import QuarterMaxPool2d
from modenorm.lab.models.blocks import ConvNormReLU, he_conv, sequential
from modenorm.lab.models.norms import NormFactory

STAGES = (64, 128, 256, 512, 512)


def vgg13(num_classes: int, norm: NormFactory) -> nn.Sequential:
    """VGG13 (Simonyan & Zisserman 2015, configuration B) with norms, for 32×32 images.

    As usual for CIFAR, one linear layer on the last 512 values classifies. Layers are named as in
    the VGG paper with a number per width: `features.conv3_64_1.norm` is the norm of conv3-64-1, and
    the four of width 512 are conv3_512_1 to conv3_512_4. Convolutions start as in `he_conv`, the
    linear layer as torch does.
    """
    layers: dict[str, nn.Module] = {}
    number: Counter[int] = Counter()
    in_channels = 3
    for stage, width in enumerate(STAGES, start=1):
        for _ in range(2):
            number[width] += 1
            conv = he_conv(in_channels, width, 3)
            layers[f"conv3_{width}_{number[width]}"] = ConvNormReLU(conv, norm(width))
            in_channels = width
        layers[f"pool{stage}"] = QuarterMaxPool2d()
    return sequential(
        features=sequential(**layers),
        flatten=nn.Flatten(),
        classifier=nn.Linear(in_channels, num_classes),
    )
