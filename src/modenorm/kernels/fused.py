"""Mode normalization as one autograd node on the GPU: a handful of launches each way.

Forward: moments, gates, statistics, coefficients, apply. Backward: reduce, modes, samples, apply,
parameters. Kept for backward: x and arrays of (N, C), (N, K) and (K, C). A plan holds the launches
for one set of sizes, so that a call does little more than allocate and launch. A double backward
repeats the forward in plain operators. With other ranks, the statistics and their gradients are
exchanged between two launches, and the running estimates are updated afterwards.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modenorm import exchange, mixing
from modenorm.exchange import Ranks
from modenorm.kernels import plain
from modenorm.kernels.gpu import Geometry, Passes
from modenorm.kernels.gpu_mixing import Mixing
from modenorm.kernels.launch import Slab
from modenorm.kernels.layout import as_dense
from modenorm.kernels.plan import (
    PlanMemory,
    affine_kind,
    aligned,
    dense_like,
    geometry_of,
    on_device,
    pointer,
)
from modenorm.mixing import RunningEstimates

__all__ = ["Training", "mode_norm", "mode_norm_inference"]


class Training(NamedTuple):
    """A training step's settings."""

    eps: float
    momentum: float
    usage: bool
    running: RunningEstimates | None  # updated in place; None: no update
    ranks: Ranks | None = None


def mode_norm(
    x: Tensor,
    gates: Tensor | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: Training,
) -> tuple[Tensor, Tensor]:
    """Y and the gates (N, K), with the batch's statistics; gates None means the linear gate's."""
    return _ModeNorm.apply(as_dense(x), gates, gate_weight, gate_bias, weight, bias, training)


