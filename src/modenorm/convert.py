"""Models with batch norm into models with mode norm, and back.

Everything is checked before anything is changed, and what was changed is returned.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.optim import Optimizer

from modenorm.distributed import share_statistics
from modenorm.gates import GateFactory
from modenorm.hooks import give_hooks, take_hooks
from modenorm.layers import ModeNorm, ModeNorm1d, ModeNorm2d, ModeNorm3d
from modenorm.parameters import add_gates
from modenorm.selection import (
    Where,
    batchnorms,
    check_convertible,
    check_model,
    is_timm_act,
    listed,
    modes_of,
    select,
)
from modenorm.substitutes import (
    LazyModeNorm1d,
    LazyModeNorm2d,
    LazyModeNorm3d,
    ModeNormAct2d,
    ModeNormNd,
)

__all__ = ["acts_as_batchnorm", "replace_batchnorm", "to_batchnorm", "turn_to_batchnorm"]

Adapter = Callable[[Any, ModeNorm], nn.Module]

TARGETS: dict[type[nn.Module], type[ModeNorm]] = {
    nn.BatchNorm1d: ModeNorm1d,
    nn.BatchNorm2d: ModeNorm2d,
    nn.BatchNorm3d: ModeNorm3d,
    nn.SyncBatchNorm: ModeNormNd,
    nn.LazyBatchNorm1d: LazyModeNorm1d,
    nn.LazyBatchNorm2d: LazyModeNorm2d,
    nn.LazyBatchNorm3d: LazyModeNorm3d,
}
SOURCES: dict[type[nn.Module], type[_BatchNorm]] = {
    ModeNorm1d: nn.BatchNorm1d,
    ModeNorm2d: nn.BatchNorm2d,
    ModeNorm3d: nn.BatchNorm3d,
    ModeNormNd: nn.SyncBatchNorm,
}


Tied = dict[tuple[nn.Parameter, int], nn.Parameter]
"""A parameter with K rows for the one that it replaces: norms that had one in common still do."""

Merged = dict[tuple[nn.Parameter, torch.dtype], nn.Parameter]
"""The same on the way back."""


class Options(NamedTuple):
    """What `replace_batchnorm` passes on to every layer."""

    gate: nn.Module | GateFactory | None
    per_mode_affine: bool
    running_update: str


@torch.inference_mode(False)  # parameters made in it could not be trained
def replace_batchnorm(
    model: nn.Module,
    num_modes: int | Mapping[str, int] = 2,
    where: Where = None,
    *,
    optimizer: Optimizer | None = None,
    gate: nn.Module | GateFactory | None = None,
    per_mode_affine: bool = False,
    running_update: str = "paper",
    subclasses: Mapping[type[nn.Module], Adapter] | None = None,
) -> dict[str, nn.Module]:
    """Replace the batch norms of a model by mode norms, in place.

    Parameters, running statistics, eps, momentum, device, dtype, `training`, `requires_grad` and
    hooks (of forward, backward and state dicts) are taken over; every mode starts from the batch
    norm's statistics. So a trained model computes in evaluation what it did before, and fine-tuning
    starts there. In training the gates, which start with noise, matter at once. Modules that occur
    several times stay shared.

    Args:
        model: changed in place. A batch norm by itself can't be: take it from the result's "".
        num_modes: K; or {name pattern: K}, where the first pattern that matches decides and norms
            that match none are left.
        where: which norms: a name pattern such as "layer1.*", several of them, "first" for the
            first in the model's order, or a function of (name, module). None for all.
        optimizer: an optimizer of the model, to which the gates' parameters are added, in the group
            that holds the norm's parameters (or the first, if none does).
        gate: as in `ModeNorm2d`; a function of (C, K), unless one norm only is replaced.
        per_mode_affine: as in `ModeNorm2d`; every mode starts from the batch norm's parameters.
        running_update: as in `ModeNorm2d`.
        subclasses: {class: function of (old, mode norm)} that makes the replacement of classes
            derived from batch norm, which may do more than batch norm and are refused otherwise.
            The replacement gets the hooks. timm's `BatchNormAct2d` is known.

    Returns:
        The new layers by name; a shared one by its first name.

    Raises:
        ValueError: There is nothing to replace, or something that can't be; the model is unchanged.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> replace_batchnorm(model, num_modes=4)
        {'1': ModeNorm2d(
          8, num_modes=4, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True
          (gate): LinearGate(num_features=8, num_modes=4)
        )}
    """
    adapters = subclasses or {}
    check_model(model)
    norms_of_model = batchnorms(model)
    found = select(norms_of_model, model, where)
    modes = modes_of({module: norms_of_model[module] for module in found}, num_modes)
    found = {module: name for module, name in found.items() if module in modes}
    check_convertible(found, TARGETS, adapters)
    if isinstance(gate, nn.Module) and len(found) > 1:
        raise ValueError(
            f"gate is one {type(gate).__name__} for {len(found)} norms; give a function of "
            f"(num_features, num_modes) that makes one for each, or choose one norm with where="
        )
    if optimizer is not None and any(isinstance(module, LazyModuleMixin) for module in found):
        raise ValueError(
            "the model has lazy norms, whose gates' parameters don't exist yet; run one batch "
            "through the model before making the optimizer"
        )
    options = Options(gate, per_mode_affine, running_update)
    fallback = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    norms, replaced = {}, {}
    tied: Tied = {}
    for module, name in found.items():
        norms[module] = _mode_norm(module, name, modes[module], options, fallback)
        _take_parameters(module, norms[module], tied)
        adapter = adapters.get(type(module))
        replaced[module] = adapter(module, norms[module]) if adapter else norms[module]
    _warn_about(found, model, mention_left=where is None)
    if optimizer is not None:
        add_gates(optimizer, {found[module]: (module, norm) for module, norm in norms.items()})
    for module, replacement in replaced.items():
        take_hooks(module, replacement)
    give_hooks(replaced.values())
    _swap(model, replaced)
    return {name: replaced[module] for module, name in found.items()}


@torch.inference_mode(False)
@torch.no_grad()
def to_batchnorm(model: nn.Module, tolerance: float = 0.0) -> dict[str, nn.Module]:
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

    Returns:
        The batch norms by name; empty if no layer acts as one.

    Example:
        >>> import modenorm
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), modenorm.ModeNorm2d(8, num_modes=1))
        >>> to_batchnorm(model)
        {'1': BatchNorm2d(8, eps=1e-05, momentum=0.1, affine=True, ...)}
    """
    check_model(model)
    if tolerance < 0:
        raise ValueError(f"tolerance is {tolerance}; it must be at least 0")
    for name, layer in model.named_modules():
        several = isinstance(layer, ModeNorm) and layer.num_modes > 1
        if several and layer.running_mean is not None and layer.running_mean.is_meta:
            raise ValueError(
                f"{name or 'the layer'} is on the meta device, where modes have no values to "
                f"compare; load the model's state first"
            )
    found = {m: name for name, m in model.named_modules() if acts_as_batchnorm(m, tolerance)}
    return turn_to_batchnorm(model, found)


