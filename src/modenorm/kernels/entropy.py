"""The entropy of how a batch uses its modes, as one autograd node for all layers.

Letters: K modes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modenorm.kernels import choose_backend, runs_triton
from modenorm.kernels.plain import differentiate, node, only_plain

__all__ = ["usage_entropy"]

SMALLEST_USAGE = 1e-30
"""Modes that are used less count as if used so, and have no gradient; 0 has no logarithm."""
MOST_LAYERS = 8
"""Whose usage is taken from where it is; that of more is brought together first."""


def usage_entropy(usages: Sequence[Tensor], strength: Tensor) -> Tensor:
    """−Σ u ln u in nats over the usages of layers, (K,) each, times the strength.

    Example:
        >>> float(usage_entropy([torch.tensor([0.5, 0.5])], torch.tensor(1.0)))  # ln 2
        0.6931...
    """
    first = usages[0]
    alike = [u.to(first.device, first.dtype) for u in usages]
    if len(alike) > MOST_LAYERS or any(u.shape != first.shape for u in alike):
        alike = [torch.cat(alike)]
    strength = strength.to(first.device, first.dtype)
    if choose_backend(alike[0]) != "fused":
        return _plain(strength, *alike)[0]
    value: Tensor = _node(strength, *alike)
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
        found = (slopes * upstream)[:, : len(given[1])]
        return None, *found.unbind()


_node = node(_Entropy)


def _entropies(usages: tuple[Tensor, ...], strength: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted entropy, and its slopes, (layers, K or more)."""
    if strength.dtype == torch.float32 and runs_triton(strength):
        from modenorm.kernels.gpu_entropy import entropies

        return entropies(usages, strength, SMALLEST_USAGE)
    usage = torch.stack(usages)
    least = usage.clamp_min(SMALLEST_USAGE)
    logs = least.log()
    slopes = (logs + 1).mul_(-strength).masked_fill_(usage < SMALLEST_USAGE, 0)
    return -strength * torch.dot(least.flatten(), logs.flatten()), slopes
