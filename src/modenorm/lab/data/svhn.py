"""SVHN's cropped digits: MATLAB files in which the label 10 stands for the digit 0."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from modenorm.lab.data.checks import Split, Splits, checked
from modenorm.lab.data.sets import DataError

NAMES = ("train_32x32.mat", "test_32x32.mat")


def read(files: Sequence[Path], num_classes: int) -> Splits:
    """Read the two files of `NAMES`, in that order."""
    return {"train": _read_mat(files[0], num_classes), "test": _read_mat(files[1], num_classes)}


def _read_mat(path: Path, num_classes: int) -> Split:
    try:
        from scipy.io import loadmat
    except ModuleNotFoundError as missing:
        raise DataError(f"SVHN needs {missing.name!r}: pip install 'modenorm[lab]'") from None
    try:
        content = loadmat(path, variable_names=["X", "y"])
    # scipy raises a dozen different errors for damaged files, down to TypeError and zlib's.
    except Exception as error:
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


def _digits(path: Path, labels: object) -> np.ndarray:
    """The labels as integers, which MATLAB may have kept as fractions, texts or cells too."""
    if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "iuf":
        raise DataError(f"{path}: y is no array of numbers, expected labels from 1 to 10")
    wrong = labels[~np.isin(labels, range(1, 11))]
    if wrong.size:
        raise DataError(f"{path}: label {wrong[0]:g}, expected 1 to 10")
    return labels.reshape(-1).astype(np.int64)
