"""Each norm as one autograd node on the GPU: a handful of launches each way.

Forward: moments, gates, statistics, coefficients, apply. Backward: reduce, modes, samples, apply,
parameters. Kept for backward: x and arrays of (N, C), (N, K) and (K, C). A plan holds the launches
for one set of sizes, so that a call does little more than allocate and launch. A double backward
repeats the forward in plain operators.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modenorm import mixing
from modenorm.kernels import plain
from modenorm.kernels.gpu import Geometry, Passes
from modenorm.kernels.gpu_channels import MAX_CHANNELS, ChannelMixing
from modenorm.kernels.gpu_mixing import Mixing
from modenorm.kernels.launch import Pointer, Slab, current_stream
from modenorm.kernels.layout import as_dense, interpreting, is_channels_last
from modenorm.mixing import RunningEstimates

__all__ = ["MAX_CHANNELS", "Training", "mode_group_norm", "mode_norm", "mode_norm_inference"]


class Training(NamedTuple):
    """A training step's settings."""

    eps: float
    momentum: float
    usage: bool
    running: RunningEstimates | None  # updated in place; None: no update


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
    with _on_device(x) as stream:
        plan = _plan(
            _geometry(x),
            num_modes,
            eps,
            0.0,
            True,
            _affine_kind(weight, bias),
            (False,) * 4,
            x.get_device(),
            _aligned(externals),
        )
        y, gates, memory = (
            torch.empty_like(x),
            plan.gates_like(x),
            plan.inference.allocate(x.device),
        )
        mean, scale, shift, finite = plan.arrays(plan.inference, memory, "inference")
        plan.passes.mean(stream, x, mean, mean)
        plan.mixing.gates(stream, mean, mean, gate_weight, gate_bias, gates, finite)
        plan.mixing.coefficients(
            stream,
            mean,
            gates,
            running_mean,
            running_var,
            _or(weight, mean),
            _or(bias, mean),
            scale,
            shift,
        )
        plan.passes.apply(stream, x, mean, scale, shift, y)
        plan.warm.add("inference")
    return y, gates


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
    return _ModeGroupNorm.apply(as_dense(x), gate_weight, gate_bias, weight, bias, eps, pixel)


class _Memory:
    """How a plan's small arrays are handed to its launches."""

    def __init__(self, direct: bool) -> None:
        self.direct = direct and not interpreting()
        self.warm: set[str] = set()

    def arrays(self, slab: Slab, memory: Tensor, stage: str) -> list[Any]:
        """Tensors while a stage has kernels to compile, addresses from then on."""
        known = self.direct and stage in self.warm
        return slab.addresses(memory) if known else slab.tensors(memory)


class _Plan(_Memory):
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
        self.num_modes, self.num_samples = num_modes, samples
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
        running = training.running
        given = gates if gates is not None else gate_weight
        assert given is not None
        num_modes = given.shape[1] if gates is not None else given.shape[0]
        with _on_device(x) as stream:
            plan = _plan(
                _geometry(x),
                num_modes,
                training.eps,
                training.momentum,
                gates is None,
                _affine_kind(weight, bias),
                _running_kind(running, training.usage),
                x.get_device(),
                _aligned((*inputs, *(running or ()))),
            )
            y = torch.empty_like(x)
            used = plan.gates_like(x) if gates is None else gates
            kept, memory = plan.kept.allocate(x.device), plan.forward.allocate(x.device)
            mean, var, mode_mean, mode_var, mass = plan.arrays(plan.kept, kept, "forward")
            scale, shift, finite = plan.arrays(plan.forward, memory, "forward")
            mix = plan.mixing
            plan.passes.moments(stream, x, mean, var)
            mix.gates(stream, mean, var, _or(gate_weight, mean), _or(gate_bias, mean), used, finite)
            buffers = running or RunningEstimates(mean, mean)
            mix.statistics(
                stream,
                mean,
                var,
                used,
                finite,
                buffers.mean,
                buffers.var,
                _or(buffers.num_batches_tracked, mean),
                _or(buffers.share, mean),
                mode_mean,
                mode_var,
                mass,
            )
            mix.coefficients(
                stream,
                mean,
                used,
                mode_mean,
                mode_var,
                _or(weight, mean),
                _or(bias, mean),
                scale,
                shift,
            )
            plan.passes.apply(stream, x, mean, scale, shift, y)
            plan.warm.add("forward")
        ctx.save_for_backward(*inputs, used, kept)
        ctx.eps, ctx.plan = training.eps, plan
        ctx.set_materialize_grads(False)
        return y, used

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dused: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, used, kept = ctx.saved_tensors
        x, gates, gate_weight, gate_bias, weight, bias = inputs
        if torch.is_grad_enabled() or dy is None:
            forward = partial(_plain_forward, eps=ctx.eps)
            return (*_plain_backward(forward, inputs, ctx.needs_input_grad, dy, dused), None)
        with _on_device(x) as stream:
            plan, stage = ctx.plan, "backward" if dused is None else "backward with gates"
            dy = _dense_like(dy, x)
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
                _or(weight, mean),
                a,
                d,
                u,
                s,
                dweight if per_mode else dweights,
                _or(dbias, mean),
            )
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
                _or(weight, mean),
                _or(bias, mean),
                _or(gate_weight, mean),
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
                    _or(dgate_weight, mean),
                    _or(dgate_bias, mean),
                    _or(dweight, mean),
                )
            plan.warm.add(stage)
        dgates = dlogits if gates is not None else None
        return dx, dgates, dgate_weight, dgate_bias, dweight, dbias, None


