"""Small arrays of several layers, which one launch reads where they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["MOST_ARRAYS", "together"]

MOST_ARRAYS = 8
"""That a launch takes; `gpu_several.array_of` tells them apart."""


def together(arrays: Sequence[Tensor]) -> Sequence[Tensor]:
    """At most eight arrays of one length: those given, or all of them in one.

    Example:
        >>> len(together([torch.zeros(2)] * 8)), len(together([torch.zeros(2)] * 9))
        (8, 1)
    """
    if len(arrays) > MOST_ARRAYS or any(array.shape != arrays[0].shape for array in arrays):
        return [torch.cat([*arrays])]
    return arrays
