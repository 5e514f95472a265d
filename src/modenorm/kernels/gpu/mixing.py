"""The parts of the mixing in Triton (mixing_launches.py): the functions of torch_mixing.py.

The launches are made for gates that are given, without a running update, and for one position: the
offset that they find is then the mean's gradient, and the slope twice the variance's.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from modenorm.kernels.gpu.device import on_device
from modenorm.kernels.gpu.launch import Pointer
from modenorm.kernels.gpu.mixing_launches import Mixing
from modenorm.kernels.gpu.plan import AffineKind, MixingKind, affine_kind, aligned, pointer
from modenorm.kernels.layout import can_count
from modenorm.kernels.mixing_arrays import Affine, Modes, Samples

__all__ = ["coefficients", "mode_gradients", "sample_gradients", "statistics", "takes"]

NO_AFFINE = Affine(None, None, 0.0)


def takes(samples: Samples, affine: Affine, *gradients: Tensor) -> bool:
    """Whether the kernels can: contiguous float32 on one device, weight and bias of one form."""
    weight, bias, _ = affine
    forms = [None if parameter is None else parameter.ndim for parameter in (weight, bias)]
    if forms[0] != forms[1] or not can_count(samples.mean, samples.gates.shape[1]):
        return False
    return all(
        array.dtype == torch.float32
        and array.device == samples.mean.device
        and type(array) in (Tensor, torch.nn.Parameter)
        and array.is_contiguous()
        for array in (*samples, weight, bias, *gradients)
        if array is not None
    )


def statistics(samples: Samples) -> Modes:
    """Mean, variance and mass of the modes."""
    mean, num_modes = samples.mean, samples.gates.shape[1]
    mode_mean = _empty(mean, num_modes, mean.shape[1])
    modes = Modes(mode_mean, torch.empty_like(mode_mean), _empty(mean, num_modes))
    launches = _launches_for(samples, NO_AFFINE)
    unused = (mean,) * 5  # whether samples are finite, and the running estimates
    with on_device(mean) as stream:
        launches.statistics(stream, *samples, *unused, *modes, modes.mass)
    return modes


def coefficients(samples: Samples, modes: Modes, affine: Affine) -> tuple[Tensor, Tensor]:
    """Scale and shift, (N, C)."""
    mean, _, gates = samples
    scale, shift = torch.empty_like(mean), torch.empty_like(mean)
    launches = _launches_for(samples, affine, *modes)
    with on_device(mean) as stream:
        launches.coefficients(
            stream, mean, gates, modes.mean, modes.var, *_parameters(affine, mean), scale, shift
        )
    return scale, shift


def mode_gradients(
    dscale: Tensor, dshift: Tensor, samples: Samples, modes: Modes, affine: Affine
) -> tuple[Tensor, Tensor, None, Tensor | None, Tensor | None]:
    """Gradients of μ and σ² over the mass, (K, C), nothing to hand on, and weight's and bias's."""
    mean, _, gates = samples
    weight, bias, _ = affine
    u, s = torch.empty_like(modes.mean), torch.empty_like(modes.mean)
    dweight, dbias = (None if p is None else torch.empty_like(p) for p in (weight, bias))
    shared = dweight is not None and dweight.ndim == 1
    dweights = torch.empty_like(modes.mean) if shared else pointer(dweight, mean)
    launches = _launches_for(samples, affine, *modes, dscale, dshift)
    with on_device(mean) as stream:
        launches.modes_backward(
            stream, mean, gates, *modes, pointer(weight, mean), dscale, dshift, u, s, dweights,
            pointer(dbias, mean),
        )  # fmt: skip
        if shared:
            unused = (mean, mean)  # the gate's parameters
            launches.parameters_backward(
                stream, mean, gates, dweights, *unused, pointer(dweight, mean)
            )
    return u, s, None, dweight, dbias


def sample_gradients(
    dscale: Tensor,
    dshift: Tensor,
    samples: Samples,
    modes: Modes,
    affine: Affine,
    u: Tensor,
    s: Tensor,
    _: None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of mean and var, (N, C), and of the gates, from those of the modes, u and s."""
    mean = samples.mean
    slope, offset = dscale.clone(), dshift.clone()  # the launch writes over them
    scale, dgates = torch.empty_like(mean), torch.empty_like(samples.gates)
    given = (*samples, modes.mean, modes.var, u.contiguous(), s.contiguous())
    unused = (mean,) * 3  # the gate's weight, gradients of the gates and of the usage as outputs
    launch = _launches_for(samples, affine, *given).samples_backward[False, False]
    with on_device(mean) as stream:
        launch(stream, *given, *_parameters(affine, mean), *unused, slope, offset, scale, dgates)
    return offset, slope.mul_(0.5), dgates


def _parameters(affine: Affine, mean: Tensor) -> tuple[Pointer, Pointer]:
    """Weight and bias as a launch takes them, whether there are any or not."""
    return pointer(affine.weight, mean), pointer(affine.bias, mean)


def _empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, device=like.device, dtype=like.dtype)


def _launches_for(samples: Samples, affine: Affine, *others: Tensor) -> Mixing:
    """The launches of these sizes; other tensors that they read are looked at for alignment."""
    sizes = (*samples.mean.shape, samples.gates.shape[1])
    weight, bias, eps = affine
    direct = aligned((*samples, weight, bias, *others))
    kind = affine_kind(weight, bias)
    return _launches(sizes, float(eps), kind, samples.mean.get_device(), direct)


@functools.lru_cache(maxsize=4096)
def _launches(
    sizes: tuple[int, int, int],
    eps: float,
    affine: AffineKind,
    device: int,  # kernels are compiled for one
    direct: bool,
) -> Mixing:
    num_samples, num_channels, num_modes = sizes
    return Mixing(
        num_samples, num_channels, 1, num_modes, MixingKind(eps, affine), direct, chained=False
    )
