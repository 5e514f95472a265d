"""Mode norms that act as batch norms into batch norms.

Everything is checked before anything is changed, and what was changed is returned.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from modenorm.convert.optimizers import check_optimizer, exchange_parameters
from modenorm.convert.replacement import put_in_place, take_hooks
from modenorm.convert.selection import check_model, listed
from modenorm.convert.substitutes import ModeNormAct2d, ModeNormNd
from modenorm.layers import ModeNorm, ModeNorm1d, ModeNorm2d, ModeNorm3d

__all__ = ["acts_as_batchnorm", "to_batchnorm", "turn_to_batchnorm"]

SOURCES: dict[type[nn.Module], type[_BatchNorm]] = {
    ModeNorm1d: nn.BatchNorm1d,
    ModeNorm2d: nn.BatchNorm2d,
    ModeNorm3d: nn.BatchNorm3d,
    ModeNormNd: nn.SyncBatchNorm,
}

Merged = dict[tuple[nn.Parameter, torch.dtype], nn.Parameter]
"""A parameter in a type for the one that it replaces: norms that had one in common still do."""


@torch.inference_mode(False)
@torch.no_grad()
def to_batchnorm(
    model: nn.Module, tolerance: float = 0.0, *, optimizer: Optimizer | None = None
) -> dict[str, nn.Module]:
    """Replace mode norms that act as batch norms by batch norms, in place.

    These are layers with one mode, and layers whose modes have merged: with equal statistics (and
    equal parameters, if each mode has its own) the gates don't matter. In evaluation the model
    computes what it did before, exactly or to the tolerance; a batch norm can then be folded into
    the convolution before it (`torch.nn.utils.fusion`) or quantized. Other layers are left. A half
    layer becomes a float32 batch norm if its statistics are too large for the half type.

    The running variance is copied as it is. A mode norm keeps the biased variance, batch norm the
    unbiased one, so further training moves it by n/(n − 1), n the values per channel in a batch.

    Args:
        model: changed in place. A mode norm by itself can't be: take it from the result's "".
        tolerance: largest difference between any two modes, in each channel: of means in the modes'
            smallest standard deviation, of variances (with eps) relative to the smallest, of
            parameters to the smallest absolute value. Modes are averaged.
        optimizer: an optimizer of the model, which goes on with the batch norms' parameters where
            these are new: with one weight per mode, or another type than before. It keeps the
            gates' parameters, which then have no effect.

    Returns:
        The batch norms by name; empty if no layer acts as one.

    Example:
        >>> import modenorm
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), modenorm.ModeNorm2d(8, num_modes=1))
        >>> to_batchnorm(model)
        {'1': BatchNorm2d(8, eps=1e-05, momentum=0.1, affine=True, ...)}
    """
    check_model(model)
    if not tolerance >= 0:
        raise ValueError(f"tolerance is {tolerance}; it must be at least 0")
    if optimizer is not None:
        check_optimizer(optimizer, model)
    for name, layer in model.named_modules():
        several = isinstance(layer, ModeNorm) and layer.num_modes > 1
        if several and layer.running_mean is not None and layer.running_mean.is_meta:
            raise ValueError(
                f"{name or 'the layer'} is on the meta device, where modes have no values to "
                f"compare; load the model's state first"
            )
    found = {m: name for name, m in model.named_modules() if acts_as_batchnorm(m, tolerance)}
    return turn_to_batchnorm(model, found, optimizer)


def turn_to_batchnorm(
    model: nn.Module, found: Mapping[nn.Module, str], optimizer: Optimizer | None = None
) -> dict[str, nn.Module]:
    """Replace these mode norms of a model, {layer: name}, by batch norms, in place."""
    frozen = [name for m, name in found.items() if getattr(m, "statistics_frozen", False)]
    if frozen:
        warnings.warn(
            f"the statistics of {listed(frozen)} were frozen; a batch norm holds them still only "
            f"while it is in evaluation mode: call eval() on it after model.train()",
            stacklevel=3,
        )
    merged: Merged = {}
    replaced = {module: _batch_norm(module, merged) for module in found}
    put_in_place(model, replaced)
    if optimizer is not None:
        exchanged = {found[module]: (module, norm) for module, norm in replaced.items()}
        exchange_parameters(optimizer, model, exchanged)
    return {name: replaced[module] for module, name in found.items()}


def acts_as_batchnorm(module: nn.Module, tolerance: float) -> bool:
    """Whether this is a mode norm that a batch norm can stand in for, in evaluation."""
    if type(module) not in SOURCES and getattr(module, "batchnorm_class", None) is None:
        return False
    assert isinstance(module, ModeNorm)
    if module.num_modes == 1:
        return True
    if module.running_mean is None or module.running_var is None:
        return False
    var = module.running_var.amin(0) + module.eps
    pairs = [(module.running_mean, var.sqrt()), (module.running_var, var)]
    if module.per_mode_affine:
        pairs += [(p, p.abs().amin(0)) for p in (module.weight, module.bias) if p is not None]
    return all(bool((t.amax(0) - t.amin(0) <= tolerance * s).all()) for t, s in pairs)


def _batch_norm(layer: Any, merged: Merged) -> nn.Module:
    """The batch norm that does in evaluation what this layer does."""
    tensors = (layer.weight, layer.running_mean, *layer.gate.parameters())
    like = next((t for t in tensors if t is not None), torch.empty(0))
    make: Any = getattr(layer, "batchnorm_class", None)
    if make is None and layer.ranks is not None:
        make = partial(nn.SyncBatchNorm, process_group=layer.ranks.group)
    make = make or SOURCES[type(layer)]
    dtype = like.dtype if _holds_statistics(like.dtype, layer) else layer.running_var.dtype
    norm = make(
        layer.num_features,
        eps=layer.eps,
        momentum=layer.momentum,
        affine=layer.weight is not None,
        track_running_stats=layer.running_mean is not None,
        device=like.device,
        dtype=dtype,
    )
    for key in ("weight", "bias"):
        parameter = getattr(layer, key)
        if parameter is not None and (layer.per_mode_affine or parameter.dtype != dtype):
            parameter = merged.setdefault((parameter, dtype), _merged(layer, parameter, dtype))
        setattr(norm, key, parameter)
    if layer.running_mean is not None:
        norm.running_mean.copy_(_merge(layer.running_mean))
        norm.running_var.copy_(_merge(layer.running_var))
        norm.num_batches_tracked.copy_(layer.num_batches_tracked)
    if isinstance(layer, ModeNormAct2d):
        norm.drop, norm.act = layer.drop, layer.act
    take_hooks(layer, norm)
    return norm.train(layer.training)


def _holds_statistics(dtype: torch.dtype, layer: Any) -> bool:
    """Whether running estimates, which a half layer keeps in float32, are no overflow in a type."""
    if layer.running_mean is None or layer.running_mean.is_meta:
        return True
    largest = torch.finfo(dtype).max
    return not any(bool((t.abs() > largest).any()) for t in (layer.running_mean, layer.running_var))


def _merged(layer: Any, parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    row = _merge(parameter) if layer.per_mode_affine else parameter
    return nn.Parameter(row.to(dtype), requires_grad=parameter.requires_grad)


def _merge(rows: Tensor) -> Tensor:
    """The average of the rows, (K, C): exactly the first if all are equal."""
    return rows[0] + (rows - rows[0]).mean(0)
