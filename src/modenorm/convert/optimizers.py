"""The parameters of norms and gates in optimizers: groups of their own, and late arrivals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import LBFGS, Adafactor, Adagrad, Optimizer

from modenorm.checks import check_module
from modenorm.layers import ModeGroupNorm, ModeNorm

__all__ = [
    "NormParameters",
    "add_gates",
    "check_optimizer",
    "exchange_parameters",
    "norm_parameters",
]

NORMS = (ModeNorm, ModeGroupNorm, _NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


class NormParameters(NamedTuple):
    """A model's parameters by role; every parameter is in one of them, under its name.

    Example:
        >>> NormParameters({}, {}, {}).gates
        {}
    """

    norms: dict[str, nn.Parameter]
    gates: dict[str, nn.Parameter]
    others: dict[str, nn.Parameter]


def norm_parameters(model: nn.Module) -> NormParameters:
    """Sort a model's parameters into those of norms, of gates, and others.

    For optimizers that should not decay norms and gates. Weight decay on a gate pulls it towards
    gates that are equal for all samples, where it stops to learn. Filters that go by the number of
    dimensions see the norms' parameters, which are 1-d, but not the gates' weights, (K, C).

    Args:
        model: any model; norms of torch count as norms too.

    Returns:
        `norms`, `gates` and `others`, three dicts from parameter name to parameter.

    Example:
        >>> import torch, modenorm
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), modenorm.ModeNorm2d(8))
        >>> norms, gates, others = norm_parameters(model)
        >>> list(norms), list(gates), list(others)
        (['1.weight', '1.bias'], ['1.gate.weight', '1.gate.bias'], ['0.weight', '0.bias'])
        >>> optimizer = torch.optim.AdamW([
        ...     {"params": others.values(), "weight_decay": 0.05},
        ...     {"params": [*norms.values(), *gates.values()], "weight_decay": 0.0},
        ... ])
    """
    check_module(model)
    norm_ids: set[int] = set()
    gate_ids: set[int] = set()
    for module in model.modules():
        if isinstance(module, NORMS):
            for name, parameter in _own_parameters(module):
                of_gate = isinstance(module, ModeGroupNorm) and name.startswith("gate_")
                (gate_ids if of_gate else norm_ids).add(id(parameter))
        if isinstance(module, ModeNorm):
            gate_ids.update(map(id, module.gate.parameters()))
    sorted_by_role = NormParameters({}, {}, {})
    for name, parameter in model.named_parameters():
        if id(parameter) in gate_ids:
            sorted_by_role.gates[name] = parameter
        elif id(parameter) in norm_ids:
            sorted_by_role.norms[name] = parameter
        else:
            sorted_by_role.others[name] = parameter
    return sorted_by_role


def _own_parameters(norm: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """A norm's parameters and those that a parametrization computes them from, by their names."""
    yield from norm.named_parameters(recurse=False)
    if is_parametrized(norm):
        for name, parts in norm.parametrizations.items():
            yield from ((name, parameter) for parameter in parts.parameters())


def add_gates(optimizer: Optimizer, norms: Mapping[str, tuple[nn.Module, ModeNorm]]) -> None:
    """Add the gates' parameters to the groups of the norms that they replace."""
    groups = optimizer.param_groups
    group_of = {id(p): group for group in groups for p in group["params"]}
    for name, (old, layer) in norms.items():
        group = next((group_of[id(p)] for p in old.parameters() if id(p) in group_of), groups[0])
        fresh = {f"gate.{key}": p for key, p in layer.gate.named_parameters()}
        held = {id(p) for some in groups for p in some["params"]}
        fresh = {key: p for key, p in fresh.items() if id(p) not in held}
        group["params"].extend(fresh.values())
        if "param_names" in group:
            group["param_names"].extend(f"{name}.{key}".lstrip(".") for key in fresh)
        if isinstance(optimizer, Adagrad) and fresh:  # it makes its state when it is made
            settings = {key: group[key] for key in optimizer.defaults}
            optimizer.state.update(Adagrad(fresh.values(), **settings).state)


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuse an optimizer of something else, or whose state can't follow parameters that change."""
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"optimizer is {optimizer!r}; expected one of torch.optim")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    learning = {id(p) for p in model.parameters() if p.requires_grad}
    if learning and held.isdisjoint(learning):
        raise ValueError(
            "the optimizer has no parameter of this model that learns; give the one that trains "
            "it, or leave optimizer= out. Of a frozen part that is in another model's optimizer, "
            "give the whole model, or call requires_grad_(False) on the part first"
        )
    if isinstance(optimizer, LBFGS) and optimizer.state:
        raise ValueError(
            "the optimizer is an LBFGS that has made a step, whose history is that of all "
            "parameters in one row; leave optimizer= out, and make a new LBFGS afterwards"
        )


def exchange_parameters(
    optimizer: Optimizer, model: nn.Module, replaced: Mapping[str, tuple[nn.Module, nn.Module]]
) -> None:
    """Give the places of weights and biases to those of the norms that came instead, by name.

    Several norms may have had one in common; it stays as well if the model still has it somewhere.
    """
    heirs: dict[nn.Parameter, dict[nn.Parameter, str]] = {}
    for name, (old, new) in replaced.items():
        for key in ("weight", "bias"):
            before, after = getattr(old, key), getattr(new, key)
            if before is not None and before is not after:
                heirs.setdefault(before, {}).setdefault(after, f"{name}.{key}".lstrip("."))
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for place in reversed(range(len(group["params"]))):  # later places don't move earlier ones
            before = group["params"][place]
            if before in heirs:
                kept = {before: names[before]} if before in names else {}
                _share_out(optimizer, group, place, kept, heirs[before])


def _share_out(
    optimizer: Optimizer,
    group: dict[str, Any],
    place: int,
    kept: Mapping[nn.Parameter, str],
    heirs: Mapping[nn.Parameter, str],
) -> None:
    """Put other parameters in one's place, beside it if it is kept, with their names and states."""
    before = group["params"][place]
    group["params"][place : place + 1] = [*kept, *heirs]
    if "param_names" in group:
        own, (_, *others) = group["param_names"][place], heirs.values()
        group["param_names"][place : place + 1] = [*kept.values(), own, *others]
    for after in heirs:
        state = _converted(optimizer.state.get(before, {}), before, after)
        if state and not isinstance(optimizer, Adafactor):
            optimizer.state[after] = state
    if not kept:
        optimizer.state.pop(before, None)


def _converted(state: Mapping[str, Any], before: Tensor, after: Tensor) -> dict[str, Any]:
    """The state of a parameter for one with a row for each mode, or without, or of another type.

    The state of a row is copied to each, or that of all rows added up; Adafactor's, which is in
    parts that depend on the number of dimensions, begins anew.
    """
    found = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            value = value.clone()
            if value.shape == before.shape:
                value = value.to(after.dtype if value.dtype == before.dtype else value.dtype)
                rows = value.ndim > after.ndim
                value = value.sum(0) if rows else value.expand_as(after).clone()
        found[key] = value
    return found
