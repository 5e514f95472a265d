"""Models with batch norm into models with mode norm; back.py has the way back.

Everything is checked before anything is changed, and what was changed is returned.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.optim import Optimizer

from modenorm.convert.optimizers import add_gates, check_optimizer, exchange_parameters
from modenorm.convert.replacement import put_in_place, take_hooks
from modenorm.convert.selection import (
    Where,
    batchnorms,
    check_convertible,
    check_model,
    is_timm_act,
    listed,
    modes_of,
    select,
)
from modenorm.convert.substitutes import (
    LazyModeNorm1d,
    LazyModeNorm2d,
    LazyModeNorm3d,
    ModeNormAct2d,
    ModeNormNd,
)
from modenorm.distributed import share_statistics
from modenorm.gates import GateFactory
from modenorm.layers import ModeNorm, ModeNorm1d, ModeNorm2d, ModeNorm3d

__all__ = ["replace_batchnorm"]

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


Tied = dict[tuple[nn.Parameter, int], nn.Parameter]
"""A parameter with K rows for the one that it replaces: norms that had one in common still do."""


class LayerOptions(NamedTuple):
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
    if optimizer is not None:
        if any(isinstance(module, LazyModuleMixin) for module in found):
            raise ValueError(
                "the model has lazy norms, whose gates' parameters don't exist yet; run one batch "
                "through the model before making the optimizer"
            )
        check_optimizer(optimizer, model)
    options = LayerOptions(gate, per_mode_affine, running_update)
    fallback = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    norms, replaced = {}, {}
    tied: Tied = {}
    for module, name in found.items():
        norms[module] = _mode_norm(module, name, modes[module], options, fallback)
        _take_parameters(module, norms[module], tied)
        adapter = adapters.get(type(module))
        replaced[module] = _adapted(adapter, module, name, norms[module])
    _warn_about(found, model, mention_left=where is None)
    for module, replacement in replaced.items():
        take_hooks(module, replacement)
    put_in_place(model, replaced)
    if optimizer is not None:
        exchanged = {found[module]: (module, norm) for module, norm in norms.items()}
        add_gates(optimizer, exchanged)
        exchange_parameters(optimizer, model, exchanged)
    return {name: replaced[module] for module, name in found.items()}


def _mode_norm(
    old: Any, name: str, num_modes: int, options: LayerOptions, fallback: Tensor
) -> ModeNorm:
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


def _adapted(adapter: Adapter | None, old: nn.Module, name: str, norm: ModeNorm) -> nn.Module:
    """What takes a batch norm's place: the mode norm, or what the caller's function makes of it."""
    if adapter is None:
        return norm
    made = adapter(old, norm)
    if not isinstance(made, nn.Module):
        raise ValueError(
            f"subclasses makes {made!r} of {name or 'the norm'} ({type(old).__name__}); its "
            f"function must return an nn.Module: the mode norm, or one that contains it"
        )
    return made


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
