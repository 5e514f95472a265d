"""Decode image files, by itself or as a process beside others (see decoding.py).

Imports neither torch nor NumPy nor the rest of this package, so that such a process starts at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from PIL import Image

TOGETHER = 1 << 18
"""Bytes that are handed over at once."""


def open_image(path: str | Path, size: int | None) -> Image.Image:
    """Decode a file to RGB; `size` resizes the short side and crops the centre."""
    with Image.open(path) as image:
        return to_rgb(image) if size is None else _short_side_crop(image, size)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to 8 bits of red, green and blue; grey of 16 bits keeps the upper 8, as colours do.

    Raises:
        ValueError: The pixels are floating-point numbers, whose range is not known.
    """
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers; convert it to 8 bits")
    if image.mode.startswith("I"):  # Pillow would take all values above 255 for white
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    return image.convert("RGB")


def _short_side_crop(image: Image.Image, size: int) -> Image.Image:
    image.draft("RGB", (size, size))  # lets the JPEG decoder skip detail, never below the size
    image = to_rgb(image)
    width, height = image.size
    scale = size / min(width, height)
    width, height = max(size, round(width * scale)), max(size, round(height * scale))
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


def main() -> None:
    """Write the images of the files given as JSON, channels first, up to one that is not right."""
    paths, size, shape = json.load(sys.stdin)
    with open(sys.stdout.fileno(), "wb", buffering=TOGETHER) as pipe:  # fewer changes of process
        for path in paths:
            image = open_image(path, size)
            if list(image.size) != shape:
                return
            pipe.write(b"".join(band.tobytes() for band in image.split()))


if __name__ == "__main__":
    main()
