"""Switches on the modes of a model's gates, drawn anew before each of its forwards.

Letters: K modes.
"""

from __future__ import annotations

import contextlib
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from modenorm.buffers import recomputing
from modenorm.convert.selection import listed
from modenorm.gates import LinearGate
from modenorm.kernels.switches import draw_for_biases, draw_switches
from modenorm.layers import ModeNorm
from modenorm.state import last_linear

__all__ = ["Switches", "check_switched"]


class Penalty(Protocol):
    """What has the switches' log odds, and what else goes into a draw."""

    log_odds: nn.Parameter | None
    strength: Tensor
    random: Tensor


class Switches:
    """A model's hook that draws switches; copies of the model have the same ones.

    Linear gates have them in the bias, by `LinearGate.bias_changes`, and keep their fused kernels;
    others have a hook, which adds them to the logits. In evaluation they are the most likely ones.

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
        self.removed = False
        self.draw: _Draw | None = None  # of the last forward in training
        self._repeated: _Draw | None = None  # of the last one that a backward may compute again
        self._pending: weakref.WeakSet[_Token] = weakref.WeakSet()
        self._ddp: DistributedDataParallel | None = None
        self._log_odds().register_post_accumulate_grad_hook(self._average)

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
        """Draw them for a forward in training."""
        if self.removed or not model.training:
            return
        self.draw = None  # the last graph goes before the next comes
        if torch.is_grad_enabled():
            self._ddp, self._repeated = _ddp_of(model), None
        self.draw = self._draw_for_biases()
        if self.draw is None:
            noise = torch.rand_like(self._log_odds())
            self.draw = _Draw(draw_switches(self._log_odds(), noise).log())
        if torch.is_grad_enabled():
            self._repeated = self.draw
        if not (torch.compiler.is_compiling() or recomputing()):
            self._note(self.draw.changes.grad_fn)

    def _note(self, node: Any) -> None:
        """Remember a draw until its graph is differentiated or gone."""
        if node is not None:
            token = _Token()
            node.register_prehook(token.finish)
            self._pending.add(token)

    def take_cost(self) -> Tensor | None:
        """The cost as found with the last draw, once, if nothing has changed since."""
        draw = self.draw
        if draw is None or draw.cost is None:
            return None
        cost, draw.cost = draw.cost, None
        return cost if draw.state == self._state() else None

    def remove(self) -> None:
        """Write what the most likely switches add into the biases; copies have none from now on."""
        changes = draw_switches(self._log_odds(), None).log().split(self.sizes)
        for layer, change in zip(self.layers, changes, strict=True):
            bias = _bias_of(layer)
            bias.add_(change.to(bias))
        self.removed, self.draw, self._repeated = True, None, None

    def _draw_for_biases(self) -> _Draw | None:
        """Drawn into the biases of all gates at once, where that can be done."""
        biases = [layer.gate.bias for layer in self.layers if isinstance(layer.gate, LinearGate)]
        if len(biases) < len(self.layers):
            return None
        if [len(bias) for bias in biases] != self.sizes:
            raise ValueError(
                f"the gates have {[len(bias) for bias in biases]} modes, but the ModeSparsity on "
                f"them was made for {self.sizes}: call its remove(), then make a new one"
            )
        penalty = self.penalty
        drawn = draw_for_biases(self._log_odds(), penalty.strength, penalty.random, biases)
        if drawn is None:
            return None
        cost = drawn.cost if drawn.cost.requires_grad else None
        return _Draw(drawn.changes, biases, drawn.used, cost, self._state())

    def _on_bias(self, place: int, gate: nn.Module, bias: Tensor) -> Tensor:
        draw = self._draw_of(gate)
        if draw is not None and draw.biases and bias is draw.biases[place]:
            return draw.used[place]
        return bias if self.removed else bias + self._change(place, draw)

    def _on_logits(self, place: int, gate: nn.Module, _: tuple[Any, ...], logits: Tensor) -> Tensor:
        draw = self._draw_of(gate)
        return logits if self.removed else logits + self._change(place, draw).to(logits)

    def _draw_of(self, gate: nn.Module) -> _Draw | None:
        """What was drawn for a gate in training; parts of a model have what it had last."""
        if self.removed or not gate.training:
            return None
        if not recomputing():
            if torch.is_grad_enabled():
                self._repeated = self.draw
            return self.draw
        if sum(not token.done for token in self._pending) > 1:
            raise RuntimeError(
                "a part of the model is computed again in backward (checkpointing), after several "
                "forwards of the model in training: which switches it had is not known; call "
                'backward after each forward, or use ModeSparsity with method="entropy"'
            )
        return self._repeated

    def _change(self, place: int, draw: _Draw | None) -> Tensor:
        """What is added to the logits of a layer's modes: as drawn, or the most likely."""
        first = sum(self.sizes[:place])
        part = slice(first, first + self.sizes[place])
        if draw is not None:
            return draw.changes[part]
        return draw_switches(self._log_odds()[part], None).log()

    @torch.no_grad()
    def _average(self, log_odds: Tensor) -> None:
        """Average the gradient over the ranks, as DDP does with those of the model."""
        ddp = self._ddp
        if ddp is None or log_odds.grad is None:
            return
        if not any(parameter is log_odds for parameter in ddp.parameters()):
            distributed.all_reduce(log_odds.grad, group=ddp.process_group)
            log_odds.grad /= distributed.get_world_size(ddp.process_group)

    def _log_odds(self) -> nn.Parameter:
        assert self.penalty.log_odds is not None
        return self.penalty.log_odds

    def _state(self) -> tuple[int, ...]:
        """Changes when what a cost depends on does."""
        given = (self._log_odds(), self.penalty.strength)
        return tuple(n for t in given for n in (id(t), t._version, t.data_ptr()))

    def __deepcopy__(self, _: dict[int, Any]) -> Switches:
        return self

    def __reduce__(self) -> Any:
        if self.removed:
            return _removed, ()
        raise pickle.PicklingError(
            "the model has the switches of a ModeSparsity on it, which a pickle can't hold: save "
            "state dicts, or call remove() of the penalty first"
        )


