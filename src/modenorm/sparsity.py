"""A penalty on modes that aren't needed, to be added to a training's loss.

Letters: N samples, K modes. Nothing here waits for the device or branches on data, so a step with
it can be captured as a CUDA graph; the modes of all layers are treated in one go.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor, nn

from modenorm.checks import check_choice
from modenorm.kernels.entropy import usage_entropy
from modenorm.kernels.switches import expected_open
from modenorm.layers import ModeNorm
from modenorm.listeners import Listener
from modenorm.modes.recording import listening, mode_layers
from modenorm.switches import Switches

__all__ = ["DEFAULT_STRENGTH", "METHODS", "ModeSparsity"]

METHODS = ("entropy", "switch")
DEFAULT_STRENGTH = {"entropy": 0.002, "switch": 0.1}

FIRST_SWITCH = 2.0  # log odds: switches start open


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
    closes modes before they find their samples. The penalty is in nats next to the loss, so a mode
    goes if it lowers the loss by less than its part of the entropy costs. Even the default strength
    took useful modes from a ResNet20 (docs/automatic_modes_study.md). `strength` is a tensor that
    can be changed at any time, also between replays of a captured step.

    Several penalties on one model add up. A layer that a forward uses several times counts with its
    last use. With switches under DistributedDataParallel the gradients of their parameters are
    averaged over the ranks.

    Mode group norms are left alone: they average their modes without the gates, so a mode without
    channels counts as much as any other.

    Args:
        model: The model to penalise. With "switch" its gates are changed until `remove` is called.
            Each process of a parallel training looks at its own part of the batch.
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
    random: Tensor
    """Of "switch": seed and number of the noise in captured steps, where a launch advances it."""

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
        self._usages: dict[int, Tensor] = {}
        self._switches: Switches | None = None
        self._attached = contextlib.ExitStack()
        self._removed = False
        like = next(layers[0].parameters(), torch.empty(0))
        kind: dict[str, Any] = {"device": like.device, "dtype": torch.float32}
        self.register_buffer("strength", torch.tensor(float(strength), **kind))
        self.log_odds: nn.Parameter | None = None
        if method == "switch":
            num_switches = sum(layer.num_modes for layer in layers)
            self.log_odds = nn.Parameter(torch.full((num_switches,), FIRST_SWITCH, **kind))
            seed = int(torch.randint(1 << 62, (), device="cpu"))
            self.register_buffer("random", torch.tensor([seed, 0], device=like.device))
            self._switches = Switches(self, layers)
            self._switches.attach(model, self._attached)
        else:
            heard = [(layer, self._listener(place, layer)) for place, layer in enumerate(layers)]
            self._attached.enter_context(listening(heard, "usage_listener"))

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles, say of a module that holds this one, are on no model."""
        alone: dict[str, Any] = {
            "_usages": {},
            "_switches": None,
            "_attached": contextlib.ExitStack(),
            "_removed": True,
        }
        return {**self.__dict__, **alone}

    def forward(self) -> Tensor:
        """The loss of the model's last forward in training.

        >>> import modenorm
        >>> layer = modenorm.ModeNorm1d(4, num_modes=4)
        >>> penalty = ModeSparsity(layer)
        >>> y = layer(torch.randn(8, 4))
        >>> bool(penalty() > 0)
        True
        """
        if self._removed:
            raise ValueError(
                "this ModeSparsity is on no model: remove() was called, or it is a copy; make a "
                "new one, or leave it out of the loss"
            )
        if self.log_odds is not None:
            kept = None if self._switches is None else self._switches.take_cost()
            return self.strength * expected_open(self.log_odds).sum() if kept is None else kept
        if not self._usages:
            raise ValueError(
                "ModeSparsity heard no gates since it was last called; call it after each forward "
                "of the model in training mode, with gradients enabled and not inside of a "
                "reentrant checkpoint, which has none"
            )
        heard = list(self._usages.values())
        self.forget()
        return usage_entropy(heard, self.strength)

    def forget(self) -> None:
        """Let go of the last forward, after a step that does without the penalty.

        >>> import modenorm
        >>> layer = modenorm.ModeNorm1d(4, num_modes=4)
        >>> penalty = ModeSparsity(layer)
        >>> y = layer(torch.randn(8, 4))
        >>> penalty.forget()
        """
        self._usages.clear()
        if self._switches is not None:
            self._switches.take_cost()

    @torch.no_grad()
    def remove(self) -> None:
        """Take it off the model; what the switches say is written into the gates' biases.

        >>> import modenorm
        >>> layer = modenorm.ModeNorm1d(4, num_modes=4)
        >>> ModeSparsity(layer, method="switch").remove()
        """
        if self._removed:
            return
        self._removed = True
        if self._switches is not None:
            self._switches.remove()
        self._attached.close()
        self.forget()

    def _listener(self, place: int, layer: ModeNorm) -> Listener:
        def listen(usage: Tensor) -> None:
            if usage.requires_grad and layer.training:
                self._usages[place] = usage

        return listen

    def extra_repr(self) -> str:
        """The arguments."""
        return f"strength={float(self.strength):g}, method={self.method!r}"
