"""What the parts of a mixing take, in every language.

Letters: N samples, C channels, K modes.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Affine", "Modes", "Samples"]


class Samples(NamedTuple):
    """What is known of each sample."""

    mean: Tensor  # (N, C)
    var: Tensor  # (N, C)
    gates: Tensor  # (N, K)


class Modes(NamedTuple):
    """What follows for each mode."""

    mean: Tensor  # (K, C)
    var: Tensor  # (K, C)
    mass: Tensor  # (K,)


class Affine(NamedTuple):
    """The layer's own map."""

    weight: Tensor | None  # (C,), or (K, C) for one per mode
    bias: Tensor | None  # (C,) or (K, C)
    eps: float  # added to variances
