"""Mode norms with another number of modes: rows of gates, estimates and optimizer state.

Letters: C channels, K modes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from modenorm.checks import check_count
from modenorm.layers import ModeGroupNorm, ModeNorm
from modenorm.modes.recording import mode_layers
from modenorm.state import last_linear, modes_in
from modenorm.switches import check_switched

__all__ = [
    "close_modes", "combine_modes", "group_members", "group_weights", "match_modes",
    "merged_statistics", "mode_rows", "set_num_modes",
]  # fmt: skip

Layer = ModeNorm | ModeGroupNorm
CLOSED = -1e4  # a logit that leaves its mode nothing, whatever the others are, in any precision


def mode_rows(layer: Layer) -> list[nn.Parameter]:
    """The parameters with a row for each mode, those of a gate that ends in a linear layer first.

    Example:
        >>> [tuple(p.shape) for p in mode_rows(ModeNorm(8, num_modes=3))]
        [(3, 8), (3,)]
    """
    if isinstance(layer, ModeGroupNorm):
        return [layer.gate_weight, layer.gate_bias]
    linear = last_linear(layer.gate, layer.num_modes)
    rows = [] if linear is None else [linear.weight, linear.bias]
    if layer.per_mode_affine:
        rows += [p for p in (layer.weight, layer.bias) if p is not None]
    return rows


def group_weights(groups: Sequence[tuple[int, ...]], shares: Tensor) -> Tensor:
    """The part of each mode in each group, by their shares: float64 (groups, K), rows sum to 1.

    Example:
        >>> group_weights([(0, 2)], torch.tensor([0.1, 0.6, 0.3]))
        tensor([[0.2500, 0.0000, 0.7500]], dtype=torch.float64)
    """
    part = group_members(groups, len(shares)) * shares.double().cpu().clamp_min(1e-30)
    return part / part.sum(1, keepdim=True)


def group_members(groups: Sequence[tuple[int, ...]], num_modes: int) -> Tensor:
    """Which modes belong to each group: float64 (groups, K).

    Example:
        >>> group_members([(0, 2)], 3)
        tensor([[1., 0., 1.]], dtype=torch.float64)
    """
    rows = [[float(mode in group) for mode in range(num_modes)] for group in groups]
    return torch.tensor(rows, dtype=torch.float64, device="cpu")


def merged_statistics(weights: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of all samples of a group's modes together, (groups, C).

    Example:
        >>> mean, var = merged_statistics(
        ...     torch.tensor([[0.5, 0.5]]), torch.tensor([[0.0], [2.0]]), torch.ones(2, 1)
        ... )
        >>> float(mean), float(var)
        (1.0, 2.0)
    """
    together = weights @ mean
    between = (mean - together[:, None]) ** 2  # (groups, K, C)
    return together, (weights[:, :, None] * (var + between)).sum(1)


@torch.no_grad()
def combine_modes(
    layer: Layer,
    groups: Sequence[tuple[int, ...]],
    shares: Tensor,
    offsets: Tensor,
    optimizer: Optimizer | None = None,
) -> None:
    """Give a layer one mode for each group of its modes, in place.

    Parameters stay the same objects. A group's gate is the mean of its modes' rows, weighted by
    their shares, plus an offset on the bias; its statistics are those of all its samples together.
    An optimizer's state of the rows is added up, since the gradient of the common row is the sum of
    theirs.

    Args:
        layer: Its gate ends in a linear layer; of a mode group norm, groups are single modes.
        groups: The old modes of each new one; modes in none are dropped.
        shares: (K,), mean gate of each mode.
        offsets: Added to the bias of each new mode.
        optimizer: Whose state is changed along.

    Example:
        >>> layer = ModeNorm(8, num_modes=3)
        >>> combine_modes(layer, [(0, 2)], torch.ones(3) / 3, torch.zeros(1))
        >>> layer.num_modes, layer.gate.weight.shape
        (1, torch.Size([1, 8]))
    """
    weights = group_weights(groups, shares)
    member = group_members(groups, layer.num_modes)
    rows = mode_rows(layer)
    if isinstance(layer, ModeNorm):
        _combine_estimates(layer, weights, member)
        _set_width(last_linear(layer.gate, layer.num_modes), len(groups))
    bias = rows[1]
    for parameter in rows:
        before = parameter.shape
        _reshape(parameter, _mix(weights, parameter.data))
        if optimizer is not None:
            _combine_state(optimizer, parameter, before, member)
    bias.add_(offsets.to(bias))
    layer.num_modes = len(groups)


