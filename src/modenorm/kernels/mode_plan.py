"""The launches of a mode norm of one size, and the memory between them.

Forward: moments, gates, statistics, coefficients; the map follows. Backward: reduce, modes,
samples; the map and the parameters follow. fused.py makes one autograd node of them, operators.py
hands them to `torch.compile`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modenorm.kernels.gpu import Geometry, Passes
from modenorm.kernels.gpu_mixing import Mixing
from modenorm.kernels.launch import Pointer, Slab
from modenorm.kernels.plan import PlanMemory, affine_kind, aligned, geometry_of, pointer
from modenorm.mixing import RunningEstimates

__all__ = ["Inputs", "ModePlan", "plan_for"]


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


class ModePlan(PlanMemory):
    """The launches and memory of a mode norm of one size."""

    def __init__(
        self,
        geometry: Geometry,
        num_modes: int,
        eps: float,
        momentum: float,
        has_gate: bool,
        affine: tuple[bool, bool, bool],
        running: tuple[bool, bool, bool, bool],
        direct: bool,
    ) -> None:
        super().__init__(direct)
        samples, channels, positions = geometry[:3]
        self.num_modes, self.num_samples, self.num_positions = num_modes, samples, positions
        self.passes = Passes(geometry, direct)
        options = (eps, momentum, has_gate, affine, running, direct)
        self.mixing = Mixing(samples, channels, positions, num_modes, *options)
        rows, modes = (samples, channels), (num_modes, channels)
        self.kept = Slab(rows, rows, modes, modes, (num_modes,))  # mean, var, of modes, mass
        self.forward = Slab(rows, rows, (samples,))  # scale, shift, finite
        self.inference = Slab(rows, rows, rows, (samples,))  # mean, scale, shift, finite
        self.backward = Slab(rows, rows, rows, modes, modes, modes)  # A, D, scale, u, s, dweights

    def gates_like(self, x: Tensor) -> Tensor:
        """Memory for the gates, (N, K)."""
        shape = (self.num_samples, self.num_modes)
        return torch.empty(shape, device=x.device, dtype=torch.float32)

    def statistics(
        self,
        stream: int,
        x: Tensor,
        inputs: Inputs,
        running: RunningEstimates | None,
        used: Tensor,
        finite: Pointer,
        kept: list[Any],
    ) -> None:
        """Moments, gates, and the modes' statistics with their running update."""
        mean, var, *of_modes = kept
        self.passes.moments(stream, x, mean, var)
        gate = (pointer(inputs.gate_weight, mean), pointer(inputs.gate_bias, mean))
        self.mixing.gates(stream, mean, var, *gate, used, finite)
        buffers = running or RunningEstimates(mean, mean)
        counters = (
            pointer(buffers.num_batches_tracked, mean),
            pointer(buffers.share, mean),
        )
        self.mixing.statistics(
            stream, mean, var, used, finite, buffers.mean, buffers.var, *counters, *of_modes
        )

    def coefficients(
        self,
        stream: int,
        inputs: Inputs,
        used: Tensor,
        kept: list[Any],
        scale: Pointer,
        shift: Pointer,
    ) -> None:
        """Scale and shift of every sample and channel."""
        mean, _, mode_mean, mode_var, _ = kept
        affine = (pointer(inputs.weight, mean), pointer(inputs.bias, mean))
        self.mixing.coefficients(stream, mean, used, mode_mean, mode_var, *affine, scale, shift)

    def modes_backward(
        self,
        stream: int,
        dy: Tensor,
        x: Tensor,
        inputs: Inputs,
        used: Tensor,
        kept: list[Any],
        memory: list[Any],
        dweight: Tensor | None,
        dbias: Tensor | None,
    ) -> None:
        """Sums of the upstream gradient, and the gradients of the modes' statistics."""
        mean, _, mode_mean, mode_var, mass = kept
        a, d, _, u, s, dweights = memory
        self.passes.reduce_backward(stream, dy, x, mean, d, a)
        shares = pointer(dweight, mean) if inputs.per_mode else dweights
        self.mixing.modes_backward(
            stream, mean, used, mode_mean, mode_var, mass, pointer(inputs.weight, mean),
            a, d, u, s, shares, pointer(dbias, mean),
        )  # fmt: skip

    def samples_backward(
        self,
        stream: int,
        inputs: Inputs,
        used: Tensor,
        dused: Tensor | None,
        kept: list[Any],
        memory: list[Any],
        dlogits: Tensor,
    ) -> None:
        """Turn A and D into the slope and offset of dx, in place; write scale and gates' part."""
        mean, var, mode_mean, mode_var, _ = kept
        a, d, scale, u, s, _ = memory
        mix = self.mixing
        launch = mix.samples_backward if dused is None else mix.samples_backward_extra
        parameters = (pointer(p, mean) for p in (inputs.weight, inputs.bias, inputs.gate_weight))
        extra = used if dused is None else dused.contiguous()
        launch(
            stream, mean, var, used, mode_mean, mode_var, u, s, *parameters, extra,
            a, d, scale, dlogits,
        )  # fmt: skip

    def parameters_backward(
        self,
        stream: int,
        inputs: Inputs,
        mean: Pointer,
        dweights: Pointer,
        dlogits: Tensor,
        dgate_weight: Tensor | None,
        dgate_bias: Tensor | None,
        dweight: Tensor | None,
    ) -> None:
        """Gradients of the gate's parameters, and of a weight that the modes share."""
        if inputs.gates is None or (dweight is not None and not inputs.per_mode):
            gradients = (pointer(d, mean) for d in (dgate_weight, dgate_bias, dweight))
            self.mixing.parameters_backward(stream, mean, dlogits, dweights, *gradients)


def plan_for(
    x: Tensor,
    inputs: Inputs,
    eps: float,
    momentum: float = 0.0,
    usage: bool = False,
    running: RunningEstimates | None = None,
    others: tuple[Tensor | None, ...] = (),
) -> ModePlan:
    """The plan of a call; other tensors that its launches read are looked at for alignment."""
    tensors = (x, *inputs, *(running or ()), *others)
    return _plan(
        geometry_of(x),
        inputs.num_modes,
        eps,
        momentum,
        inputs.gates is None,
        affine_kind(inputs.weight, inputs.bias),
        _running_kind(running, usage),
        x.get_device(),
        aligned(tensors),
    )


@functools.lru_cache(maxsize=4096)
def _plan(
    geometry: Geometry,
    num_modes: int,
    eps: float,
    momentum: float,
    has_gate: bool,
    affine: tuple[bool, bool, bool],
    running: tuple[bool, bool, bool, bool],
    device: int,
    direct: bool,
) -> ModePlan:
    return ModePlan(geometry, num_modes, eps, momentum, has_gate, affine, running, direct)


def _running_kind(running: RunningEstimates | None, usage: bool) -> tuple[bool, bool, bool, bool]:
    if running is None:
        return False, False, False, False
    return True, usage, running.num_batches_tracked is not None, running.share is not None
