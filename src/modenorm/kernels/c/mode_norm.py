"""Mode normalization as one autograd node on the CPU: one call of C each way (mode_norm.c).

For the paper's gate or given gates, without other ranks; everything else takes the two nodes of
kernels/streaming.py. Kept for backward: x and arrays of (N, C), (N, K) and (K, C). A double
backward repeats the forward in plain operators.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from modenorm.buffers import recomputing
from modenorm.checks import Options
from modenorm.kernels import plain
from modenorm.kernels.c.library import address, call_at, dense, floats
from modenorm.kernels.choice import runs_c
from modenorm.kernels.cpp import node as cpp_node
from modenorm.kernels.layout import as_dense, dense_like, is_channels_last, laid_out
from modenorm.kernels.mode_norm_arrays import Found, Inputs, beside_output
from modenorm.mixing import RunningEstimates

__all__ = ["mode_norm"]

MOST_PLANS = 4096
NO_GRADIENTS = (None,) * 4  # of the node's last inputs


def mode_norm(
    x: Tensor,
    gates: Tensor | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    estimates: RunningEstimates | None,
    options: Options,
) -> Found | None:
    """y, the gates (N, K) and the modes' usage (K,), or None if C can't take these tensors.

    Gates None means the gate's. In training the estimates are moved; otherwise they are used, and y
    is not differentiable. What doesn't matter is None, but for gates that were given.
    """
    x = as_dense(x.resolve_neg())
    inputs = [dense(t) for t in (gates, gate_weight, gate_bias, weight, bias)]
    plan = _plan_for(x, inputs, estimates, options)
    if plan is None:
        return None
    if options.training and recomputing():
        estimates = None
    matter = (options.gates_matter and gates is None, options.usage_matters)
    if options.training and gates is None and not any(matter):
        node = plan.node_for(Inputs(*inputs), estimates)
        if node is not None:
            return node(torch.get_num_threads(), x, *inputs, *(estimates or ())), None, None
    y, *more = _node(x, *inputs, estimates, plan, *matter)
    used, usage = beside_output(more, *matter)
    return y, used if gates is None else gates, usage


class _Plan:
    """Of calls that look the same: the numbers for C, and where arrays lie in shared memory."""

    def __init__(self, x: Tensor, inputs: list[Tensor | None], options: Options) -> None:
        gates, gate_weight, _, *affine = inputs
        num_samples, num_channels = x.shape[:2]
        num_modes = _num_modes(gates, gate_weight)
        rows, table = num_samples * num_channels, num_modes * num_channels
        self.eps, self.gates_shape = options.eps, (num_samples, num_modes)
        steps = (num_channels if p is not None and p.ndim == 2 else 0 for p in affine)
        sizes = (num_samples, num_channels, num_modes, math.prod(x.shape[2:]))
        self.numbers = (float(options.eps), *steps, *sizes, int(is_channels_last(x)))
        momentum = -1.0 if options.momentum is None else float(options.momentum)
        self.moves = (momentum, int(options.running_update == "usage"))
        self.training = options.training
        self.gates_in_kept = 3 * rows + 2 * table + num_modes
        self.kept, self.scratch = self.gates_in_kept + num_samples * num_modes, rows + table
        self.gates_in_scratch = 4 * rows + 3 * table
        self.backward_scratch = self.gates_in_scratch + num_samples * num_modes
        self.nodes: dict[bool, Callable[..., Tensor]] = {}  # whether estimates move

    def address_of_gates(self, used: Tensor | None, kept: Tensor) -> int:
        """Of gates that have no other place, they lie with what is kept."""
        return kept.data_ptr() + 4 * self.gates_in_kept if used is None else used.data_ptr()

    def node_for(
        self, inputs: Inputs, estimates: RunningEstimates | None
    ) -> Callable[..., Tensor] | None:
        """An autograd node of C++, if there is one."""
        moves = estimates is not None
        node = self.nodes.get(moves)
        if node is None:
            layer = _Layer(self.numbers[0], *self.moves, *self.numbers[1:])
            node = cpp_node.make(
                cpp_node.MODE_NORM,
                cpp_node.tasks_in_c("", layer),
                (self.kept, self.scratch, self.backward_scratch),
                inputs,
                estimates or (),
                partial(plain.mode_norm, eps=self.eps),
                can_omit_dx=True,
                owner=layer,
            )
            if node is not None:
                self.nodes[moves] = node
        return node


class _Layer(ctypes.Structure):
    """As in mode_norm.c."""

    _fields_ = (
        ("eps", ctypes.c_float),
        ("momentum", ctypes.c_float),
        *((name, ctypes.c_int64) for name in (
            "by_usage", "weight_step", "bias_step", "samples", "channels", "modes", "positions",
            "last",
        )),
    )  # fmt: skip


_plans: dict[tuple[Any, ...], _Plan | None] = {}


def _plan_for(
    x: Tensor, inputs: list[Tensor | None], estimates: RunningEstimates | None, options: Options
) -> _Plan | None:
    """The plan of a call on a dense x; None if C can't take these tensors."""
    tensors = (x, *inputs, *(estimates or ()))
    key = (
        options.num_modes, options.eps, options.momentum, options.running_update, options.training,
        *[
            None if t is None else (type(t), t.shape, t.is_contiguous(), t.dtype, t.device)
            for t in tensors
        ],
    )  # fmt: skip
    if key not in _plans:
        if len(_plans) == MOST_PLANS:
            _plans.clear()
        fits = _fit(x, inputs, estimates, options.num_modes)
        _plans[key] = _Plan(x, inputs, options) if fits else None
    return _plans[key]


