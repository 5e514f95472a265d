"""How the kernels of narrow convolutions are launched: what each program works on, and the grids.

Weights are (COUT, CIN, 3, 3), in any order in memory; shapes are those of x or of dx.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from modenorm.lab.layers.geometry import power_of_two

if TYPE_CHECKING:
    from modenorm.kernels.gpu.launch import Launch

__all__ = [
    "CONV_TILES",
    "GRAD_TILES",
    "STRIDED_CONV_TILES",
    "STRIDED_GRAD_TILES",
    "STRIDED_INPUT_TILES",
    "ConvTile",
    "GradTile",
    "add_up_launch",
    "conv_launch",
    "strided_conv_launch",
    "strided_input_launch",
    "strided_wgrad_launches",
    "wgrad_launches",
]


class ConvTile(NamedTuple):
    """What a program of the forward pass, or of dx, works on.

    With stride 2 its columns and rows are those of y and dy, of which dx has twice as many.
    """

    columns: int
    """Columns of pixels; 64 and more with 4 warps take the wide matrix instructions of sm_90."""
    out: int
    """Channels of the result."""
    rows: int
    """Rows of the result; the program reads two more of x, or one."""
    vector: int
    """Channels per copy from memory: 8 pass the L1 cache by, 4 go through it."""
    stages: int
    """Steps of which the rows are in shared memory at a time, with the one in use."""
    unroll: int
    """Rows of x per step, with stride 2 of dy; best a divisor of rows + 2, or of rows."""
    warps: int


class GradTile(NamedTuple):
    """What a program of the weights' gradient works on."""

    pixels: int
    """Pixels per step."""
    rows: int
    """Rows of taps, 1 or 3."""
    taps: int
    """Taps of a row, 1 or 3."""
    vector: int
    stages: int
    warps: int
    programs: int
    """Shares of the pixels, at most: each leaves a partial result of all taps."""


CONV_TILES = {
    (16, 16): ConvTile(64, out=16, rows=8, vector=8, stages=3, unroll=1, warps=1),
    (32, 32): ConvTile(64, out=32, rows=8, vector=8, stages=3, unroll=1, warps=4),
    (64, 64): ConvTile(64, out=32, rows=8, vector=8, stages=3, unroll=1, warps=4),
}
"""By channels in and out; a pair that is not there takes the next tile for as many of both.

The fastest of those tried while eight trainings share a GPU; alone, fewer rows take less time.
"""
GRAD_TILES = {
    (16, 16): GradTile(pixels=128, rows=3, taps=3, vector=8, stages=3, warps=4, programs=128),
    (32, 32): GradTile(pixels=64, rows=3, taps=3, vector=8, stages=3, warps=4, programs=44),
    (64, 64): GradTile(pixels=128, rows=1, taps=1, vector=8, stages=3, warps=4, programs=8),
}
STRIDED_CONV_TILES = {
    (16, 32): ConvTile(64, out=32, rows=4, vector=8, stages=3, unroll=1, warps=4),
    (32, 64): ConvTile(64, out=32, rows=4, vector=8, stages=3, unroll=1, warps=4),
    (64, 64): ConvTile(64, out=32, rows=2, vector=8, stages=2, unroll=1, warps=4),
}
"""Those with stride 2."""
STRIDED_INPUT_TILES = {
    (16, 32): ConvTile(64, out=16, rows=4, vector=8, stages=3, unroll=1, warps=2),
    (32, 64): ConvTile(64, out=32, rows=4, vector=8, stages=3, unroll=1, warps=4),
    (64, 64): ConvTile(64, out=32, rows=2, vector=8, stages=3, unroll=1, warps=4),
}
"""Those of dx; also by channels of x and y."""
STRIDED_GRAD_TILES = {
    (16, 32): GradTile(pixels=64, rows=3, taps=3, vector=8, stages=3, warps=4, programs=64),
    (32, 64): GradTile(pixels=64, rows=1, taps=3, vector=8, stages=3, warps=4, programs=44),
    (64, 64): GradTile(pixels=64, rows=1, taps=1, vector=8, stages=3, warps=4, programs=16),
}