def turn_to_batchnorm(model: nn.Module, found: Mapping[nn.Module, str]) -> dict[str, nn.Module]:
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
    give_hooks(replaced.values())
    _swap(model, replaced)
    return {name: replaced[module] for module, name in found.items()}


def _mode_norm(old: Any, name: str, num_modes: int, options: Options, fallback: Tensor) -> ModeNorm:
    """The mode norm that takes a batch norm's place, with its state."""
    target: Any = next((TARGETS[base] for base in type(old).__mro__ if base in TARGETS), ModeNormNd)
    like = next((t for t in (old.weight, old.running_mean) if t is not None), fallback)
    settings = {
        "eps": old.eps,
        "momentum": old.momentum,
        "affine": old.weight is not None,
        "track_running_stats": old.running_mean is not None,
        "device": like.device,
        "dtype": like.dtype,
        **options._asdict(),
    }
    if is_timm_act(old):
        target, settings = ModeNormAct2d, {**settings, "drop": old.drop, "act": old.act}
    lazy = isinstance(old, LazyModuleMixin)
    try:
        layer = target(*(() if lazy else (old.num_features,)), num_modes, **settings)
    except ValueError as error:
        raise ValueError(f"{name or 'the norm'} can't become a mode norm: {error}") from None
    if isinstance(layer, ModeNormAct2d):
        layer.batchnorm_class = type(old)
    if isinstance(old, nn.SyncBatchNorm):
        share_statistics(layer, old.process_group, name)
    if not lazy:
        _take_statistics(old, layer)
    return layer.train(old.training)


@torch.no_grad()
def _take_parameters(old: Any, layer: ModeNorm, tied: Tied) -> None:
    """The same Parameter objects where their shapes fit, so that optimizers keep working."""
    for key in ("weight", "bias"):
        parameter = getattr(old, key)
        if parameter is None or not layer.per_mode_affine:
            setattr(layer, key, parameter)
            continue
        own = tied.get((parameter, layer.num_modes), getattr(layer, key))
        if own is None:
            own = nn.Parameter(parameter.new_empty((layer.num_modes, *parameter.shape)))
        tied[parameter, layer.num_modes] = own
        setattr(layer, key, own)
        own.requires_grad = parameter.requires_grad
        if not torch.nn.parameter.is_lazy(own):
            own.copy_(parameter)


@torch.no_grad()
def _take_statistics(old: Any, layer: ModeNorm) -> None:
    for key in ("running_mean", "running_var", "num_batches_tracked"):
        own, theirs = getattr(layer, key), getattr(old, key)
        if own is not None and theirs is not None:
            own.copy_(theirs)
    if layer.running_share is not None and layer.num_batches_tracked is not None:
        layer.running_share.copy_(layer.num_batches_tracked / layer.num_modes)


def _warn_about(found: dict[nn.Module, str], model: nn.Module, mention_left: bool) -> None:
    still = [
        name
        for m, name in found.items()
        if any(not p.requires_grad for p in m.parameters()) or (model.training and not m.training)
    ]
    if still:
        warnings.warn(
            f"these norms were frozen (no gradients, or in evaluation mode while the model "
            f"trains) and stay so, but their new gates learn: {listed(still)}. Unfreeze them to "
            f"let modes form, leave them out with where=, or freeze the gates with "
            f"layer.gate.requires_grad_(False)",
            stacklevel=3,
        )
    left = [f"{name} ({type(m).__name__})" for name, m in model.named_modules() if _is_frozen(m)]
    if left and mention_left:
        warnings.warn(
            f"left as they are, since their statistics and parameters are constants: "
            f"{listed(left)}. Load the model with batch norms to convert these",
            stacklevel=3,
        )


def _is_frozen(module: nn.Module) -> bool:
    """Whether this is one of the many classes called FrozenBatchNorm."""
    looks = "BatchNorm" in type(module).__name__ and "running_mean" in module._buffers
    return looks and not isinstance(module, _BatchNorm)


def _swap(model: nn.Module, replaced: Mapping[nn.Module, nn.Module]) -> None:
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is not None and child in replaced:
                parent._modules[key] = replaced[child]


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
