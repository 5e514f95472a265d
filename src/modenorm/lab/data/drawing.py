"""Vectorised drawing on a small canvas: many pictures at once, float32, coverage from 0 to 1.

Only operations that IEEE 754 rounds exactly are used (+ - × ÷, square root, comparison, floor),
never a sum over an axis nor a sine, so that every machine draws the same bits. Shapes: n pictures,
P points, canvas (n, SIDE, SIDE), points (n, P, 2) in pixels.
"""

from __future__ import annotations

import numpy as np

SIDE = 32
Array = np.ndarray

# Pixel centres as a row and as a column.
X = np.arange(SIDE, dtype=np.float32)[None, None, :] + 0.5
Y = np.arange(SIDE, dtype=np.float32)[None, :, None] + 0.5


def uniform(rng: np.random.Generator, low: float, high: float, *shape: int) -> Array:
    """float32 numbers in [low, high)."""
    return np.float32(low) + np.float32(high - low) * rng.random(shape, np.float32)


def rotation(rng: np.random.Generator, n: int, degrees: float) -> tuple[Array, Array]:
    """Cosines and sines of random angles up to ±degrees, by tan of the half angle."""
    half = uniform(rng, -1, 1, n) * np.float32(degrees / 114.6)
    scale = 1 / (1 + half * half)
    return (1 - half * half) * scale, 2 * half * scale


def segments(points: Array, closed: bool) -> list[tuple[Array, ...]]:
    """Start and direction of each segment as (n, 1, 1) arrays: ax, ay, dx, dy."""
    ends = np.concatenate([points[:, 1:], points[:, :1]], 1) if closed else points[:, 1:]
    steps = ends - points[:, : ends.shape[1]]
    columns = np.concatenate([points[:, : ends.shape[1]], steps], 2)[..., None, None]
    return [tuple(columns[:, i, k] for k in range(4)) for i in range(ends.shape[1])]


def distance(points: Array, closed: bool = False) -> Array:
    """Distance of each pixel to the line through the points."""
    nearest = np.full((len(points), SIDE, SIDE), np.inf, np.float32)
    along, ex, ey = (np.empty_like(nearest) for _ in range(3))
    for ax, ay, dx, dy in segments(points, closed):
        inverse = 1 / (dx * dx + dy * dy + 1e-6)
        np.add((X - ax) * (dx * inverse), (Y - ay) * (dy * inverse), out=along)
        np.clip(along, 0, 1, out=along)
        np.subtract(X - ax, np.multiply(along, dx, out=ex), out=ex)
        np.subtract(Y - ay, np.multiply(along, dy, out=ey), out=ey)
        np.multiply(ex, ex, out=ex)
        np.multiply(ey, ey, out=ey)
        np.minimum(nearest, np.add(ex, ey, out=ex), out=nearest)
    return np.sqrt(nearest, out=nearest)


def stroke(points: Array, width: Array) -> Array:
    """Coverage of an open line of the given width."""
    return np.clip(width[:, None, None] / 2 + 0.5 - distance(points), 0, 1)


def fill(points: Array) -> Array:
    """Coverage of a closed polygon."""
    inside = np.zeros((len(points), SIDE, SIDE), bool)
    for ax, ay, dx, dy in segments(points, closed=True):
        crosses = (ay > Y) != (ay + dy > Y)
        slope = dx / np.where(dy == 0, np.float32(1), dy)
        inside ^= crosses & (ax + (Y - ay) * slope > X)
    edge = distance(points, closed=True)
    return np.clip(np.where(inside, edge, -edge) + 0.5, 0, 1)


def smooth_noise(rng: np.random.Generator, n: int, channels: int, cells: int) -> Array:
    """Noise from 0 to 1 that is linear between the points of a coarse grid: (n, channels, S, S)."""
    grid = rng.random((n, channels, cells + 1, cells + 1), np.float32)
    place = np.arange(SIDE, dtype=np.float32) * np.float32(cells / SIDE)
    low = np.floor(place).astype(int)
    part = place - np.floor(place)
    rows = grid[:, :, low] * (1 - part)[:, None] + grid[:, :, low + 1] * part[:, None]
    return rows[..., low] * (1 - part) + rows[..., low + 1] * part


def blend(below: Array, above: Array, coverage: Array) -> Array:
    """Paint colours (n, 3) or pictures (n, 3, S, S) over pictures, where there is coverage."""
    above = above[..., None, None] if above.ndim == 2 else above
    return below + (above - below) * coverage[:, None]


def to_bytes(pictures: Array) -> Array:
    """uint8 from brightness 0 to 1."""
    return (np.clip(pictures, 0, 1) * 255 + 0.5).astype(np.uint8)
