"""Which tensors of a layer have a row for each mode, and what a state dict says of their number.

Letters: K modes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from modenorm.gates import LinearGate

__all__ = ["explain_modes", "fit_share", "last_linear", "modes_in", "spread_batchnorm"]


def last_linear(gate: nn.Module, num_modes: int) -> Any:
    """The layer with a weight (K, …) and a bias (K,) that makes a gate's logits; None if unknown.

    Example:
        >>> last_linear(nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)), 2)
        Linear(in_features=4, out_features=2, bias=True)
    """
    while isinstance(gate, nn.Sequential) and len(gate):
        gate = gate[-1]
    if not isinstance(gate, LinearGate | nn.Linear) or gate.bias is None or is_lazy(gate.bias):
        return None
    return gate if gate.bias.shape == (num_modes,) else None


def modes_in(layer: Any, state_dict: Mapping[str, Any], prefix: str) -> int | None:
    """K of a mode norm or mode group norm in a state dict; None if that doesn't tell."""
    for name, ndim in _with_modes(layer).items():
        tensor = state_dict.get(prefix + name)
        if isinstance(tensor, Tensor) and tensor.ndim == ndim:
            return len(tensor)
    return None


def _with_modes(layer: Any) -> dict[str, int]:
    """The numbers of dimensions of tensors with a row for each mode, by name."""
    if not hasattr(layer, "gate"):
        return {"gate_weight": 1}
    known = {"running_mean": 2}
    linear = last_linear(layer.gate, layer.num_modes)
    if linear is not None:
        name = next(name for name, module in layer.named_modules() if module is linear)
        known |= {f"{name}.weight": 2, f"{name}.bias": 1}
    if layer.per_mode_affine:
        known |= {"weight": 2, "bias": 2}
    return known


def explain_modes(
    layer: Any, state_dict: Mapping[str, Any], prefix: str, errors: list[str]
) -> None:
    """Say in words what torch only says in shapes."""
    found = modes_in(layer, state_dict, prefix)
    if found not in (None, layer.num_modes):
        errors.append(
            f"{prefix.removesuffix('.') or 'the layer'} has num_modes={found} in this state, but "
            f"num_modes={layer.num_modes} in the model: call modenorm.match_modes(model, "
            f"state_dict) before loading, or make the model with the numbers it was saved with."
        )


def spread_batchnorm(layer: Any, state_dict: Any, prefix: str) -> None:
    """Take a batch norm's state: every mode starts from its statistics, the gate stays."""
    if not _is_batchnorm(layer, state_dict, prefix):
        return
    names = ["running_mean", "running_var"]
    if layer.per_mode_affine:
        names += ["weight", "bias"]
    for key in (prefix + name for name in names):
        if key in state_dict and state_dict[key].ndim == 1:
            state_dict[key] = state_dict[key].repeat(layer.num_modes, 1)
    kept = dict(layer.gate.state_dict(prefix=prefix + "gate."))
    # torch before 0.4.1 had no counter
    kept[prefix + "num_batches_tracked"] = layer.num_batches_tracked
    for name, tensor in kept.items():
        if tensor is not None and not getattr(tensor, "is_meta", False):  # that has no values
            state_dict.setdefault(name, tensor)


def fit_share(layer: Any, state_dict: Any, prefix: str) -> None:
    """Let a state of the other `running_update` load: with equal shares, or without any."""
    key, share = prefix + "running_share", layer.running_share
    if share is None:
        state_dict.pop(key, None)
    elif key not in state_dict and prefix + "running_mean" in state_dict:
        tracked = state_dict.get(prefix + "num_batches_tracked")
        if tracked is not None:
            share = (tracked.to(share.dtype) / layer.num_modes).repeat(layer.num_modes)
        if not getattr(share, "is_meta", False):
            state_dict[key] = share


def _is_batchnorm(layer: Any, state_dict: Mapping[str, Any], prefix: str) -> bool:
    """Whether it is the state of a batch norm with as many estimates as the layer: some or none."""
    tracked = layer.running_mean is not None
    row = state_dict.get(prefix + ("running_mean" if tracked else "weight"))
    if row is None or is_lazy(row) or row.ndim != 1:
        return False
    return tracked or not any(name.startswith(prefix + "gate.") for name in state_dict)
