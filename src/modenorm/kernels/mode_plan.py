"""The launches of a mode norm of one size, and the memory between them.

Forward: moments, gates, statistics, coefficients, map. Backward: reduce, modes, samples, map,
parameters.
fused.py makes one autograd node of them, operators.py hands all but the maps to `torch.compile`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from modenorm.kernels.gpu import Geometry, Passes
from modenorm.kernels.gpu_inference import inference_launch, lines_shape
from modenorm.kernels.gpu_mixing import Mixing
from modenorm.kernels.launch import Pointer, Slab
from modenorm.kernels.mode_arrays import Backward, Forward, Inference, Inputs
from modenorm.kernels.plan import affine_kind, aligned, geometry_of, pointer
from modenorm.kernels.stage import Part, Split, Stage, Stream
from modenorm.kernels.tiles import one_launch
from modenorm.mixing import RunningEstimates

__all__ = ["ModePlan", "plan_for"]


class ModePlan:
    """The launches and memory of a mode norm of one size.

    `run_statistics` and `run_map` do what `run_forward` does, `run_modes_backward` and
    `run_samples_backward` what `run_backward` does: the halves are for ranks, which exchange
    something in between. Of a backward there are two: gates with a gradient from elsewhere, and
    without.
    """

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
        samples, channels, positions = geometry[:3]
        self.num_modes, self.num_samples, self.num_positions = num_modes, samples, positions
        self.passes = Passes(geometry, direct)
        options = (eps, momentum, has_gate, affine, running, direct)
        self.mixing = Mixing(samples, channels, positions, num_modes, *options)
        rows, modes = (samples, channels), (num_modes, channels)
        gates = (samples, num_modes)
        self.kept = Slab(rows, rows, modes, modes, (num_modes,), gates)  # moments, of modes, mass
        self.forward = Slab(rows, rows, (samples,))  # scale, shift, finite
        self.inference, run_inference = self._plan_inference(geometry, eps, affine)
        # A, D, scale, u, s, dweights, dlogits
        self.backward = Slab(rows, rows, rows, modes, modes, modes, gates)
        self.run_forward = Stage(direct, self._forward)
        self.run_statistics = Stage(direct, self._statistics)
        self.run_map = Stage(direct, self._map)
        self.run_inference = Stage(direct, run_inference)
        self.run_backward = tuple(Stage(direct, self._backward) for _ in (False, True))
        self.run_modes_backward = Stage(direct, self._modes_backward)
        self.run_samples_backward = tuple(
            Stage(direct, self._samples_backward) for _ in (False, True)
        )

    def _plan_inference(
        self, geometry: Geometry, eps: float, affine: tuple[bool, bool, bool]
    ) -> tuple[Slab, Part]:
        """The memory and the launches of an evaluation."""
        if not one_launch(geometry, self.num_modes):
            rows = (self.num_samples, geometry.num_channels)
            return Slab(rows, rows, rows, (self.num_samples,)), self._inference
        self.whole = inference_launch(geometry, self.num_modes, eps, affine, self.passes.direct)
        return Slab(lines_shape(geometry)), self._whole_inference

    def gates_like(self, x: Tensor) -> Tensor:
        """Memory for the gates, (N, K)."""
        shape = (self.num_samples, self.num_modes)
        return torch.empty(shape, device=x.device, dtype=torch.float32)

    def _open(self, split: Split, arrays: Forward) -> tuple[Forward, list[Pointer], list[Pointer]]:
        """The arrays of a forward with what the slabs hold: gates, if they have no other place."""
        *kept, gates = split(self.kept, arrays.kept)
        used = gates if arrays.used is None else arrays.used
        return arrays._replace(used=used), kept, split(self.forward, arrays.scratch)

    def _open_backward(
        self, split: Split, arrays: Backward
    ) -> tuple[Backward, list[Pointer], list[Pointer]]:
        *kept, gates = split(self.kept, arrays.kept)
        *work, dlogits = split(self.backward, arrays.scratch)
        used = gates if arrays.used is None else arrays.used
        dlogits = dlogits if arrays.dlogits is None else arrays.dlogits
        return arrays._replace(used=used, dlogits=dlogits), kept, work

    def _forward(self, stream: Stream, split: Split, arrays: Forward) -> None:
        arrays, kept, work = self._open(split, arrays)
        self.mix(stream, arrays.x, arrays.inputs, arrays.running, arrays.used, kept, work)
        scale, shift, _ = work
        self.passes.apply(stream, arrays.x, kept[0], scale, shift, arrays.y)

    def _statistics(self, stream: Stream, split: Split, arrays: Forward) -> None:
        arrays, kept, (_, _, finite) = self._open(split, arrays)
        self.statistics(stream, arrays.x, arrays.inputs, arrays.running, arrays.used, finite, kept)

    def _map(self, stream: Stream, split: Split, arrays: Forward) -> None:
        arrays, kept, (scale, shift, _) = self._open(split, arrays)
        self.coefficients(stream, arrays.inputs, arrays.used, kept, scale, shift)
        self.passes.apply(stream, arrays.x, kept[0], scale, shift, arrays.y)

    def _whole_inference(self, stream: Stream, split: Split, arrays: Inference) -> None:
        (lines,) = split(self.inference, arrays.scratch)
        x, gate_weight, gate_bias, weight, bias, running_mean, running_var, used, _, y = arrays
        affine = (pointer(weight, lines), pointer(bias, lines))
        self.whole(
            stream, x, gate_weight, gate_bias, running_mean, running_var, *affine, used, lines, y
        )

    def _inference(self, stream: Stream, split: Split, arrays: Inference) -> None:
        mean, scale, shift, finite = split(self.inference, arrays.scratch)
        x, gate_weight, gate_bias, weight, bias, running_mean, running_var, used, _, y = arrays
        self.passes.moments(stream, x, mean, scale)  # faster than the mean alone
        self.mixing.gates(stream, mean, mean, gate_weight, gate_bias, used, finite)
        estimates = [mean, mean, running_mean, running_var, None]
        inputs = Inputs(None, gate_weight, gate_bias, weight, bias)
        self.coefficients(stream, inputs, used, estimates, scale, shift)
        self.passes.apply(stream, x, mean, scale, shift, y)

    def _backward(self, stream: Stream, split: Split, arrays: Backward) -> None:
        arrays, kept, work = self._open_backward(split, arrays)
        self.mix_backward(stream, arrays, kept, work)
        self._map_backward(stream, arrays, kept, work)

    def _modes_backward(self, stream: Stream, split: Split, arrays: Backward) -> None:
        self._mix_modes(stream, *self._open_backward(split, arrays))

    def _samples_backward(self, stream: Stream, split: Split, arrays: Backward) -> None:
        arrays, kept, work = self._open_backward(split, arrays)
        self._mix_samples(stream, arrays, kept, work)
        self._map_backward(stream, arrays, kept, work)

    def _map_backward(
        self, stream: Stream, arrays: Backward, kept: list[Any], work: list[Any]
    ) -> None:
        slope, offset, scale, *_ = work
        lines = (kept[0], scale, slope, offset)
        self.passes.apply_backward(stream, arrays.dy, arrays.x, *lines, arrays.dx)

    def mix(
        self,
        stream: Stream,
        x: Tensor,
        inputs: Inputs,
        running: RunningEstimates | None,
        used: Tensor,
        kept: list[Any],
        work: list[Any],
    ) -> None:
        """Moments, gates, the modes' statistics with their running update; scale and shift."""
        scale, shift, finite = work
        self.statistics(stream, x, inputs, running, used, finite, kept)
        self.coefficients(stream, inputs, used, kept, scale, shift)

    def mix_backward(
        self, stream: Stream, arrays: Backward, kept: list[Any], work: list[Any]
    ) -> None:
        """All gradients but dx, of which slope, offset and scale."""
        self._mix_modes(stream, arrays, kept, work)
        self._mix_samples(stream, arrays, kept, work)

    def _mix_modes(
        self, stream: Stream, arrays: Backward, kept: list[Any], work: list[Any]
    ) -> None:
        given = (arrays.dy, arrays.x, arrays.inputs, arrays.used)
        self.modes_backward(stream, *given, kept, work, arrays.dweight, arrays.dbias)

    def _mix_samples(
        self, stream: Stream, arrays: Backward, kept: list[Any], work: list[Any]
    ) -> None:
        inputs, dlogits = arrays.inputs, arrays.dlogits
        self.samples_backward(stream, inputs, arrays.used, arrays.dused, kept, work, dlogits)
        found = (arrays.dgate_weight, arrays.dgate_bias, arrays.dweight)
        self.parameters_backward(stream, inputs, kept[0], work[-1], dlogits, *found)

    def statistics(
        self,
        stream: Stream,
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
        buffers = _estimates(running, mean)
        self.mixing.statistics(stream, mean, var, used, finite, *buffers, *of_modes)

    def coefficients(
        self,
        stream: Stream,
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
        stream: Stream,
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
        stream: Stream,
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
        extra = used if dused is None else dused
        launch(
            stream, mean, var, used, mode_mean, mode_var, u, s, *parameters, extra,
            a, d, scale, dlogits,
        )  # fmt: skip

    def parameters_backward(
        self,
        stream: Stream,
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
    gates_apart: bool = True,
) -> ModePlan:
    """The plan of a call; other tensors that its launches read are looked at for alignment.

    Gates that are not apart lie with what is kept for backward.
    """
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
        gates_apart,
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
    gates_apart: bool,
    direct: bool,
) -> ModePlan:
    return ModePlan(geometry, num_modes, eps, momentum, has_gate, affine, running, direct)


def _estimates(running: RunningEstimates | None, mean: Pointer) -> tuple[Pointer, ...]:
    """What a launch takes for the running estimates, whether there are any or not."""
    given = running or (None,) * 4
    return tuple(pointer(estimate, mean) for estimate in given)


def _running_kind(running: RunningEstimates | None, usage: bool) -> tuple[bool, bool, bool, bool]:
    if running is None:
        return False, False, False, False
    return True, usage, running.num_batches_tracked is not None, running.share is not None
