"""The entropy of how a batch uses its modes, as one autograd node for all layers.

Letters: K modes, M modes of all layers.
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


def usage_entropy(usages: Sequence[Tensor], strength: Tensor) -> Tensor:
    """−Σ u ln u in nats over the usages of layers, (K,) each, times the strength.

    Example:
        >>> float(usage_entropy([torch.tensor([0.5, 0.5])], torch.tensor(1.0)))  # ln 2
        0.6931...
    """
    first = usages[0]
    alike = [u.to(first.device, first.dtype) for u in usages]
    usage = first if len(alike) == 1 else torch.cat(alike)
    strength = strength.to(first.device, first.dtype)
    if choose_backend(usage) != "fused":
        return _plain(usage, strength)[0]
    value: Tensor = _node(usage, strength)
    return value


def _plain(usage: Tensor, strength: Tensor) -> tuple[Tensor]:
    return (strength * torch.special.entr(usage.clamp_min(SMALLEST_USAGE)).sum(),)


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, usage: Tensor, strength: Tensor) -> Tensor:
        value, slopes = _entropy(usage, strength)
        ctx.save_for_backward(usage, strength, slopes)
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, None]:
        usage, strength, slopes = ctx.saved_tensors
        if only_plain(upstream):
            given, needed = (usage, strength), (True, False)
            return differentiate(_plain, given, needed, (upstream,))[0], None
        return slopes * upstream, None


_node = node(_Entropy)


def _entropy(usage: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted entropy, and its slopes, (M,)."""
    if usage.dtype == torch.float32 and runs_triton(usage):
        from modenorm.kernels.gpu_entropy import entropy

        return entropy(usage, strength, SMALLEST_USAGE)
    least = usage.clamp_min(SMALLEST_USAGE)
    logs = least.log()
    slopes = (logs + 1).mul_(-strength).masked_fill_(usage < SMALLEST_USAGE, 0)
    return -strength * torch.dot(least, logs), slopes
