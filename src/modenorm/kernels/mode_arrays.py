"""The arrays of a mode norm's launches, by name: tensors, or slots that stand for them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from modenorm.mixing import RunningEstimates

__all__ = ["Backward", "Forward", "Inference", "Inputs", "fits"]


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

    def contiguous(self) -> Inputs:
        """Each of them as it is read: without gaps."""
        return Inputs(*(t if t is None or t.is_contiguous() else t.contiguous() for t in self))


def fits(x: Tensor, inputs: Inputs, estimates: RunningEstimates | None) -> bool:
    """Whether shapes and kinds are as the launches expect: they would read whatever lies there."""
    table = (inputs.num_modes, x.shape[1])
    affine = table if inputs.per_mode else table[1:]
    shapes = (table, table[:1], affine, affine)
    if not all(t is None or t.shape == s for t, s in zip(inputs[1:], shapes, strict=True)):
        return False
    if estimates is None:
        return True
    mean, var, tracked, share = estimates
    return (
        mean.shape == var.shape == table
        and (share is None or share.shape == table[:1])
        and (tracked is None or (tracked.dtype == torch.int64 and tracked.ndim == 0))
        and all(
            t is None or (t.dtype == torch.float32 and t.is_contiguous())
            for t in (mean, var, share)
        )
    )


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
    kept: Any  # a slab
    scratch: Any  # a slab
    dx: Any
    dlogits: Any
    dgate_weight: Any
    dgate_bias: Any
    dweight: Any
    dbias: Any

    @property
    def inputs(self) -> Inputs:
        """What was given beside x."""
        return Inputs(*self[2:7])
