"""The entropy of how a batch uses its modes, and its slope, in one launch for eight layers."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from modenorm.kernels.gpu_arrays import begin
from modenorm.kernels.launch import Launch
from modenorm.kernels.plan import aligned, on_device

__all__ = ["entropies"]

MOST_LAYERS = 8
"""Of a launch, which takes each layer's gates from where they are."""
MOST_NUMBERS = 8192
"""In a tile of all layers and some samples."""
APART = 4
"""Between the sums of launches, so that all addresses are multiples of 16."""


@triton.jit
def _entropies_kernel(
    gates0_ptr,  # (N, K), as all gates
    gates1_ptr,
    gates2_ptr,
    gates3_ptr,
    gates4_ptr,
    gates5_ptr,
    gates6_ptr,
    gates7_ptr,
    strength_ptr,  # ()
    value_ptr,  # ()
    slopes_ptr,  # (layers, K)
    num_layers,
    num_samples,
    num_modes,
    smallest,
    BLOCK_LAYERS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """−Σ u ln u of the layers' usage u = mean_n g_n, and its slope in g, times the strength."""
    begin(OVERLAPS)
    columns = tl.arange(0, BLOCK_LAYERS * BLOCK_K)
    layers, modes = columns // BLOCK_K, columns % BLOCK_K
    known = (layers < num_layers) & (modes < num_modes)
    starts = tl.where(layers == 1, gates1_ptr.to(tl.int64), gates0_ptr.to(tl.int64))
    starts = tl.where(layers == 2, gates2_ptr.to(tl.int64), starts)
    starts = tl.where(layers == 3, gates3_ptr.to(tl.int64), starts)
    starts = tl.where(layers == 4, gates4_ptr.to(tl.int64), starts)
    starts = tl.where(layers == 5, gates5_ptr.to(tl.int64), starts)
    starts = tl.where(layers == 6, gates6_ptr.to(tl.int64), starts)
    starts = tl.where(layers == 7, gates7_ptr.to(tl.int64), starts)
    ptrs = starts.to(tl.pointer_type(tl.float32)) + modes
    sums = tl.zeros([BLOCK_N, BLOCK_LAYERS * BLOCK_K], tl.float32)
    for start in range(0, num_samples, BLOCK_N):
        samples = start + tl.arange(0, BLOCK_N)
        mask = (samples < num_samples)[:, None] & known[None, :]
        sums += tl.load(ptrs[None, :] + samples[:, None] * num_modes, mask=mask, other=0.0)
    usage = tl.sum(sums, 0) / num_samples
    empty = usage < smallest
    usage = tl.where(empty, smallest, usage)
    logs = tl.log(usage)
    weight = -tl.load(strength_ptr)
    tl.store(value_ptr, tl.sum(tl.where(known, weight * usage * logs, 0.0), 0))
    slopes = tl.where(empty, 0.0, weight * (logs + 1.0) / num_samples)
    tl.store(slopes_ptr + layers * num_modes + modes, slopes, mask=known)


def entropies(
    gates: tuple[Tensor, ...], strength: Tensor, smallest: float
) -> tuple[Tensor, Tensor]:
    """The weighted sum of entropies of gates, (N, K) each, and its slopes, (layers, K)."""
    dense = [g.contiguous() for g in gates]
    first, count = dense[0], len(dense)
    starts = range(0, count, MOST_LAYERS)
    values = torch.empty(APART * len(starts), device=first.device)
    slopes = torch.empty((count, first.shape[1]), device=first.device)
    direct, place = aligned((*dense, strength)), first.get_device()
    with on_device(first) as stream:
        for i, start in enumerate(starts):
            some = dense[start : start + MOST_LAYERS]
            launch = _launch(len(some), *first.shape, smallest, place, direct)
            some += [first] * (MOST_LAYERS - len(some))
            launch(stream, *some, strength, values[APART * i :], slopes[start:])
    return values[0] if len(starts) == 1 else values[::APART].sum(), slopes


@functools.lru_cache(maxsize=1024)
def _launch(
    num_layers: int,
    num_samples: int,
    num_modes: int,
    smallest: float,
    device: int,
    direct: bool,
) -> Launch:
    layers, modes = map(triton.next_power_of_2, (num_layers, num_modes))
    samples = min(triton.next_power_of_2(num_samples), max(1, MOST_NUMBERS // (modes * layers)))
    sizes = (num_layers, num_samples, num_modes, smallest)
    warps = 4 if layers * samples * modes <= 4096 else 8
    return Launch(_entropies_kernel, (1,), sizes, (layers, samples, modes), warps, direct)
