"""The entropy of how a batch uses its modes, and its slopes, in one launch."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from modenorm.kernels.gpu_arrays import begin
from modenorm.kernels.launch import Launch
from modenorm.kernels.plan import aligned, on_device

__all__ = ["entropy"]


@triton.jit
def _entropy_kernel(
    usage_ptr,  # (M,)
    strength_ptr,  # ()
    value_ptr,  # ()
    slopes_ptr,  # (M,)
    count,
    smallest,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """−Σ u ln u and its slopes, times the strength."""
    begin(OVERLAPS)
    modes = tl.arange(0, BLOCK)
    known = modes < count
    weight = -tl.load(strength_ptr)
    usage = tl.load(usage_ptr + modes, mask=known, other=1.0)
    unused = usage < smallest
    usage = tl.where(unused, smallest, usage)
    logs = tl.log(usage)
    tl.store(slopes_ptr + modes, tl.where(unused, 0.0, weight * (logs + 1.0)), mask=known)
    tl.store(value_ptr, weight * tl.sum(usage * logs, 0))


def entropy(usage: Tensor, strength: Tensor, smallest: float) -> tuple[Tensor, Tensor]:
    """The weighted entropy of usages, (M,), and its slopes, (M,)."""
    usage = usage.contiguous()
    value, slopes = torch.empty_like(strength), torch.empty_like(usage)
    launch = _launch(len(usage), smallest, usage.get_device(), aligned((usage, strength)))
    with on_device(usage) as stream:
        launch(stream, usage, strength, value, slopes)
    return value, slopes


@functools.lru_cache(maxsize=1024)
def _launch(count: int, smallest: float, device: int, direct: bool) -> Launch:
    block = triton.next_power_of_2(count)
    return Launch(
        _entropy_kernel, (1,), (count, smallest), (block,), 1 if block <= 32 else 4, direct
    )
