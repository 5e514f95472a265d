"""Mode normalization's mixing as one autograd node: for CPUs and custom gates.

The same numbers as `mixing.batch_statistics` and `mixing.coefficients`, but only (N, C), (N, K) and
(K, C) arrays are kept for backward: left to autograd, the plain form keeps several (N, K, C) ones,
which for (N, C) inputs is K times the input. Its parts are in Triton (kernels/gpu/mixing.py),
in C (kernels/c/mixing.py) or in torch operators (kernels/torch_mixing.py).
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modenorm import exchange, mixing
from modenorm.exchange import Ranks
from modenorm.kernels import torch_mixing
from modenorm.kernels.c import mixing as c_mixing
from modenorm.kernels.choice import choose_kernels
from modenorm.kernels.mixing_arrays import Affine, Modes, Samples
from modenorm.kernels.plain import differentiate, only_plain

__all__ = ["mix"]


def mix(
    mean: Tensor,
    var: Tensor,
    gates: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    ranks: Ranks | None = None,
    positions: int = 1,
) -> tuple[Tensor, Tensor, mixing.Statistics]:
    """Scale and shift (N, C) around the mean as a constant centre, and the batch's statistics.

    With ranks the statistics are those of all, each sample weighted by its number of positions.
    """
    weight, bias = mixing.written_out(weight, bias, gates.shape[1], mean.shape[1])
    among = None if ranks is None else _Among(ranks, positions)
    scale, shift, mode_mean, mode_var, mass = _Mix.apply(mean, var, gates, weight, bias, eps, among)
    if among is not None:
        return scale, shift, exchange.with_share(mode_mean, mode_var, mass, positions)
    return scale, shift, mixing.Statistics(mode_mean, mode_var, mass, mass / gates.shape[0])


class _Among(NamedTuple):
    """The ranks that share the statistics, and what a sample of this one weighs."""

    ranks: Ranks
    positions: int


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mean: Tensor,
        var: Tensor,
        gates: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        among: _Among | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        samples, affine = Samples(mean, var, gates), Affine(weight, bias, eps)
        parts = _parts(samples, affine)
        modes = parts.statistics(samples)
        if among is not None:
            modes = _merged(modes, among)
        scale, shift = parts.coefficients(samples, modes, affine)
        ctx.save_for_backward(*samples, weight, bias, *modes)
        ctx.eps, ctx.among = eps, among
        ctx.mark_non_differentiable(*modes)
        ctx.set_materialize_grads(False)
        return scale, shift, *modes

    @staticmethod
    def backward(
        ctx: Any, dscale: Tensor | None, dshift: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: checkpointing unpacks them once
        inputs = saved[:5]
        if only_plain(dscale, dshift):
            forward = partial(_plain_mix, eps=ctx.eps, among=ctx.among)
            found = differentiate(forward, inputs, ctx.needs_input_grad, (dscale, dshift))
            return (*found, None, None)
        with torch.autocast(inputs[0].device.type, enabled=False):
            return (*_differentiate(ctx, saved, dscale, dshift), None, None)


def _differentiate(
    ctx: Any, saved: tuple[Tensor, ...], dscale: Tensor | None, dshift: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of mean, var, gates, weight and bias."""
    mean, var, gates, weight, bias, *of_modes = saved
    samples, modes = Samples(mean, var, gates), Modes(*of_modes)
    affine = Affine(weight, bias, ctx.eps)
    a = torch.zeros_like(samples.mean) if dscale is None else dscale
    d = torch.zeros_like(samples.mean) if dshift is None else dshift
    parts = _parts(samples, affine, a, d)
    u, s, handed, dweight, dbias = parts.mode_gradients(a, d, samples, modes, affine)
    if not any(ctx.needs_input_grad[:3]):
        return None, None, None, dweight, dbias
    if ctx.among is not None:
        u, s = exchange.sum_gradients(u, s, modes.mass, ctx.among.ranks.number)
    found = parts.sample_gradients(a, d, samples, modes, affine, u, s, handed)
    return *found, dweight, dbias


def _merged(modes: Modes, among: _Among) -> Modes:
    mean, var, mass = modes
    mass, mean, var = exchange.merge(mass, mean, var, among.ranks.number, among.positions)
    return Modes(mean, var, mass)


def _parts(samples: Samples, affine: Affine, *gradients: Tensor) -> ModuleType:
    """The module whose functions serve: statistics, coefficients, and the gradients of both."""
    kernels = choose_kernels(*samples, affine.weight, affine.bias, *gradients)
    if kernels == "gpu":
        from modenorm.kernels.gpu import mixing as gpu_mixing

        return gpu_mixing if gpu_mixing.takes(samples, affine, *gradients) else torch_mixing
    return c_mixing if kernels == "c" else torch_mixing


def _plain_mix(
    mean: Tensor,
    var: Tensor,
    gates: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    among: _Among | None,
) -> tuple[Tensor, Tensor]:
    if among is None:
        return mixing.batch_map(mean, var, gates, weight, bias, eps, constant=True)[:2]
    batch = exchange.statistics(mean, var, gates * among.positions, among.ranks)
    centre = mean.detach()
    return mixing.coefficients(batch.mean, batch.var, gates, centre, weight, bias, eps)
