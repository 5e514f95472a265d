"""What the readers hand over, checked once: as many labels as images, every label a class."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from modenorm.lab.data.sets import DataError

Split = tuple[np.ndarray, np.ndarray]  # images uint8 (N, 1 or 3, H, W), labels int64 (N,)
Splits = dict[str, Split]  # "train", "test"


def checked(
    path: Path,
    images: np.ndarray,
    labels: np.ndarray,
    num_classes: int,
    labels_path: Path | None = None,
) -> Split:
    """Images and labels as every reader returns them, or an error that names the file.

    Args:
        path: The file of the images.
        images: (N, C, H, W).
        labels: (N,).
        num_classes: How many numbers labels may be.
        labels_path: The file of the labels, if that is another one.
    """
    if len(images) != len(labels):
        raise DataError(f"{path}: {len(images)} images, expected {len(labels)} as there are labels")
    if len(images) == 0:
        raise DataError(f"{path}: no images, expected at least one")
    if labels.min() < 0 or labels.max() >= num_classes:
        wrong = labels.min() if labels.min() < 0 else labels.max()
        raise DataError(f"{labels_path or path}: label {wrong}, expected 0 to {num_classes - 1}")
    return images, labels.astype(np.int64)