class _GroupPlan(_Memory):
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
        super().__init__(direct)
        samples, channels, positions = geometry[:3]
        self.passes = Passes(geometry, direct)
        self.mixing = ChannelMixing(
            samples, channels, positions, num_modes, eps, pixel, affine[:2], direct
        )
        rows, modes = (samples, channels), (samples, num_modes)
        self.gates_shape = (samples, channels, num_modes)
        self.kept = Slab(rows, rows if pixel else (1,), modes, modes)  # mean, var, of the modes
        self.forward = Slab(rows, rows)  # scale, shift
        slope = rows if pixel else (1,)
        self.backward = Slab(rows, rows, rows, rows, slope, (samples, 2 * num_modes))


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
        with _on_device(x) as stream:
            plan = _group_plan(
                _geometry(x),
                gate_weight.shape[0],
                eps,
                pixel,
                _affine_kind(weight, bias),
                x.get_device(),
                _aligned(inputs),
            )
            y = torch.empty_like(x)
            gates = torch.empty(plan.gates_shape, device=x.device, dtype=torch.float32)
            kept, memory = plan.kept.allocate(x.device), plan.forward.allocate(x.device)
            mean, var, mode_mean, mode_var = plan.arrays(plan.kept, kept, "forward")
            scale, shift = plan.arrays(plan.forward, memory, "forward")
            (plan.passes.moments if pixel else plan.passes.mean)(stream, x, mean, var)
            plan.mixing.forward(
                stream,
                mean,
                var,
                gate_weight,
                gate_bias,
                _or(weight, mean),
                _or(bias, mean),
                scale,
                shift,
                gates,
                mode_mean,
                mode_var,
            )
            plan.passes.apply(stream, x, mean, scale, shift, y)
            plan.warm.add("forward")
        ctx.save_for_backward(*inputs, gates, kept)
        ctx.eps, ctx.pixel, ctx.plan = eps, pixel, plan
        ctx.set_materialize_grads(False)
        return y, gates

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dgates: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, gates, kept = ctx.saved_tensors
        x, gate_weight, _, weight, bias = inputs
        if torch.is_grad_enabled() or dy is None:
            forward = partial(_plain_group_forward, eps=ctx.eps, pixel=ctx.pixel)
            found = _plain_backward(forward, inputs, ctx.needs_input_grad, dy, dgates)
            return (*found, None, None)
        with _on_device(x) as stream:
            plan, stage = ctx.plan, "backward" if dgates is None else "backward with gates"
            dy = _dense_like(dy, x)
            dx = torch.empty_like(x)
            dgate = torch.empty((2, *gate_weight.shape), device=x.device, dtype=torch.float32)
            dweight, dbias = (None if p is None else torch.empty_like(p) for p in (weight, bias))
            memory = plan.backward.allocate(x.device)
            mean, var, mode_mean, mode_var = plan.arrays(plan.kept, kept, stage)
            a, d, scale, offset, slope, dgate_parts = plan.arrays(plan.backward, memory, stage)
            mix = plan.mixing
            plan.passes.reduce_backward(stream, dy, x, mean, d, a)
            samples = mix.backward if dgates is None else mix.backward_extra
            samples(
                stream,
                mean,
                var,
                gates,
                mode_mean,
                mode_var,
                gate_weight,
                _or(weight, mean),
                gates if dgates is None else dgates.contiguous(),
                a,
                d,
                scale,
                slope,
                offset,
                dgate_parts,
            )
            passes = plan.passes
            last = passes.apply_backward if ctx.pixel else passes.apply_backward_flat
            last(stream, dy, x, mean, scale, slope, offset, dx)
            mix.parameters(
                stream,
                mean,
                mode_mean,
                mode_var,
                a,
                d,
                dgate_parts,
                _or(dweight, mean),
                _or(dbias, mean),
                dgate,
            )
            plan.warm.add(stage)
        return dx, dgate[0], dgate[1], dweight, dbias, None, None


