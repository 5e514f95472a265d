"""Mode normalization for `torch.compile` on a GPU.

Inductor's own sums over the positions of every sample are slow, and it would make dozens of
launches of the mixing. So what leads to the map's coefficients, forward and backward, is an
operator that it does not look into; the maps themselves are plain operators, which it fuses with
what stands around the norm: the activation, the residual. Measured in docs/kernels.md.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from modenorm import mixing
from modenorm.checks import Options
from modenorm.kernels import plain
from modenorm.kernels.layout import as_dense, dense_like
from modenorm.mixing import RunningEstimates

__all__ = ["available", "mode_norm"]

_TRITON = importlib.util.find_spec("triton") is not None
_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def available(x: Tensor) -> bool:
    """Whether the operators serve a compiled call on this tensor."""
    return _TRITON and x.device.type == "cuda" and x.dtype in _TYPES


def mode_norm(
    x: Tensor,
    gates: Tensor | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    estimates: RunningEstimates | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Y and the gates (N, K); gates None: the linear gate. Estimates are updated in place.

    The gates have a gradient only if they matter.
    """
    given = (gates, gate_weight, gate_bias, weight, bias)
    constants = [None if t is None else t.detach() for t in (x, *given)]
    moved = estimates if estimates is not None and options.momentum is not None else None
    usage = options.running_update == "usage"
    rate = 0.0 if options.momentum is None else options.momentum
    buffers = (None,) * 4 if moved is None else moved
    scale, shift, *kept = statistics(*constants, *buffers, options.eps, rate, usage)
    if estimates is not None and moved is None:
        *_, mode_mean, mode_var, mass = kept
        batch = mixing.Statistics(mode_mean, mode_var, mass, mass / x.shape[0])
        mixing.update_running(estimates, batch, options.momentum, options.running_update)
    y, *used = _Map.apply(x, *given, scale, shift, *kept, options.eps, options.gates_matter)
    return y, used[0] if used else kept[0]


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
        scale: Tensor,
        shift: Tensor,
        used: Tensor,
        mean: Tensor,
        var: Tensor,
        mode_mean: Tensor,
        mode_var: Tensor,
        mass: Tensor,
        eps: float,
        gates_matter: bool,
    ) -> tuple[Tensor, ...]:
        given = (gates, gate_weight, gate_bias, weight, bias)
        ctx.save_for_backward(x, *given, used, mean, var, mode_mean, mode_var, mass)
        ctx.eps = eps
        y = plain.apply(x, mean, scale, shift)
        return (y, used.clone()) if gates_matter else (y,)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dused: Tensor | None = None) -> tuple[Tensor | None, ...]:
        x, *given, used, mean, var, mode_mean, mode_var, mass = ctx.saved_tensors
        kept = (used, mean, var, mode_mean, mode_var, mass)
        scale, slope, offset, *found = gradients(dy, dused, x, *given, *kept, ctx.eps)
        along = x.shape[:2] + (1,) * (x.ndim - 2)
        apart = x - mean.view(along)
        dx = dy * scale.view(along) + (apart * slope.view(along) + offset.view(along))
        present = (None if p is None else d for p, d in zip(given, found, strict=True))
        return plain.as_type(dx, x.dtype), *present, *(None,) * 10


@torch.library.custom_op(
    "modenorm::statistics", mutates_args=("running_mean", "running_var", "tracked", "share")
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
    usage: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Scale, shift, gates, mean, variance, and the modes' mean, variance and mass."""
    from modenorm.kernels.mode_arrays import Inputs
    from modenorm.kernels.mode_plan import plan_for
    from modenorm.kernels.plan import on_device

    x, inputs = as_dense(x), Inputs(gates, gate_weight, gate_bias, weight, bias)
    estimates = None
    if running_mean is not None and running_var is not None:
        estimates = RunningEstimates(running_mean, running_var, tracked, share)
    outputs = _empty_statistics(x, gates, gate_weight)
    scale, shift, used, *kept = outputs
    if gates is not None:
        used.copy_(gates)
    with on_device(x) as stream:
        options = Options(True, momentum, eps, "usage" if usage else "paper")
        plan = plan_for(x, inputs, estimates, options, moves=estimates is not None)
        assert plan is not None  # all was seen to fit while tracing
        work = [scale, shift, torch.empty_like(scale[:, 0])]
        plan.mix(stream, x, inputs, estimates, used, kept, work)
    return outputs


@statistics.register_fake
def _(
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
    usage: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _empty_statistics(x, gates, gate_weight)


def _empty_statistics(
    x: Tensor, gates: Tensor | None, gate_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_samples, num_channels = x.shape[:2]
    if gates is not None:
        num_modes = gates.shape[1]
    else:
        assert gate_weight is not None
        num_modes = gate_weight.shape[0]
    rows, modes = (num_samples, num_channels), (num_modes, num_channels)
    return (
        _floats(x, rows),
        _floats(x, rows),
        _floats(x, (num_samples, num_modes)),
        _floats(x, rows),
        _floats(x, rows),
        _floats(x, modes),
        _floats(x, modes),
        _floats(x, (num_modes,)),
    )


@torch.library.custom_op("modenorm::gradients", mutates_args=())
def gradients(
    dy: Tensor,
    dused: Tensor | None,
    x: Tensor,
    gates: Tensor | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    used: Tensor,
    mean: Tensor,
    var: Tensor,
    mode_mean: Tensor,
    mode_var: Tensor,
    mass: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Scale, slope and offset of dx, then the inputs' gradients, of no size if there is none."""
    from modenorm.kernels.mode_arrays import Backward, Inputs
    from modenorm.kernels.mode_plan import plan_for
    from modenorm.kernels.plan import on_device

    x, inputs = as_dense(x), Inputs(gates, gate_weight, gate_bias, weight, bias)
    outputs = _empty_gradients(x, gates, gate_weight, gate_bias, weight, bias)
    scale, slope, offset, dgates, *found = outputs
    present = [None if p is None else d for p, d in zip(inputs[1:], found, strict=True)]
    kept = [mean, var, mode_mean, mode_var, mass]
    with on_device(x) as stream:
        plan = plan_for(x, inputs, None, Options(eps=eps), others=(used, *kept))
        assert plan is not None  # all was seen to fit while tracing
        dlogits = torch.empty_like(used) if gates is None else dgates
        u, s, dweights = (torch.empty_like(mode_mean) for _ in range(3))
        work = [slope, offset, scale, u, s, dweights]
        dused = None if dused is None else dused.contiguous()
        places = (used, dused, None, None, None, dlogits)
        arrays = Backward(dense_like(dy, x), x, *inputs, *places, *present)
        plan.mix_backward(stream, arrays, kept, work)
    return outputs


@gradients.register_fake
def _(
    dy: Tensor,
    dused: Tensor | None,
    x: Tensor,
    gates: Tensor | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    used: Tensor,
    mean: Tensor,
    var: Tensor,
    mode_mean: Tensor,
    mode_var: Tensor,
    mass: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _empty_gradients(x, gates, gate_weight, gate_bias, weight, bias)


def _empty_gradients(
    x: Tensor, *inputs: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = x.shape[:2]
    dgates, dgate_weight, dgate_bias, dweight, dbias = (
        _floats(x, (0,) if given is None else given.shape) for given in inputs
    )
    parameters = (dgate_weight, dgate_bias, dweight, dbias)
    return _floats(x, rows), _floats(x, rows), _floats(x, rows), dgates, *parameters


def _floats(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, device=x.device, dtype=torch.float32)
