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
from modenorm.kernels import runs_c, runs_triton, torch_mixing
from modenorm.kernels.c import mixing as c_mixing
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
        parts = _parts(mean, var, gates, weight, bias)
        mass, mode_mean, mode_var = parts.statistics(mean, var, gates)
        if among is not None:
            mass, mode_mean, mode_var = exchange.merge(
                mass, mode_mean, mode_var, among.ranks.number, among.positions
            )
        scale, shift = parts.coefficients(mean, gates, mode_mean, mode_var, weight, bias, eps)
        ctx.save_for_backward(mean, var, gates, weight, bias, mode_mean, mode_var, mass)
        ctx.eps, ctx.among = eps, among
        ctx.mark_non_differentiable(mode_mean, mode_var, mass)
        ctx.set_materialize_grads(False)
        return scale, shift, mode_mean, mode_var, mass

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
    mean, var, gates, weight, bias, mode_mean, mode_var, mass = saved
    a = torch.zeros_like(mean) if dscale is None else dscale
    d = torch.zeros_like(mean) if dshift is None else dshift
    parts = _parts(mean, var, gates, weight, bias, a, d)
    u, s, handed, dweight, dbias = parts.mode_gradients(
        a, d, mean, gates, mode_mean, mode_var, mass, weight, bias, ctx.eps
    )
    if not any(ctx.needs_input_grad[:3]):
        return None, None, None, dweight, dbias
    if ctx.among is not None:
        u, s = exchange.sum_gradients(u, s, mass, ctx.among.ranks.number)
    dmean, dvar, dgates = parts.sample_gradients(
        a, d, mean, var, gates, mode_mean, mode_var, u, s, handed, bias
    )
    return dmean, dvar, dgates, dweight, dbias


def _parts(
    mean: Tensor,
    var: Tensor,
    gates: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *gradients: Tensor,
) -> ModuleType:
    if runs_triton(mean):
        from modenorm.kernels.gpu import mixing as gpu_mixing

        fits = gpu_mixing.takes(mean, var, gates, weight, bias, *gradients)
        return gpu_mixing if fits else torch_mixing
    fits = runs_c(mean, var, gates, weight, bias, *gradients)
    return c_mixing if fits else torch_mixing


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
        batch = mixing.batch_statistics(mean, var, gates)
    else:
        batch = exchange.statistics(mean, var, gates * among.positions, among.ranks)
    centre = mean.detach()
    return mixing.coefficients(batch.mean, batch.var, gates, centre, weight, bias, eps)
