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
        self._sizes, self._kind = (num_samples, num_channels, num_modes), kind
        self._direct, self._chained = direct, chained
        self._modes = triton.next_power_of_2(num_modes)
        self._channels = triton.next_power_of_2(num_channels)
        self._launch_by_samples(num_positions)
        self._launch_by_modes()

    def _launch_by_samples(self, num_positions: int) -> None:
        """Where a program has a sample, or a few."""
        num_samples, num_channels, num_modes = self._sizes
        kind, modes, channels, direct = self._kind, self._modes, self._channels, self._direct
        eps, affine, has_gate = kind.eps, kind.affine, kind.has_gate
        wide = min(channels, max(16, 8192 // modes))
        self.gates = Launch(
            gates_kernel,
            (num_samples,),
            (num_channels, num_modes),
            (has_gate, wide >= num_channels, modes, wide),
            _warps(modes, wide, 64),
            direct,
        )
        narrow, few = min(channels, 128), min(triton.next_power_of_2(num_samples), 4)
        self.coefficients = Launch(
            coefficients_kernel,
            (triton.cdiv(num_samples, few), triton.cdiv(num_channels, narrow)),
            (num_samples, num_channels, eps),
            (*affine, self._chained, num_modes, few, narrow),
            _warps(few, narrow, 64),
            direct,
        )
        # it holds more numbers in registers
        wide = min(channels, max(16, 4096 // modes))
        whole = wide >= num_channels
        # by whether gates have a gradient from elsewhere, and the usage has one
        self.samples_backward = {
            (of_gates, of_usage): Launch(
                samples_backward_kernel,
                (num_samples,),
                (num_channels, num_modes, num_positions, eps),
                (*affine, has_gate, of_gates, of_usage, self._chained, whole, modes, wide),
                _warps(modes, wide, 32),
                direct,
            )
            for of_gates in (False, True)
            for of_usage in (False, True)
        }

    def _launch_by_modes(self) -> None:
        """Where a program has a mode, or a few, and sums over the samples."""
        num_samples, num_channels, num_modes = sizes = self._sizes
        kind, affine, direct = self._kind, self._kind.affine, self._direct
        many = num_channels * num_modes >= 8192
        block = min(self._channels, 32 if many else 16)
        walk = min(triton.next_power_of_2(num_samples), 4096 // block)
        short_walk = min(walk, 64) if many else walk
        by_mode = (triton.cdiv(num_channels, block), num_modes)
        statistics: Cut = (statistics_kernel, by_mode, (walk, block), 4 if many else 8)
        backward: Cut = (modes_backward_kernel, by_mode, (short_walk, block), 4)
        size = num_channels * num_modes if num_modes > 1 and num_samples <= MOST_GROUPED else 0
        if size >= STATISTICS_GROUPED:
            statistics = (group_statistics_kernel, *_groups(*sizes, STATISTICS_GROUP))
        if size >= BACKWARD_GROUPED:
            backward = (group_backward_kernel, *_groups(*sizes, BACKWARD_GROUP))
        kernel, grid, tile, warps = statistics
        constants: tuple[int, ...] = (*kind.running, kind.has_usage, self._chained, *tile)
        self.statistics = Launch(kernel, grid, (*sizes, kind.momentum), constants, warps, direct)
        kernel, grid, tile, warps = backward
        constants = (*affine, self._chained, *tile)
        self.modes_backward = Launch(kernel, grid, (*sizes, kind.eps), constants, warps, direct)
        shares_weight = affine.weight and not affine.per_mode
        self.parameters_backward = Launch(
            parameters_backward_kernel,
            by_mode,
            sizes,
            (kind.has_gate, shares_weight, walk, self._modes, block),
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
