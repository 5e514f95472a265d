"""Sizes and memory formats that the launches of several layers need."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["channels_last", "power_of_two", "result_size"]


def result_size(image: Sequence[int], taps: Sequence[int], stride: int, padding: int) -> list[int]:
    """Height and width of a convolution's result.

    >>> result_size((32, 31), (3, 3), 2, 1)
    [16, 16]
    """
    sizes = zip(image, taps, strict=True)
    return [(size + 2 * padding - tap) // stride + 1 for size, tap in sizes]


def channels_last(x: Tensor) -> Tensor:
    """The images with the channels of a pixel side by side; themselves if they are so."""
    return x.contiguous(memory_format=torch.channels_last)


def power_of_two(number: int) -> int:
    """The smallest power of two that is no less.

    >>> [power_of_two(number) for number in (1, 2, 3, 64, 65)]
    [1, 2, 4, 64, 128]
    """
    return 1 << (number - 1).bit_length()
