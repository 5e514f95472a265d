"""What the kernels have in common: how they begin, and how they read small arrays."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from modenorm.kernels.layout import interpreting

__all__ = [
    "TINY",
    "begin",
    "begin_beside",
    "can_overlap",
    "end_beside",
    "from_end",
    "load_rows",
]

TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32


@functools.cache
def can_overlap() -> bool:
    """Whether all GPUs can start a kernel while the one before it ends (compute capability 9)."""
    if interpreting() or not torch.cuda.is_available():
        return False
    devices = range(torch.cuda.device_count())
    return all(torch.cuda.get_device_capability(device) >= (9, 0) for device in devices)


@triton.jit
def begin(OVERLAPS: tl.constexpr):
    """Wait for the results of the kernel before, and let the one after get ready.

    Every kernel calls it before its first store. What is read before may run beside the kernel
    before, and has to be older than that: it is, if that kernel comes right before this one and
    has begun with this function too. `Launch` decides whether a kernel overlaps.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def begin_beside(OVERLAPS: tl.constexpr):
    """Begin beside the kernel before, whose results are not needed; `end_beside` must follow.

    Right if that kernel itself has waited, by `begin`, for all that is read here.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def end_beside(OVERLAPS: tl.constexpr):
    """Wait for the kernel before, so that whoever waits for this one has waited for both."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def from_end(AXIS: tl.constexpr):
    """This program's place on an axis, counted from its end."""
    return tl.num_programs(AXIS) - 1 - tl.program_id(AXIS)


@triton.jit
def load_rows(ptr, rows, channels, mask_rows, mask_c, num_channels):
    """A tile of an array with one column per channel."""
    mask = mask_rows[:, None] & mask_c[None, :]
    return tl.load(ptr + rows[:, None] * num_channels + channels[None, :], mask=mask, other=0.0)
