"""Mode normalization's mixing as one autograd node in torch operators: for CPUs and custom gates.

The same numbers as `mixing.batch_statistics` and `mixing.coefficients`, but modes are taken one
after the other and only (N, C), (N, K) and (K, C) arrays are kept for backward: left to autograd,
the plain form keeps several (N, K, C) arrays, which for (N, C) inputs is K times the input.
Letters and formulas as in docs/math.md.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modenorm import exchange, mixing
from modenorm.exchange import Ranks
from modenorm.kernels.plain import differentiate

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
    among = None if ranks is None else _Among(ranks, positions)
    scale, shift, mode_mean, mode_var, mass = _Mix.apply(mean, var, gates, weight, bias, eps, among)
    if among is not None:
        return scale, shift, exchange.with_share(mode_mean, mode_var, mass)
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
        mass = gates.sum(0)
        weights = (gates / mass.clamp_min(torch.finfo(gates.dtype).tiny)).t()  # (K, N)
        mode_mean = weights @ mean
        mode_var = weights @ var
        for k, row in enumerate(weights):
            mode_var[k] += row @ (mean - mode_mean[k]).square_()
        if among is not None:
            mass, mode_mean, mode_var = exchange.merge(
                mass * among.positions, mode_mean, mode_var, among.ranks.number
            )
            mass = mass / among.positions
        inverse = _scaled(mode_var, weight, eps)
        shift = torch.zeros_like(mean)
        for k in range(gates.shape[1]):
            shift += (mean - mode_mean[k]).mul_(inverse[k]).mul_(gates[:, k, None])
        if bias is not None:
            shift += gates @ bias if bias.ndim == 2 else bias
        ctx.save_for_backward(mean, var, gates, weight, bias, mode_mean, mode_var, mass)
        ctx.eps, ctx.among = eps, among
        ctx.mark_non_differentiable(mode_mean, mode_var, mass)
        ctx.set_materialize_grads(False)
        return gates @ inverse, shift, mode_mean, mode_var, mass

    @staticmethod
    def backward(
        ctx: Any, dscale: Tensor | None, dshift: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: checkpointing unpacks them once
        inputs = saved[:5]
        if torch.is_grad_enabled():
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
    divisor = mass.clamp_min(torch.finfo(mass.dtype).tiny)[:, None]
    inverse = torch.rsqrt(mode_var + ctx.eps)
    scaled = _scaled(mode_var, weight, ctx.eps)
    t, e = gates.t() @ a, gates.t() @ d  # (K, C)
    for k in range(gates.shape[1]):
        t[k] += gates[:, k] @ (mean - mode_mean[k]).mul_(d)
    u = -scaled * e
    s = -0.5 * scaled * inverse**2 * t
    if ctx.among is not None and any(ctx.needs_input_grad[:3]):
        u, s = exchange.total(torch.cat([u, s], 1), ctx.among.ranks.number).chunk(2, 1)
    u, s = u / divisor, s / divisor
    dmean, dgates = gates @ u, torch.empty_like(gates)
    for k in range(gates.shape[1]):
        apart = mean - mode_mean[k]
        dmean += (apart * (2 * s[k])).mul_(gates[:, k, None])
        direct = torch.addcmul(a, d, apart) @ scaled[k]
        spread = torch.addcmul(var, apart, apart).sub_(mode_var[k]) @ s[k]
        dgates[:, k] = direct + apart @ u[k] + spread
    dweight, dbias = inverse * t, e
    if bias is not None and bias.ndim == 2:
        dgates += d @ bias.t()
    if weight is not None and weight.ndim == 1:
        dweight = dweight.sum(0)
    if bias is not None and bias.ndim == 1:
        dbias = d.sum(0)
    return (
        dmean,
        gates @ s,
        dgates,
        None if weight is None else dweight,
        None if bias is None else dbias,
    )


def _scaled(mode_var: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """α/σ of every mode, (K, C)."""
    inverse = torch.rsqrt(mode_var + eps)
    return inverse if weight is None else inverse * weight


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
