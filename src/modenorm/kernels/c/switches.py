"""The switches of all gates in C (switches.c): the same functions as in gpu/switches.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modenorm.kernels.c.library import address, call_at, dense, floats
from modenorm.kernels.several import MOST_ARRAYS

__all__ = ["draw", "draw_backward"]


def draw(
    log_odds: Tensor,
    strength: Tensor,
    _random: Tensor,
    noise: Tensor,
    biases: Sequence[Tensor],
    constants: tuple[float, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The cost, the used biases, (layers, K), what else is found, (3, S), and the noise."""
    sizes = (len(biases), len(biases[0]))
    cost, used, found = floats(()), floats(sizes), floats((3, len(log_odds)))
    given = (*_eight(biases), dense(log_odds), strength, noise, cost, used, found)
    call_at("switches", [*map(address, given)], (*constants, *sizes))
    return cost, used, found, noise


def draw_backward(
    upstream: Sequence[Tensor | None], cost_upstream: Tensor | None, found: Tensor
) -> Tensor:
    """The gradient of the log odds, (S,), by those of the used biases and of the cost."""
    gradient = torch.empty_like(found[0])
    given = (*_eight(upstream), cost_upstream, found, gradient)
    sizes = (len(upstream), found.shape[1] // len(upstream))
    call_at("switches_backward", [*map(address, given)], sizes)
    return gradient


def _eight(arrays: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [*map(dense, arrays), *[None] * (MOST_ARRAYS - len(arrays))]
