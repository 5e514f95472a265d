"""Each norm as one autograd node on the GPU: a handful of launches each way.

Forward: moments, gates, mixing, apply. Backward: reduce, mixing, gate, apply. Kept for backward: x
and arrays of (N, C), (N, K) and (K, C). A double backward repeats the forward in plain operators.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modenorm import mixing
from modenorm.kernels import gpu, gpu_channels, gpu_mixing, plain
from modenorm.kernels.gpu_channels import MAX_CHANNELS
from modenorm.kernels.layout import as_dense
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
    gates: Tensor | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Y and the gates (N, K), with the running estimates. Not differentiable."""
    x = as_dense(x)
    mean, _ = gpu.moments(x, with_var=False)
    used, _ = gpu_mixing.gates_forward(mean, mean, gate_weight, gate_bias, gates)
    scale, shift = gpu_mixing.mix_inference(
        mean, used, weight, bias, running_mean, running_var, eps
    )
    return gpu.apply(x, mean, scale, shift), used


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
        mean, var = gpu.moments(x)
        assert var is not None
        used, finite = gpu_mixing.gates_forward(mean, var, gate_weight, gate_bias, gates)
        mixed = gpu_mixing.mix_forward(
            mean,
            var,
            used,
            finite,
            weight,
            bias,
            training.running,
            training.eps,
            training.momentum,
            training.usage,
        )
        y = gpu.apply(x, mean, mixed.scale, mixed.shift)
        inputs = (x, gates, gate_weight, gate_bias, weight, bias)
        ctx.save_for_backward(*inputs, mean, var, used, mixed.scale, *mixed[2:])
        ctx.eps = training.eps
        ctx.set_materialize_grads(False)
        return y, used

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dused: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors[:6]
        if torch.is_grad_enabled() or dy is None:
            forward = partial(_plain_forward, eps=ctx.eps)
            return (*_plain_backward(forward, inputs, ctx.needs_input_grad, dy, dused), None)
        x, _, gate_weight, gate_bias, weight, bias = inputs
        mean, var, used, scale, mode_mean, mode_var, mass = ctx.saved_tensors[6:]
        num_positions = x.numel() // mean.numel()
        dshift, dscale = gpu.reduce_backward(dy, x, mean)
        dweight, dbias, slope, offset, parts = gpu_mixing.mix_backward(
            dscale,
            dshift,
            mean,
            var,
            used,
            mode_mean,
            mode_var,
            mass,
            weight,
            bias,
            num_positions,
            ctx.eps,
        )
        dgates = dgate_weight = dgate_bias = dx = None
        if gate_weight is not None:
            dgate_weight, dgate_bias = gpu_mixing.gate_backward(
                parts, dused, used, mean, gate_weight, gate_bias, offset, num_positions
            )
        elif ctx.needs_input_grad[1]:
            dgates = parts.sum(0) if dused is None else parts.sum(0) + dused
        if ctx.needs_input_grad[0]:
            dx = gpu.apply_backward(dy, x, mean, scale, slope, offset)
        return dx, dgates, dgate_weight, dgate_bias, dweight, dbias, None


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
        mean, var = gpu.moments(x, with_var=pixel)
        scale, shift, *modes = gpu_channels.channels_forward(
            mean, var, gate_weight, gate_bias, weight, bias, eps
        )
        y = gpu.apply(x, mean, scale, shift)
        ctx.save_for_backward(x, gate_weight, gate_bias, weight, bias, mean, var, scale, *modes)
        ctx.eps, ctx.pixel = eps, pixel
        ctx.set_materialize_grads(False)
        return y, modes[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dgates: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors[:5]
        if torch.is_grad_enabled() or dy is None:
            forward = partial(_plain_group_forward, eps=ctx.eps, pixel=ctx.pixel)
            found = _plain_backward(forward, inputs, ctx.needs_input_grad, dy, dgates)
            return (*found, None, None)
        x, gate_weight, gate_bias, weight, bias = inputs
        mean, var, scale, gates, mode_mean, mode_var = ctx.saved_tensors[5:]
        dshift, dscale = gpu.reduce_backward(dy, x, mean)
        slope, offset, dweights, dgate = gpu_channels.channels_backward(
            dscale,
            dshift,
            dgates,
            mean,
            var,
            gates,
            mode_mean,
            mode_var,
            gate_weight,
            weight,
            x.numel() // mean.numel(),
            ctx.eps,
        )
        dgate_weight, dgate_bias = dgate.sum(0)
        return (
            gpu.apply_backward(dy, x, mean, scale, slope, offset)
            if ctx.needs_input_grad[0]
            else None,
            dgate_weight,
            dgate_bias,
            None if weight is None else dweights.sum(0),
            None if bias is None else dshift.sum(0),
            None,
            None,
        )


def _plain_backward(
    forward: Callable[..., tuple[Tensor, Tensor]],
    inputs: tuple[Tensor | None, ...],
    needed: tuple[bool, ...],
    dy: Tensor | None,
    dused: Tensor | None,
) -> list[Tensor | None]:
    """The gradients by plain differentiable operators, so that they can be differentiated again."""
    with torch.enable_grad():
        outputs = forward(*inputs)
        pairs = [(o, d) for o, d in zip(outputs, (dy, dused), strict=True) if d is not None]
        wanted = [t for t, need in zip(inputs, needed, strict=False) if need and t is not None]
        found = torch.autograd.grad(
            [o for o, _ in pairs],
            wanted,
            [d for _, d in pairs],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
    gradients = iter(found)
    return [
        next(gradients) if need and t is not None else None
        for t, need in zip(inputs, needed, strict=False)
    ]


def _plain_forward(
    x: Tensor | None,
    gates: Tensor | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    assert x is not None
    mean, var = plain.moments(x)
    assert var is not None
    if gates is None:
        assert gate_weight is not None
        assert gate_bias is not None
        logits = mean @ gate_weight.t() + gate_bias
        gates = torch.softmax(logits, dim=1)
    batch = mixing.batch_statistics(mean, var, gates)
    scale, shift = mixing.coefficients(
        batch.mean,
        batch.var,
        gates,
        mean,
        weight,
        bias,
        eps,
    )
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
