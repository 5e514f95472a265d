"""The launches of a mode norm of one size, and the memory between them.

Forward: moments, gates, statistics, coefficients, map. Backward: reduce, modes, samples,
parameters, map.
mode_norm.py makes one autograd node of them, mode_norm_operator.py hands all but the maps to
`torch.compile`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from modenorm.checks import Options
from modenorm.kernels import plain
from modenorm.kernels.cpp.node import MODE_NORM
from modenorm.kernels.gpu.inference import inference_launch, lines_shape
from modenorm.kernels.gpu.launch import Pointer
from modenorm.kernels.gpu.mixing_launches import Mixing
from modenorm.kernels.gpu.passes import Geometry, Passes
from modenorm.kernels.gpu.plan import (
    AffineKind,
    MixingKind,
    affine_kind,
    aligned,
    geometry_of,
    pointer,
    running_kind,
)
from modenorm.kernels.gpu.slab import Slab, backward_slab, forward_slab, kept_slab
from modenorm.kernels.gpu.stage import Part, Split, Stage, Stream, node_of
from modenorm.kernels.gpu.tiles import one_launch
from modenorm.kernels.mode_norm_arrays import Backward, Forward, Inference, Inputs, fits
from modenorm.mixing import RunningEstimates

__all__ = ["ModePlan", "plan_for"]

MOST_PLANS = 4096


class ModePlan:
    """The launches and memory of a mode norm of one size.

    `run_statistics` and `run_map` do what `run_forward` does, `run_modes_backward` and
    `run_samples_backward` what `run_backward` does: the halves are for ranks, which exchange
    something in between. `run_mix` and `run_mix_backward` leave out the maps of x and dy, and so
    does `run_cut_backward`, where a ReLU follows the map. There is a backward for each kind of
    upstream gradients: with those of the gates or not, of the usage or not.
    """

    def __init__(
        self,
        geometry: Geometry,
        num_modes: int,
        kind: MixingKind,
        direct: bool,
    ) -> None:
        samples, channels, positions = geometry[:3]
        self.num_modes, self.num_samples, self.num_positions = num_modes, samples, positions
        self.passes = Passes(geometry, direct)
        self.mixing = Mixing(samples, channels, positions, num_modes, kind, direct)
        rows = (samples, channels)
        self.kept = kept_slab(*rows, num_modes)
        self.forward = forward_slab(*rows)
        self.inference, run_inference = self._plan_inference(geometry, kind.eps, kind.affine)
        self.backward = backward_slab(*rows, num_modes)
        stage, kinds = partial(Stage, direct), self.mixing.samples_backward
        parts = (self._statistics, self._coefficients, self._apply)
        self.run_forward, self.run_mix = stage(*parts), stage(*parts[:2])
        self.run_statistics, self.run_map = stage(parts[0]), stage(*parts[1:])
        self.run_inference = stage(run_inference)
        mix = [self._modes_backward, self._samples_backward]
        shares_weight = kind.affine.weight and not kind.affine.per_mode
        # the map runs beside the parameters' launch, which has waited for what the map reads
        self.beside = kind.has_gate or shares_weight
        if self.beside:
            mix.append(self._parameters_backward)
        back = [*mix, self._apply_backward]
        self.run_backward = {kind: stage(*back) for kind in kinds}
        self.run_mix_backward, self.run_cut_backward = (
            {kind: stage(*mix) for kind in kinds} for _ in range(2)
        )
        self.run_modes_backward = stage(back[0])
        self.run_samples_backward = {kind: stage(*back[1:]) for kind in kinds}
        self._node: Callable[..., Tensor] | None = None

    def node_for(
        self, inputs: Inputs, moved: RunningEstimates | None, eps: float
    ) -> Callable[..., Tensor] | None:
        """An autograd node of C++ for calls like this; None if there is none yet."""
        if self._node is None:
            self._node = node_of(
                MODE_NORM,
                self.run_forward,
                self.run_backward[False, False],
                (self.kept, self.forward, self.backward),
                inputs,
                moved or (),
                partial(plain.mode_norm, eps=eps),
            )
        return self._node

    def _plan_inference(
        self, geometry: Geometry, eps: float, affine: AffineKind
    ) -> tuple[Slab, Part]:
        """The memory and the launches of an evaluation."""
        if not one_launch(geometry, self.num_modes):
            rows = (self.num_samples, geometry.num_channels)
            # mean, scale, shift, finite
            return Slab(rows, rows, rows, (self.num_samples,)), self._inference
        self.whole = inference_launch(geometry, self.num_modes, eps, affine, self.passes.direct)
        return Slab(lines_shape(geometry)), self._whole_inference

    def gates_like(self, x: Tensor) -> Tensor:
        """Memory for the gates, (N, K)."""
        shape = (self.num_samples, self.num_modes)
        return torch.empty(shape, device=x.device, dtype=torch.float32)

    def usage_like(self, x: Tensor) -> Tensor:
        """Memory for the usage of the modes, (K,)."""
        return torch.empty(self.num_modes, device=x.device, dtype=torch.float32)

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

    def _statistics(self, stream: Stream, split: Split, arrays: Forward) -> None:
        """Moments, gates, and the modes' statistics with their running update."""
        arrays, (mean, var, *of_modes), (_, _, finite) = self._open(split, arrays)
        inputs, used = arrays.inputs, arrays.used
        self.passes.moments(stream, arrays.x, mean, var)
        gate = (pointer(inputs.gate_weight, mean), pointer(inputs.gate_bias, mean))
        self.mixing.gates(stream, mean, var, *gate, used, finite)
        buffers = _estimates(arrays.running, mean)
        usage = pointer(arrays.usage, mean)
        self.mixing.statistics(stream, mean, var, used, finite, *buffers, *of_modes, usage)

    def _coefficients(self, stream: Stream, split: Split, arrays: Forward) -> None:
        """Scale and shift of every sample and channel."""
        arrays, (mean, _, mode_mean, mode_var, _), (*lines, _) = self._open(split, arrays)
        inputs, statistics = arrays.inputs, (mode_mean, mode_var)
        affine = (pointer(inputs.weight, mean), pointer(inputs.bias, mean))
        self.mixing.coefficients(stream, mean, arrays.used, *statistics, *affine, *lines)

    def _apply(self, stream: Stream, split: Split, arrays: Forward) -> None:
        arrays, (mean, *_), (scale, shift, _) = self._open(split, arrays)
        self.passes.apply(stream, arrays.x, mean, scale, shift, arrays.y)

    def _whole_inference(self, stream: Stream, split: Split, arrays: Inference) -> None:
        (lines,) = split(self.inference, arrays.scratch)
        x, gate_weight, gate_bias, weight, bias, *estimates, used, _, y = arrays
        affine = (pointer(weight, lines), pointer(bias, lines))
        self.whole(stream, x, gate_weight, gate_bias, *estimates, *affine, used, lines, y)

    def _inference(self, stream: Stream, split: Split, arrays: Inference) -> None:
        mean, scale, shift, finite = split(self.inference, arrays.scratch)
        x, gate_weight, gate_bias, weight, bias, *estimates, used, _, y = arrays
        self.passes.mean(stream, x, mean, scale)  # which is written over afterwards
        self.mixing.gates(stream, mean, mean, gate_weight, gate_bias, used, finite)
        affine = (pointer(weight, mean), pointer(bias, mean))
        self.mixing.coefficients(stream, mean, used, *estimates, *affine, scale, shift)
        self.passes.apply(stream, x, mean, scale, shift, y)

    def _modes_backward(self, stream: Stream, split: Split, arrays: Backward) -> None:
        """Sums of the upstream gradient, and the gradients of the modes' statistics."""
        arrays, kept, (a, d, _, u, s, dweights) = self._open_backward(split, arrays)
        mean, _, mode_mean, mode_var, mass = kept
        inputs, dweight, dbias = arrays.inputs, arrays.dweight, arrays.dbias
        if arrays.mapped is None:
            self.passes.reduce_backward(stream, arrays.dy, arrays.x, mean, d, a)
        else:
            scale, shift, _ = split(self.forward, arrays.mapped)
            lines = (mean, scale, shift, d, a)
            self.passes.reduce_cut_backward(stream, arrays.dy, arrays.x, *lines)
        shares = pointer(dweight, mean) if inputs.per_mode else dweights
        self.mixing.modes_backward(
            stream, mean, arrays.used, mode_mean, mode_var, mass, pointer(inputs.weight, mean),
            a, d, u, s, shares, pointer(dbias, mean),
        )  # fmt: skip

    def _samples_backward(self, stream: Stream, split: Split, arrays: Backward) -> None:
        """Turn A and D into the slope and offset of dx, in place; the gates' and their part."""
        arrays, kept, (a, d, scale, u, s, _) = self._open_backward(split, arrays)
        mean, var, mode_mean, mode_var, _ = kept
        inputs, dused, dusage = arrays.inputs, arrays.dused, arrays.dusage
        parameters = (pointer(p, mean) for p in (inputs.weight, inputs.bias, inputs.gate_weight))
        self.mixing.samples_backward[dused is not None, dusage is not None](
            stream, mean, var, arrays.used, mode_mean, mode_var, u, s, *parameters,
            pointer(dused, mean), pointer(dusage, mean), a, d, scale, arrays.dlogits,
        )  # fmt: skip

    def _apply_backward(self, stream: Stream, split: Split, arrays: Backward) -> None:
        arrays, (mean, *_), (slope, offset, scale, *_) = self._open_backward(split, arrays)
        lines = (mean, scale, slope, offset)
        launch = self.passes.apply_backward[True, self.beside]
        launch(stream, arrays.dy, arrays.x, *lines, arrays.dx)

    def _parameters_backward(self, stream: Stream, split: Split, arrays: Backward) -> None:
        """Gradients of the gate's parameters, and of a weight that the modes share."""
        arrays, (mean, *_), (*_, dweights) = self._open_backward(split, arrays)
        found = (arrays.dgate_weight, arrays.dgate_bias, arrays.dweight)
        gradients = (pointer(gradient, mean) for gradient in found)
        self.mixing.parameters_backward(stream, mean, arrays.dlogits, dweights, *gradients)