def _combine_estimates(layer: ModeNorm, weights: Tensor, member: Tensor) -> None:
    mean, var = layer.running_mean, layer.running_var
    if mean is not None and var is not None:
        merged = merged_statistics(weights, mean.double().cpu(), var.double().cpu())
        layer.running_mean, layer.running_var = merged[0].to(mean), merged[1].to(var)
    if layer.running_share is not None:
        layer.running_share = _mix(member, layer.running_share)


def _combine_state(
    optimizer: Optimizer, parameter: Tensor, before: torch.Size, member: Tensor
) -> None:
    state = optimizer.state.get(parameter, {})
    for key, value in state.items():
        if isinstance(value, Tensor) and _has_rows(value.shape, before):
            state[key] = _mix(member, value)


def _has_rows(shape: torch.Size, parameter: torch.Size) -> bool:
    """Whether a state has a parameter's rows: whole, or as one number each (Adafactor's)."""
    if len(shape) != len(parameter) or shape[:1] != parameter[:1]:
        return False
    return len(shape) > 0 and shape[1:] in (parameter[1:], (1,) * (len(parameter) - 1))


def _mix(weights: Tensor, rows: Tensor) -> Tensor:
    """Sums of rows, exact where a row is taken alone."""
    flat = rows.reshape(len(rows), -1).double().cpu()
    return (weights @ flat).reshape(-1, *rows.shape[1:]).to(rows)


def _reshape(parameter: nn.Parameter, rows: Tensor) -> None:
    """Give a parameter data of another shape.

    As long as a graph of an earlier step lives, say by its loss, autograd goes on to expect
    gradients of the old shape; it begins anew when the type changes, here to another and back.
    """
    other = torch.float32 if rows.dtype == torch.float64 else torch.float64
    parameter.grad = None
    parameter.data = rows.to(other)
    parameter.data = rows


def _set_width(linear: nn.Module, num_modes: int) -> None:
    name = "out_features" if isinstance(linear, nn.Linear) else "num_modes"
    setattr(linear, name, num_modes)


@torch.no_grad()
def set_num_modes(layer: Layer, num_modes: int) -> None:
    """Give a layer another number of modes, in place, and begin anew: gate, estimates, parameters.

    Example:
        >>> layer = ModeNorm(8, num_modes=2)
        >>> set_num_modes(layer, 5)
        >>> layer.running_mean.shape
        torch.Size([5, 8])
    """
    rows, linear = _resizable(layer, num_modes)
    if isinstance(layer, ModeNorm):
        _set_width(linear, num_modes)
        for name in ("running_mean", "running_var", "running_share"):
            if (buffer := getattr(layer, name)) is not None:
                setattr(layer, name, buffer.new_empty(num_modes, *buffer.shape[1:]))
    for parameter in rows:
        _reshape(parameter, parameter.data.new_empty(num_modes, *parameter.shape[1:]))
    layer.num_modes = num_modes
    layer.reset_parameters()
    if isinstance(layer, ModeNorm):
        linear.reset_parameters()  # also inside of a gate that can't reset itself


