"""Mode group normalization as one autograd node on the GPU.

Forward: moments, mixing, apply. Backward: reduce, mixing, apply, parameters. See kernels/fused.py.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modenorm import mixing
from modenorm.kernels import plain
from modenorm.kernels.gpu import Geometry, Passes
from modenorm.kernels.gpu_channels import MAX_CHANNELS, ChannelMixing
from modenorm.kernels.layout import as_dense, dense_like
from modenorm.kernels.plan import affine_kind, aligned, geometry_of, pointer
from modenorm.kernels.slab import Slab
from modenorm.kernels.stage import Split, Stage, Stream

__all__ = ["fits", "mode_group_norm"]


def fits(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether the kernels take these: not too many channels, one weight and bias for each."""
    few = x.shape[1] <= MAX_CHANNELS
    return few and all(p is None or p.shape == x.shape[1:2] for p in (weight, bias))


def mode_group_norm(
    x: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    pixel: bool,
) -> tuple[Tensor, Tensor]:
    """Y and the gates (N, C, K); pixel takes variances over all values of the channels."""
    parameters = (gate_weight, gate_bias, weight, bias)
    dense = (p if p is None or p.is_contiguous() else p.contiguous() for p in parameters)
    return _node(as_dense(x), *dense, eps, pixel)


class _Forward(NamedTuple):
    """The arrays of a forward, as tensors or as slots."""

    x: Any
    gate_weight: Any
    gate_bias: Any
    weight: Any
    bias: Any
    gates: Any  # (N, C, K)
    kept: Any  # a slab
    scratch: Any  # a slab
    y: Any


class _Backward(NamedTuple):
    """The arrays of a backward."""

    dy: Any
    x: Any
    gate_weight: Any
    weight: Any
    gates: Any
    dgates: Any
    kept: Any  # a slab
    scratch: Any  # a slab
    dx: Any
    dgate: Any
    dweight: Any
    dbias: Any


class _GroupPlan:
    """The launches and memory of a mode group norm of one size."""

    def __init__(
        self,
        geometry: Geometry,
        num_modes: int,
        eps: float,
        pixel: bool,
        affine: tuple[bool, bool, bool],
        direct: bool,
    ) -> None:
        samples, channels, positions = geometry[:3]
        self.passes, self.pixel = Passes(geometry, direct), pixel
        self.mixing = ChannelMixing(
            samples, channels, positions, num_modes, eps, pixel, affine[:2], direct
        )
        rows, modes = (samples, channels), (samples, num_modes)
        self.gates_shape = (samples, channels, num_modes)
        self.kept = Slab(rows, rows if pixel else (1,), modes, modes)  # mean, var, of the modes
        self.forward = Slab(rows, rows)  # scale, shift
        slope = rows if pixel else (1,)
        self.backward = Slab(rows, rows, rows, rows, slope, (samples, 2 * num_modes))
        self.run_forward = Stage(direct, self._forward)
        self.run_backward = tuple(Stage(direct, self._backward) for _ in (False, True))
        """With a gradient of the gates from elsewhere, and without."""

    def _forward(self, stream: Stream, split: Split, arrays: _Forward) -> None:
        x, gate_weight, gate_bias, weight, bias, gates, kept, scratch, y = arrays
        mean, var, mode_mean, mode_var = split(self.kept, kept)
        scale, shift = split(self.forward, scratch)
        (self.passes.moments if self.pixel else self.passes.mean)(stream, x, mean, var)
        affine = (pointer(weight, mean), pointer(bias, mean))
        self.mixing.forward(
            stream, mean, var, gate_weight, gate_bias, *affine, scale, shift, gates,
            mode_mean, mode_var,
        )  # fmt: skip
        self.passes.apply(stream, x, mean, scale, shift, y)

    def _backward(self, stream: Stream, split: Split, arrays: _Backward) -> None:
        dy, x, gate_weight, weight, gates, dgates, kept, scratch, dx, dgate, *found = arrays
        mean, var, mode_mean, mode_var = split(self.kept, kept)
        a, d, scale, offset, slope, dgate_parts = split(self.backward, scratch)
        self.passes.reduce_backward(stream, dy, x, mean, d, a)
        mix, passes = self.mixing, self.passes
        samples = mix.backward if dgates is None else mix.backward_extra
        samples(
            stream, mean, var, gates, mode_mean, mode_var, gate_weight, pointer(weight, mean),
            pointer(dgates, gates), a, d, scale, slope, offset, dgate_parts,
        )  # fmt: skip
        last = passes.apply_backward if self.pixel else passes.apply_backward_flat
        last(stream, dy, x, mean, scale, slope, offset, dx)
        dweight, dbias = (pointer(gradient, mean) for gradient in found)
        mix.parameters(stream, mean, mode_mean, mode_var, a, d, dgate_parts, dweight, dbias, dgate)


@functools.lru_cache(maxsize=4096)
def _group_plan(
    geometry: Geometry,
    num_modes: int,
    eps: float,
    pixel: bool,
    affine: tuple[bool, bool, bool],
    device: int,
    direct: bool,
) -> _GroupPlan:
    return _GroupPlan(geometry, num_modes, eps, pixel, affine, direct)


class _ModeGroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_weight: Tensor,
        gate_bias: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        pixel: bool,
    ) -> tuple[Tensor, Tensor]:
        inputs = (x, gate_weight, gate_bias, weight, bias)
        plan = _group_plan(
            geometry_of(x),
            gate_weight.shape[0],
            eps,
            pixel,
            affine_kind(weight, bias),
            x.get_device(),
            aligned(inputs),
        )
        y = torch.empty_like(x)
        gates = torch.empty(plan.gates_shape, device=x.device, dtype=torch.float32)
        kept, scratch = plan.kept.allocate(x.device), plan.forward.allocate(x.device)
        plan.run_forward(_Forward(*inputs, gates, kept, scratch, y))
        ctx.save_for_backward(*inputs, gates, kept)
        ctx.eps, ctx.pixel, ctx.plan = eps, pixel, plan
        ctx.set_materialize_grads(False)
        return y, gates

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dgates: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, gates, kept = ctx.saved_tensors
        x, gate_weight, _, weight, bias = inputs
        if plain.only_plain(dy, dgates) or dy is None:
            forward = partial(_plain_group_forward, eps=ctx.eps, pixel=ctx.pixel)
            found = plain.differentiate(forward, inputs, ctx.needs_input_grad, (dy, dgates))
            return (*found, None, None)
        plan, dy = ctx.plan, dense_like(dy, x)
        dgates = None if dgates is None else dense_like(dgates, gates)
        dx = torch.empty_like(x)
        dgate = torch.empty((2, *gate_weight.shape), device=x.device, dtype=torch.float32)
        dweight, dbias = (None if p is None else torch.empty_like(p) for p in (weight, bias))
        scratch = plan.backward.allocate(x.device)
        given = (dy, x, gate_weight, weight, gates, dgates, kept, scratch)
        arrays = _Backward(*given, dx, dgate, dweight, dbias)
        plan.run_backward[dgates is None](arrays)
        return dx, dgate[0], dgate[1], dweight, dbias, None, None


_node = plain.node(_ModeGroupNorm)


def _plain_group_forward(
    x: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    pixel: bool,
) -> tuple[Tensor, Tensor]:
    mean, var = plain.moments(x, with_var=pixel)
    scale, shift, gates = mixing.channel_modes(mean, var, gate_weight, gate_bias, weight, bias, eps)
    return plain.apply(x, mean, scale, shift), gates
