"""Mode group normalization for `torch.compile` on a GPU: as mode_norm_operator.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modenorm.kernels import plain
from modenorm.kernels.cpp.operator import Work, operator
from modenorm.kernels.gpu.slab import channel_backward_slab, channel_forward_slab, channel_kept_slab
from modenorm.kernels.layout import as_dense, dense_like
from modenorm.kernels.mode_group_norm_arrays import (
    ChannelBackward,
    ChannelForward,
    Given,
    can_count_gates,
)

__all__ = ["mode_group_norm"]


def mode_group_norm(x: Tensor, given: Given, gates_matter: bool) -> tuple[Tensor, Tensor]:
    """y and the gates (N, C, K), which have a gradient only if they matter."""
    constants = (None if p is None else p.detach() for p in given[:4])
    gates, kept, lines = statistics(x.detach(), *constants, given.eps, given.pixel)
    y, *used = _Map.apply(x, *given, gates, kept, lines, gates_matter)
    return y, used[0] if used else gates


class _Map(torch.autograd.Function):
    """The map, with the gradient of everything that its coefficients were made from."""

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
        gates: Tensor,
        kept: Tensor,
        lines: Tensor,
        gates_matter: bool,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, gate_weight, gate_bias, weight, bias, kept)
        ctx.eps, ctx.pixel = eps, pixel
        mean, *_ = channel_kept_slab(gates.shape, pixel).tensors(kept)
        y = plain.apply(x, mean, *channel_forward_slab(*x.shape[:2]).tensors(lines))
        return (y, gates.clone()) if gates_matter else (y,)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dused: Tensor | None = None) -> tuple[Tensor | None, ...]:
        x, *parameters, kept = ctx.saved_tensors
        given = (x, *parameters, kept, ctx.eps, ctx.pixel)
        lines, *dgate, dweight, dbias = gradients(dy, dused, *given)
        shape = (*x.shape[:2], *parameters[0].shape)
        slab = channel_backward_slab(shape, ctx.pixel)
        _, _, scale, offset, slope, _ = slab.tensors(lines)
        along = x.shape[:2] + (1,) * (x.ndim - 2)
        dx = dy * scale.view(along) + offset.view(along)
        if ctx.pixel:
            mean, *_ = channel_kept_slab(shape, ctx.pixel).tensors(kept)
            # not x - mean: that is in the forward too, and might be kept for here, in float32
            dx = dx - (mean.view(along) - x) * slope.view(along)
        _, _, weight, bias = parameters
        found = (None if weight is None else dweight, None if bias is None else dbias)
        return plain.as_type(dx, x.dtype), *dgate, *found, *(None,) * 6


_GIVEN = "Tensor gate_weight, Tensor gate_bias, Tensor? weight, Tensor? bias"


def _statistics_like(x: Tensor, gate_weight: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the results of `statistics`."""
    samples, channels, pixel = x.shape[0], x.shape[1], given[-1]
    shape = (samples, channels, gate_weight.shape[0])
    gates = torch.empty(shape, device=x.device, dtype=torch.float32)
    kept = channel_kept_slab(shape, pixel).allocate(x.device)
    return gates, kept, channel_forward_slab(samples, channels).allocate(x.device)


@operator(
    f"channel_statistics(Tensor x, {_GIVEN}, float eps, bool pixel) -> (Tensor, Tensor, Tensor)",
    _statistics_like,
)
def statistics(x: Tensor, *given: Any) -> Work:
    """The gates, what is kept for backward, and the map's scale and shift: two slabs."""
    from modenorm.kernels.gpu.mode_group_norm_plan import channel_plan_for

    x, inputs = as_dense(x), Given(*given).contiguous()
    assert can_count_gates(x, len(inputs.gate_weight)), "too many rows"
    plan = channel_plan_for(x, inputs)
    gates = torch.empty(plan.gates_shape, device=x.device, dtype=torch.float32)
    kept, lines = plan.kept.allocate(x.device), plan.forward.allocate(x.device)
    arrays = ChannelForward(x, *inputs[:4], gates, kept, lines, None)
    return Work((gates, kept, lines), plan.run_mix, arrays)


def _gradients_like(
    dy: Tensor, dgates: Tensor | None, x: Tensor, gate_weight: Tensor, *given: Any
) -> tuple[Tensor, ...]:
    """Memory for the results of `gradients`."""
    gate_bias, weight, bias, _, eps, pixel = given
    shape = (x.shape[0], x.shape[1], gate_weight.shape[0])
    lines = channel_backward_slab(shape, pixel).allocate(x.device)
    return lines, *_empty_gradients(Given(gate_weight, gate_bias, weight, bias, eps, pixel))


@operator(
    f"channel_gradients(Tensor dy, Tensor? dgates, Tensor x, {_GIVEN}, Tensor kept, "
    "float eps, bool pixel) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _gradients_like,
)
def gradients(
    dy: Tensor,
    dgates: Tensor | None,
    x: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kept: Tensor,
    eps: float,
    pixel: bool,
) -> Work:
    """A slab with scale, offset and slope of dx; the gate's, weight's and bias's gradients."""
    from modenorm.kernels.gpu.mode_group_norm_plan import channel_plan_for

    x = as_dense(x)
    inputs = Given(gate_weight, gate_bias, weight, bias, eps, pixel).contiguous()
    dgates = None if dgates is None else dgates.contiguous()
    plan = channel_plan_for(x, inputs, (kept, dgates))
    found = _empty_gradients(inputs)
    places = [None if p is None else d for p, d in zip(inputs[:4], found, strict=True)]
    lines = plan.backward.allocate(x.device)
    arrays = ChannelBackward(
        dense_like(dy, x), x, *inputs[:3], dgates, kept, lines, None, *places
    )  # fmt: skip
    return Work((lines, *found), plan.run_mix_backward[dgates is None], arrays)


def _empty_gradients(given: Given) -> list[Tensor]:
    """Memory for gradients of the gate, the weight and the bias, of no size where there is none."""
    shapes = [(0,) if p is None else p.shape for p in given[:4]]
    device = given.gate_weight.device
    return [torch.empty(shape, device=device, dtype=torch.float32) for shape in shapes]
