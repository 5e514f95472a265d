"""What a state dict says about the number of modes of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["explain_modes", "modes_in"]


def modes_in(state_dict: Mapping[str, Any], prefix: str) -> int | None:
    """K of the layer with this prefix in a state dict; None if it has no modes."""
    for name, ndim in (("running_mean", 2), ("gate_weight", 1), ("gate.weight", 2)):
        tensor = state_dict.get(prefix + name)
        if isinstance(tensor, Tensor) and tensor.ndim == ndim:
            return len(tensor)
    return None


def explain_modes(
    num_modes: int, state_dict: Mapping[str, Any], prefix: str, errors: list[str]
) -> None:
    """Say in words what torch only says in shapes."""
    found = modes_in(state_dict, prefix)
    if found not in (None, num_modes):
        errors.append(
            f"{prefix.removesuffix('.') or 'the layer'} has num_modes={found} in this state, but "
            f"num_modes={num_modes} in the model: call modenorm.match_modes(model, "
            f"state_dict) before loading, or make the model with the numbers it was saved with."
        )
