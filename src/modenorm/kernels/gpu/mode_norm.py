"""Mode normalization as one autograd node on the GPU: a handful of launches each way.

The launches are those of mode_norm_plan.py, so a call does little more than allocate and launch.
Kept for backward: x and arrays of (N, C), (N, K) and (K, C). A double backward repeats the forward
in plain operators. With other ranks, the statistics and their gradients are exchanged between two
launches, and the running estimates are updated afterwards.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from modenorm import exchange, mixing
from modenorm.buffers import recomputing
from modenorm.checks import Options
from modenorm.exchange import Ranks
from modenorm.kernels import plain
from modenorm.kernels.gpu.device import current_stream, is_elsewhere
from modenorm.kernels.gpu.mode_norm_plan import ModePlan, plan_for
from modenorm.kernels.layout import as_aligned, as_dense, dense_like, laid_out
from modenorm.kernels.mode_norm_arrays import (
    Backward,
    Forward,
    Found,
    Inference,
    Inputs,
    beside_output,
)
from modenorm.mixing import RunningEstimates

__all__ = ["mode_norm", "mode_norm_inference"]

Estimates = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
NO_ESTIMATES: Estimates = (None, None, None, None)
NO_GRADIENTS = (None, None, None)  # of the node's last inputs, which are no tensors


def mode_norm(
    x: Tensor, inputs: Inputs, estimates: RunningEstimates | None, options: Options
) -> Found | None:
    """y, the gates (N, K) and the modes' usage (K,) if they matter, by the batch's statistics.

    These move the estimates. None if the kernels can't take these tensors.
    """
    x = as_dense(x)
    running = None if recomputing() else estimates
    moves = running is not None and options.ranks is None
    apart = options.gates_matter or inputs.gates is not None
    plan = plan_for(x, inputs, estimates, options, moves, apart)
    if plan is None:
        return None
    if not (apart or options.usage_matters or options.ranks or is_elsewhere(x)):
        node = plan.node_for(inputs, running, options.eps)
        if node is not None:
            return node(current_stream(x), x, *inputs, *(running or ())), None, None
    y, *more = _node(x, *inputs, running, plan, options)
    return y, *beside_output(more, options.gates_matter, options.usage_matters)


def mode_norm_inference(
    x: Tensor, inputs: Inputs, estimates: RunningEstimates, options: Options
) -> Found | None:
    """y and the gates (N, K), with a linear gate and running estimates. Not differentiable.

    None if the kernels can't take these tensors.
    """
    x = as_dense(x)
    plan = plan_for(x, inputs, estimates, options)
    if plan is None:
        return None
    y, gates = torch.empty_like(x), plan.gates_like(x)
    scratch = plan.inference.allocate(x.device)
    plan.run_inference(Inference(x, *inputs[1:], *estimates[:2], gates, scratch, y))
    return y, gates, None


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
        running: RunningEstimates | None,
        plan: ModePlan,
        options: Options,
    ) -> tuple[Tensor | None, ...]:
        inputs, ranks, used = (gates, gate_weight, gate_bias, weight, bias), options.ranks, gates
        y = torch.empty_like(x)
        usage = plan.usage_like(x) if options.usage_matters else None
        if options.gates_matter and gates is None:
            used = plan.gates_like(x)
        kept, scratch = plan.kept.allocate(x.device), plan.forward.allocate(x.device)
        moved: Estimates = running if running and ranks is None else NO_ESTIMATES
        arrays = Forward(x, *inputs, *moved, usage, used, kept, scratch, y)
        if ranks is None:
            plan.run_forward(arrays)
        else:
            plan.run_statistics(arrays)
            _merge(plan.kept.tensors(kept)[2:5], plan.num_positions, running, ranks, options)
            plan.run_map(arrays)
        ctx.save_for_backward(x, *inputs, used, kept)
        ctx.plan, ctx.options, ctx.strides = plan, options, x.stride()
        ctx.set_materialize_grads(False)
        heard = (y, used) if options.gates_matter else (y,)
        return heard if usage is None else (*heard, usage)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *more: Tensor | None) -> tuple[Tensor | None, ...]:
        *given, used, kept = ctx.saved_tensors
        options, plan, ranks = ctx.options, ctx.plan, ctx.options.ranks
        dused, dusage = beside_output(more, options.gates_matter, options.usage_matters)
        if plain.only_plain(dy, dused, dusage) or dy is None:
            forward = partial(plain.mode_norm, eps=options.eps, ranks=ranks)
            upstream = (dy, dused, dusage)
            found = plain.differentiate(forward, given, ctx.needs_input_grad, upstream)
            return (*found, *NO_GRADIENTS)
        given[0] = x = laid_out(given[0], ctx.strides)
        _, gates, *parameters = given
        dy = dense_like(dy, x)
        dused = None if dused is None else dense_like(dused, used)
        dusage = None if dusage is None else as_aligned(dusage)
        dx = torch.empty_like(x)
        dgates = None if gates is None else torch.empty_like(gates)
        gradients = [None if p is None else torch.empty_like(p) for p in parameters]
        scratch = plan.backward.allocate(x.device)
        places = (used, dused, dusage, kept, scratch, dx, dgates)
        kind = dused is not None, dusage is not None
        arrays = Backward._make((dy, *given, *places, *gradients, None))
        if ranks is None:
            plan.run_backward[kind](arrays)
        else:
            plan.run_modes_backward(arrays)
            if any(ctx.needs_input_grad[:4]):
                _sum(plan.backward.tensors(scratch)[3:5], plan.kept.tensors(kept)[4], ranks)
            plan.run_samples_backward[kind](arrays)
        return dx, dgates, *gradients, *NO_GRADIENTS


_node = plain.node(_ModeNorm)


def _merge(
    statistics: list[Tensor],
    num_positions: int,
    running: RunningEstimates | None,
    ranks: Ranks,
    options: Options,
) -> None:
    """Replace this rank's mean, variance and mass of the modes by those of all ranks."""
    mode_mean, mode_var, mass = statistics
    merged = exchange.merge(mass, mode_mean, mode_var, ranks.number, num_positions)
    for of_rank, found in zip((mass, mode_mean, mode_var), merged, strict=True):
        of_rank.copy_(found)
    if running is not None:
        batch = exchange.with_share(mode_mean, mode_var, mass, num_positions)
        mixing.update_running(running, batch, options.momentum, options.running_update)


def _sum(gradients: list[Tensor], mass: Tensor, ranks: Ranks) -> None:
    """Replace this rank's gradients of the statistics by the sums of all ranks."""
    u, s = gradients
    summed = exchange.sum_gradients(u, s, mass, ranks.number)
    for of_rank, found in zip(gradients, summed, strict=True):
        of_rank.copy_(found)
