"""Moments and gates in one launch, in Triton, by programs that hold all channels of a sample."""

from __future__ import annotations

import triton
import triton.language as tl

from modenorm.kernels.gpu import hinted, row_moments
from modenorm.kernels.gpu_arrays import begin, load_rows
from modenorm.kernels.gpu_mixing import all_finite, softmax, too_large
from modenorm.kernels.launch import Launch
from modenorm.kernels.tiles import Geometry, gated_tile

__all__ = ["gated_moments_launch"]


@triton.jit
def _gated_moments_kernel(
    x_ptr,  # (N, C, L) by strides
    mean_ptr,  # (N, C)
    var_ptr,  # (N, C)
    gate_weight_ptr,  # (K, C)
    gate_bias_ptr,  # (K,)
    gates_ptr,  # (N, K)
    finite_ptr,  # (N,), 1.0 or 0.0
    num_channels,
    num_positions,
    stride_channel,
    stride_position,
    num_modes,
    SINGLE: tl.constexpr,
    DIVIDES_C: tl.constexpr,
    DIVIDES_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """What _moments_kernel and _gates_kernel do, for one sample."""
    begin(OVERLAPS)
    num_channels, num_positions, stride_channel, stride_position = hinted(
        num_channels, num_positions, stride_channel, stride_position, DIVIDES_C, DIVIDES_P
    )
    sample = tl.program_id(0).to(tl.int64)
    channels, modes = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_K)
    mask_c, mask_k = channels < num_channels, modes < num_modes
    # under way while x is read
    weight = load_rows(gate_weight_ptr, modes, channels, mask_k, mask_c, num_channels)
    base = x_ptr + sample * num_channels * num_positions
    mean, var = row_moments(
        base, channels, mask_c, num_positions, stride_channel, stride_position, True,
        SINGLE, BLOCK_P,
    )  # fmt: skip
    out = sample * num_channels + channels
    tl.store(mean_ptr + out, mean, mask=mask_c)
    tl.store(var_ptr + out, var, mask=mask_c)
    gates = softmax(weight * mean[None, :], gate_bias_ptr, modes, mask_k)
    tl.store(gates_ptr + sample * num_modes + modes, gates, mask=mask_k)
    bad = too_large(mean, var, tl.num_programs(0))
    tl.store(finite_ptr + sample, all_finite(bad, gates))


def gated_moments_launch(geometry: Geometry, num_modes: int, direct: bool) -> Launch | None:
    """The launch for tensors of one geometry, None where two are better; direct: see `Launch`."""
    tile = gated_tile(geometry, num_modes)
    if tile is None:
        return None
    single = tile.positions >= geometry.num_positions
    blocks = (tile.rows, tile.positions, triton.next_power_of_2(num_modes))
    sizes = (*geometry._replace(num_samples=1).sizes, num_modes)
    constants, grid = (single, *geometry.divisors, *blocks), (geometry.num_samples,)
    return Launch(_gated_moments_kernel, grid, sizes, constants, tile.num_warps, direct)
