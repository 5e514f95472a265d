"""The small part, and all of the paper: from channel moments to one map per sample and channel.

Letters: N samples, C channels, K modes. Every norm of this family is

    y_ncl = (x_ncl − m_nc) · scale_nc + shift_nc,

where scale and shift depend on x only through the moments m_nc = mean_l x and v_nc = var_l x.
Plain differentiable operators on (N, C) arrays; the fused kernels compute the same.
Derivations: docs/math.md.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "RunningEstimates",
    "Statistics",
    "autocasting",
    "batch_map",
    "batch_statistics",
    "channel_modes",
    "coefficients",
    "divisor_of",
    "full_precision",
    "product",
    "update_running",
    "written_out",
]


class Statistics(NamedTuple):
    """What each mode looks like: mean and biased variance per channel, and the mass it received."""

    mean: Tensor  # (K, C)
    var: Tensor  # (K, C)
    mass: Tensor  # (K,), Σ_n g_nk
    share: Tensor  # (K,), mass over the mass of all samples


class RunningEstimates(NamedTuple):
    """A layer's buffers, changed in place by a training step."""

    mean: Tensor  # (K, C)
    var: Tensor  # (K, C)
    num_batches_tracked: Tensor | None = None
    share: Tensor | None = None  # (K,), summed shares, for momentum=None with "usage"