def _geometry(x: Tensor) -> Geometry:
    num_samples, num_channels = x.shape[:2]
    num_positions = x.numel() // (num_samples * num_channels)
    return Geometry(num_samples, num_channels, num_positions, is_channels_last(x), x.dtype)


def _affine_kind(weight: Tensor | None, bias: Tensor | None) -> tuple[bool, bool, bool]:
    return weight is not None, bias is not None, weight is not None and weight.ndim == 2


def _running_kind(running: RunningEstimates | None, usage: bool) -> tuple[bool, bool, bool, bool]:
    if running is None:
        return False, False, False, False
    return True, usage, running.num_batches_tracked is not None, running.share is not None


def _or(tensor: Tensor | None, other: Pointer) -> Pointer:
    """A pointer for the kernel, which does not follow it where there is no tensor."""
    return other if tensor is None else tensor


def _aligned(tensors: tuple[Tensor | None, ...]) -> bool:
    bits = 0
    for tensor in tensors:
        if tensor is not None:
            bits |= tensor.data_ptr()
    return bits % 16 == 0


def _dense_like(dy: Tensor, x: Tensor) -> Tensor:
    """The upstream gradient in x's order, at an address that the launches can take."""
    if dy.stride() != x.stride() or dy.data_ptr() % 16:
        dy = torch.empty_like(x).copy_(dy)
    return dy


@contextlib.contextmanager
def _on_other_device(x: Tensor) -> Iterator[int]:
    with torch.cuda.device(x.get_device()):
        yield current_stream(x)


def _on_device(x: Tensor) -> contextlib.AbstractContextManager[int]:
    """The stream to launch on, with x's device as the current one."""
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        return _on_other_device(x)
    return contextlib.nullcontext(current_stream(x))


def _plain_backward(
    forward: Callable[..., tuple[Tensor, Tensor]],
    inputs: list[Tensor | None],
    needed: tuple[bool, ...],
    dy: Tensor | None,
    dgates: Tensor | None,
) -> list[Tensor | None]:
    """The gradients by plain differentiable operators, so that they can be differentiated again."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        outputs = forward(*inputs)
        pairs = [(o, d) for o, d in zip(outputs, (dy, dgates), strict=True) if d is not None]
        wanted = [t for t, need in zip(inputs, needed, strict=False) if need and t is not None]
        found = torch.autograd.grad(
            [o for o, _ in pairs],
            wanted,
            [d for _, d in pairs],
            create_graph=create_graph,
            allow_unused=True,
        )
    gradients = iter(found)
    return [
        next(gradients) if need and t is not None else None
        for t, need in zip(inputs, needed, strict=False)
    ]


def _plain_forward(
    x: Tensor,
    gates: Tensor | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    mean, var = plain.moments(x)
    assert var is not None
    if gates is None:
        assert gate_weight is not None
        assert gate_bias is not None
        gates = torch.softmax(mean @ gate_weight.t() + gate_bias, dim=1)
    batch = mixing.batch_statistics(mean, var, gates)
    scale, shift = mixing.coefficients(batch.mean, batch.var, gates, mean, weight, bias, eps)
    return plain.apply(x, mean, scale, shift), gates


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
