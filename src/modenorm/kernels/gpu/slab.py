"""Many small float32 arrays in one allocation, and which arrays the norms keep in such slabs."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Slab",
    "Slot",
    "backward_slab",
    "channel_backward_slab",
    "channel_forward_slab",
    "channel_kept_slab",
    "forward_slab",
    "kept_slab",
]


class Slot(NamedTuple):
    """An array of a launch that is only recorded: some bytes after one of a call's addresses."""

    base: int
    offset: int
    ndim: int


class Slab:
    """Arrays that start at multiples of 64 bytes."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        self.shapes = shapes
        self.starts = []
        self.size = 0
        for shape in shapes:
            self.starts.append(self.size)
            self.size += -(-math.prod(shape) // 16) * 16

    def allocate(self, device: torch.device) -> Tensor:
        """Memory for all arrays, uninitialised."""
        return torch.empty(self.size, device=device, dtype=torch.float32)

    def tensors(self, memory: Tensor) -> list[Tensor]:
        """The arrays, as views."""
        return [
            memory.as_strided(shape, (*shape[1:], 1), start)
            for start, shape in zip(self.starts, self.shapes, strict=True)
        ]

    def slots(self, memory: Slot) -> list[Slot]:
        """The arrays, as places in memory that every call has elsewhere."""
        return [
            Slot(memory.base, memory.offset + 4 * start, len(shape))
            for start, shape in zip(self.starts, self.shapes, strict=True)
        ]

    def addresses(self, memory: Tensor) -> list[int]:
        """The arrays, as addresses: what a launch takes once it is compiled."""
        base = memory.data_ptr()
        return [base + 4 * start for start in self.starts]


def kept_slab(samples: int, channels: int, modes: int) -> Slab:
    """Mean and variance, then the modes' mean, variance and mass, then gates."""
    rows, table = (samples, channels), (modes, channels)
    return Slab(rows, rows, table, table, (modes,), (samples, modes))


def forward_slab(samples: int, channels: int) -> Slab:
    """Scale, shift, and whether samples are finite."""
    rows = (samples, channels)
    return Slab(rows, rows, (samples,))


def backward_slab(samples: int, channels: int, modes: int) -> Slab:
    """Slope, offset and scale of dx; gradients of the modes' statistics and weights, of logits."""
    rows, table = (samples, channels), (modes, channels)
    return Slab(rows, rows, rows, table, table, table, (samples, modes))


def channel_kept_slab(shape: tuple[int, ...], pixel: bool) -> Slab:
    """Of a mode group norm with gates of (N, C, K): mean and variance, the modes', log mass."""
    samples, channels, modes = shape
    rows, of_modes = (samples, channels), (samples, modes)
    return Slab(rows, rows if pixel else (1,), of_modes, of_modes, of_modes)


def channel_forward_slab(samples: int, channels: int) -> Slab:
    """Of a mode group norm: scale and shift."""
    return Slab((samples, channels), (samples, channels))


def channel_backward_slab(shape: tuple[int, ...], pixel: bool) -> Slab:
    """Of a mode group norm: gradients of scale and shift; scale, offset, slope; of the gate."""
    samples, channels, modes = shape
    rows = (samples, channels)
    return Slab(rows, rows, rows, rows, rows if pixel else (1,), (samples, 2 * modes))
