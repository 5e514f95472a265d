"""How the streaming passes cut a tensor into tiles: small rules, read off a sweep on an H200."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

__all__ = [
    "Geometry",
    "Lines",
    "Tile",
    "in_pieces",
    "inference_tile",
    "lines_for",
    "map_tile",
    "moments_tile",
    "one_launch",
    "power_of_two_in",
    "reduce_tile",
]


class Geometry(NamedTuple):
    """A tensor's size and order in memory."""

    num_samples: int
    num_channels: int
    num_positions: int
    channels_last: bool
    dtype: torch.dtype

    @property
    def rows(self) -> tuple[int, int]:
        """Outer blocks, rows in each."""
        if self.channels_last:
            return self.num_samples, self.num_channels
        return 1, self.num_samples * self.num_channels

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Rows, positions, and their strides."""
        strides = (1, self.num_channels) if self.channels_last else (self.num_positions, 1)
        return self.rows[1], self.num_positions, *strides

    @property
    def divisors(self) -> tuple[int, int]:
        """Powers of two up to 16 that divide rows and positions, where that side is contiguous."""
        if self.channels_last:
            return power_of_two_in(self.num_channels), 1
        return 1, power_of_two_in(self.num_positions)

    @property
    def is_ragged(self) -> bool:
        """Whether rows of positions are short and no multiple of 16 bytes."""
        if self.channels_last or not 16 <= self.num_positions < 512:
            return False
        return self.num_positions * self.dtype.itemsize % 16 != 0


def power_of_two_in(number: int) -> int:
    """The largest power of two up to 16 that divides a number."""
    return min(16, number & -number)


class Tile(NamedTuple):
    """Rows and positions of a program's tile, and its warps."""

    rows: int
    positions: int
    num_warps: int


class Lines(NamedTuple):
    """Rows that are read as one line, and a program's tile: numbers in a piece, pieces, lines."""

    rows: int
    width: int
    pieces: int
    lines: int


class Rule(NamedTuple):
    """Channels last: the tile up to so many positions and channels."""

    positions: int
    channels: int
    rows: int
    size: int
    num_warps: int


ANY = 1 << 62
# The first rule that fits decides.
MOMENTS_2_BYTES = (
    Rule(4, 512, 128, 512, 1),
    Rule(16, 512, 64, 1024, 1),
    Rule(64, 512, 32, 1024, 1),
    Rule(64, ANY, 512, 512, 4),
    Rule(256, 64, 32, 8192, 4),
    Rule(256, 256, 32, 1024, 2),
    Rule(256, ANY, 64, 512, 1),
    Rule(1024, 64, 32, 8192, 4),
    Rule(1024, 256, 32, 2048, 4),
    Rule(1024, ANY, 64, 1024, 2),
    Rule(ANY, 64, 64, 8192, 4),
    Rule(ANY, ANY, 64, 2048, 4),
)
REDUCE_2_BYTES = (
    Rule(4, 512, 128, 512, 1),
    Rule(16, 512, 64, 1024, 1),
    Rule(64, 512, 32, 1024, 1),
    Rule(64, ANY, 512, 2048, 1),
    Rule(256, 256, 32, 2048, 2),
    Rule(256, ANY, 256, 2048, 1),
    Rule(1024, 16, 16, 16384, 4),
    Rule(1024, 64, 32, 4096, 4),
    Rule(1024, 256, 64, 4096, 4),
    Rule(1024, ANY, 128, 2048, 1),
    Rule(ANY, ANY, 64, 8192, 4),
)
MOMENTS_4_BYTES = (
    Rule(64, ANY, 32, 2048, 2),
    Rule(1024, 8, 8, 8192, 4),
    Rule(ANY, 64, 32, 4096, 4),
    Rule(ANY, ANY, 64, 2048, 2),
)
REDUCE_4_BYTES = (
    Rule(64, ANY, 32, 2048, 2),
    Rule(256, ANY, 32, 8192, 4),
    Rule(1024, 8, 8, 8192, 4),
    Rule(1024, 64, 32, 4096, 4),
    Rule(1024, ANY, 64, 2048, 2),
    Rule(ANY, 64, 64, 4096, 8),
    Rule(ANY, ANY, 64, 4096, 4),
)


# Evaluation in one launch, by a program for each sample.
SMALL_SAMPLE, LARGEST_SAMPLE = 64 << 10, 1 << 20
"""Bytes. Up to the first, fewer launches always pay; beyond the second, caches lose the sample.

Never more than 2^20 numbers: see `_pieces` in inference.py.
"""
PROCESSORS = 132
"""Of an H200."""
MOST_MODES = 8
INFERENCE_WARPS, INFERENCE_BYTES = 8, 64
"""Warps of a program, most bytes that a thread reads at once."""
SHORT_ROW, LONG_ROW = 512, 16 << 10
"""Bytes of rows of positions that are read in tiles."""


def one_launch(geometry: Geometry, num_modes: int) -> bool:
    """Whether evaluation is one launch; if not, two passes with the mixing between them."""
    size, samples = _sample_bytes(geometry), geometry.num_samples
    largest = LARGEST_SAMPLE
    if not geometry.channels_last and num_modes > 2:
        largest = min(largest, 2 * SMALL_SAMPLE)
    elif not geometry.channels_last and geometry.dtype.itemsize == 4:
        largest = min(largest, 4 * SMALL_SAMPLE)
    if num_modes > MOST_MODES or size > largest:
        return False
    row = geometry.num_channels * geometry.dtype.itemsize
    if geometry.channels_last and row < 32 and samples > 2 * PROCESSORS:
        return False  # so short rows are read slowly
    return size <= SMALL_SAMPLE or samples >= PROCESSORS // 2


