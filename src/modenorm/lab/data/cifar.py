"""CIFAR-10 and CIFAR-100: Python pickles, read without giving a pickle any power.

The unpickler resolves six global names, and each to a class of this file: an array of bytes, its
type, or a byte string. Everything else in a pickle that needs a name is refused.
"""

from __future__ import annotations

import io
import math
import pickle
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from modenorm.lab.data.checks import Splits, checked
from modenorm.lab.data.sets import DataError

NAMES = {
    10: (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"),
    100: ("train", "test"),
}
LABELS = {10: b"labels", 100: b"fine_labels"}


class _Array:
    """Stands for ndarray and for the function that makes one; holds uint8 and nothing else."""

    def __init__(self, *_: object) -> None:
        self.values = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _DType) or not isinstance(data, bytes):
            raise pickle.UnpicklingError("an array that is not uint8")
        if len(data) != math.prod(shape):
            raise pickle.UnpicklingError(f"{len(data)} bytes for an array of shape {shape}")
        order = "F" if fortran else "C"
        self.values = np.frombuffer(data, np.uint8).reshape(shape, order=order)  # type: ignore[call-overload]


class _DType:
    """Stands for numpy.dtype; the only type is uint8."""

    def __init__(self, code: str | bytes, *_: object) -> None:
        if code not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"array of type {code!r}")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        pass


class _Bytes(bytes):
    """Stands for _codecs.encode, by which Python 3 writes bytes in protocol 2."""

    def __new__(cls, text: str = "", encoding: str = "latin1") -> bytes:  # type: ignore[misc]
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"bytes in encoding {encoding!r}")
        return text.encode("latin1")

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("bytes with a state")


class _Unpickler(pickle.Unpickler):
    ALLOWED: dict[tuple[str, str], type] = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): _Array,
        ("numpy._core.multiarray", "_reconstruct"): _Array,
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _DType,
        ("_codecs", "encode"): _Bytes,
        ("__builtin__", "bytes"): _Bytes,
    }

    def find_class(self, module: str, name: str) -> type:
        """Resolve an allowed name to its stand-in."""
        try:
            return self.ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}") from None


def unpickle(data: bytes, path: Path) -> dict[bytes, Any]:
    """Read one batch: a dict of arrays, bytes, numbers and lists, with bytes as keys."""
    try:
        batch = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    # A damaged pickle can raise anything: its opcodes are executed as they come.
    except Exception as error:
        raise DataError(f"{path}: expected a CIFAR batch, refused to unpickle ({error})") from error
    if not isinstance(batch, dict):
        raise DataError(f"{path}: a pickled {type(batch).__name__}, expected a dict")
    return batch


def read_batch(data: bytes, path: Path, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 3, 32, 32) and labels of one batch."""
    batch = unpickle(data, path)
    key = LABELS[num_classes]
    array, labels = batch.get(b"data"), batch.get(key)
    if not isinstance(array, _Array) or array.values.shape[1:] != (3072,):
        raise DataError(f"{path}: expected data of shape (N, 3072)")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise DataError(f"{path}: expected a list of integers {key.decode()!r}")
    images = array.values.reshape(-1, 3, 32, 32)
    if wrong := [label for label in labels if not 0 <= label < num_classes]:  # any size of integer
        raise DataError(f"{path}: label {wrong[0]}, expected 0 to {num_classes - 1}")
    return checked(path, images, np.array(labels, np.int64), num_classes)


def read(files: Sequence[Path], num_classes: int) -> Splits:
    """Read the batches, or the published archive of them."""
    archive = len(files) == 1
    named = dict(_members(files[0]) if archive else ((f.name, _bytes(f)) for f in files))
    batches = []
    for name in NAMES[num_classes]:
        path = files[0] / name if archive else files[0].parent / name
        if name not in named:
            raise DataError(f"{path}: missing from the archive")
        batches.append(read_batch(named[name], path, num_classes))
    images = np.concatenate([images for images, _ in batches[:-1]])
    labels = np.concatenate([labels for _, labels in batches[:-1]])
    return {"train": (images, labels), "test": batches[-1]}


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error})") from error


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """The files of a tar archive by their last name; nothing is written to disk."""
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                stream = tar.extractfile(member) if member.isfile() else None
                if stream is not None:
                    yield Path(member.name).name, stream.read()
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        reason = str(error).split(":\n")[0]  # tarfile adds a line for each compression it tried
        raise DataError(f"{archive}: expected a complete tar.gz archive ({reason})") from error
