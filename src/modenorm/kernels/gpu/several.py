"""Launches on small arrays of up to eight layers, which stay where they are: one program each.

Letters: K modes of each layer.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl

from modenorm.kernels.gpu.launch import Launch

__all__ = ["array_of", "launch_for", "padded", "tile_of"]


def padded(count: int) -> int:
    """Columns of float32 such that every row begins at a multiple of 16 bytes.

    Example:
        >>> padded(4), padded(5)
        (4, 8)
    """
    return -(-count // 4) * 4


@triton.jit
def tile_of(num_layers, num_modes, BLOCK_LAYERS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Layer and mode of each number in a program's tile, and whether there is one."""
    columns = tl.arange(0, BLOCK_LAYERS * BLOCK_K)
    layers, modes = columns // BLOCK_K, columns % BLOCK_K
    return layers, modes, (layers < num_layers) & (modes < num_modes)


@triton.jit
def array_of(rows, ptr0, ptr1, ptr2, ptr3, ptr4, ptr5, ptr6, ptr7):
    """For every row, the address of the float32 array with its number."""
    starts = tl.where(rows == 1, ptr1.to(tl.int64), ptr0.to(tl.int64))
    starts = tl.where(rows == 2, ptr2.to(tl.int64), starts)
    starts = tl.where(rows == 3, ptr3.to(tl.int64), starts)
    starts = tl.where(rows == 4, ptr4.to(tl.int64), starts)
    starts = tl.where(rows == 5, ptr5.to(tl.int64), starts)
    starts = tl.where(rows == 6, ptr6.to(tl.int64), starts)
    starts = tl.where(rows == 7, ptr7.to(tl.int64), starts)
    return starts.to(tl.pointer_type(tl.float32))


@functools.lru_cache(maxsize=1024)
def launch_for(
    kernel: Any, sizes: tuple[float, ...], constants: tuple[bool, ...], device: int, direct: bool
) -> Launch:
    """The launch of a kernel for sizes that begin with the numbers of layers and modes."""
    layers, modes = (triton.next_power_of_2(int(size)) for size in sizes[:2])
    warps = 1 if layers * modes <= 32 else 4
    return Launch(kernel, (1,), sizes, (*constants, layers, modes), warps, direct)
