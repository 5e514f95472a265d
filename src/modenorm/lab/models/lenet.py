"""The two LeNets for 32×32×3 images, with a norm between each convolution and its activation.

Weights start as torch's layers start them.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, TypeVar

from torch import nn

from modenorm.lab.layers.quarter_pool import QuarterMaxPool2d
from modenorm.lab.layers.small_conv import SmallConv2d
from modenorm.lab.models.blocks import sequential
from modenorm.lab.models.norms import NormFactory

Activation = Literal["relu", "tanh", "sigmoid"]
Pool = Literal["max", "avg"]

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
}
POOLS: dict[str, Callable[[], nn.Module]] = {
    "max": QuarterMaxPool2d,
    "avg": partial(nn.AvgPool2d, 2),
}
Choice = TypeVar("Choice")


def lenet(
    num_classes: int, norm: NormFactory, *, activation: Activation = "relu", pool: Pool = "max"
) -> nn.Sequential:
    """LeNet-5 (LeCun et al. 1998): 6 and 16 maps of 5×5, pooled by two, then 120, 84, classes.

    The second convolution sees all maps of the first, and the output layer is linear. Activations
    never fall, so the largest of some is that of the largest: after max-pooling they are a quarter.
    """
    act, pooling = _choose(ACTIVATIONS, activation, "activation"), _choose(POOLS, pool, "pool")

    def stage(in_channels: int, out_channels: int) -> nn.Sequential:
        conv, after = SmallConv2d(in_channels, out_channels, 5), norm(out_channels)
        if pool == "max":
            return sequential(conv=conv, norm=after, pool=pooling(), act=act())
        return sequential(conv=conv, norm=after, act=act(), pool=pooling())

    return sequential(
        stage1=stage(3, 6),
        stage2=stage(6, 16),
        flatten=nn.Flatten(),
        hidden1=sequential(fc=nn.Linear(16 * 5 * 5, 120), act=act()),
        hidden2=sequential(fc=nn.Linear(120, 84), act=act()),
        classifier=nn.Linear(84, num_classes),
    )


def lenet1989(
    num_classes: int, norm: NormFactory, *, activation: Activation = "sigmoid"
) -> nn.Sequential:
    """LeNet of LeCun et al. 1989: two strided convolutions of 12 maps, then 30 units, classes.

    The convolutions are 5×5 with stride 2 and padding 2, so that each halves the image as in the
    original, whose image was 16×16. The second one sees all maps of the first; every position of a
    map has the same bias (the norm's); the output layer is linear.
    """
    act = _choose(ACTIVATIONS, activation, "activation")

    def stage(in_channels: int) -> nn.Sequential:
        return sequential(
            conv=SmallConv2d(in_channels, 12, 5, stride=2, padding=2),
            norm=norm(12),
            act=act(),
        )

    return sequential(
        stage1=stage(3),
        stage2=stage(12),
        flatten=nn.Flatten(),
        hidden=sequential(fc=nn.Linear(12 * 8 * 8, 30), act=act()),
        classifier=nn.Linear(30, num_classes),
    )


def _choose(choices: dict[str, Choice], name: str, what: str) -> Choice:
    if name not in list(choices):  # what was given need not be hashable
        raise ValueError(f"unknown {what} {name!r}; known: {', '.join(choices)}")
    return choices[name]