def _fit(
    x: Tensor,
    inputs: list[Tensor | None],
    estimates: RunningEstimates | None,
    expected_modes: int | None,
) -> bool:
    """Whether kinds and shapes are as C expects: it would read whatever lies there."""
    gates, gate_weight, gate_bias, weight, bias = inputs
    mean, var, tracked, share = (None,) * 4 if estimates is None else estimates
    if not runs_c(x, gates, gate_weight, gate_bias, weight, bias, mean, var, share):
        return False
    first = gate_weight if gates is None else gates
    if first is None or first.ndim != 2:
        return False
    num_modes = _num_modes(gates, gate_weight)
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


def _num_modes(gates: Tensor | None, gate_weight: Tensor | None) -> int:
    if gates is not None:
        return gates.shape[1]
    assert gate_weight is not None
    return gate_weight.shape[0]


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
        plan: _Plan,
        gates_matter: bool,
        usage_matters: bool,
    ) -> tuple[Tensor, ...]:
        y, kept, scratch = torch.empty_like(x), floats(plan.kept), floats(plan.scratch)
        used = floats(plan.gates_shape) if gates_matter else gates
        of_gates = plan.address_of_gates(used, kept)
        usage = floats(plan.gates_shape[1]) if usage_matters else None
        given = map(address, (x, gate_weight, gate_bias, weight, bias, y))
        moved = map(address, _in_c_order(estimates))
        from_batch = int(plan.training or estimates is None)
        call_at(
            "forward",
            (*given, of_gates, *map(address, (kept, scratch, usage)), *moved),
            (*plan.moves, from_batch, *plan.numbers),
        )
        ctx.save_for_backward(x, gates, gate_weight, gate_bias, weight, bias, used, kept)
        ctx.plan, ctx.strides, ctx.matter = plan, x.stride(), (gates_matter, usage_matters)
        ctx.set_materialize_grads(False)
        heard = (y,) if used is None or not gates_matter else (y, used)
        return heard if usage is None else (*heard, usage)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *more: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, used, kept = ctx.saved_tensors  # once: checkpointing unpacks them once
        x, gates, *parameters = inputs
        plan, needed = ctx.plan, ctx.needs_input_grad
        dused, dusage = beside_output(more, *ctx.matter)
        upstream = (dy, dused, dusage)
        if plain.only_plain(*upstream) or dy is None or not runs_c(x, *upstream):
            forward = partial(plain.mode_norm, eps=plan.eps)
            return (*plain.differentiate(forward, inputs, needed, upstream), *NO_GRADIENTS)
        x = laid_out(x, ctx.strides)
        dy, dused, dusage = dense_like(dy, x), dense(dused), dense(dusage)
        dx = torch.empty_like(x) if needed[0] else None
        gradients = [None if p is None else torch.empty_like(p) for p in parameters]
        dgates = None if gates is None else torch.empty_like(gates)
        scratch = floats(plan.backward_scratch)
        gate_weight, _, weight, bias = parameters
        of_gates = plan.address_of_gates(used, kept)
        free = scratch.data_ptr()
        of_dgates = free + 4 * plan.gates_in_scratch if dgates is None else dgates.data_ptr()
        given = map(address, (gate_weight, weight, bias, dused, dusage, dx))
        found = map(address, gradients)
        call_at(
            "backward",
            (*map(address, (dy, x)), of_gates, address(kept), *given, of_dgates, *found, free),
            plan.numbers,
        )
        return dx, dgates, *gradients, *NO_GRADIENTS


_node = plain.node(_ModeNorm)


def _in_c_order(estimates: RunningEstimates | None) -> tuple[Tensor | None, ...]:
    if estimates is None:
        return (None,) * 4
    return estimates.mean, estimates.var, estimates.share, estimates.num_batches_tracked
