"""Mode normalization's mixing on the GPU: its launches for one set of sizes.

All arrays are small, (N, C), (N, K) or (K, C), and live in the second-level cache. Sums over
samples belong to one program per mode and block of channels, sums over channels to one program per
sample: no atomics, the same result in every run, and a time that hardly depends on K.
"""

from __future__ import annotations

import triton

from modenorm.kernels.gpu_mixing_backward import (
    modes_backward_kernel,
    parameters_backward_kernel,
    samples_backward_kernel,
)
from modenorm.kernels.gpu_mixing_forward import (
    coefficients_kernel,
    gates_kernel,
    statistics_kernel,
)
from modenorm.kernels.gpu_mixing_wide import gate_parts_kernel, sample_lines_kernel
from modenorm.kernels.launch import Launch, Pointer, Recorder
from modenorm.kernels.slab import CHANNEL_BLOCK, channel_blocks

__all__ = ["Mixing"]


class Mixing:
    """The launches of the mixing for one set of sizes and options.

    Args:
        num_samples: N.
        num_channels: C.
        num_positions: L.
        num_modes: K.
        eps: added to the variances.
        momentum: the weight of the batch in the running estimates.
        has_gate: the linear gate's parameters are given, not the gates.
        affine: which of weight and bias there are, and whether they are per mode.
        running: whether to update the running estimates, by usage, with a counter, with shares.
        has_usage: whether to write the usage of the modes down.
        direct: see `Launch`.
    """

    def __init__(
        self,
        num_samples: int,
        num_channels: int,
        num_positions: int,
        num_modes: int,
        eps: float,
        momentum: float,
        has_gate: bool,
        affine: tuple[bool, bool, bool],
        running: tuple[bool, bool, bool, bool],
        has_usage: bool,
        direct: bool,
    ) -> None:
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
            (has_gate, modes, wide),
            _warps(modes, wide, 64),
            direct,
        )
        self.statistics = Launch(
            statistics_kernel,
            by_mode,
            (*sizes, momentum),
            (*running, has_usage, walk, block),
            4 if many else 8,
            direct,
        )
        self.coefficients = Launch(
            coefficients_kernel,
            (triton.cdiv(num_samples, few), triton.cdiv(num_channels, narrow)),
            (num_samples, num_channels, eps),
            (*affine, num_modes, few, narrow),
            _warps(few, narrow, 64),
            direct,
        )
        self.modes_backward = Launch(
            modes_backward_kernel,
            by_mode,
            (*sizes, eps),
            (*affine, short_walk, block),
            4,
            direct,
        )
        kinds = [(of_gates, of_usage) for of_gates in (False, True) for of_usage in (False, True)]
        whole = less_wide >= num_channels
        samples_backward = {
            kind: Launch(
                samples_backward_kernel,
                (num_samples,),
                (num_channels, num_modes, num_positions, eps),
                (*affine, has_gate, *kind, whole, modes, less_wide),
                _warps(modes, less_wide, 32),
                direct,
            )
            for kind in kinds
        }
        blocks = channel_blocks(num_channels, num_modes)
        if blocks:
            grid, tile = (triton.cdiv(num_samples, few), blocks), (few, CHANNEL_BLOCK)
            self.gate_parts = Launch(
                gate_parts_kernel,
                grid,
                (num_samples, num_channels, eps),
                (*affine, num_modes, *tile),
                1,
                direct,
            )
            samples_backward = {
                kind: Launch(
                    sample_lines_kernel,
                    grid,
                    (num_samples, num_channels, num_positions, eps),
                    (
                        *(affine[0], affine[2], has_gate, *kind, num_modes, modes),
                        *(triton.next_power_of_2(blocks), *tile),
                    ),
                    1,
                    direct,
                )
                for kind in kinds
            }
        self.in_blocks, self.of_samples = bool(blocks), samples_backward
        has_weight, _, per_mode = affine
        self.parameters_backward, self.late_parameters_backward = (
            Launch(
                parameters_backward_kernel,
                by_mode,
                sizes,
                (has_gate, has_weight and not per_mode, late, walk, modes, block),
                4,
                direct,
            )
            for late in (False, True)
        )

    def samples_backward(
        self,
        stream: int | Recorder,
        kind: tuple[bool, bool],
        mean: Pointer,
        var: Pointer,
        gates: Pointer,
        statistics: tuple[Pointer, ...],
        affine: tuple[Pointer, ...],
        gate_weight: Pointer,
        upstream: tuple[Pointer, ...],
        found: tuple[Pointer, ...],
        parts: Pointer,
    ) -> None:
        """Gradients of the gates, and slope, offset and scale of dx in place of A and D.

        Args:
            stream: to launch on.
            kind: whether gates have a gradient from elsewhere, and whether the usage has one.
            mean: of samples and channels.
            var: of samples and channels.
            gates: of the samples.
            statistics: the modes' mean and variance, U and S.
            affine: weight and bias.
            gate_weight: of the linear gate.
            upstream: the gradients of gates and of usage from elsewhere.
            found: A, D, scale, and the gradients of logits or gates.
            parts: memory for sums over blocks of channels.
        """
        launch = self.of_samples[kind]
        if not self.in_blocks:
            given = (mean, var, gates, *statistics, *affine, gate_weight)
            launch(stream, *given, *upstream, *found)
            return
        self.gate_parts(stream, mean, var, *statistics, *affine, *found[:2], parts)
        given = (mean, gates, *statistics, affine[0], gate_weight)
        launch(stream, *given, *upstream, parts, *found)


def _warps(rows: int, channels: int, numbers: int) -> int:
    """As many warps as read a row of the channels at once, 16 bytes a thread.

    Then tiles with one row and with several are shared out alike, and nothing has to go through
    shared memory to meet: each such exchange ends a group of loads that wait together. More, if
    a thread would hold more than so many numbers of a tile.
    """
    return min(4, max(1, channels // 128, rows * channels // (32 * numbers)))
