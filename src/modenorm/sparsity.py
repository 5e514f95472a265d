"""A penalty on modes that aren't needed, to be added to a training's loss.

Letters: N samples, K modes. Nothing here waits for the device or branches on data, so a step with
it can be captured as a CUDA graph; the modes of all layers are treated in one go.
"""

from __future__ import annotations

import contextlib
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modenorm.checks import check_choice
from modenorm.gates import LinearGate
from modenorm.kernels.entropy import usage_entropy
from modenorm.layers import ModeNorm
from modenorm.listeners import UsageListener
from modenorm.recording import mode_layers
from modenorm.resizing import last_linear

__all__ = ["DEFAULT_STRENGTH", "METHODS", "ModeSparsity"]

METHODS = ("entropy", "switch")
DEFAULT_STRENGTH = {"entropy": 0.002, "switch": 0.1}

# The hard-concrete distribution of Louizos, Welling & Kingma (2018), with their constants.
TEMPERATURE, LOW, HIGH = 2 / 3, -0.1, 1.1
FIRST_SWITCH = 2.0  # log odds: switches start open
CLOSED = 1e-6  # the smallest factor on a gate; 0 would have no logarithm


def draw_switches(log_odds: Tensor, noise: Tensor | None) -> Tensor:
    """Hard-concrete switches, drawn with uniform noise, or without it the most likely ones.

    Example:
        >>> draw_switches(torch.tensor([-9.0, 9.0]), None)
        tensor([1.0000e-06, 1.0000e+00])
    """
    soft = torch.sigmoid(log_odds)
    if noise is not None:
        soft = torch.sigmoid((log_odds + noise.clamp(1e-6, 1 - 1e-6).logit()) / TEMPERATURE)
    return (soft * (HIGH - LOW) + LOW).clamp(0, 1) * (1 - CLOSED) + CLOSED


def expected_open(log_odds: Tensor) -> Tensor:
    """The probability that a drawn switch is not closed.

    Example:
        >>> bool(expected_open(torch.tensor(2.0)) > 0.9)
        True
    """
    return torch.sigmoid(log_odds - TEMPERATURE * math.log(-LOW / HIGH))


