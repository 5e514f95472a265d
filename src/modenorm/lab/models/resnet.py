"""Residual networks (He et al. 2016): depths 20, 56, 110 for CIFAR, and ResNet18 for larger images.

Convolutions start as in `he_conv`, the linear layer as torch does.
"""

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from modenorm.lab.layers.max_pool import HalvingMaxPool2d
from modenorm.lab.models.blocks import ConvNormReLU, he_conv, norm_relu, sequential
from modenorm.lab.models.norms import NormFactory

Shortcut = Literal["pad", "project"]
Stem = Literal["imagenet", "small"]


def resnet20(num_classes: int, norm: NormFactory) -> nn.Sequential:
    """The CIFAR ResNet with 20 layers."""
    return _cifar_resnet(20, num_classes, norm)


def resnet56(num_classes: int, norm: NormFactory) -> nn.Sequential:
    """The CIFAR ResNet with 56 layers."""
    return _cifar_resnet(56, num_classes, norm)


def resnet110(num_classes: int, norm: NormFactory) -> nn.Sequential:
    """The CIFAR ResNet with 110 layers."""
    return _cifar_resnet(110, num_classes, norm)


def resnet18(num_classes: int, norm: NormFactory, *, stem: Stem = "imagenet") -> nn.Sequential:
    """ResNet18 with projection shortcuts (option B), for images of any size.

    Args:
        num_classes: Number of classes.
        norm: Makes the norms.
        stem: "imagenet", the default for every image size: 7×7 with stride 2 and a max-pool, as in
            the paper for 224×224. "small": 3×3 with stride 1 and no pool, the choice for 64×64.
    """
    match stem:
        case "imagenet":
            first = ConvNormReLU(he_conv(3, 64, 7, 2), norm(64), pool=HalvingMaxPool2d())
        case "small":
            first = ConvNormReLU(he_conv(3, 64, 3), norm(64))
        case _:
            raise ValueError(f"unknown stem {stem!r}; known: imagenet, small")
    widths = (64, 128, 256, 512)
    return _resnet(first, num_classes, norm, widths=widths, blocks=2, shortcut="project")


class BasicBlock(nn.Module):
    """relu(F(x) + shortcut(x)), F two 3×3 convolutions with norms; the first one may stride."""

    def __init__(
        self, in_channels: int, out_channels: int, stride: int, norm: NormFactory, kind: Shortcut
    ) -> None:
        super().__init__()
        self.conv1 = he_conv(in_channels, out_channels, 3, stride)
        self.norm1 = norm(out_channels)
        self.conv2 = he_conv(out_channels, out_channels, 3)
        self.norm2 = norm(out_channels)
        self.shortcut = _shortcut(in_channels, out_channels, stride, norm, kind)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to x (N, C, H, W)."""
        out = norm_relu(self.norm1, self.conv1(x))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class PadShortcut(nn.Module):
    """Every stride-th pixel, with zero channels added evenly on both sides (option A)."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        added = out_channels - in_channels
        self.before, self.after = added // 2, added - added // 2
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Subsample and pad x (N, C, H, W)."""
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, self.before, self.after))


def _cifar_resnet(depth: int, num_classes: int, norm: NormFactory) -> nn.Sequential:
    stem = ConvNormReLU(he_conv(3, 16, 3), norm(16))
    blocks = (depth - 2) // 6
    return _resnet(stem, num_classes, norm, widths=(16, 32, 64), blocks=blocks, shortcut="pad")


def _resnet(
    stem: nn.Module,
    num_classes: int,
    norm: NormFactory,
    *,
    widths: Sequence[int],
    blocks: int,
    shortcut: Shortcut,
) -> nn.Sequential:
    stages = nn.Sequential()
    in_channels = widths[0]
    for width in widths:
        stage = nn.Sequential()
        for _ in range(blocks):
            stride = 1 if in_channels == width else 2
            stage.append(BasicBlock(in_channels, width, stride, norm, shortcut))
            in_channels = width
        stages.append(stage)
    return sequential(
        stem=stem,
        stages=stages,
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        classifier=nn.Linear(in_channels, num_classes),
    )


def _shortcut(
    in_channels: int, out_channels: int, stride: int, norm: NormFactory, kind: Shortcut
) -> nn.Module:
    if in_channels == out_channels:
        return nn.Identity()
    if kind == "pad":
        return PadShortcut(in_channels, out_channels, stride)
    return sequential(conv=he_conv(in_channels, out_channels, 1, stride), norm=norm(out_channels))
