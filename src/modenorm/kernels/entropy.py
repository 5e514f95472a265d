"""The entropy of how a batch uses its modes as one autograd node for layers of the same size.

Letters: N samples, K modes. All samples have the same slope, so only (layers, K) numbers are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from modenorm.kernels import choose_backend, native_mixing, runs_native, runs_triton
from modenorm.kernels.plain import differentiate, node, only_plain

__all__ = ["usage_entropy"]


def usage_entropy(gates: Sequence[Tensor], strength: Tensor, smallest: float) -> Tensor:
    """Σ H(mean_n g_n) in nats over the gates of layers, (N, K) each, times the strength.

    Modes that are used less than `smallest` count as if used so, and have no gradient.
    """
    if any(choose_backend(g) != "fused" for g in gates):
        return _plain(*gates, strength=strength, smallest=smallest)[0]
    alike: dict[Any, list[Tensor]] = {}
    for g in gates:
        alike.setdefault((g.shape, g.dtype, g.device), []).append(g)
    found = []
    for (_, dtype, device), group in alike.items():
        value = _node(strength.to(device, dtype), smallest, *group)
        found.append(value.to(strength.device))
    return sum(found[1:], found[0])


def _plain(*gates: Tensor, strength: Tensor, smallest: float) -> tuple[Tensor]:
    usage = torch.cat([g.mean(0) for g in gates])
    entropy = torch.special.entr(usage.clamp_min(smallest)).sum()
    return (strength * entropy,)


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, strength: Tensor, smallest: float, *gates: Tensor) -> Tensor:
        value, slopes = _entropies_of(gates[0])(gates, strength, smallest)
        ctx.save_for_backward(strength, slopes, *gates)
        ctx.smallest = smallest
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        strength, slopes, *gates = ctx.saved_tensors
        if only_plain(upstream):
            forward = partial(_plain, strength=strength, smallest=ctx.smallest)
            needed = ctx.needs_input_grad[2:]
            return None, None, *differentiate(forward, gates, needed, (upstream,))
        of_all = slopes.unsqueeze(1).expand(-1, len(gates[0]), -1) * upstream
        return None, None, *of_all.unbind()


_node = node(_Entropy)


def _entropies_of(gates: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    """`_entropies` in Triton, in C, or as it is here."""
    if gates.dtype == torch.float32 and runs_triton(gates):
        from modenorm.kernels.gpu_entropy import entropies

        return entropies
    return native_mixing.entropies if runs_native(gates) else _entropies


def _entropies(
    gates: tuple[Tensor, ...], strength: Tensor, smallest: float
) -> tuple[Tensor, Tensor]:
    """The weighted sum of entropies of gates, (N, K) each, and its slopes, (layers, K)."""
    usage = torch.stack(gates).mean(1)
    least = usage.clamp_min(smallest)
    logs = least.log()
    value = -strength * torch.dot(least.flatten(), logs.flatten())
    slopes = (logs + 1).mul_(-strength / len(gates[0]))
    return value, slopes.masked_fill_(usage < smallest, 0)
