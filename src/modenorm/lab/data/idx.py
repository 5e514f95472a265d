"""The idx format of MNIST and Fashion-MNIST: a big-endian header, then the bytes."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from modenorm.lab.data.checks import Split, Splits, checked
from modenorm.lab.data.sets import DataError

NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def read_idx(path: Path, ndim: int) -> np.ndarray:
    """Read an idx file of bytes with `ndim` dimensions, compressed or not."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            header = stream.read(4 + 4 * ndim)
            magic = bytes([0, 0, 8, ndim])
            if not header:
                raise DataError(f"{path}: empty, expected a header and data: get it again")
            if header[:4] != magic:
                raise DataError(f"{path}: magic {header[:4].hex()}, expected {magic.hex()}")
            if len(header) < 4 + 4 * ndim:
                raise DataError(f"{path}: truncated, expected a header of {4 + 4 * ndim} bytes")
            shape = struct.unpack(f">{ndim}I", header[4:])
            data = stream.read()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: expected a complete gzip file ({error})") from error
    if len(data) != math.prod(shape):
        raise DataError(
            f"{path}: {len(data)} bytes of data, expected {math.prod(shape)} for shape {shape}"
        )
    return np.frombuffer(data, np.uint8).reshape(shape)


def read(files: Sequence[Path], num_classes: int) -> Splits:
    """Read the four files of `NAMES`, in that order."""
    return {
        "train": _split(files[0], files[1], num_classes),
        "test": _split(files[2], files[3], num_classes),
    }


def _split(images: Path, labels: Path, num_classes: int) -> Split:
    pixels = read_idx(images, 3)
    if pixels.shape[1:] != (28, 28):
        raise DataError(f"{images}: images of {pixels.shape[1:]} pixels, expected (28, 28)")
    return checked(images, pixels[:, None], read_idx(labels, 1), num_classes, labels)
