"""Is what lies in a folder the published data set? Counts, shapes, labels, and a checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch

from modenorm.lab.data.catalog import MULTITASK, PUBLISHED
from modenorm.lab.data.files import IncompleteError, md5
from modenorm.lab.data.registry import load
from modenorm.lab.data.sets import DataError, ImageSet
from modenorm.lab.provenance import commit
from modenorm.lab.training.files import write_whole


@dataclass(frozen=True)
class Verdict:
    """What was found in one split, and every way in which it is not as published."""

    dataset: str
    split: str
    count: int
    shape: tuple[int, ...]
    histogram: tuple[int, ...]
    sha256: str
    original_files: bool
    problems: tuple[str, ...]


def present(root: Path) -> list[str]:
    """The names of the sets whose files are all below `root`."""

    def found(name: str) -> bool:
        try:
            return bool(PUBLISHED[name].find(root))
        except DataError:
            return False

    names = [name for name in PUBLISHED if found(name)]
    return names + ["multitask"] * (set(MULTITASK) <= set(names))


def incomplete(root: Path) -> dict[str, str]:
    """The sets of which some files are below `root` and others are not, and what is missing."""
    missing = {}
    for name, published in PUBLISHED.items():
        try:
            published.find(root)
        except IncompleteError as error:
            missing[name] = str(error)
        except DataError:
            pass
    return missing


def verify(name: str, root: Path) -> list[Verdict]:
    """Read a set from its files, never from the cache, and compare it with what is published."""
    if name not in (*PUBLISHED, "multitask"):
        expected = ", ".join((*PUBLISHED, "multitask"))
        raise DataError(f"{name!r} is not a published data set: expected {expected}")
    data = load(name, root, use_cache=False)
    parts = MULTITASK if name == "multitask" else (name,)
    original = all(_is_original(part, root) for part in parts)
    return [
        _verdict(
            name, split, images, sum((PUBLISHED[p].histograms[split] for p in parts), ()), original
        )
        for split, images in (("train", data.train), ("test", data.test))
    ]


def _verdict(
    name: str, split: str, images: ImageSet, expected: tuple[int, ...], original: bool
) -> Verdict:
    histogram = tuple(torch.bincount(images.labels, minlength=images.num_classes).tolist())
    shape = tuple(images.images.shape[1:])
    problems = []
    if len(images) != sum(expected):
        problems.append(f"{len(images)} images, expected {sum(expected)}")
    if shape != (3, 32, 32):
        problems.append(f"images of shape {shape}, expected (3, 32, 32)")
    wrong = [
        k for k, (got, want) in enumerate(zip(histogram, expected, strict=True)) if got != want
    ]
    if wrong:
        k = wrong[0]
        problems.append(
            f"{histogram[k]} images of class {images.classes[k]}, expected {expected[k]}"
            + (f" ({len(wrong)} classes differ)" if len(wrong) > 1 else "")
        )
    sha = checksum(images)
    return Verdict(name, split, len(images), shape, histogram, sha, original, tuple(problems))


def checksum(images: ImageSet) -> str:
    """sha256 over the decoded images (uint8) and then the labels (int64, little endian)."""
    digest = hashlib.sha256(images.images.contiguous().numpy().reshape(-1).data)
    digest.update(images.labels.numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def _is_original(name: str, root: Path) -> bool:
    """Whether the files are the published ones byte by byte, which only archives can show."""
    published = PUBLISHED[name]
    known = {Path(path).name: digest for path, digest in published.downloads.items()}
    return all(known.get(path.name) == md5(path) for path in published.find(root))


def write_json(path: Path, verdicts: Iterable[Verdict]) -> None:
    """One line for each verdict, with its provenance."""
    provenance = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "commit": commit(),
    }
    lines = [json.dumps(asdict(verdict) | provenance) for verdict in verdicts]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, ("\n".join(lines) + "\n").encode())
