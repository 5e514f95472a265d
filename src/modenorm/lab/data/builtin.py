"""A data set made by code: four domains that look nothing alike, ten classes in each.

`digits` are white strokes on black, `signs` are coloured digits on clutter among other digits,
`textures` are two-coloured patterns, `shapes` are dark silhouettes on light paper. Labels are kept
apart as domain · 10 + class. The same seed gives the same bytes on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch

from modenorm.lab.data import glyphs
from modenorm.lab.data.drawing import (
    SIDE,
    Array,
    X,
    Y,
    blend,
    fill,
    rotation,
    smooth_noise,
    stroke,
    to_bytes,
    uniform,
)
from modenorm.lab.data.sets import DataSet, ImageSet

DIGITS = tuple(glyphs.DIGITS)
SHAPES = tuple(glyphs.SHAPES)
TEXTURES = (
    "rows", "columns", "rising", "falling", "checkers", "dots", "rings", "bricks", "waves", "mesh",
)  # fmt: skip
DIGIT_TABLE = glyphs.table(glyphs.DIGITS)
CHUNK = 256  # pictures drawn at once, so that the canvases stay in the cache


def place(
    rng: np.random.Generator, outlines: Array, n: int, size: float, turn: float, bend: float
) -> Array:
    """N outlines in pixels: bent, stretched, sheared, turned and moved.

    Args:
        rng: Source of the numbers.
        outlines: One outline (P, 2), or one for each picture (n, P, 2).
        n: Number of pictures.
        size: Half the height in pixels.
        turn: Largest angle in degrees.
        bend: Largest weight of the quadratic terms that bend the lines.
    """
    x, y = outlines[..., 0], outlines[..., 1]
    bends = uniform(rng, -bend, bend, 6, n, 1)
    stretch = uniform(rng, 0.75 * size, 1.1 * size, 2, n, 1)
    shear = uniform(rng, -0.2, 0.2, n, 1)
    xs = (x + shear * y + bends[0] * x * x + bends[1] * x * y + bends[2] * y * y) * stretch[0]
    ys = (y + bends[3] * x * x + bends[4] * x * y + bends[5] * y * y) * stretch[1]
    cosine, sine = (part[:, None] for part in rotation(rng, n, turn))
    shift = uniform(rng, SIDE / 2 - 2.5, SIDE / 2 + 2.5, n, 1, 2)
    return np.stack([xs * cosine - ys * sine, xs * sine + ys * cosine], -1) + shift


def add_noise(rng: np.random.Generator, pictures: Array, amount: float) -> Array:
    """The same noise in all channels."""
    n = len(pictures)
    return pictures + uniform(rng, -amount, amount, n, 1, SIDE, SIDE)


def draw_digits(rng: np.random.Generator, label: int, n: int) -> Array:
    """White handwriting on black."""
    points = place(rng, glyphs.DIGITS[DIGITS[label]], n, 10, 28, 0.3)
    ink = stroke(points, uniform(rng, 1.5, 4, n)) * uniform(rng, 0.75, 1, n, 1, 1)
    return np.repeat(ink[:, None], 3, 1)


def draw_signs(rng: np.random.Generator, label: int, n: int) -> Array:
    """A digit in colour between two others that are cut off, on blurred ground, scratched."""
    ground = uniform(rng, 0.1, 0.55, n, 1, 1, 1) + uniform(rng, -0.12, 0.12, n, 3, 1, 1)
    ground = ground + (smooth_noise(rng, n, 3, 4) - 0.5) * 0.3
    contrast = uniform(rng, 0.16, 0.45, n, 1)
    contrast[rng.random(n) < 0.35] *= -1
    colour = ground[:, :, SIDE // 2, SIDE // 2] + contrast + uniform(rng, -0.15, 0.15, n, 3)
    width = uniform(rng, 2.2, 4.2, n)
    ink = stroke(place(rng, glyphs.DIGITS[DIGITS[label]], n, 9.5, 12, 0.08), width)
    for side in (-1, 1):
        neighbour = place(rng, DIGIT_TABLE[rng.integers(10, size=n)], n, 9.5, 12, 0.08)
        neighbour[..., 0] += side * uniform(rng, 15, 20, n, 1)
        ink = np.maximum(ink, stroke(neighbour, width))
    scratch = stroke(uniform(rng, 0, SIDE, n, 2, 2), uniform(rng, 0.5, 1.5, n)) * 0.6
    picture = blend(blend(ground, colour, ink), uniform(rng, 0, 0.7, n, 3), scratch)
    return add_noise(rng, picture, 0.06)


def wave(x: Array) -> Array:
    """A triangle wave of period 1 between -1 and 1."""
    return np.abs(x - np.floor(x) - 0.5) * 4 - 1


def pattern(name: str, u: Array, v: Array) -> Array:
    """A pattern of period about 1; its two colours meet where it is 0."""
    if name in ("rows", "columns"):
        return wave(v if name == "rows" else u)
    if name in ("rising", "falling"):
        return wave((u + v if name == "rising" else u - v) * 0.7071)
    if name == "checkers":
        return wave(u / 2) * wave(v / 2) * 2
    if name == "waves":
        return wave(v + wave(u / 2) * 0.35)
    if name == "rings":
        return wave(np.sqrt(u * u + v * v))
    if name == "bricks":
        joint = wave(u / 2 + np.floor(v) / 2)
        return 1 - np.maximum(wave(v) * 2, joint * 4 - 2.2)
    if name == "dots":
        u = u + np.floor(v) / 2
    x, y = u - np.floor(u) - 0.5, v - np.floor(v) - 0.5
    if name == "dots":
        return 1 - (x * x + y * y) * 14
    return np.maximum(np.abs(x), np.abs(y)) * 6 - 2.3


def draw_textures(rng: np.random.Generator, label: int, n: int) -> Array:
    """A pattern in two strong colours, in uneven light."""
    name = TEXTURES[label]
    period = uniform(rng, 4, 9, n, 1, 1)
    cosine, sine = (part[:, None, None] for part in rotation(rng, n, 18))
    middle = uniform(rng, 6, 26, n, 2, 1, 1)
    x, y = X - middle[:, 0], Y - middle[:, 1]
    values = pattern(name, (x * cosine - y * sine) / period, (x * sine + y * cosine) / period)
    coverage = np.clip(values * 1.2 + 0.5, 0, 1)
    first, second = two_colours(rng, n)
    picture = blend(np.broadcast_to(first[..., None, None], (n, 3, SIDE, SIDE)), second, coverage)
    light = 0.7 + smooth_noise(rng, n, 1, 2) * 0.5
    return add_noise(rng, picture * light, 0.14)


def two_colours(rng: np.random.Generator, n: int) -> tuple[Array, Array]:
    """A strong colour and its complement mixed with another, (n, 3) each."""
    first = uniform(rng, 0, 1, n, 3)
    second = (1 - first) * 0.75 + uniform(rng, 0, 0.25, n, 3)
    far = np.where(first < 0.5, first * 0.6, 1 - (1 - first) * 0.6)
    return far, second


def draw_shapes(rng: np.random.Generator, label: int, n: int) -> Array:
    """A dark silhouette with a soft shadow on light paper."""
    paper = uniform(rng, 0.82, 0.98, n, 3, 1, 1) + (smooth_noise(rng, n, 1, 2) - 0.5) * 0.12
    points = place(rng, glyphs.SHAPES[SHAPES[label]], n, 10, 35, 0.27)
    shadow = fill(points + 1.5) * 0.18
    picture = blend(paper, np.zeros((n, 3), np.float32), shadow)
    picture = blend(picture, uniform(rng, 0.02, 0.35, n, 3), fill(points))
    return add_noise(rng, picture, 0.03)


Draw = Callable[[np.random.Generator, int, int], Array]
DOMAINS: dict[str, tuple[Draw, tuple[str, ...]]] = {
    "digits": (draw_digits, DIGITS),
    "signs": (draw_signs, DIGITS),
    "textures": (draw_textures, TEXTURES),
    "shapes": (draw_shapes, SHAPES),
}
CLASSES = tuple(f"{domain}/{name}" for domain, (_, names) in DOMAINS.items() for name in names)


@lru_cache(maxsize=2)
def make(num_train: int = 12000, num_test: int = 4000, seed: int = 0) -> DataSet:
    """Draw the data set: classes in equal numbers, in mixed order."""
    return DataSet("builtin", _make_split(num_train, seed, 0), _make_split(num_test, seed, 1))


def _make_split(num_images: int, seed: int, split: int) -> ImageSet:
    order = _generator(seed, split, len(CLASSES)).permutation(num_images)
    labels = np.arange(num_images) % len(CLASSES)
    images = np.empty((num_images, 3, SIDE, SIDE), np.uint8)
    for label in range(len(CLASSES)):
        draw, _ = list(DOMAINS.values())[label // 10]
        rng = _generator(seed, split, label)
        places = order[label :: len(CLASSES)]
        for start in range(0, len(places), CHUNK):
            chunk = places[start : start + CHUNK]
            images[chunk] = to_bytes(draw(rng, label % 10, len(chunk)))
    mixed = torch.empty(num_images, dtype=torch.int64)
    mixed[torch.from_numpy(order)] = torch.from_numpy(labels)
    return ImageSet(torch.from_numpy(images), mixed, mixed // 10, CLASSES, tuple(DOMAINS))


def _generator(seed: int, *key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, *key))))