def autocasting(x: Tensor) -> bool:
    """Whether products with x would run in autocast's half type."""
    if not torch._C._is_any_autocast_enabled():  # asking for a device takes far longer
        return False
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def full_precision(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Keeps a gate of the user's own in full precision; compiled, it follows autocast."""
    if autocasting(x) and not torch.compiler.is_compiling():
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()


def product(left: Tensor, right: Tensor) -> Tensor:
    """The matrix product in the tensors' own type, whatever autocast says."""
    if autocasting(left):
        return (left[:, :, None] * right).sum(1)
    return left @ right


def written_out(
    weight: Tensor | None, bias: Tensor | None, num_modes: int, num_channels: int
) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias, (C,) or (K, C), of which either size may be given as 1."""
    sizes = (num_modes, num_channels)

    def expanded(parameter: Tensor | None) -> Tensor | None:
        if parameter is None or parameter.shape in (sizes, sizes[1:]):
            return parameter
        return parameter.expand(sizes if parameter.ndim == 2 else sizes[1:])

    return expanded(weight), expanded(bias)


def batch_statistics(
    mean: Tensor, var: Tensor, gates: Tensor, counts: Tensor | None = None
) -> Statistics:
    """μ_k and σ²_k of the batch, as sums of squares around a mean: never ⟨x²⟩ − ⟨x⟩².

    A mode that no sample belongs to gets mean 0 and variance 0: finite, and multiplied by 0 later.

    Args:
        mean: m, (N, C).
        var: v, (N, C).
        gates: g, (N, K).
        counts: (N,), positions that count in each sample; None when all samples have the same.
    """
    origin = _origin(mean, 0)
    batch = _statistics(mean - origin, var, gates, counts, origin)
    return batch._replace(mean=batch.mean + origin)


def batch_map(
    mean: Tensor,
    var: Tensor,
    gates: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    counts: Tensor | None = None,
    constant: bool = False,
) -> tuple[Tensor, Tensor, Statistics]:
    """Scale and shift around the mean by the batch's own statistics, and these.

    Args:
        mean: m, (N, C).
        var: v, (N, C).
        gates: g, (N, K).
        weight: See `coefficients`.
        bias: See `coefficients`.
        eps: Added to every variance.
        counts: See `batch_statistics`.
        constant: The map's centre is not to be differentiated.
    """
    origin = _origin(mean, 0)
    apart = mean - origin
    batch = _statistics(apart, var, gates, counts, origin)
    centre = apart.detach() if constant else apart
    scale, shift = coefficients(batch.mean, batch.var, gates, centre, weight, bias, eps)
    return scale, shift, batch._replace(mean=batch.mean + origin)


def _origin(mean: Tensor, axis: int) -> Tensor:
    """A constant amid the means, from which they are counted.

    Sums of large means lose digits, in the gates' gradients first of all: these are differences of
    sums that nearly cancel, and differences of means stay the same wherever one counts from.
    """
    return mean.detach().mean(axis).nan_to_num(0.0, 0.0, 0.0)  # of no samples, or too large


def _statistics(
    apart: Tensor, var: Tensor, gates: Tensor, counts: Tensor | None, origin: Tensor
) -> Statistics:
    """`batch_statistics` of means that are counted from the origin, and so are the modes'."""
    total = gates.shape[0] if counts is None else counts.sum()
    if counts is not None:
        gates = gates * counts[:, None]
    mass = gates.sum(0)  # (K,)
    weights = (gates / divisor_of(mass)).t()  # (K, N), rows sum to 1
    mode_mean = product(weights, apart) - origin * (mass[:, None] == 0)
    between = (apart - mode_mean[:, None]) ** 2  # (K, N, C)
    mode_var = (weights[:, :, None] * (var + between)).sum(1)
    return Statistics(mode_mean, mode_var, mass, mass / total)


def divisor_of(mass: Tensor) -> Tensor:
    """What sums over a mode are divided by: of one without any mass, infinity.

    Its means are then 0, and so are their slopes, also if samples that are all padding have it.
    """
    return mass.clamp_min(torch.finfo(mass.dtype).tiny).masked_fill(mass == 0, torch.inf)


def coefficients(
    mode_mean: Tensor,
    mode_var: Tensor,
    gates: Tensor,
    centre: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Scale and shift, (N, C), of the map y = (x − centre) · scale + shift.

    scale = α Σ_k g_nk/σ_k and shift = β + α Σ_k g_nk (centre − μ_k)/σ_k: only differences of means
    appear, so a large mean costs no digits. Weight and bias are (C,), or (K, C) for one per mode.
    """
    inverse = torch.rsqrt(mode_var + eps)  # (K, C)
    if weight is not None:
        inverse = inverse * weight
    offset = inverse * (centre[:, None] - mode_mean)  # (N, K, C)
    if bias is not None and bias.ndim == 2:
        offset = offset + bias
    shift = (gates[:, :, None] * offset).sum(1)
    if bias is not None and bias.ndim == 1:
        shift = shift + bias
    return product(gates, inverse), shift


def channel_modes(
    mean: Tensor,
    var: Tensor | None,
    gate_weight: Tensor,
    gate_bias: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mode group normalization's scale and shift, (N, C), and its gates, (N, C, K).

    With var, σ²_k is taken over all values of the channels; without, over their averages.
    """
    logs = torch.log_softmax(mean[..., None] * gate_weight + gate_bias, dim=-1)  # (N, C, K)
    weights = torch.softmax(logs, dim=1)  # gates over their sum, which may be too small a number
    apart = mean - _origin(mean, 1)[:, None]
    mode_mean = (weights * apart[..., None]).sum(1)  # (N, K)
    distance = apart[..., None] - mode_mean[:, None]  # (N, C, K)
    square = distance**2
    if var is not None:
        square = square + var[..., None]
    inverse = torch.rsqrt((weights * square).sum(1) + eps)  # (N, K)
    scale = inverse.mean(1, keepdim=True).expand_as(mean)
    shift = (distance * inverse[:, None]).mean(-1)
    if weight is not None:
        scale, shift = scale * weight, shift * weight
    if bias is not None:
        shift = shift + bias
    return scale, shift, logs.exp()


@torch.no_grad()
def update_running(
    estimates: RunningEstimates, batch: Statistics, momentum: float | None, running_update: str
) -> None:
    """Move the running estimates towards the batch, without the cancellation of ⟨x²⟩ − ⟨x⟩².

    With d = μ − running_mean this is the paper's average of ⟨x⟩ and ⟨x²⟩ with rate λ:
    running_var ← (1−λ) running_var + λ σ² + λ(1−λ) d² and running_mean ← running_mean + λ d.
    A batch with NaN or infinity, or with every position masked, changes nothing; a mode without
    samples, or whose gates together are no normal number, keeps its estimates.

    Args:
        estimates: changed in place.
        batch: the batch's statistics.
        momentum: λ; None averages over all batches so far.
        running_update: "paper" gives every mode the same rate; "usage" weights it by the mode's
            share of the batch.
    """
    # in the estimates' type, which may hold less
    kept = batch.mean.to(estimates.mean.dtype), batch.var.to(estimates.var.dtype)
    finite = torch.isfinite(kept[0]).all() & torch.isfinite(kept[1]).all()
    # (K,); a mass below the smallest divisor of `batch_statistics` gives no mean
    received = finite & (batch.mass >= torch.finfo(batch.mass.dtype).tiny)
    share = torch.where(received, batch.share, 0)
    if estimates.num_batches_tracked is not None:
        estimates.num_batches_tracked.add_(received.any())
    if estimates.share is not None:
        estimates.share.add_(share)
    rate = _rate(estimates, share, momentum, running_update)[:, None]  # (K, 1)
    used = received[:, None]
    step = batch.mean - estimates.mean
    var = (1 - rate) * estimates.var + rate * batch.var + rate * (1 - rate) * step**2
    estimates.var.copy_(torch.where(used, var, estimates.var))
    estimates.mean.copy_(torch.where(used, estimates.mean + rate * step, estimates.mean))


def _rate(
    estimates: RunningEstimates, share: Tensor, momentum: float | None, running_update: str
) -> Tensor:
    """λ of each mode, (K,)."""
    if momentum is not None:
        return momentum * (share if running_update == "usage" else torch.ones_like(share))
    if running_update == "usage":
        assert estimates.share is not None
        return torch.where(share > 0, share / estimates.share, 0)
    assert estimates.num_batches_tracked is not None
    return (1 / estimates.num_batches_tracked.clamp_min(1).to(share.dtype)).expand_as(share)
