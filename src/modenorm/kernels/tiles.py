"""How the streaming passes cut a tensor into tiles: small rules, read off a sweep on an H200."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

__all__ = ["Geometry", "Tile", "map_tile", "moments_tile", "reduce_tile"]


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
            return _power_of_two_in(self.num_channels), 1
        return 1, _power_of_two_in(self.num_positions)


def _power_of_two_in(number: int) -> int:
    return min(16, number & -number)


class Tile(NamedTuple):
    """Rows and positions of a program's tile, and its warps."""

    rows: int
    positions: int
    num_warps: int


def moments_tile(geometry: Geometry) -> Tile:
    """The tile of `moments`, from a sweep on an H200."""
    rows, positions, wide = _extent(geometry)
    if not geometry.channels_last:
        return _rows_tile(rows, positions, wide)
    if wide and positions <= 64:
        return Tile(min(rows, 32), positions, 2)
    if wide:
        return _columns_tile(
            rows, positions, 32 if rows <= 64 else 64, 4096 if rows <= 64 else 2048
        )
    if positions <= 64:
        return Tile(min(rows, 512), 1, 4)
    return _columns_tile(rows, positions, 64, 1024, 8 if rows <= 64 else 2)


def reduce_tile(geometry: Geometry) -> Tile:
    """The tile of `reduce_backward`, from a sweep on an H200."""
    rows, positions, wide = _extent(geometry)
    if geometry.channels_last and not wide and positions <= 64:
        return Tile(min(rows, 512), 4, 2)
    if geometry.channels_last and not wide:
        return _columns_tile(rows, positions, 64, 8192 if rows <= 64 else 512)
    return moments_tile(geometry)


def map_tile(geometry: Geometry, backward: bool) -> Tile:
    """The tile of `apply` and `apply_backward`, from a sweep on an H200."""
    rows, positions, wide = _extent(geometry)
    if geometry.channels_last:
        return _columns_tile(rows, positions, 64, 1024 if wide or backward else 2048, 4)
    size = 4096 if positions >= 2048 else 1024 if positions >= 256 else 512
    positions = min(positions, size)
    num_warps = 8 if size == 4096 else 4 if wide and size == 1024 else 2
    return Tile(min(rows, size // positions), positions, num_warps)


def _extent(geometry: Geometry) -> tuple[int, int, bool]:
    """Rows and positions as powers of two, and whether elements take four bytes."""
    rows = triton.next_power_of_2(geometry.rows[1])
    return rows, triton.next_power_of_2(geometry.num_positions), geometry.dtype.itemsize == 4


def _rows_tile(rows: int, positions: int, wide: bool) -> Tile:
    """Contiguous positions: one long row, or as many short ones as fill a program."""
    if positions >= 2048:
        return Tile(1, min(positions, 4096), 4)
    if positions >= 512:
        return Tile(min(rows, 1024 // positions if wide else 2048 // positions), positions, 2)
    size = 2048 if wide and positions >= 128 else 4096
    return Tile(min(rows, size // positions), positions, 4)


def _columns_tile(
    rows: int, positions: int, most_rows: int, size: int, num_warps: int | None = None
) -> Tile:
    """Channels side by side: a block of them, and positions until the tile has its size."""
    rows = min(rows, most_rows)
    return Tile(rows, min(positions, size // rows), num_warps or max(2, min(8, size // 1024)))
