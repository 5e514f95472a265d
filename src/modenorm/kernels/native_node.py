"""Mode normalization as one autograd node on the CPU: one call of C each way (cpu_layer.c).

For the paper's gate or given gates, without other ranks; everything else takes the two nodes of
kernels/streaming.py. Kept for backward: x and arrays of (N, C), (N, K) and (K, C). A double
backward repeats the forward in plain operators.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from modenorm.buffers import recomputing
from modenorm.checks import Options
from modenorm.kernels import plain, runs_native
from modenorm.kernels.layout import as_dense, dense_like, is_channels_last
from modenorm.kernels.native import call
from modenorm.mixing import RunningEstimates

__all__ = ["mode_norm"]


def mode_norm(
    x: Tensor,
    gates: Tensor | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    estimates: RunningEstimates | None,
    options: Options,
) -> tuple[Tensor, Tensor | None] | None:
    """Y and the gates (N, K), or None if C can't take these tensors; gates None: the gate's.

    In training the estimates are moved; otherwise they are used, and y is not differentiable.
    Gates that don't matter are None, unless they were given.
    """
    inputs = (as_dense(x.resolve_neg()), gates, gate_weight, gate_bias, weight, bias)
    if not _fit(*inputs, estimates, options.num_modes):
        return None
    if options.training and recomputing():
        estimates = None
    found = _node(*inputs, estimates, options)
    return found if options.gates_matter and gates is None else (found, gates)


def _fit(
    x: Tensor,
    gates: Tensor | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    estimates: RunningEstimates | None,
    expected_modes: int | None,
) -> bool:
    """Whether kinds and shapes are as C expects: it would read whatever lies there."""
    mean, var, tracked, share = (None,) * 4 if estimates is None else estimates
    if not runs_native(x, gates, gate_weight, gate_bias, weight, bias, mean, var, share):
        return False
    first = gate_weight if gates is None else gates
    if first is None or first.ndim != 2:
        return False
    num_modes = first.shape[0 if gates is None else 1]
    if expected_modes not in (None, num_modes):
        return False
    table, row, column = (num_modes, x.shape[1]), (x.shape[1],), (num_modes,)
    shapes = (
        (gates, ((x.shape[0], num_modes),)),
        (gate_weight, (table,)),
        (gate_bias, (column,)),
        (weight, (row, table)),
        (bias, (row, table)),
        (mean, (table,)),
        (var, (table,)),
        (share, (column,)),
        (tracked, ((),)),
    )
    changed = [buffer for buffer in (mean, var, share) if buffer is not None]
    return (
        all(tensor is None or tensor.shape in allowed for tensor, allowed in shapes)
        and all(buffer.is_contiguous() for buffer in changed)
        and (tracked is None or (tracked.dtype == torch.int64 and tracked.device == x.device))
    )


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
        estimates: RunningEstimates | None,
        options: Options,
    ) -> Tensor | tuple[Tensor, Tensor]:
        y = torch.empty_like(x)
        if gates is None:
            assert gate_weight is not None
            used = x.new_empty((x.shape[0], gate_weight.shape[0]))
        else:
            used = gates.contiguous()
        num_modes = used.shape[1]
        rows, table = x.shape[0] * x.shape[1], num_modes * x.shape[1]
        kept, scratch = x.new_empty(3 * rows + 2 * table + num_modes), x.new_empty(rows + table)
        sizes = _sizes(options.eps, weight, bias, x, num_modes)
        call(
            "forward",
            (gate_weight, gate_bias, weight, bias),
            (y, used, kept, scratch, *_in_c_order(estimates)),
            -1.0 if options.momentum is None else float(options.momentum),
            int(options.running_update == "usage"),
            int(options.training or estimates is None),
            *sizes,
            first=(x,),
        )
        ctx.save_for_backward(x, gates, gate_weight, gate_bias, weight, bias, used, kept)
        ctx.eps, ctx.sizes = options.eps, sizes
        ctx.set_materialize_grads(False)
        return (y, used) if options.gates_matter and gates is None else y

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor | None, dused: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        *inputs, used, kept = ctx.saved_tensors  # once: checkpointing unpacks them once
        x, gates, gate_weight, gate_bias, weight, bias = inputs
        needed = ctx.needs_input_grad
        if plain.only_plain(dy, dused) or dy is None or not runs_native(x, dy, dused):
            forward = partial(plain.mode_norm, eps=ctx.eps)
            return (*plain.differentiate(forward, inputs, needed, (dy, dused)), None, None)
        dx = torch.empty_like(x) if needed[0] else None
        parameters = (gate_weight, gate_bias, weight, bias)
        gradients = [None if p is None else x.new_empty(p.shape) for p in parameters]
        dgates = torch.empty_like(used)
        rows, table = x.shape[0] * x.shape[1], used.shape[1] * x.shape[1]
        scratch = x.new_empty(4 * rows + 3 * table)
        call(
            "backward",
            (used, kept, gate_weight, weight, bias, dused),
            (dx, dgates, *gradients, scratch),
            *ctx.sizes,
            first=(dense_like(dy, x), x),
        )
        return dx, None if gates is None else dgates, *gradients, None, None


_node = plain.node(_ModeNorm)


def _in_c_order(estimates: RunningEstimates | None) -> tuple[Tensor | None, ...]:
    if estimates is None:
        return (None,) * 4
    return estimates.mean, estimates.var, estimates.share, estimates.num_batches_tracked


def _sizes(
    eps: float, weight: Tensor | None, bias: Tensor | None, x: Tensor, num_modes: int
) -> tuple[int | float, ...]:
    """The numbers that both calls end with."""
    num_samples, num_channels = x.shape[:2]
    num_positions = x.numel() // (num_samples * num_channels)
    steps = (num_channels if p is not None and p.ndim == 2 else 0 for p in (weight, bias))
    sizes = (num_samples, num_channels, num_modes, num_positions)
    return float(eps), *steps, *sizes, int(is_channels_last(x))
