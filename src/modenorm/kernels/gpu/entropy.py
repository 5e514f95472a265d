"""The entropy of how a batch uses its modes, and its slopes, in one launch for eight layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from modenorm.kernels.gpu.common import begin
from modenorm.kernels.gpu.device import on_device
from modenorm.kernels.gpu.plan import aligned
from modenorm.kernels.gpu.several import array_of, launch_for, padded, tile_of
from modenorm.kernels.several import MOST_ARRAYS

__all__ = ["entropies"]


@triton.jit
def _entropies_kernel(
    usage0_ptr,  # (K,), as all usages
    usage1_ptr,
    usage2_ptr,
    usage3_ptr,
    usage4_ptr,
    usage5_ptr,
    usage6_ptr,
    usage7_ptr,
    strength_ptr,  # ()
    value_ptr,  # ()
    slopes_ptr,  # (layers, pitch)
    num_layers,
    num_modes,
    pitch,
    smallest,
    BLOCK_LAYERS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """−Σ u ln u of the layers' usages, and its slopes, times the strength."""
    begin(OVERLAPS)
    layers, modes, known = tile_of(num_layers, num_modes, BLOCK_LAYERS, BLOCK_K)
    usages_ptr = array_of(
        layers, usage0_ptr, usage1_ptr, usage2_ptr, usage3_ptr,
        usage4_ptr, usage5_ptr, usage6_ptr, usage7_ptr,
    )  # fmt: skip
    weight = -tl.load(strength_ptr)
    usage = tl.load(usages_ptr + modes, mask=known, other=1.0)
    unused = usage < smallest
    usage = tl.where(unused, smallest, usage)
    logs = tl.log(usage)
    slopes = tl.where(unused, 0.0, weight * (logs + 1.0))
    tl.store(slopes_ptr + layers * pitch + modes, slopes, mask=known)
    tl.store(value_ptr, weight * tl.sum(usage * logs, 0))


def entropies(
    usages: tuple[Tensor, ...], strength: Tensor, smallest: float
) -> tuple[Tensor, Tensor]:
    """The weighted entropy of usages, (K,) each, and its slopes, (layers, K or more)."""
    dense = [u.contiguous() for u in usages]
    first, count = dense[0], len(dense)
    pitch = padded(len(first))
    value = torch.empty_like(strength)
    slopes = torch.empty((count, pitch), device=first.device, dtype=torch.float32)
    direct = aligned((*dense, strength))
    sizes = (count, len(first), pitch, smallest)
    launch = launch_for(_entropies_kernel, sizes, (), first.get_device(), direct)
    with on_device(first) as stream:
        launch(stream, *dense, *[first] * (MOST_ARRAYS - count), strength, value, slopes)
    return value, slopes
