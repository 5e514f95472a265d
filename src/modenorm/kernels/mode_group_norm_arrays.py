"""The arrays of a mode group norm's launches, by name: tensors, or slots that stand for them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from modenorm.kernels.layout import MOST_ROWS

__all__ = ["ChannelBackward", "ChannelForward", "Given", "can_count_gates", "fits"]

MAX_CHANNELS = 8192
"""A program of gpu/mode_group_mixing.py keeps all channels of its sample in registers."""


class Given(NamedTuple):
    """What a mode group norm is given beside x, and how its variances are taken."""

    gate_weight: Tensor
    gate_bias: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    pixel: bool
    """Take variances over all values of the channels, not over their averages."""

    def contiguous(self) -> Given:
        """The same, in contiguous memory."""
        weight, bias = (None if p is None else p.contiguous() for p in (self.weight, self.bias))
        gate = self.gate_weight.contiguous(), self.gate_bias.contiguous()
        return Given(*gate, weight, bias, self.eps, self.pixel)


def fits(x: Tensor, given: Given) -> bool:
    """Whether the kernels take these: not too many channels, one weight and bias for each."""
    few = x.shape[1] <= MAX_CHANNELS and can_count_gates(x, len(given.gate_weight))
    return few and all(p is None or p.shape == x.shape[1:2] for p in (given.weight, given.bias))


def can_count_gates(x: Tensor, num_modes: int) -> bool:
    """Whether kernels on a GPU can: twice, as many as a gate has parameters. See `can_count`."""
    return torch.compiler.is_compiling() or 2 * x.shape[:2].numel() * num_modes < MOST_ROWS


class ChannelForward(NamedTuple):
    """The arrays of a forward."""

    x: Any
    gate_weight: Any
    gate_bias: Any
    weight: Any
    bias: Any
    gates: Any  # (N, C, K), or None
    kept: Any  # a slab
    scratch: Any  # a slab
    y: Any


class ChannelBackward(NamedTuple):
    """The arrays of a backward."""

    dy: Any
    x: Any
    gate_weight: Any
    gate_bias: Any
    weight: Any
    dgates: Any
    kept: Any  # a slab
    scratch: Any  # a slab
    dx: Any
    dgate_weight: Any
    dgate_bias: Any
    dweight: Any
    dbias: Any
