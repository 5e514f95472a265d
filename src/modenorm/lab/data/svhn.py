"""SVHN's cropped digits: MATLAB files in which the label 10 stands for the digit 0."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from modenorm.lab.data.checks import Split, Splits, checked
from modenorm.lab.data.sets import DataError

NAMES = ("train_32x32.mat", "test_32x32.mat")
ORDERS = {b"IM": "<", b"MI": ">"}
MATRIX, COMPRESSED, COMPLEX = 14, 15, 0x800
TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
"""How the values of an array may be stored."""
CLASSES = {
    6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8",
}  # fmt: skip
"""Arrays of numbers; others, such as texts, are passed over."""


def read(files: Sequence[Path], num_classes: int) -> Splits:
    """Read the two files of `NAMES`, in that order."""
    return {"train": _read_mat(files[0], num_classes), "test": _read_mat(files[1], num_classes)}


def _read_mat(path: Path, num_classes: int) -> Split:
    try:
        content = dict(_arrays(path.read_bytes()))
    except (OSError, ValueError, struct.error, zlib.error) as error:
        raise DataError(f"{path}: expected a complete MATLAB 5 file ({error})") from error
    images, labels = content.get("X"), content.get("y")
    if images is None or labels is None:
        raise DataError(f"{path}: expected the arrays X and y")
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[:3] != (32, 32, 3):
        raise DataError(
            f"{path}: X is {images.dtype} {images.shape}, expected uint8 (32, 32, 3, N)"
        )
    digits = _digits(path, labels)
    planes = np.ascontiguousarray(images.transpose(3, 2, 0, 1))
    return checked(path, planes, np.where(digits == 10, 0, digits), num_classes)


def _arrays(data: bytes) -> Iterator[tuple[str, np.ndarray]]:
    """The names and values of a file's arrays of numbers.

    scipy reads such files too, but memory that is not its own if they are damaged.
    """
    if data[126:128] not in ORDERS:
        raise ValueError("its header is not one of MATLAB 5")
    order = ORDERS[data[126:128]]
    for kind, content in _elements(data[128:], order):
        found = [(kind, content)]
        if kind == COMPRESSED:
            found = list(_elements(zlib.decompress(content), order))
        for inner, variable in found:
            if inner != MATRIX:
                raise ValueError(f"a variable of type {inner}")
            yield from _array(variable, order)


def _array(variable: bytes, order: str) -> Iterator[tuple[str, np.ndarray]]:
    """The name and the values of a variable, if it is an array of real numbers."""
    parts = list(_elements(variable, order))
    flags = struct.unpack_from(order + "I", parts[0][1])[0] if parts else 0
    if flags & 0xFF not in CLASSES or flags & COMPLEX:
        return
    if len(parts) != 4 or parts[3][0] not in TYPES:
        raise ValueError("an array that is not made of flags, shape, name and values")
    (_, shape), (_, name), (kind, values) = parts[1:]
    numbers = np.frombuffer(values, order + TYPES[kind]).astype(CLASSES[flags & 0xFF])
    sizes = np.frombuffer(shape, order + "i4").tolist()
    if min(sizes, default=-1) < 0:
        raise ValueError(f"an array of shape {sizes}")
    yield name.decode("latin1"), numbers.reshape(sizes, order="F")


def _elements(data: bytes, order: str) -> Iterator[tuple[int, bytes]]:
    """The type and the content of each element; short ones lie in their own tag."""
    place = 0
    while place < len(data):
        kind, size = struct.unpack_from(order + "II", data, place)
        start, padding = place + 8, -size % 8 if kind != COMPRESSED else 0
        if short := kind >> 16:
            kind, size, start, padding = kind & 0xFFFF, short, place + 4, max(4 - short, 0)
        if start + size > len(data):
            raise ValueError(f"{len(data) - start} bytes of {size}")
        yield kind, data[start : start + size]
        place = start + size + padding


def _digits(path: Path, labels: np.ndarray) -> np.ndarray:
    """The labels as integers, which MATLAB may have kept as other numbers."""
    wrong = labels[~np.isin(labels, range(1, 11))]
    if wrong.size:
        raise DataError(f"{path}: label {wrong[0]:g}, expected 1 to 10")
    return labels.reshape(-1).astype(np.int64)
