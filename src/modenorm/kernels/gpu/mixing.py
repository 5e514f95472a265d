"""The parts of the mixing in Triton (mixing_launches.py): the functions of torch_mixing.py.

The launches are made for gates that are given, without a running update, and for one position: the
offset that they find is then the mean's gradient, and the slope twice the variance's.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from modenorm.kernels.gpu.device import on_device
from modenorm.kernels.gpu.mixing_launches import Mixing
from modenorm.kernels.gpu.plan import AffineKind, MixingKind, affine_kind, aligned, pointer
from modenorm.kernels.layout import can_count

__all__ = ["coefficients", "mode_gradients", "sample_gradients", "statistics", "takes"]

Handed = tuple[Tensor | None, float]
"""What `mode_gradients` hands on to `sample_gradients`: weight and eps."""


def takes(
    mean: Tensor,
    var: Tensor,
    gates: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *gradients: Tensor,
) -> bool:
    """Whether the kernels can: contiguous float32 on one device, weight and bias of one form."""
    forms = [None if parameter is None else parameter.ndim for parameter in (weight, bias)]
    if forms[0] != forms[1] or not can_count(mean, gates.shape[1]):
        return False
    return all(
        array.dtype == torch.float32
        and array.device == mean.device
        and type(array) in (Tensor, torch.nn.Parameter)
        and array.is_contiguous()
        for array in (mean, var, gates, weight, bias, *gradients)
        if array is not None
    )


def statistics(mean: Tensor, var: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mass of the modes, (K,), and their μ and σ², (K, C)."""
    num_modes, num_channels = gates.shape[1], mean.shape[1]
    mass, mode_mean = _empty(gates, num_modes), _empty(mean, num_modes, num_channels)
    mode_var = torch.empty_like(mode_mean)
    launches = _launches_for(mean, gates, None, None, 0.0, var)
    unused = (mean,) * 5  # whether samples are finite, and the running estimates
    with on_device(mean) as stream:
        launches.statistics(stream, mean, var, gates, *unused, mode_mean, mode_var, mass, mass)
    return mass, mode_mean, mode_var


def coefficients(
    mean: Tensor,
    gates: Tensor,
    mode_mean: Tensor,
    mode_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Scale and shift, (N, C)."""
    scale, shift = torch.empty_like(mean), torch.empty_like(mean)
    launches = _launches_for(mean, gates, weight, bias, eps, mode_mean, mode_var)
    affine = (pointer(weight, mean), pointer(bias, mean))
    with on_device(mean) as stream:
        launches.coefficients(stream, mean, gates, mode_mean, mode_var, *affine, scale, shift)
    return scale, shift


def mode_gradients(
    dscale: Tensor,
    dshift: Tensor,
    mean: Tensor,
    gates: Tensor,
    mode_mean: Tensor,
    mode_var: Tensor,
    mass: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Handed, Tensor | None, Tensor | None]:
    """Gradients of μ and σ² over the mass, (K, C), what is handed on, and weight's and bias's."""
    u, s = torch.empty_like(mode_mean), torch.empty_like(mode_mean)
    dweight, dbias = (None if p is None else torch.empty_like(p) for p in (weight, bias))
    shared = dweight is not None and dweight.ndim == 1
    dweights = torch.empty_like(mode_mean) if shared else pointer(dweight, mean)
    given = (mean, gates, mode_mean, mode_var, mass)
    launches = _launches_for(mean, gates, weight, bias, eps, *given, dscale, dshift)
    with on_device(mean) as stream:
        launches.modes_backward(
            stream, *given, pointer(weight, mean), dscale, dshift, u, s, dweights,
            pointer(dbias, mean),
        )  # fmt: skip
        if shared:
            unused = (mean, mean)  # the gate's parameters
            launches.parameters_backward(
                stream, mean, gates, dweights, *unused, pointer(dweight, mean)
            )
    return u, s, (weight, eps), dweight, dbias


def sample_gradients(
    dscale: Tensor,
    dshift: Tensor,
    mean: Tensor,
    var: Tensor,
    gates: Tensor,
    mode_mean: Tensor,
    mode_var: Tensor,
    u: Tensor,
    s: Tensor,
    handed: Handed,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of mean and var, (N, C), and of the gates, from those of the modes, u and s."""
    weight, eps = handed
    slope, offset = dscale.clone(), dshift.clone()  # the launch writes over them
    scale, dgates = torch.empty_like(mean), torch.empty_like(gates)
    given = (mean, var, gates, mode_mean, mode_var, u.contiguous(), s.contiguous())
    launches = _launches_for(mean, gates, weight, bias, eps, *given)
    affine = (pointer(weight, mean), pointer(bias, mean))
    unused = (mean,) * 3  # the gate's weight, gradients of the gates and of the usage as outputs
    launch = launches.samples_backward[False, False]
    with on_device(mean) as stream:
        launch(stream, *given, *affine, *unused, slope, offset, scale, dgates)
    return offset, slope.mul_(0.5), dgates


def _empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, device=like.device, dtype=like.dtype)


def _launches_for(
    mean: Tensor,
    gates: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *others: Tensor,
) -> Mixing:
    """The launches of these sizes; other tensors that they read are looked at for alignment."""
    sizes = (*mean.shape, gates.shape[1])
    direct = aligned((mean, gates, weight, bias, *others))
    return _launches(sizes, float(eps), affine_kind(weight, bias), mean.get_device(), direct)


@functools.lru_cache(maxsize=4096)
def _launches(
    sizes: tuple[int, int, int],
    eps: float,
    affine: AffineKind,
    device: int,  # kernels are compiled for one
    direct: bool,
) -> Mixing:
    num_samples, num_channels, num_modes = sizes
    return Mixing(num_samples, num_channels, 1, num_modes, MixingKind(eps, affine), direct)