def mode_norm_inference(
    x: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Y and the gates (N, K), with the running estimates. Not differentiable."""
    x = as_dense(x)
    externals = (x, gate_weight, gate_bias, weight, bias, running_mean, running_var)
    num_modes = gate_weight.shape[0]
    with on_device(x) as stream:
        plan = _plan(
            geometry_of(x),
            num_modes,
            eps,
            0.0,
            True,
            affine_kind(weight, bias),
            (False,) * 4,
            x.get_device(),
            aligned(externals),
        )
        y, gates, memory = (
            torch.empty_like(x),
            plan.gates_like(x),
            plan.inference.allocate(x.device),
        )
        mean, scale, shift, finite = plan.arrays(plan.inference, memory, "inference")
        plan.passes.moments(stream, x, mean, scale)  # faster than the mean alone
        plan.mixing.gates(stream, mean, mean, gate_weight, gate_bias, gates, finite)
        plan.mixing.coefficients(
            stream,
            mean,
            gates,
            running_mean,
            running_var,
            pointer(weight, mean),
            pointer(bias, mean),
            scale,
            shift,
        )
        plan.passes.apply(stream, x, mean, scale, shift, y)
        plan.warm.add("inference")
    return y, gates


class _Plan(PlanMemory):
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
        self.mixing = Mixing(
            samples,
            channels,
            positions,
            num_modes,
            eps,
            momentum,
            has_gate,
            affine,
            running,
            direct,
        )
        rows, modes = (samples, channels), (num_modes, channels)
        self.kept = Slab(rows, rows, modes, modes, (num_modes,))  # mean, var, of modes, mass
        self.forward = Slab(rows, rows, (samples,))  # scale, shift, finite
        self.inference = Slab(rows, rows, rows, (samples,))  # mean, scale, shift, finite
        self.backward = Slab(rows, rows, rows, modes, modes, modes)  # A, D, scale, u, s, dweights

    def gates_like(self, x: Tensor) -> Tensor:
        shape = (self.num_samples, self.num_modes)
        return torch.empty(shape, device=x.device, dtype=torch.float32)


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
) -> _Plan:
    return _Plan(geometry, num_modes, eps, momentum, has_gate, affine, running, direct)


class _ModeNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gates: Tensor | None,
        gate_weight: Tensor | None,
        gate_bias: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        training: Training,
    ) -> tuple[Tensor, Tensor]:
        inputs = (x, gates, gate_weight, gate_bias, weight, bias)
        running = training.running if training.ranks is None else None
        given = gates if gates is not None else gate_weight
        assert given is not None
        num_modes = given.shape[1] if gates is not None else given.shape[0]
        with on_device(x) as stream:
            plan = _plan(
                geometry_of(x),
                num_modes,
                training.eps,
                training.momentum,
                gates is None,
                affine_kind(weight, bias),
                _running_kind(running, training.usage),
                x.get_device(),
                aligned((*inputs, *(running or ()))),
            )
            y = torch.empty_like(x)
            used = plan.gates_like(x) if gates is None else gates
            kept, memory = plan.kept.allocate(x.device), plan.forward.allocate(x.device)
            mean, var, mode_mean, mode_var, mass = plan.arrays(plan.kept, kept, "forward")
            scale, shift, finite = plan.arrays(plan.forward, memory, "forward")
            mix = plan.mixing
            plan.passes.moments(stream, x, mean, var)
            mix.gates(
                stream,
                mean,
                var,
                pointer(gate_weight, mean),
                pointer(gate_bias, mean),
                used,
                finite,
            )
            buffers = running or RunningEstimates(mean, mean)
            mix.statistics(
                stream,
                mean,
                var,
                used,
                finite,
                buffers.mean,
                buffers.var,
                pointer(buffers.num_batches_tracked, mean),
                pointer(buffers.share, mean),
                mode_mean,
                mode_var,
                mass,
            )
            if training.ranks is not None:
                _merge(plan.kept.tensors(kept)[2:], plan.num_positions, training)
            mix.coefficients(
                stream,
                mean,
                used,
                mode_mean,
                mode_var,
                pointer(weight, mean),
                pointer(bias, mean),
                scale,
                shift,
            )
            plan.passes.apply(stream, x, mean, scale, shift, y)
            plan.warm.add("forward")
        ctx.save_for_backward(*inputs, used, kept)
        ctx.eps, ctx.plan, ctx.ranks = training.eps, plan, training.ranks
        ctx.set_materialize_grads(False)
        return y, used

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dused: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, used, kept = ctx.saved_tensors
        x, gates, gate_weight, gate_bias, weight, bias = inputs
        if torch.is_grad_enabled() or dy is None:
            forward = partial(plain.mode_norm, eps=ctx.eps, ranks=ctx.ranks)
            return (*plain.differentiate(forward, inputs, ctx.needs_input_grad, (dy, dused)), None)
        with on_device(x) as stream:
            plan, stage = ctx.plan, "backward" if dused is None else "backward with gates"
            dy = dense_like(dy, x)
            dx = torch.empty_like(x)
            dweight, dbias, dgate_weight, dgate_bias = (
                None if p is None else torch.empty_like(p)
                for p in (weight, bias, gate_weight, gate_bias)
            )
            dlogits = torch.empty_like(used)
            memory = plan.backward.allocate(x.device)
            mean, var, mode_mean, mode_var, mass = plan.arrays(plan.kept, kept, stage)
            a, d, scale, u, s, dweights = plan.arrays(plan.backward, memory, stage)
            mix = plan.mixing
            per_mode = weight is not None and weight.ndim == 2
            plan.passes.reduce_backward(stream, dy, x, mean, d, a)
            mix.modes_backward(
                stream,
                mean,
                used,
                mode_mean,
                mode_var,
                mass,
                pointer(weight, mean),
                a,
                d,
                u,
                s,
                dweight if per_mode else dweights,
                pointer(dbias, mean),
            )
            if ctx.ranks is not None and any(ctx.needs_input_grad[:4]):
                _sum(plan.backward.tensors(memory)[3:5], plan.kept.tensors(kept)[4], ctx.ranks)
            samples = mix.samples_backward if dused is None else mix.samples_backward_extra
            samples(
                stream,
                mean,
                var,
                used,
                mode_mean,
                mode_var,
                u,
                s,
                pointer(weight, mean),
                pointer(bias, mean),
                pointer(gate_weight, mean),
                used if dused is None else dused.contiguous(),
                a,
                d,
                scale,
                dlogits,
            )
            plan.passes.apply_backward(stream, dy, x, mean, scale, a, d, dx)
            if gates is None or (weight is not None and not per_mode):
                mix.parameters_backward(
                    stream,
                    mean,
                    dlogits,
                    dweights,
                    pointer(dgate_weight, mean),
                    pointer(dgate_bias, mean),
                    pointer(dweight, mean),
                )
            plan.warm.add(stage)
        dgates = dlogits if gates is not None else None
        return dx, dgates, dgate_weight, dgate_bias, dweight, dbias, None


def _merge(statistics: list[Tensor], num_positions: int, training: Training) -> None:
    """Replace this rank's mean, variance and mass of the modes by those of all ranks."""
    assert training.ranks is not None
    mode_mean, mode_var, mass = statistics
    merged = exchange.merge(mass * num_positions, mode_mean, mode_var, training.ranks.number)
    mass.copy_(merged[0] / num_positions)
    mode_mean.copy_(merged[1])
    mode_var.copy_(merged[2])
    if training.running is not None:
        batch = exchange.with_share(mode_mean, mode_var, mass)
        update = "usage" if training.usage else "paper"
        mixing.update_running(training.running, batch, training.momentum, update)


def _sum(gradients: list[Tensor], mass: Tensor, ranks: Ranks) -> None:
    """Sum the gradients of the statistics, which the kernel has divided by the mass."""
    u, s = gradients
    divisor = mass.clamp_min(torch.finfo(mass.dtype).tiny)[:, None]
    both = exchange.total(torch.cat([u, s], 1) * divisor, ranks.number) / divisor
    u.copy_(both[:, : u.shape[1]])
    s.copy_(both[:, u.shape[1] :])


def _running_kind(running: RunningEstimates | None, usage: bool) -> tuple[bool, bool, bool, bool]:
    if running is None:
        return False, False, False, False
    return True, usage, running.num_batches_tracked is not None, running.share is not None
