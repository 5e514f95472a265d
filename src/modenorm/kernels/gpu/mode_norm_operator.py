"""Mode normalization for `torch.compile` on a GPU.

Inductor's own sums over the positions of every sample are slow, and it would make dozens of
launches of the mixing. So what leads to the map's coefficients, forward and backward, is an
operator that it does not look into; the maps themselves are plain operators, which it fuses with
what stands around the norm: the activation, the residual. Measured in docs/speed.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modenorm import mixing
from modenorm.checks import Options
from modenorm.kernels import plain
from modenorm.kernels.cpp.operator import Work, operator
from modenorm.kernels.gpu.slab import Slab, backward_slab, forward_slab, kept_slab
from modenorm.kernels.layout import as_aligned, as_dense, dense_like
from modenorm.kernels.mode_norm_arrays import Backward, Forward, Found, Inputs, beside_output
from modenorm.mixing import RunningEstimates

__all__ = ["mode_norm"]


def mode_norm(
    x: Tensor, inputs: Inputs, estimates: RunningEstimates | None, options: Options
) -> Found:
    """y, the gates (N, K) and the modes' usage (K,), by the batch's statistics.

    These move the estimates in place. The gates have a gradient only if they matter, and there is
    a usage only if that does.
    """
    constants = [None if t is None else t.detach() for t in (x, *inputs)]
    moved = estimates if options.momentum is not None else None
    by_usage = options.running_update == "usage"
    rate = 0.0 if options.momentum is None else options.momentum
    numbers = (options.eps, rate, by_usage, options.usage_matters)
    kept, lines, usage = statistics(*constants, *(moved or (None,) * 4), *numbers)
    _, _, mode_mean, mode_var, mass, gates = _kept_slab(x, inputs).tensors(kept)
    if estimates is not None and moved is None:
        batch = mixing.Statistics(mode_mean, mode_var, mass, mass / x.shape[0])
        mixing.update_running(estimates, batch, options.momentum, options.running_update)
    matter = options.gates_matter
    asked = usage if options.usage_matters else None
    y, *more = _Map.apply(x, *inputs, kept, lines, asked, options.eps, matter, options.relu)
    used, found = beside_output(more, matter, options.usage_matters)
    if used is None:
        used = gates if inputs.gates is None else inputs.gates
    return y, used, found


class _Map(torch.autograd.Function):
    """The map, with the gradient of everything that its coefficients were made from."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gates: Tensor | None,
        gate_weight: Tensor | None,
        gate_bias: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        kept: Tensor,
        lines: Tensor,
        usage: Tensor | None,
        eps: float,
        gates_matter: bool,
        relu: bool,
    ) -> tuple[Tensor, ...]:
        inputs = Inputs(gates, gate_weight, gate_bias, weight, bias)
        ctx.save_for_backward(x, *inputs, kept, lines if relu else None)
        ctx.eps, ctx.gates_matter, ctx.usage_matters = eps, gates_matter, usage is not None
        mean, *_, used = _kept_slab(x, inputs).tensors(kept)
        scale, shift, _ = forward_slab(*x.shape[:2]).tensors(lines)
        y = plain.apply(x, mean, scale, shift)
        y = y.relu() if relu else y
        found = (y, (used if gates is None else gates).clone()) if gates_matter else (y,)
        return found if usage is None else (*found, usage)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *more: Tensor) -> tuple[Tensor | None, ...]:
        x, *given, kept, mapped = ctx.saved_tensors
        inputs = Inputs(*given)
        dused, dusage = beside_output(more, ctx.gates_matter, ctx.usage_matters)
        lines, *found = gradients(dy, dused, dusage, x, *inputs, kept, mapped, ctx.eps)
        mean, *_ = _kept_slab(x, inputs).tensors(kept)
        slope, offset, scale, *_ = _backward_slab(x, inputs).tensors(lines)
        along = x.shape[:2] + (1,) * (x.ndim - 2)
        # not x - mean: that is in the forward too, and might be kept for here, in float32
        apart = mean.view(along) - x
        if mapped is not None:
            _, shift, _ = forward_slab(*x.shape[:2]).tensors(mapped)
            dy = torch.where(shift.view(along) - apart * scale.view(along) <= 0, 0, dy)
        dx = dy * scale.view(along) + (offset.view(along) - apart * slope.view(along))
        present = (None if p is None else d for p, d in zip(inputs, found, strict=True))
        return plain.as_type(dx, x.dtype), *present, *(None,) * 6


_INPUTS = "Tensor? gates, Tensor? gate_weight, Tensor? gate_bias, Tensor? weight, Tensor? bias"


