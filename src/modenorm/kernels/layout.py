"""How a tensor lies in memory, seen as samples × channels × positions.

Letters: N samples, C channels, L positions.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Planes",
    "as_dense",
    "as_planes",
    "can_count",
    "dense_like",
    "interpreting",
    "is_channels_last",
    "laid_out",
    "planes_like",
    "statistics_dtype",
]


MOST_ROWS = (1 << 31) - (1 << 16)
"""Kernels on a GPU count rows in 32 bits, also those of a tile that are beyond the last."""


class Planes(NamedTuple):
    """A dense view of a tensor: (N, C, L) with `axis` 2, or channels last, (N, L, C) with `axis` 1.

    `axis` is the one that positions lie along.
    """

    view: Tensor
    axis: int

    def rows(self, values: Tensor) -> Tensor:
        """(N, C) values, shaped to broadcast along the positions."""
        return values.unsqueeze(self.axis)


@functools.cache
def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def can_count(x: Tensor, num_modes: int = 1) -> bool:
    """Whether kernels on a GPU can count samples times channels, and samples times modes.

    Tracing, sizes may be symbols that a look would tie down: operators look when they run.
    """
    if torch.compiler.is_compiling() or x.numel() * num_modes < MOST_ROWS:
        return True
    return max(x.shape[:2].numel(), x.shape[0] * num_modes) < MOST_ROWS


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Statistics are float32 whatever the input's type, float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def is_channels_last(x: Tensor) -> bool:
    """Whether a dense x has its channels side by side, as it has with a single position."""
    return not x.is_contiguous() or x.ndim == 2 or x.shape[2:].numel() == 1


def _lies_channels_last(x: Tensor) -> bool:
    if x.ndim == 4:
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.ndim > 2 and x.movedim(1, -1).is_contiguous()


def as_dense(x: Tensor) -> Tensor:
    """x if it is dense in one of the two memory orders, else a copy in the closer one."""
    if x.is_contiguous() or _lies_channels_last(x):
        return x
    outer = [stride for stride, size in zip(x.stride()[2:], x.shape[2:], strict=True) if size > 1]
    if outer and 0 < x.stride(1) < min(outer):  # a slice of a channels-last tensor
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    return x.contiguous()


def laid_out(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A saved x as it lay when it was saved: hooks on saved tensors may hand out a copy."""
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def dense_like(dy: Tensor, x: Tensor) -> Tensor:
    """The upstream gradient in x's order, at an address that kernels can take."""
    if dy.stride() != x.stride() or dy.data_ptr() % 16 or dy.is_neg():
        dy = torch.empty_like(x).copy_(dy)
    return dy


def as_aligned(array: Tensor) -> Tensor:
    """A small array in a row, at an address that kernels can take."""
    if array.is_contiguous() and not array.data_ptr() % 16 and not array.is_neg():
        return array
    return torch.empty_like(array, memory_format=torch.contiguous_format).copy_(array)


def as_planes(x: Tensor) -> Planes:
    """View x in the order in which it lies; copy only if it is neither dense nor channels last."""
    last = x.movedim(1, -1)
    single = x.shape[2:].numel() == 1  # then it lies in both orders, and channels make longer rows
    if single or (last.is_contiguous() and not x.is_contiguous()):
        return Planes(last.contiguous().view(x.shape[0], -1, x.shape[1]), 1)
    return Planes(x.contiguous().view(x.shape[0], x.shape[1], -1), 2)


def planes_like(x: Tensor, planes: Planes) -> Planes:
    """View x in the same order as `planes`, copying if it lies otherwise (an expanded gradient)."""
    if planes.axis == 1:
        return Planes(x.movedim(1, -1).contiguous().view(planes.view.shape), 1)
    return Planes(x.contiguous().view(planes.view.shape), 2)
