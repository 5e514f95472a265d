"""The outlines that the built-in data set draws: ten digits as strokes, ten shapes as polygons.

Coordinates run from -1 to 1, x to the right and y down. They are rounded, so that they are the
same numbers on every machine whatever its sine is.
"""

from __future__ import annotations

import math

import numpy as np

Points = list[tuple[float, float]]


def _arc(x: float, y: float, rx: float, ry: float, start: float, stop: float, n: int) -> Points:
    """N + 1 points of an ellipse; degrees, clockwise from the right."""
    angles = [math.radians(start + (stop - start) * i / n) for i in range(n + 1)]
    return [(x + rx * math.cos(a), y + ry * math.sin(a)) for a in angles]


def _mirrored(half: Points) -> Points:
    """A closed outline from its right half, listed from top to bottom."""
    return half + [(-x, y) for x, y in reversed(half) if x != 0]


_STROKES: dict[str, Points] = {
    "0": _arc(0, 0, 0.6, 1, -90, 270, 14),
    "1": [(-0.4, -0.55), (0.1, -1), (0.1, 1)],
    "2": [*_arc(0, -0.45, 0.58, 0.55, 195, 400, 8), (-0.6, 1), (0.65, 1)],
    "3": _arc(-0.05, -0.5, 0.55, 0.5, 205, 440, 8) + _arc(-0.05, 0.48, 0.65, 0.52, 275, 515, 8),
    "4": [(0.3, 1), (0.3, -1), (-0.65, 0.4), (0.7, 0.4)],
    "5": [(0.55, -1), (-0.4, -1), (-0.48, -0.1), *_arc(-0.02, 0.38, 0.62, 0.62, 232, 505, 9)],
    "6": [(0.4, -1), (-0.05, -0.75), (-0.4, -0.25), *_arc(0, 0.42, 0.58, 0.58, 190, 550, 12)],
    "7": [(-0.6, -1), (0.6, -1), (0.1, 0), (-0.15, 1)],
    "8": _arc(0, -0.5, 0.48, 0.48, 90, 450, 10) + _arc(0, 0.5, 0.6, 0.5, 270, 630, 11)[1:],
    "9": [*_arc(0, -0.42, 0.56, 0.58, 10, -350, 12), (0.5, 0.3), (0.25, 1)],
}

_STAR = [
    (r * math.sin(math.radians(36 * i)), 0.06 - r * math.cos(math.radians(36 * i)))
    for i, r in ((i, 0.42 if i % 2 else 1.0) for i in range(10))
]

_OUTLINES: dict[str, Points] = {
    "circle": _arc(0, 0, 0.85, 0.85, 0, 345, 23),
    "square": [(-0.75, -0.75), (0.75, -0.75), (0.75, 0.75), (-0.75, 0.75)],
    "triangle": [(0, -0.9), (0.9, 0.7), (-0.9, 0.7)],
    "star": _STAR,
    "heart": _mirrored(
        [(0, -0.42), *_arc(0.43, -0.38, 0.44, 0.46, 200, 370, 7), (0.62, 0.22), (0, 0.95)]
    ),
    "cross": _mirrored([(0.3, -0.9), (0.3, -0.3), (0.9, -0.3), (0.9, 0.3), (0.3, 0.3), (0.3, 0.9)]),
    "moon": _arc(0, 0, 0.9, 0.9, -45, -315, 16) + _arc(0.42, 0, 0.64, 0.68, 110, 250, 9),
    "arrow": [
        (0.95, 0), (0.2, -0.7), (0.2, -0.27), (-0.9, -0.27), (-0.9, 0.27), (0.2, 0.27), (0.2, 0.7),
    ],
    "house": _mirrored(
        [(0, -0.95), (0.95, -0.1), (0.7, -0.1), (0.7, 0.85), (0.2, 0.85), (0.2, 0.3)]
    ),
    "fish": [
        *_arc(0.2, 0, 0.75, 0.52, -160, 160, 14), (-0.95, 0.55), (-0.72, 0), (-0.95, -0.55),
    ],
}  # fmt: skip


def _rounded(points: Points) -> np.ndarray:
    return np.array([(round(x, 4), round(y, 4)) for x, y in points], np.float32)


DIGITS = {name: _rounded(points) for name, points in _STROKES.items()}
SHAPES = {name: _rounded(points) for name, points in _OUTLINES.items()}


def table(outlines: dict[str, np.ndarray]) -> np.ndarray:
    """All outlines in one array, the short ones ended by repeating their last point."""
    longest = max(len(points) for points in outlines.values())
    padded = [np.pad(p, ((0, longest - len(p)), (0, 0)), mode="edge") for p in outlines.values()]
    return np.stack(padded)