@dataclass(eq=False)
class _Draw:
    """Switches of one forward: what they add to all logits, and biases that have them in them."""

    changes: Tensor
    biases: Sequence[Tensor] = ()
    used: Sequence[Tensor] = ()
    cost: Tensor | None = None
    state: tuple[int, ...] = ()


class _Token:
    """Whether a draw's graph has been differentiated; is there as long as that graph."""

    done = False

    def finish(self, _: Any) -> None:
        """A node's hook."""
        self.done = True


def check_switched(layers: Mapping[str, nn.Module], call: str) -> None:
    """Refuse to change the modes of layers that have a switch on each."""
    gates = {name: getattr(layer, "gate", None) for name, layer in layers.items()}
    switched = [name for name, gate in gates.items() if gate is not None and _has_switches(gate)]
    if switched:
        raise ValueError(
            f"a ModeSparsity has its switches on {listed(switched)}, one for each mode; call its "
            f"remove() before {call}"
        )


def _has_switches(gate: nn.Module) -> bool:
    """Whether there are switches on a gate that have not been removed."""
    hooks = (*getattr(gate, "bias_changes", ()), *gate._forward_hooks.values())
    owners = (getattr(getattr(hook, "func", None), "__self__", None) for hook in hooks)
    return any(isinstance(owner, Switches) and not owner.removed for owner in owners)


def _removed() -> Switches:
    """What a copy of a model has in the place of switches that were removed."""
    switches = Switches.__new__(Switches)
    switches.removed = True
    return switches


def _ddp_of(model: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel that will average this model's gradients, or None."""
    active = getattr(DistributedDataParallel, "_active_ddp_module", None)
    ddp = model if isinstance(model, DistributedDataParallel) else active
    # what counts is no_sync() around the forward, as it does for DDP
    return ddp if ddp is not None and ddp.require_backward_grad_sync else None


def _bias_of(layer: ModeNorm) -> nn.Parameter:
    linear = last_linear(layer.gate, layer.num_modes)
    if linear is None or not isinstance(linear.bias, nn.Parameter):
        raise ValueError(
            f'method "switch" needs gates that end in a linear layer with a bias; '
            f"got {type(layer.gate).__name__}, without one or with one that is computed: "
            f'use method "entropy"'
        )
    return linear.bias


def _take_off(gate: LinearGate, change: Callable[[nn.Module, Tensor], Tensor]) -> None:
    gate.bias_changes = tuple(other for other in gate.bias_changes if other is not change)
