"""The arrays of a mode norm's launches, by name: tensors, or slots that stand for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modenorm.kernels.layout import can_count
from modenorm.mixing import RunningEstimates

__all__ = ["Backward", "Forward", "Found", "Inference", "Inputs", "beside_output", "fits"]

Found = tuple[Tensor, Tensor | None, Tensor | None]
"""What a mode norm finds: y, the gates, and the usage of the modes."""


def beside_output(
    more: Sequence[Tensor | None], gates_matter: bool, usage_matters: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gates and usage, or their gradients, of what a node has beside y: those that matter."""
    return more[0] if gates_matter else None, more[-1] if usage_matters else None


class Inputs(NamedTuple):
    """What a mode norm is given beside x: gates or a linear gate, and the affine parameters."""

    gates: Tensor | None
    gate_weight: Tensor | None
    gate_bias: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @property
    def num_modes(self) -> int:
        """K."""
        if self.gates is not None:
            return self.gates.shape[1]
        assert self.gate_weight is not None
        return self.gate_weight.shape[0]

    @property
    def per_mode(self) -> bool:
        """Whether every mode has a weight of its own."""
        return self.weight is not None and self.weight.ndim == 2


def fits(
    x: Tensor, inputs: Inputs, estimates: RunningEstimates | None, num_modes: int | None
) -> bool:
    """Whether all is as the launches expect: they would read whatever lies at an address."""
    if num_modes not in (None, inputs.num_modes) or not can_count(x, inputs.num_modes):
        return False
    device, table = x.device, (inputs.num_modes, x.shape[1])
    gates, affine = (x.shape[0], table[0]), table if inputs.per_mode else table[1:]
    tensors = (*inputs, *(estimates or ()))
    shapes = (gates, table, table[:1], affine, affine, table, table, (), table[:1])
    for tensor, shape in zip(tensors, shapes, strict=False):
        if tensor is not None and (
            tensor.shape != shape
            or tensor.device != device
            or tensor.dtype != (torch.float32 if shape else torch.int64)  # a counter
            or not tensor.is_contiguous()
        ):
            return False
    return True


class Forward(NamedTuple):
    """The arrays of a training step's forward, as tensors or as slots."""

    x: Any
    gates: Any
    gate_weight: Any
    gate_bias: Any
    weight: Any
    bias: Any
    running_mean: Any
    running_var: Any
    tracked: Any
    share: Any
    usage: Any  # (K,)
    used: Any  # gates, (N, K)
    kept: Any  # a slab
    scratch: Any  # a slab
    y: Any

    @property
    def inputs(self) -> Inputs:
        """What was given beside x."""
        return Inputs(*self[1:6])

    @property
    def running(self) -> RunningEstimates | None:
        """The running estimates to update."""
        return None if self.running_mean is None else RunningEstimates(*self[6:10])


class Inference(NamedTuple):
    """The arrays of an evaluation."""

    x: Any
    gate_weight: Any
    gate_bias: Any
    weight: Any
    bias: Any
    running_mean: Any
    running_var: Any
    used: Any
    scratch: Any  # a slab
    y: Any


class Backward(NamedTuple):
    """The arrays of a backward."""

    dy: Any
    x: Any
    gates: Any
    gate_weight: Any
    gate_bias: Any
    weight: Any
    bias: Any
    used: Any
    dused: Any
    dusage: Any
    kept: Any  # a slab
    scratch: Any  # a slab
    dx: Any
    dlogits: Any
    dgate_weight: Any
    dgate_bias: Any
    dweight: Any
    dbias: Any
    mapped: Any  # a slab, the forward's scratch memory: if a ReLU follows the map

    @property
    def inputs(self) -> Inputs:
        """What was given beside x."""
        return Inputs(*self[2:7])
