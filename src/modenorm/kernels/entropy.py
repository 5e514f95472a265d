"""The entropy of how a batch uses its modes, as one autograd node for all layers.

Letters: K modes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modenorm.kernels.choice import FUSED, choose_path, runs_triton
from modenorm.kernels.plain import differentiate, node, only_plain
from modenorm.kernels.several import together

__all__ = ["usage_entropy"]

SMALLEST_USAGE = 1e-30
"""Modes that are used less count as if used so, and have no gradient; 0 has no logarithm."""


def usage_entropy(usages: Sequence[Tensor], strength: Tensor) -> Tensor:
    """−Σ u ln u in nats over the usages of layers, (K,) each, times the strength.

    Example:
        >>> float(usage_entropy([torch.tensor([0.5, 0.5])], torch.tensor(1.0)))  # ln 2
        0.6931...
    """
    first = usages[0]
    if any(u.dtype != first.dtype or u.device != first.device for u in usages):
        usages = [u.to(first) for u in usages]
    usages = together(usages)
    strength = strength.to(first)
    if choose_path(first) not in FUSED:
        return _plain(strength, *usages)[0]
    value: Tensor = _node(strength, *usages)
    return value


def _plain(strength: Tensor, *usages: Tensor) -> tuple[Tensor]:
    usage = torch.stack(usages).clamp_min(SMALLEST_USAGE)
    return (strength * torch.special.entr(usage).sum(),)


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, strength: Tensor, *usages: Tensor) -> Tensor:
        value, slopes = _entropies(usages, strength)
        ctx.save_for_backward(slopes, strength, *usages)
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        slopes, *given = ctx.saved_tensors
        if only_plain(upstream):
            needed = (False, *ctx.needs_input_grad[1:])
            return tuple(differentiate(_plain, given, needed, (upstream,)))
        found = slopes * upstream
        if found.shape[1] > len(given[1]):
            found = found[:, : len(given[1])]
        return None, *found.unbind()


_node = node(_Entropy)


def _entropies(usages: tuple[Tensor, ...], strength: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted entropy, and its slopes, (layers, K or more)."""
    if strength.dtype == torch.float32 and runs_triton(strength):
        from modenorm.kernels.gpu.entropy import entropies

        return entropies(usages, strength, SMALLEST_USAGE)
    weight, value = -float(strength), 0.0
    slopes: list[list[float]] = []
    for usage in usages:
        slopes.append([])
        for share in usage.tolist():  # on a CPU an operator costs more than a few numbers
            unused = share < SMALLEST_USAGE
            least = SMALLEST_USAGE if unused else share
            log = math.log(least)
            value += weight * least * log
            slopes[-1].append(0.0 if unused else weight * (log + 1))
    dtype, device = strength.dtype, strength.device
    found = torch.tensor(value, dtype=dtype, device=device)
    return found, torch.tensor(slopes, dtype=dtype, device=device)