def _statistics_like(x: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the results of `statistics`."""
    device, inputs = x.device, Inputs(*given[:5])
    kept = _kept_slab(x, inputs).allocate(device)
    return kept, forward_slab(*x.shape[:2]).allocate(device), _usage(x, inputs, given[-1])


@operator(
    f"statistics(Tensor x, {_INPUTS}, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
    "Tensor(c!)? tracked, Tensor(d!)? share, "
    "float eps, float momentum, bool by_usage, bool usage_matters) -> (Tensor, Tensor, Tensor)",
    _statistics_like,
)
def statistics(
    x: Tensor,
    gates: Tensor | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    tracked: Tensor | None,
    share: Tensor | None,
    eps: float,
    momentum: float,
    by_usage: bool,
    usage_matters: bool,
) -> Work:
    """What is kept for backward, and the map's scale and shift: two slabs. The modes' usage."""
    from modenorm.kernels.gpu.mode_norm_plan import plan_for

    x, inputs = as_dense(x), Inputs(gates, gate_weight, gate_bias, weight, bias)
    estimates = None
    if running_mean is not None and running_var is not None:
        estimates = RunningEstimates(running_mean, running_var, tracked, share)
    update, apart = "usage" if by_usage else "paper", gates is not None
    options = Options(True, momentum, eps, update, usage_matters=usage_matters)
    plan = plan_for(x, inputs, estimates, options, estimates is not None, apart)
    assert plan is not None, "too many rows"  # all else was seen to fit while tracing
    kept, lines = plan.kept.allocate(x.device), plan.forward.allocate(x.device)
    running, usage = (running_mean, running_var, tracked, share), _usage(x, inputs, usage_matters)
    arrays = Forward(x, *inputs, *running, usage, gates, kept, lines, None)
    return Work((kept, lines, usage), plan.run_mix, arrays)


def _gradients_like(dy: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Memory for the results of `gradients`."""
    x, inputs = given[2], Inputs(*given[3:8])
    lines = _backward_slab(x, inputs).allocate(x.device)
    return lines, *(_like(tensor, x) for tensor in inputs)


@operator(
    "gradients(Tensor dy, Tensor? dused, Tensor? dusage, "
    f"Tensor x, {_INPUTS}, Tensor kept, Tensor? mapped, float eps) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _gradients_like,
)
def gradients(
    dy: Tensor,
    dused: Tensor | None,
    dusage: Tensor | None,
    x: Tensor,
    gates: Tensor | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    kept: Tensor,
    mapped: Tensor | None,
    eps: float,
) -> Work:
    """A slab with slope, offset and scale of dx; the inputs' gradients, of no size if none.

    `mapped` are the map's lines if a ReLU follows it, and dy is the gradient of what that gives.
    """
    from modenorm.kernels.gpu.mode_norm_plan import plan_for

    x, inputs = as_dense(x), Inputs(gates, gate_weight, gate_bias, weight, bias)
    dused = None if dused is None else dused.contiguous()
    dusage = None if dusage is None else as_aligned(dusage)
    options, apart = Options(True, None, eps), gates is not None
    plan = plan_for(x, inputs, None, options, gates_apart=apart, others=(kept, dused, mapped))
    assert plan is not None, "too many rows"
    found = [_like(given, x) for given in inputs]
    dgates, *gradients = (None if p is None else d for p, d in zip(inputs, found, strict=True))
    lines = plan.backward.allocate(x.device)
    places = (gates, dused, dusage, kept, lines, None, dgates)
    arrays = Backward._make((dense_like(dy, x), x, *inputs, *places, *gradients, mapped))
    stages = plan.run_mix_backward if mapped is None else plan.run_cut_backward
    stage = stages[dused is not None, dusage is not None]
    return Work((lines, *found), stage, arrays)


def _kept_slab(x: Tensor, inputs: Inputs) -> Slab:
    return kept_slab(x.shape[0], x.shape[1], inputs.num_modes)


def _backward_slab(x: Tensor, inputs: Inputs) -> Slab:
    return backward_slab(x.shape[0], x.shape[1], inputs.num_modes)


def _usage(x: Tensor, inputs: Inputs, matters: bool) -> Tensor:
    """Memory for the usage of the modes, of no size if it doesn't matter."""
    size = inputs.num_modes if matters else 0
    return torch.empty(size, device=x.device, dtype=torch.float32)


def _like(given: Tensor | None, x: Tensor) -> Tensor:
    """Memory for a gradient, of no size where there is nothing to have one."""
    shape = (0,) if given is None else given.shape
    return torch.empty(shape, device=x.device, dtype=torch.float32)