def _resizable(layer: Layer, num_modes: int) -> tuple[list[nn.Parameter], Any]:
    """The rows of each mode and the layer that makes logits, if their number can be changed."""
    check_count("num_modes", num_modes)
    rows = mode_rows(layer)
    if not all(isinstance(parameter, nn.Parameter) for parameter in rows):
        raise ValueError(
            "the layer's rows per mode are computed from other parameters, so their number can't "
            "be changed; remove the parametrization or the pruning of torch.nn.utils first"
        )
    if isinstance(layer, ModeGroupNorm):
        return rows, None
    if layer.num_features == 0:
        raise ValueError("the layer is lazy; run one batch through the model first")
    linear = last_linear(layer.gate, layer.num_modes)
    linear = linear or last_linear(layer.gate, num_modes)  # changed along with another layer
    if linear is None:
        raise ValueError(
            f"the gate is {type(layer.gate).__name__}, whose number of modes can't be changed; "
            f"it must end in a linear layer with a bias"
        )
    return rows, linear


@torch.no_grad()
def close_modes(model: nn.Module, pruned: nn.Module) -> list[nn.Parameter]:
    """Let a model compute what its pruned copy does, with every tensor in its place and shape.

    For steps that are captured, compiled or wrapped and can't go on with fewer modes. The first
    modes of each mode norm become those of the copy. The others get a bias so low that they receive
    no sample and no gradient: they stay closed in further training, until they are pruned.

    Args:
        model: Changed in place.
        pruned: A copy of it after `prune_modes`; mode group norms have to be as they were.

    Returns:
        The parameters that changed, whose modes are in another order: an optimizer's momentum of
        them means nothing any more.

    Example:
        >>> model = ModeNorm(8, num_modes=3)
        >>> pruned = ModeNorm(8, num_modes=1)
        >>> len(close_modes(model, pruned))
        2
        >>> model.gate.bias.data[1:]
        tensor([-10000., -10000.])
    """
    changed: list[nn.Parameter] = []
    for layer, smaller in zip(model.modules(), pruned.modules(), strict=True):
        if not isinstance(layer, ModeNorm) or layer.num_modes == smaller.num_modes:
            continue
        linear, kept = last_linear(layer.gate, layer.num_modes), smaller.num_modes
        for name, source in smaller.state_dict().items():
            target = layer.state_dict()[name]
            if target.shape != source.shape:
                target[:kept].copy_(source)
        linear.weight[kept:] = 0.0
        linear.bias[kept:] = CLOSED
        pairs = zip(layer.parameters(), smaller.parameters(), strict=True)
        changed += [ours for ours, theirs in pairs if ours.shape != theirs.shape]
    return changed


@torch.inference_mode(False)
def match_modes(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Give a model's layers the numbers of modes that a state dict has, so that it can be loaded.

    For the state of a pruned model, or of one trained with other numbers of modes. Layers whose
    number changes begin anew, so load the state afterwards. If one can't change, none does.

    Args:
        model: Changed in place.
        state_dict: Of the same model but for the numbers of modes.

    Returns:
        The numbers before and after, by name, of the layers that changed.

    Example:
        >>> import modenorm
        >>> pruned, model = (nn.Sequential(modenorm.ModeNorm2d(8, k)) for k in (3, 8))
        >>> match_modes(model, pruned.state_dict())
        {'0': (8, 3)}
        >>> model.load_state_dict(pruned.state_dict())
        <All keys matched successfully>
    """
    if not isinstance(state_dict, Mapping):
        raise ValueError(
            f"state_dict is a {type(state_dict).__name__}; expected model.state_dict()"
        )
    wanted: dict[str, tuple[Layer, int]] = {}
    for name, layer in mode_layers(model).items():
        num_modes = modes_in(layer, state_dict, f"{name}." if name else "")
        if num_modes is not None and num_modes != layer.num_modes:
            _resizable(layer, num_modes)
            wanted[name] = (layer, num_modes)
    check_switched({name: layer for name, (layer, _) in wanted.items()}, "match_modes")
    changed = {name: (layer.num_modes, num_modes) for name, (layer, num_modes) in wanted.items()}
    for layer, num_modes in wanted.values():  # after all were looked at: some may share a gate
        set_num_modes(layer, num_modes)
    return changed