_plans: dict[tuple[Any, ...], ModePlan] = {}


def plan_for(
    x: Tensor,
    inputs: Inputs,
    estimates: RunningEstimates | None,
    options: Options,
    moves: bool = False,
    gates_apart: bool = True,
    others: tuple[Tensor | None, ...] = (),
) -> ModePlan | None:
    """The plan of a call on a dense x; None if its launches can't take these tensors.

    Estimates may move or not. Gates that are not apart lie with what is kept for backward. Other
    tensors that the launches read are looked at for alignment.
    """
    beside = (*inputs, *(estimates or ()))
    direct = aligned((x, *beside, *others))
    key = (
        x.shape, x.is_contiguous(), x.dtype, x.device, options.num_modes,
        options.eps, options.momentum, options.running_update, options.usage_matters,
        moves, gates_apart, direct,
        *[None if t is None else (t.shape, t.is_contiguous(), t.dtype, t.device) for t in beside],
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None and fits(x, inputs, estimates, options.num_modes):
        if len(_plans) == MOST_PLANS:
            _plans.clear()
        kind = MixingKind(
            options.eps,
            affine_kind(inputs.weight, inputs.bias),
            has_gate=inputs.gates is None,
            momentum=options.momentum or 0.0,  # with None there is no update here
            running=running_kind(estimates if moves else None, options.running_update == "usage"),
            has_usage=options.usage_matters,
        )
        plan = _plans[key] = ModePlan(geometry_of(x), inputs.num_modes, kind, direct)
    return plan


def _estimates(running: RunningEstimates | None, mean: Pointer) -> tuple[Pointer, ...]:
    """What a launch takes for the running estimates, whether there are any or not."""
    given = running or (None,) * 4
    return tuple(pointer(estimate, mean) for estimate in given)
