"""Mode group normalization as one autograd node on the GPU. See kernels/fused.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from modenorm.kernels import plain
from modenorm.kernels.channel_arrays import ChannelBackward, ChannelForward, Given
from modenorm.kernels.channel_plan import channel_plan_for
from modenorm.kernels.layout import as_aligned, as_dense, dense_like, laid_out

__all__ = ["mode_group_norm"]


def mode_group_norm(x: Tensor, given: Given) -> tuple[Tensor, Tensor]:
    """Y and the gates (N, C, K)."""
    return _node(as_dense(x), *given.contiguous())


class _ModeGroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        inputs = Given(*given)
        plan = channel_plan_for(x, inputs)
        y = torch.empty_like(x)
        gates = torch.empty(plan.gates_shape, device=x.device, dtype=torch.float32)
        kept, scratch = plan.kept.allocate(x.device), plan.forward.allocate(x.device)
        plan.run_forward(ChannelForward(x, *inputs[:4], gates, kept, scratch, y))
        ctx.save_for_backward(x, *inputs[:4], kept)
        ctx.eps, ctx.pixel, ctx.plan, ctx.strides = inputs.eps, inputs.pixel, plan, x.stride()
        ctx.set_materialize_grads(False)
        return y, gates

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dgates: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, kept = ctx.saved_tensors
        x, gate_weight, gate_bias, weight, bias = inputs
        if plain.only_plain(dy, dgates) or dy is None:
            forward = partial(plain.mode_group_norm, eps=ctx.eps, pixel=ctx.pixel)
            found = plain.differentiate(forward, inputs, ctx.needs_input_grad, (dy, dgates))
            return (*found, None, None)
        x = laid_out(x, ctx.strides)
        plan, dy = ctx.plan, dense_like(dy, x)
        dgates = None if dgates is None else as_aligned(dgates)
        dx = torch.empty_like(x)
        dgate = torch.empty((2, *gate_weight.shape), device=x.device, dtype=torch.float32)
        dweight, dbias = (None if p is None else torch.empty_like(p) for p in (weight, bias))
        scratch = plan.backward.allocate(x.device)
        given = (dy, x, gate_weight, gate_bias, weight, dgates, kept, scratch)
        plan.run_backward[dgates is None](ChannelBackward(*given, dx, dgate, dweight, dbias))
        return dx, dgate[0], dgate[1], dweight, dbias, None, None


_node = plain.node(_ModeGroupNorm)