def in_pieces(geometry: Geometry, num_modes: int) -> bool:
    """Whether evaluation in one launch reads a sample in pieces, not in tiles."""
    if geometry.channels_last:
        return False
    row = geometry.num_positions * geometry.dtype.itemsize
    return num_modes <= 2 or row % 16 != 0 or not SHORT_ROW <= row <= LONG_ROW


def _sample_bytes(geometry: Geometry) -> int:
    return geometry.num_channels * geometry.num_positions * geometry.dtype.itemsize


def inference_tile(geometry: Geometry, num_modes: int) -> Tile:
    """The tile of evaluation in one launch; rows are pieces of up to 16 bytes, if it has such.

    A piece is no longer than a channel, so it has numbers of two channels at most.
    """
    samples, channels, positions, channels_last, dtype = geometry
    pieces, large = in_pieces(geometry, num_modes), _sample_bytes(geometry) > SMALL_SAMPLE
    size = triton.next_power_of_2(channels * positions)
    many = large and (not channels_last or (dtype.itemsize == 4 and positions <= 64))
    num_warps = min(2 * INFERENCE_WARPS if many else INFERENCE_WARPS, max(1, size // 512))
    most = 32 * num_warps * INFERENCE_BYTES // dtype.itemsize
    rows, columns = map(triton.next_power_of_2, (channels, positions))
    if channels_last:
        most *= 2 if large and samples <= PROCESSORS else 1
        return _columns_tile(rows, columns, most, most, num_warps)
    if not pieces:
        return Tile(min(rows, max(1, most // columns)), columns, num_warps)
    if num_modes > 2 or (large and dtype.itemsize == 2):
        most //= 2  # pieces have a sum for each mode
    width = min(16 // dtype.itemsize, triton.next_power_of_2(positions + 1) // 2)
    return Tile(min(size, most) // width, width, num_warps)


def moments_tile(geometry: Geometry) -> Tile:
    """The tile of `moments`."""
    return _reduction_tile(geometry, MOMENTS_2_BYTES, MOMENTS_4_BYTES)


def reduce_tile(geometry: Geometry) -> Tile:
    """The tile of `reduce_backward`."""
    return _reduction_tile(geometry, REDUCE_2_BYTES, REDUCE_4_BYTES)


def lines_for(geometry: Geometry) -> Lines | None:
    """How sums over ragged rows read them as lines; None if they don't."""
    size, positions = geometry.dtype.itemsize, geometry.num_positions
    rows = 16 // power_of_two_in(positions * size)
    pieces = triton.next_power_of_2(rows * positions * size // 16)
    most = 64 if rows == 8 else 128
    if not geometry.is_ragged or geometry.rows[1] % rows or pieces > most:
        return None
    return Lines(rows, 16 // size, pieces, max(1, (512 if rows == 8 else 256) // pieces))


def map_tile(geometry: Geometry, backward: bool) -> Tile:
    """The tile of `apply` and `apply_backward`."""
    rows, positions, wide = _extent(geometry)
    if geometry.channels_last:
        if rows >= 512 and positions > 64 and not wide:
            tile = (128, 512, 1) if backward else (128, 8192, 8)
            return _columns_tile(rows, positions, *tile)
        return _columns_tile(rows, positions, 64, 1024 if wide or backward else 2048, 4)
    if positions < 512:
        return Tile(min(rows, (1024 if positions > 128 else 512) // positions), positions, 1)
    size = 4096 if positions >= 2048 else 1024
    return Tile(1, min(positions, size), 8 if size == 4096 else 4 if wide else 2)


def _extent(geometry: Geometry) -> tuple[int, int, bool]:
    """Rows and positions as powers of two, and whether elements take four bytes."""
    rows = triton.next_power_of_2(geometry.rows[1])
    return rows, triton.next_power_of_2(geometry.num_positions), geometry.dtype.itemsize == 4


def _reduction_tile(
    geometry: Geometry, of_2_bytes: tuple[Rule, ...], of_4_bytes: tuple[Rule, ...]
) -> Tile:
    rows, positions, wide = _extent(geometry)
    if not geometry.channels_last:
        return _rows_tile(rows, positions, wide)
    for rule in of_4_bytes if wide else of_2_bytes:
        if positions <= rule.positions and rows <= rule.channels:
            break
    return _columns_tile(rows, positions, *rule[2:])


def _rows_tile(rows: int, positions: int, wide: bool) -> Tile:
    """Contiguous positions: one long row, or as many short ones as one warp can hold."""
    if positions >= 2048:
        return Tile(1, positions if positions <= 4096 else 1024, 4)
    if positions >= 512:
        return Tile(min(rows, 1024 // positions if wide else 2048 // positions), positions, 2)
    return Tile(min(rows, 1024 // positions), positions, 1)


def _columns_tile(rows: int, positions: int, most_rows: int, size: int, num_warps: int) -> Tile:
    """Channels side by side: a block of them, and positions until the tile has its size."""
    rows = min(rows, most_rows)
    return Tile(rows, min(positions, size // rows), num_warps)
