"""Switches on the modes of a model's gates, drawn anew before each of its forwards.

Letters: K modes.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from modenorm.gates import LinearGate
from modenorm.kernels.switches import draw_for_biases, draw_switches
from modenorm.layers import ModeNorm
from modenorm.resizing import last_linear

__all__ = ["Switches"]


class Penalty(Protocol):
    """Who has the switches' log odds, and what else goes into a draw."""

    log_odds: nn.Parameter | None
    strength: Tensor
    random: Tensor


class Switches:
    """A model's hook that draws switches; copies of the model have the same ones.

    Linear gates have them in the bias, by `LinearGate.bias_changes`, and keep their fused kernels;
    others have a hook, which adds them to the logits.

    Args:
        penalty: Of which the switches are.
        layers: Whose gates have them.
    """

    def __init__(self, penalty: Penalty, layers: Sequence[ModeNorm]) -> None:
        for layer in layers:
            _bias_of(layer)
        self.penalty = penalty
        self.layers = tuple(layers)
        self.sizes = [layer.num_modes for layer in layers]
        # the first ones are for parts of the model that are called by themselves
        self.changes = self._changes(drawn=False).detach()
        self.biases: Sequence[Tensor] = ()
        self.used: Sequence[Tensor] = ()  # instead of these biases
        self._cost: tuple[Tensor, tuple[int, int]] | None = None

    def attach(self, model: nn.Module, attached: contextlib.ExitStack) -> None:
        """Put them on a model and its gates until the stack is closed."""
        for place, layer in enumerate(self.layers):
            if isinstance(layer.gate, LinearGate):  # whose fused kernels a hook would pass by
                change = partial(self._on_bias, place)
                layer.gate.bias_changes += (change,)
                attached.callback(_take_off, layer.gate, change)
            else:
                hook = partial(self._on_logits, place)
                attached.callback(layer.gate.register_forward_hook(hook).remove)
        attached.callback(model.register_forward_pre_hook(self).remove)

    def __call__(self, model: nn.Module, _: tuple[Any, ...]) -> None:
        """Draw them for a training step, or take the most likely ones."""
        self.biases, self.used, self._cost = (), (), None
        if not (model.training and self._draw_for_biases()):
            self.changes = self._changes(drawn=model.training)

    def take_cost(self) -> Tensor | None:
        """The cost as found with the last draw, once, if nothing has changed since."""
        kept, self._cost = self._cost, None
        return None if kept is None or kept[1] != self._versions() else kept[0]

    def write_into_biases(self) -> None:
        """Add what the most likely switches add."""
        changes = self._changes(drawn=False).split(self.sizes)
        for layer, change in zip(self.layers, changes, strict=True):
            bias = _bias_of(layer)
            bias.add_(change.to(bias))

    def _draw_for_biases(self) -> bool:
        """Whether they could be drawn into the biases of all gates at once."""
        biases = [layer.gate.bias for layer in self.layers if isinstance(layer.gate, LinearGate)]
        if len(biases) < len(self.layers):
            return False
        penalty = self.penalty
        drawn = draw_for_biases(self._log_odds(), penalty.strength, penalty.random, biases)
        if drawn is None:
            return False
        self.biases, self.used, self.changes = biases, drawn.used, drawn.changes
        if drawn.cost.requires_grad:
            self._cost = (drawn.cost, self._versions())
        return True

    def _on_bias(self, place: int, bias: Tensor) -> Tensor:
        if self.biases and bias is self.biases[place]:
            return self.used[place]
        return bias + self._change(place)

    def _on_logits(self, place: int, _: nn.Module, __: tuple[Any, ...], logits: Tensor) -> Tensor:
        return logits + self._change(place).to(logits)

    def _change(self, place: int) -> Tensor:
        first = sum(self.sizes[:place])
        return self.changes[first : first + self.sizes[place]]

    def _changes(self, drawn: bool) -> Tensor:
        """What is added to the logits of all layers' modes: drawn, or the most likely."""
        log_odds = self._log_odds()
        noise = torch.rand_like(log_odds) if drawn else None
        return draw_switches(log_odds, noise).log()

    def _log_odds(self) -> Tensor:
        assert self.penalty.log_odds is not None
        return self.penalty.log_odds

    def _versions(self) -> tuple[int, int]:
        return self._log_odds()._version, self.penalty.strength._version

    def __deepcopy__(self, _: dict[int, Any]) -> Switches:
        return self

    def __reduce__(self) -> str:
        raise pickle.PicklingError(
            "the model has the switches of a ModeSparsity on it, which a pickle can't hold: save "
            "state dicts, or call remove() of the penalty first"
        )


def _bias_of(layer: ModeNorm) -> nn.Parameter:
    linear = last_linear(layer.gate, layer.num_modes)
    if linear is None or not isinstance(linear.bias, nn.Parameter):
        raise ValueError(
            f'method "switch" needs gates that end in a linear layer with a bias; '
            f"got {type(layer.gate).__name__}, without one or with one that is computed: "
            f'use method "entropy"'
        )
    return linear.bias


def _take_off(gate: LinearGate, change: Callable[[Tensor], Tensor]) -> None:
    gate.bias_changes = tuple(other for other in gate.bias_changes if other is not change)
