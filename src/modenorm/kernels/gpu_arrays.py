"""How the mixing's kernels read small arrays."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["TINY", "load_affine", "load_rows"]

TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32


@triton.jit
def load_rows(ptr, rows, channels, mask_rows, mask_c, num_channels):
    """A tile of an array with one column per channel."""
    mask = mask_rows[:, None] & mask_c[None, :]
    return tl.load(ptr + rows[:, None] * num_channels + channels[None, :], mask=mask, other=0.0)


@triton.jit
def load_affine(ptr, channels, mask_c, offs_kc, mask_kc, PER_MODE: tl.constexpr):
    """A weight or bias, (1, C), or (K, C) if there is one per mode."""
    if PER_MODE:
        values = tl.load(ptr + offs_kc, mask=mask_kc, other=0.0)
    else:
        values = tl.load(ptr + channels, mask=mask_c, other=0.0)[None, :]
    return values