def conv_launch(
    shape: Sequence[int],
    weights: Sequence[int],
    strides: Sequence[int],
    transposed: bool,
    tile: ConvTile | None = None,
) -> Launch:
    """The launch for x of a shape; weights are (COUT, CIN, 3, 3), in any order in memory."""
    from modenorm.kernels.gpu.launch import Launch
    from modenorm.lab.layers.narrow_conv_kernels import conv_kernel

    num_images, _, height, width = shape
    c_out, c_in = weights[:2]
    stride_out, stride_in, *steps = strides
    if transposed:
        c_out, c_in, stride_out, stride_in = c_in, c_out, stride_in, stride_out
    tile = tile or _tile(CONV_TILES, c_in, c_out)
    out, rows = min(tile.out, c_out), min(tile.rows, height)
    grid = (-(-num_images * width // tile.columns), -(-height // rows), c_out // out)
    constants = (
        height, width, c_in, c_out, stride_out, stride_in, *steps, transposed,
        tile.columns, out, rows, tile.vector, tile.stages, tile.unroll, _wide(tile),
    )  # fmt: skip
    return Launch(conv_kernel, grid, (num_images,), constants, tile.warps, direct=False)


def wgrad_launches(
    shape: Sequence[int],
    weights: Sequence[int],
    strides: Sequence[int],
    tile: GradTile | None = None,
) -> tuple[Launch, Launch, int]:
    """The launches for x of a shape and weights, and the number of partial results between them."""
    from modenorm.kernels.gpu.launch import Launch
    from modenorm.lab.layers.narrow_conv_kernels import wgrad_kernel

    num_images, _, height, width = shape
    c_out, c_in = weights[:2]
    tile = tile or _tile(GRAD_TILES, c_in, c_out)
    num_pixels = num_images * height * width
    steps, parts = _shares(num_pixels, tile)
    constants = (
        height, width, c_in, c_out, tile.rows, tile.taps, power_of_two(tile.taps * c_in),
        power_of_two(tile.rows * c_out), tile.pixels, tile.vector, tile.stages,
    )  # fmt: skip
    grid = (parts, 9 // (tile.rows * tile.taps))
    wgrad = Launch(wgrad_kernel, grid, (num_pixels, steps), constants, tile.warps, direct=False)
    return wgrad, add_up_launch(weights, strides, parts), parts


def strided_conv_launch(
    shape: Sequence[int],
    weights: Sequence[int],
    strides: Sequence[int],
    tile: ConvTile | None = None,
) -> Launch:
    """The launch with stride 2 for x of a shape."""
    from modenorm.lab.layers.strided_conv_kernels import strided_conv_kernel

    tile = tile or _tile(STRIDED_CONV_TILES, weights[1], weights[0])
    return _strided_launch(strided_conv_kernel, shape, weights, strides, weights[0], tile)


def strided_input_launch(
    shape: Sequence[int],
    weights: Sequence[int],
    strides: Sequence[int],
    tile: ConvTile | None = None,
) -> Launch:
    """The launch with stride 2 that gives dx of a shape."""
    from modenorm.lab.layers.strided_conv_kernels import strided_input_kernel

    tile = tile or _tile(STRIDED_INPUT_TILES, weights[1], weights[0])
    return _strided_launch(strided_input_kernel, shape, weights, strides, weights[1], tile)


def _strided_launch(
    kernel: Any,
    shape: Sequence[int],
    weights: Sequence[int],
    strides: Sequence[int],
    channels: int,
    tile: ConvTile,
) -> Launch:
    """For x or dx of a shape, and a result with so many channels."""
    from modenorm.kernels.gpu.launch import Launch

    num_images, _, height, width = shape
    high, wide = -(-height // 2), -(-width // 2)
    c_out, c_in = weights[:2]
    out, rows = min(tile.out, channels), min(tile.rows, high)
    grid = (-(-num_images * wide // tile.columns), -(-high // rows), channels // out)
    constants = (
        height, width, c_in, c_out, *strides, tile.columns, out, rows, tile.vector, tile.stages,
        tile.unroll, _wide(tile),
    )  # fmt: skip
    return Launch(kernel, grid, (num_images,), constants, tile.warps, direct=False)


def strided_wgrad_launches(
    shape: Sequence[int],
    weights: Sequence[int],
    strides: Sequence[int],
    tile: GradTile | None = None,
) -> tuple[Launch, Launch, int]:
    """As `wgrad_launches`, with stride 2."""
    from modenorm.kernels.gpu.launch import Launch
    from modenorm.lab.layers.strided_conv_kernels import strided_wgrad_kernel

    num_images, _, height, width = shape
    c_out, c_in = weights[:2]
    tile = tile or _tile(STRIDED_GRAD_TILES, c_in, c_out)
    num_pixels = num_images * -(-height // 2) * -(-width // 2)
    steps, parts = _shares(num_pixels, tile)
    constants = (
        height, width, c_in, c_out, tile.rows, tile.taps, power_of_two(tile.taps * c_in),
        tile.pixels, tile.vector, tile.stages,
    )  # fmt: skip
    grid, sizes = (parts, 9 // (tile.rows * tile.taps)), (num_pixels, steps)
    wgrad = Launch(strided_wgrad_kernel, grid, sizes, constants, tile.warps, direct=False)
    return wgrad, add_up_launch(weights, strides, parts), parts


def add_up_launch(weights: Sequence[int], strides: Sequence[int], parts: int) -> Launch:
    """The launch that adds partial results (parts, KH, KW, CIN, COUT) to weights of a shape."""
    from modenorm.kernels.gpu.launch import Launch
    from modenorm.lab.layers.narrow_conv_kernels import add_up_kernel

    c_out, c_in, *taps = weights
    together = min(power_of_two(parts), 256)
    block = min(4096 // together, 256)
    constants = (c_in, c_out, *taps, *strides, block, together)
    grid = (-(-math.prod(weights) // block),)
    return Launch(add_up_kernel, grid, (parts,), constants, direct=False)


def _tile(tiles: dict[tuple[int, int], Any], c_in: int, c_out: int) -> Any:
    return tiles[min(pair for pair in tiles if pair[0] >= c_in and pair[1] >= c_out)]


def _wide(tile: ConvTile) -> bool:
    """Whether products take the wide matrix instructions of sm_90."""
    return tile.columns >= 64 and tile.warps >= 4


def _shares(num_pixels: int, tile: GradTile) -> tuple[int, int]:
    """Steps of each program, and the number of programs that have something to do."""
    steps = -(-num_pixels // (tile.pixels * tile.programs))
    return steps, -(-num_pixels // (tile.pixels * steps))
