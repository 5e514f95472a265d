"""The switches on the modes of all gates, drawn for a step, as one autograd node.

The hard-concrete distribution of Louizos, Welling & Kingma (2018), with their constants.

Letters: K modes, S switches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modenorm.kernels.c import switches as c_switches
from modenorm.kernels.choice import FUSED, choose_kernels, choose_path, runs_triton
from modenorm.kernels.plain import differentiate, node, only_plain
from modenorm.kernels.several import together

__all__ = ["Drawn", "draw_for_biases", "draw_switches", "expected_open"]

TEMPERATURE, LOW, HIGH = 2 / 3, -0.1, 1.1
CLOSED = 1e-6
"""The smallest factor on a gate; 0 would have no logarithm."""
SHIFT = TEMPERATURE * math.log(-LOW / HIGH)
CONSTANTS = (TEMPERATURE, LOW, HIGH, CLOSED, SHIFT)


def draw_switches(log_odds: Tensor, noise: Tensor | None) -> Tensor:
    """Hard-concrete switches, drawn with uniform noise, or without it the most likely ones.

    Example:
        >>> draw_switches(torch.tensor([-9.0, 9.0]), None)
        tensor([1.0000e-06, 1.0000e+00])
    """
    soft = torch.sigmoid(log_odds) if noise is None else _soft(log_odds, noise)
    return _hard(soft * (HIGH - LOW) + LOW)


def expected_open(log_odds: Tensor) -> Tensor:
    """The probability that a drawn switch is not closed.

    Example:
        >>> bool(expected_open(torch.tensor(2.0)) > 0.9)
        True
    """
    return torch.sigmoid(log_odds - SHIFT)


def _soft(log_odds: Tensor, noise: Tensor) -> Tensor:
    return torch.sigmoid((log_odds + noise.clamp(1e-6, 1 - 1e-6).logit()) / TEMPERATURE)


def _hard(stretched: Tensor) -> Tensor:
    return stretched.clamp(0, 1) * (1 - CLOSED) + CLOSED


class Drawn(NamedTuple):
    """What switches are in a step.

    Attributes:
        cost: The strength times the expected number of open ones.
        changes: Their logarithms, (S,), which are added to logits.
        used: The biases with these added, (K,) each.
    """

    cost: Tensor
    changes: Tensor
    used: Sequence[Tensor]


def draw_for_biases(
    log_odds: Tensor, strength: Tensor, random: Tensor, biases: Sequence[Tensor]
) -> Drawn | None:
    """Draw the switches of gates, and add them to the gates' biases; None where it is not served.

    Args:
        log_odds: (S,).
        strength: Of the cost.
        random: Seed and number of the noise, (2,), of which a launch makes its own while a CUDA
            graph is captured; otherwise it is torch's, so that recomputing it draws the same.
        biases: (K,) each, S numbers together.
    """
    others = (*biases, strength)
    if choose_path(log_odds) not in FUSED or log_odds.dtype != torch.float32:
        return None
    if any(t.dtype != torch.float32 or t.device != log_odds.device for t in others):
        return None
    if choose_kernels(log_odds, *others) == "torch":
        return None
    cost, changes, *used = _node(log_odds, strength, random, *together(biases))
    if len(used) < len(biases):
        used = used[0].split([len(bias) for bias in biases])
    return Drawn(cost, changes, used)


def _plain(
    log_odds: Tensor, strength: Tensor, noise: Tensor, *biases: Tensor
) -> tuple[Tensor, ...]:
    changes = draw_switches(log_odds, noise).log()
    parts = changes.split([len(bias) for bias in biases])
    used = (bias + part for bias, part in zip(biases, parts, strict=True))
    return strength * expected_open(log_odds).sum(), changes, *used


class _Switched(torch.autograd.Function):
    """From log odds and biases to the cost, the changes and the used biases.

    What its backward reads is not freed with the graph: cost and outputs may be differentiated one
    after the other.
    """

    @staticmethod
    def forward(
        ctx: Any, log_odds: Tensor, strength: Tensor, random: Tensor, *biases: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        noise = None if _makes_own_noise(log_odds) else torch.rand_like(log_odds)
        given = (log_odds, strength, random, noise, biases, CONSTANTS)
        cost, used, ctx.found, noise = _kernels_for(log_odds).draw(*given)
        ctx.save_for_backward(log_odds, strength, noise, *biases)
        return cost, ctx.found[0], *used.unbind()

    @staticmethod
    def backward(
        ctx: Any, cost: Tensor | None, changes: Tensor | None, *used: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if changes is not None or only_plain(cost, *used):
            upstream = (cost, changes, *used)
            return tuple(differentiate(_plain, ctx.saved_tensors, ctx.needs_input_grad, upstream))
        found = ctx.found
        return _kernels_for(found).draw_backward(used, cost, found), None, None, *used


_node = node(_Switched)


def _makes_own_noise(like: Tensor) -> bool:
    return like.is_cuda and torch.cuda.is_current_stream_capturing()


def _kernels_for(like: Tensor) -> ModuleType:
    """The module that draws switches and differentiates them."""
    if not runs_triton(like):
        return c_switches
    from modenorm.kernels.gpu import switches as gpu_switches

    return gpu_switches
