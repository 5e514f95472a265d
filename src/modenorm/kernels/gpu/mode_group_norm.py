"""Mode group normalization as one autograd node on the GPU. See kernels/gpu/mode_norm.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from modenorm.kernels import plain
from modenorm.kernels.gpu.device import current_stream, is_elsewhere
from modenorm.kernels.gpu.mode_group_norm_plan import channel_plan_for
from modenorm.kernels.layout import as_aligned, as_dense, dense_like, laid_out
from modenorm.kernels.mode_group_norm_arrays import ChannelBackward, ChannelForward, Given

__all__ = ["mode_group_norm"]

NO_GRADIENTS = (None,) * 4  # of the node's last inputs, which are no tensors


def mode_group_norm(x: Tensor, given: Given, gates_matter: bool) -> tuple[Tensor, Tensor | None]:
    """y, and the gates (N, C, K) if they matter."""
    x, given = as_dense(x), given.contiguous()
    plan = channel_plan_for(x, given)
    if not (gates_matter or is_elsewhere(x)):
        node = plan.node_for(given)
        if node is not None:
            return node(current_stream(x), x, *given[:4]), None
    y, *gates = _node(x, *given, plan, gates_matter)
    return y, gates[0] if gates else None


class _ModeGroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *more: Any) -> tuple[Tensor, ...]:
        *given, plan, gates_matter = more
        inputs, gates = Given(*given), None
        y = torch.empty_like(x)
        if gates_matter:
            gates = torch.empty(plan.gates_shape, device=x.device, dtype=torch.float32)
        kept, scratch = plan.kept.allocate(x.device), plan.forward.allocate(x.device)
        plan.run_forward[gates_matter](ChannelForward(x, *inputs[:4], gates, kept, scratch, y))
        ctx.save_for_backward(x, *inputs[:4], kept)
        ctx.eps, ctx.pixel, ctx.plan, ctx.strides = inputs.eps, inputs.pixel, plan, x.stride()
        ctx.set_materialize_grads(False)
        return (y,) if gates is None else (y, gates)

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor | None, dgates: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        *inputs, kept = ctx.saved_tensors
        x, gate_weight, gate_bias, weight, _ = inputs
        if plain.only_plain(dy, dgates) or dy is None:
            forward = partial(plain.mode_group_norm, eps=ctx.eps, pixel=ctx.pixel)
            found = plain.differentiate(forward, inputs, ctx.needs_input_grad, (dy, dgates))
            return (*found, *NO_GRADIENTS)
        x = laid_out(x, ctx.strides)
        plan, dy = ctx.plan, dense_like(dy, x)
        dgates = None if dgates is None else as_aligned(dgates)
        dx = torch.empty_like(x)
        found = [None if p is None else torch.empty_like(p) for p in inputs[1:]]
        scratch = plan.backward.allocate(x.device)
        given = (dy, x, gate_weight, gate_bias, weight, dgates, kept, scratch)
        plan.run_backward[dgates is None](ChannelBackward._make((*given, dx, *found)))
        return dx, *found, *NO_GRADIENTS


_node = plain.node(_ModeGroupNorm)
