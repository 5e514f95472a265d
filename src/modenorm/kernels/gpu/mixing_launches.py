"""Mode normalization's mixing on the GPU: its launches for one set of sizes.

All arrays are small, (N, C), (N, K) or (K, C), and live in the second-level cache. Sums over
samples belong to one program per mode, or a few, and block of channels, sums over channels to one
program per sample: no atomics, the same result in every run, and a time that hardly depends on K.
"""

from __future__ import annotations

from typing import Any

import triton

from modenorm.kernels.gpu.launch import Launch
from modenorm.kernels.gpu.mixing_backward import (
    modes_backward_kernel,
    parameters_backward_kernel,
    samples_backward_kernel,
)
from modenorm.kernels.gpu.mixing_forward import (
    coefficients_kernel,
    gates_kernel,
    statistics_kernel,
)
from modenorm.kernels.gpu.mixing_groups import group_backward_kernel, group_statistics_kernel
from modenorm.kernels.gpu.plan import MixingKind

__all__ = ["Mixing"]

STATISTICS_GROUPED, BACKWARD_GROUPED = 4096, 8192
"""Channels times modes from which programs that sum over samples take several modes."""
MOST_GROUPED = 256
"""Samples that such a program can hold."""
STATISTICS_GROUP, BACKWARD_GROUP = 2, 4
"""Modes that it takes."""
GROUP_CHANNELS, GROUP_WARPS = 16, 4

Grid = tuple[int, int]
Cut = tuple[Any, Grid, tuple[int, ...], int]
"""A kernel, its grid, its tile, and its warps."""


class Mixing:
    """The launches of the mixing for one set of sizes and options.

    Args:
        num_samples: N.
        num_channels: C.
        num_positions: L.
        num_modes: K.
        kind: what else they depend on.
        direct: see `Launch`.
        chained: each launch comes right after the one before it in a mode norm, and may read what
            was there before that one while it is running still.
    """

    def __init__(
        self,
        num_samples: int,
        num_channels: int,
        num_positions: int,
        num_modes: int,
        kind: MixingKind,
        direct: bool,
        chained: bool = True,
    ) -> None:
        eps, affine, has_gate = kind.eps, kind.affine, kind.has_gate
        modes = triton.next_power_of_2(num_modes)
        samples, channels = map(triton.next_power_of_2, (num_samples, num_channels))
        wide = min(channels, max(16, 8192 // modes))
        # tiles of samples_backward and modes_backward, which hold more numbers in registers
        less_wide = min(channels, max(16, 4096 // modes))
        many = num_channels * num_modes >= 8192
        block = min(channels, 32 if many else 16)
        walk = min(samples, 4096 // block)
        short_walk = min(walk, 64) if many else walk
        by_mode = (triton.cdiv(num_channels, block), num_modes)
        narrow = min(channels, 128)
        few = min(samples, 4)
        sizes = (num_samples, num_channels, num_modes)
        self.gates = Launch(
            gates_kernel,
            (num_samples,),
            sizes[1:],
            (has_gate, wide >= num_channels, modes, wide),
            _warps(modes, wide, 64),
            direct,
        )
        size = num_channels * num_modes if num_modes > 1 and num_samples <= MOST_GROUPED else 0
        statistics: Cut = (statistics_kernel, by_mode, (walk, block), 4 if many else 8)
        backward: Cut = (modes_backward_kernel, by_mode, (short_walk, block), 4)
        if size >= STATISTICS_GROUPED:
            statistics = (group_statistics_kernel, *_groups(*sizes, STATISTICS_GROUP))
        if size >= BACKWARD_GROUPED:
            backward = (group_backward_kernel, *_groups(*sizes, BACKWARD_GROUP))
        kernel, grid, tile, warps = statistics
        constants: tuple[int, ...] = (*kind.running, kind.has_usage, chained, *tile)
        self.statistics = Launch(kernel, grid, (*sizes, kind.momentum), constants, warps, direct)
        self.coefficients = Launch(
            coefficients_kernel,
            (triton.cdiv(num_samples, few), triton.cdiv(num_channels, narrow)),
            (num_samples, num_channels, eps),
            (*affine, chained, num_modes, few, narrow),
            _warps(few, narrow, 64),
            direct,
        )
        kernel, grid, tile, warps = backward
        constants = (*affine, chained, *tile)
        self.modes_backward = Launch(kernel, grid, (*sizes, eps), constants, warps, direct)
        whole = less_wide >= num_channels
        # by whether gates have a gradient from elsewhere, and the usage has one
        self.samples_backward = {
            (of_gates, of_usage): Launch(
                samples_backward_kernel,
                (num_samples,),
                (num_channels, num_modes, num_positions, eps),
                (*affine, has_gate, of_gates, of_usage, chained, whole, modes, less_wide),
                _warps(modes, less_wide, 32),
                direct,
            )
            for of_gates in (False, True)
            for of_usage in (False, True)
        }
        shares_weight = affine.weight and not affine.per_mode
        self.parameters_backward = Launch(
            parameters_backward_kernel,
            by_mode,
            sizes,
            (has_gate, shares_weight, walk, modes, block),
            4,
            direct,
        )


def _warps(rows: int, channels: int, numbers: int) -> int:
    """As many warps as read a row of the channels at once, 16 bytes a thread.

    Then tiles with one row and with several are shared out alike, and nothing has to go through
    shared memory to meet: each such exchange ends a group of loads that wait together. More, if
    a thread would hold more than so many numbers of a tile.
    """
    return min(4, max(1, channels // 128, rows * channels // (32 * numbers)))


def _groups(
    num_samples: int, num_channels: int, num_modes: int, most: int
) -> tuple[Grid, tuple[int, int, int], int]:
    """Grid, tile and warps where a program takes several modes, at most so many."""
    group, samples = map(triton.next_power_of_2, (min(most, num_modes), num_samples))
    block = min(triton.next_power_of_2(num_channels), GROUP_CHANNELS)
    grid = (triton.cdiv(num_channels, block), triton.cdiv(num_modes, group))
    return grid, (group, samples, block), GROUP_WARPS
