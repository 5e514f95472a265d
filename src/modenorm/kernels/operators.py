"""The mixing as registered operators, for `torch.compile` on a GPU.

Inductor gets the streaming passes as plain operators, which it fuses with what stands around the
norm (the activation, the residual), and the mixing as one opaque operator, whose dozens of tiny
operators it would turn into dozens of launches. Measured in docs/kernels.md.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

__all__ = ["available", "mix"]

_TRITON = importlib.util.find_spec("triton") is not None


def available(x: Tensor) -> bool:
    """Whether the operators serve a compiled call on this tensor."""
    return _TRITON and x.device.type == "cuda" and x.dtype != torch.float64


@functools.lru_cache(maxsize=4096)
def _launches(
    shape: tuple[int, int],
    num_modes: int,
    eps: float,
    has_gate: bool,
    affine: tuple[bool, bool, bool],
    device: int,
) -> Any:
    from modenorm.kernels.gpu_mixing import Mixing

    running = (False, False, False, False)
    return Mixing(*shape, 1, num_modes, eps, 0.0, has_gate, affine, running, direct=False)


def _plan(mean: Tensor, num_modes: int, eps: float, *inputs: Tensor | None) -> tuple[Any, int]:
    from modenorm.kernels.launch import current_stream
    from modenorm.kernels.plan import affine_kind

    gate_weight, weight, bias = inputs
    kind = affine_kind(weight, bias)
    shape = (mean.shape[0], mean.shape[1])
    launches = _launches(shape, num_modes, eps, gate_weight is not None, kind, mean.get_device())
    return launches, current_stream(mean)


@torch.library.custom_op("modenorm::mix", mutates_args=())
def mix(
    mean: Tensor,
    var: Tensor,
    gates: Tensor | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Scale, shift, gates, and the modes' mean, variance and mass, from the moments (N, C)."""
    scale, shift, used, mode_mean, mode_var, mass = _empty_outputs(mean, gates, gate_weight)
    if gates is not None:
        used.copy_(gates)
    launches, stream = _plan(mean, used.shape[1], eps, gate_weight, weight, bias)
    finite = torch.empty_like(mean[:, 0])
    filler = mean  # for pointers that the kernels don't follow
    launches.gates(
        stream, mean, var, _or(gate_weight, filler), _or(gate_bias, filler), used, finite
    )
    launches.statistics(
        stream, mean, var, used, finite, filler, filler, filler, filler, mode_mean, mode_var, mass
    )
    launches.coefficients(
        stream,
        mean,
        used,
        mode_mean,
        mode_var,
        _or(weight, filler),
        _or(bias, filler),
        scale,
        shift,
    )
    return scale, shift, used, mode_mean, mode_var, mass


@mix.register_fake
def _(
    mean: Tensor,
    var: Tensor,
    gates: Tensor | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _empty_outputs(mean, gates, gate_weight)


def _empty_outputs(
    mean: Tensor, gates: Tensor | None, gate_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_samples, num_channels = mean.shape
    if gates is not None:
        num_modes = gates.shape[1]
    else:
        assert gate_weight is not None
        num_modes = gate_weight.shape[0]
    rows, modes = (num_samples, num_channels), (num_modes, num_channels)
    shapes = (rows, rows, (num_samples, num_modes), modes, modes, (num_modes,))
    scale, shift, used, mode_mean, mode_var, mass = (mean.new_empty(shape) for shape in shapes)
    return scale, shift, used, mode_mean, mode_var, mass


@torch.library.custom_op("modenorm::mix_backward", mutates_args=())
def mix_backward(
    dscale: Tensor,
    dshift: Tensor,
    dused: Tensor | None,
    mean: Tensor,
    var: Tensor,
    used: Tensor,
    mode_mean: Tensor,
    mode_var: Tensor,
    mass: Tensor,
    gate_weight: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of mean, var, gates, gate_weight, gate_bias, weight and bias; empty if absent."""
    launches, stream = _plan(mean, used.shape[1], eps, gate_weight, weight, bias)
    outputs = _empty_gradients(mean, used, gate_weight, weight, bias)
    dmean, dvar, dgates, dgate_weight, dgate_bias, dweight, dbias = outputs
    dmean.copy_(dshift)  # the kernels turn A and D into the moments' gradients in place
    dvar.copy_(dscale)
    scale = torch.empty_like(mean)
    u, s, dweights = (torch.empty_like(mode_mean) for _ in range(3))
    per_mode = weight is not None and weight.ndim == 2
    launches.modes_backward(
        stream,
        mean,
        used,
        mode_mean,
        mode_var,
        mass,
        _or(weight, mean),
        dvar,
        dmean,
        u,
        s,
        dweight if per_mode else dweights,
        _or(bias, mean) if bias is None else dbias,
    )
    samples = launches.samples_backward if dused is None else launches.samples_backward_extra
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
        dvar,
        dmean,
        scale,
        dgates,
    )
    launches.parameters_backward(stream, mean, dgates, dweights, dgate_weight, dgate_bias, dweight)
    dvar.mul_(0.5)  # the slope of dx is twice the gradient
    return outputs


@mix_backward.register_fake
def _(
    dscale: Tensor,
    dshift: Tensor,
    dused: Tensor | None,
    mean: Tensor,
    var: Tensor,
    used: Tensor,
    mode_mean: Tensor,
    mode_var: Tensor,
    mass: Tensor,
    gate_weight: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _empty_gradients(mean, used, gate_weight, weight, bias)


def _empty_gradients(
    mean: Tensor,
    used: Tensor,
    gate_weight: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    modes = (used.shape[1],) if gate_weight is not None else (0,)
    return (
        mean.new_empty(mean.shape),
        mean.new_empty(mean.shape),
        used.new_empty(used.shape),
        mean.new_empty((0,) if gate_weight is None else gate_weight.shape),
        mean.new_empty(modes),
        mean.new_empty((0,) if weight is None else weight.shape),
        mean.new_empty((0,) if bias is None else bias.shape),
    )


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    mean, var, gates, gate_weight, _, weight, bias, eps = inputs
    ctx.save_for_backward(mean, var, *output[2:], gate_weight, weight, bias)
    ctx.eps, ctx.given = eps, gates is not None
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, dscale: Tensor | None, dshift: Tensor | None, dused: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    mean, var, used, mode_mean, mode_var, mass, gate_weight, weight, bias = ctx.saved_tensors
    dscale = torch.zeros_like(mean) if dscale is None else dscale
    dshift = torch.zeros_like(mean) if dshift is None else dshift
    dmean, dvar, dgates, dgate_weight, dgate_bias, dweight, dbias = mix_backward(
        dscale.contiguous(),
        dshift.contiguous(),
        dused,
        mean,
        var,
        used,
        mode_mean,
        mode_var,
        mass,
        gate_weight,
        weight,
        bias,
        ctx.eps,
    )
    has_gate = gate_weight is not None
    return (
        dmean,
        dvar,
        dgates if ctx.given else None,
        dgate_weight if has_gate else None,
        dgate_bias if has_gate else None,
        None if weight is None else dweight,
        None if bias is None else dbias,
        None,
    )


mix.register_autograd(_differentiate, setup_context=_keep)