class ModeSparsity(nn.Module):
    r"""A loss that makes the mode norms of a model give up modes that they don't need.

    Call it in each training step after the model, and add what it returns to the loss; then
    `prune_modes` takes away what makes little difference. Two methods:

    - "entropy": strength · Σ_layers H(mean_n g_n), the entropy (in nats) of the share of the batch
      that each mode receives. Deterministic, without parameters.
    - "switch": a hard-concrete switch z_k in [0, 1] on every mode, which multiplies its gates, and
      strength · the expected number of open ones (L0 regularization). Has parameters to learn,
      and is drawn anew in every forward of the model in training.

    Start it when modes have formed, about half way through the training: from the first step on it
    closes modes before they find their samples (docs/automatic_modes.md). The penalty is in nats
    beside the loss, so a mode goes if it lowers the loss by less than its part of the entropy
    costs; the default strength takes little more than duplicates. `strength` is a tensor that can
    be changed at any time, also between replays of a captured step.

    Mode group norms are left alone: they average their modes without the gates, so a mode without
    channels counts as much as any other.

    Args:
        model: Heard and, by "switch", changed until `remove` is called. Each process of a parallel
            training looks at its own part of the batch.
        strength: Of the penalty beside a loss in nats; None for the method's default.
        method: "entropy" or "switch".

    Example:
        >>> import modenorm
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), modenorm.ModeNorm2d(8, num_modes=8))
        >>> sparsity = ModeSparsity(model, strength=0.01)
        >>> loss = model(torch.randn(16, 3, 8, 8)).square().mean() + sparsity()
        >>> loss.backward()
        >>> sparsity.remove()
    """

    strength: Tensor

    def __init__(
        self,
        model: nn.Module,
        strength: float | None = None,
        method: str = "entropy",
    ) -> None:
        super().__init__()
        check_choice("method", method, METHODS)
        strength = DEFAULT_STRENGTH[method] if strength is None else strength
        if not (math.isfinite(strength) and strength >= 0):
            raise ValueError(f"strength is {strength}; it must be a finite number of at least 0")
        layers = [
            layer
            for layer in mode_layers(model).values()
            if isinstance(layer, ModeNorm) and layer.num_modes > 1
        ]
        if not layers:
            raise ValueError(
                f"{type(model).__name__} has no mode norm with several modes, so there is nothing "
                f"to make sparse; put some in, for example with modenorm.replace_batchnorm"
            )
        self.method = method
        self._layers = tuple(layers)  # not submodules: their parameters are the model's
        self._sizes = [layer.num_modes for layer in layers]
        self._usages: dict[int, Tensor] = {}
        self._attached = contextlib.ExitStack()
        self._removed = False
        like = next(layers[0].parameters(), torch.empty(0))
        kind: dict[str, Any] = {"device": like.device, "dtype": torch.float32}
        self.register_buffer("strength", torch.tensor(float(strength), **kind))
        self.log_odds: nn.Parameter | None = None
        if method == "switch":
            self.log_odds = nn.Parameter(torch.full((sum(self._sizes),), FIRST_SWITCH, **kind))
            self._attach_switches(model)
        else:
            for place, layer in enumerate(layers):
                listener = self._listener(place)
                layer.usage_listener = listener
                self._attached.callback(_release, layer, listener)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles, say of a module that holds this one, are on no model."""
        alone = {
            "_layers": (),
            "_usages": {},
            "_attached": contextlib.ExitStack(),
            "_removed": True,
        }
        return {**self.__dict__, **alone}

    def forward(self) -> Tensor:
        """The loss of the model's last forward in training."""
        if self.log_odds is not None:
            return self.strength * expected_open(self.log_odds).sum()
        if not self._usages:
            raise ValueError(
                "ModeSparsity heard no gates since it was last called; call it after each forward "
                "of the model in training mode, with gradients enabled"
            )
        heard = list(self._usages.values())
        self.forget()
        return usage_entropy(heard, self.strength)

    def forget(self) -> None:
        """Let go of the last forward, after a step that does without the penalty."""
        self._usages.clear()

    @torch.no_grad()
    def remove(self) -> None:
        """Take it off the model; what the switches say is written into the gates' biases."""
        if self._removed:
            return
        self._removed = True
        if self.log_odds is not None:
            for layer, change in zip(self._layers, self._changes(drawn=False), strict=True):
                linear = last_linear(layer.gate, layer.num_modes)
                assert linear is not None
                linear.bias.add_(change.to(linear.bias))
        self._attached.close()
        self.forget()

    def _listener(self, place: int) -> UsageListener:
        def listen(usage: Tensor) -> None:
            if usage.requires_grad:
                self._usages[place] = usage

        return listen

    def _attach_switches(self, model: nn.Module) -> None:
        for layer in self._layers:
            linear = last_linear(layer.gate, layer.num_modes)
            if linear is None or not isinstance(linear.bias, nn.Parameter):
                raise ValueError(
                    f'method "switch" needs gates that end in a linear layer with a bias; '
                    f"got {type(layer.gate).__name__}, without one or with one that is computed: "
                    f'use method "entropy"'
                )
        # the first ones are for parts of the model that are called by themselves
        drawn = [change.detach() for change in self._changes(drawn=False)]

        def added(place: int) -> Callable[[nn.Module, Any, Tensor], Tensor]:
            return lambda _, __, logits: logits + drawn[place].to(logits)

        for place, layer in enumerate(self._layers):
            if isinstance(layer.gate, LinearGate):  # whose fused kernels a hook would pass by
                change = partial(drawn.__getitem__, place)
                layer.gate.bias_changes += (change,)
                self._attached.callback(_take_off, layer.gate, change)
            else:
                self._attached.callback(layer.gate.register_forward_hook(added(place)).remove)
        self._attached.callback(model.register_forward_pre_hook(_Draw(self, drawn)).remove)

    def _changes(self, drawn: bool) -> list[Tensor]:
        """What is added to the logits of every mode, by layer: drawn, or the most likely."""
        assert self.log_odds is not None
        noise = torch.rand_like(self.log_odds) if drawn else None
        return list(torch.split(draw_switches(self.log_odds, noise).log(), self._sizes))

    def extra_repr(self) -> str:
        """The arguments."""
        return f"strength={float(self.strength):g}, method={self.method!r}"


def _release(layer: ModeNorm, listener: UsageListener) -> None:
    if layer.usage_listener is listener:  # and not that of a later penalty
        layer.usage_listener = None


class _Draw:
    """Draws the switches before every forward of a model; its copies have the same switches."""

    def __init__(self, sparsity: ModeSparsity, drawn: list[Tensor]) -> None:
        self.sparsity, self.drawn = sparsity, drawn

    def __call__(self, model: nn.Module, _: tuple[Any, ...]) -> None:
        self.drawn[:] = self.sparsity._changes(drawn=model.training)

    def __deepcopy__(self, _: dict[int, Any]) -> _Draw:
        return self

    def __reduce__(self) -> str:
        raise pickle.PicklingError(
            "the model has the switches of a ModeSparsity on it, which a pickle can't hold: save "
            "state dicts, or call remove() of the penalty first"
        )


def _take_off(gate: LinearGate, change: Callable[[], Tensor]) -> None:
    gate.bias_changes = tuple(other for other in gate.bias_changes if other is not change)
