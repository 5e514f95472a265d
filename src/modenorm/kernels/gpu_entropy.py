"""The entropy of how a batch uses its modes, and its slope, in one launch for many layers."""

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

MOST_NUMBERS = 8192
"""In a program's tile: of several small layers, or of some samples of a large one."""


@triton.jit
def _entropies_kernel(
    gates_ptr,  # (layers, N, K)
    strength_ptr,  # ()
    values_ptr,  # (programs,)
    slopes_ptr,  # (layers, K)
    num_layers,
    num_samples,
    num_modes,
    times,
    smallest,
    BLOCK_LAYERS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """−Σ u ln u of some layers' usage u = mean_n g_n, and its slope in g, times the strength."""
    begin(OVERLAPS)
    layers = tl.program_id(0) * BLOCK_LAYERS + tl.arange(0, BLOCK_LAYERS)
    modes = tl.arange(0, BLOCK_K)
    known = (layers < num_layers)[:, None] & (modes < num_modes)[None, :]
    sums = tl.zeros([BLOCK_LAYERS, BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, num_samples, BLOCK_N):
        samples = start + tl.arange(0, BLOCK_N)
        rows = layers[:, None] * num_samples + samples[None, :]
        mask = known[:, None, :] & (samples < num_samples)[None, :, None]
        offs = rows[:, :, None] * num_modes + modes[None, None, :]
        sums += tl.load(gates_ptr + offs, mask=mask, other=0.0)
    usage = tl.sum(sums, 1) / num_samples
    empty = usage < smallest
    logs = tl.log(tl.where(empty, smallest, usage))
    strength = tl.load(strength_ptr) * times
    parts = tl.where(known, -strength * logs * tl.where(empty, smallest, usage), 0.0)
    tl.store(values_ptr + tl.program_id(0), tl.sum(tl.sum(parts, 1), 0))
    slopes = tl.where(empty, 0.0, -strength * (logs + 1.0) / num_samples)
    tl.store(slopes_ptr + layers[:, None] * num_modes + modes[None, :], slopes, mask=known)


def entropies(
    gates: Tensor, strength: Tensor, times: float, smallest: float
) -> tuple[Tensor, Tensor]:
    """The weighted sum of entropies of gates, (layers, N, K), and its slopes, (layers, K)."""
    launch = _launch(*gates.shape, times, smallest, gates.get_device(), aligned((gates, strength)))
    values = torch.empty(launch.grid[0], device=gates.device)
    slopes = torch.empty((gates.shape[0], gates.shape[2]), device=gates.device)
    with on_device(gates) as stream:
        launch(stream, gates, strength, values, slopes)
    return values.sum() if len(values) > 1 else values.view(()), slopes


@functools.lru_cache(maxsize=1024)
def _launch(
    num_layers: int,
    num_samples: int,
    num_modes: int,
    times: float,
    smallest: float,
    device: int,
    direct: bool,
) -> Launch:
    modes = triton.next_power_of_2(num_modes)
    samples = min(triton.next_power_of_2(num_samples), max(1, MOST_NUMBERS // modes))
    room = max(1, MOST_NUMBERS // (samples * modes))
    layers = min(triton.next_power_of_2(num_layers), room)
    sizes = (num_layers, num_samples, num_modes, float(times), smallest)
    grid = (triton.cdiv(num_layers, layers),)
    return Launch(_entropies_kernel, grid, sizes, (layers, samples, modes), 8, direct)
