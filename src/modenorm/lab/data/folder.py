"""Image folders: train/<class>/… and val/<class>/… as ILSVRC12 and Imagenette, or Tiny-ImageNet.

`index_folder` only lists files; `read_folder` decodes them. As the name of a data set a folder is
folder:PATH, or folder:NAME=PATH to call it by another name than its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from modenorm.lab.data.checks import Split, Splits
from modenorm.lab.data.decoding import decode_files
from modenorm.lab.data.sets import DataError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff"})
TEST_FOLDERS = ("val", "validation", "test")
ANNOTATIONS = "val_annotations.txt"
PREFIX = "folder:"
OTHER = "stand-in"
"""An image folder that is none of the known ones."""
STAND_INS = ("tiny-imagenet-200", "imagenette", OTHER)
"""Folders that take ILSVRC12's place in experiments: their errors are others than the paper's."""
IMAGENETTE = frozenset(
    (
        "n01440764", "n02102040", "n02979186", "n03000684", "n03028079",
        "n03394916", "n03417042", "n03425413", "n03445777", "n03888257",
    )
)  # fmt: skip


def folder_path(dataset: str) -> Path | None:
    """The image folder that the name of a data set stands for; None for other data sets."""
    return _split(dataset)[1] if dataset.startswith(PREFIX) else None


def folder_name(dataset: str) -> str:
    """What to call a data set: a folder by its given name, or by the last part of its path.

    >>> [folder_name(name) for name in ("cifar10", "folder:a/b", "folder:imagenet=/data/2012")]
    ['cifar10', 'b', 'imagenet']
    """
    return _split(dataset)[0]


def dataset_title(dataset: str) -> str:
    """The name of a data set, with a word of warning if it stands in for ILSVRC12.

    >>> dataset_title("folder:data/imagenette")
    'imagenette (a stand-in for ILSVRC12)'
    """
    name = folder_name(dataset)
    stands_in = dataset.startswith(PREFIX) and name in STAND_INS
    return f"{name} (a stand-in for ILSVRC12)" if stands_in else name


def recognise(folder: Path) -> str:
    """Tell by its classes what an image folder is: "imagenet" (ILSVRC12) or one of `STAND_INS`."""
    classes = _class_folders(folder / "train")
    if set(classes) == IMAGENETTE:
        return "imagenette"
    synsets = all(re.fullmatch(r"n\d{8}", name) for name in classes)
    known = {1000: "imagenet", 200: "tiny-imagenet-200"}
    return known.get(len(classes), OTHER) if synsets else OTHER


def _split(dataset: str) -> tuple[str, Path]:
    text = dataset.removeprefix(PREFIX)
    name, equals, path = text.partition("=")
    if equals and os.sep not in name and text != dataset:
        return name, Path(path)
    return Path(text).name, Path(text)


@dataclass(frozen=True)
class Listing:
    """Image files and, for each, the index of its class."""

    paths: tuple[Path, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True)
class FolderIndex:
    """The files of an image folder; classes are the names of the training folders, sorted."""

    classes: tuple[str, ...]
    train: Listing
    test: Listing

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files, training first."""
        return self.train.paths + self.test.paths


def index_folder(folder: Path) -> FolderIndex:
    """List the images of a folder with a training and a validation part."""
    train = folder / "train"
    if not train.is_dir():
        raise DataError(f"{train}: missing; expected train/<class>/ and val/<class>/ in {folder}")
    classes = tuple(_class_folders(train))
    if not classes:
        raise DataError(f"{train}: no classes, expected one folder for each class")
    test = next((folder / name for name in TEST_FOLDERS if (folder / name).is_dir()), None)
    if test is None:
        raise DataError(f"{folder / 'val'}: missing; expected val/<class>/ beside train/")
    annotated = (test / ANNOTATIONS).is_file()
    index = FolderIndex(
        classes,
        _list_classes(train, classes),
        _list_annotated(test, classes) if annotated else _list_classes(test, classes),
    )
    if empty := _without_images(classes, index.train):
        raise DataError(f"{train / empty}: no images, expected some in every class of train/")
    if empty := _without_images(classes, index.test):
        raise DataError(
            f"{test}: no images of {empty}, expected some of every class of train/: add some, or "
            f"remove {train / empty}"
        )
    return index


def read_folder(index: FolderIndex, size: int | None = None) -> Splits:
    """Decode all images; `size` resizes the short side and crops the centre.

    Without `size` all images must have one size.
    """
    return {"train": _decode(index.train, size), "test": _decode(index.test, size)}


def _without_images(classes: Sequence[str], listing: Listing) -> str | None:
    """The first class of which there is no image."""
    empty = set(range(len(classes))) - set(listing.labels)
    return classes[min(empty)] if empty else None


def _class_folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in _entries(folder) if entry.is_dir())


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What lies in a folder, except what is hidden."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed ({error.strerror})") from error


def _image_files(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """The images in a folder and those below it; links are followed, but never in a circle."""
    above |= {folder.resolve()}
    for entry in _entries(folder):
        path = folder / entry.name
        if not entry.is_dir():
            if path.suffix.lower() in SUFFIXES:
                if not entry.is_file():
                    raise DataError(_describe_no_file(path))
                yield path
        elif path.resolve() not in above:
            yield from _image_files(path, above)


def _describe_no_file(path: Path) -> str:
    if path.is_symlink() and not path.exists():
        return f"{path} is a link to {os.readlink(path)}, which is not there: mend or remove it"
    return f"{path} is no regular file, as images are: remove it"


def _list_classes(folder: Path, classes: Sequence[str]) -> Listing:
    there = _class_folders(folder)
    unknown = [name for name in there if name not in set(classes)]
    if unknown:
        raise DataError(f"{folder / unknown[0]}: unknown class, expected those of train/")
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(_image_files(folder / name)) if name in there else []
        paths += found
        labels += [label] * len(found)
    return _listing(folder, paths, labels)


def _list_annotated(folder: Path, classes: Sequence[str]) -> Listing:
    """Tiny-ImageNet's val/: all images in one folder, classes in a table."""
    table = folder / ANNOTATIONS
    numbers = {name: label for label, name in enumerate(classes)}
    paths: list[Path] = []
    labels: list[int] = []
    for line in table.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, rest = line.partition("\t")
        label = rest.partition("\t")[0].strip()
        if label not in numbers:
            raise DataError(f"{table}: line {line!r}, expected a file and a class of train/")
        path = folder / "images" / name
        if not path.is_file():
            raise DataError(f"{path}: missing, expected because {ANNOTATIONS} names it")
        paths.append(path)
        labels.append(numbers[label])
    return _listing(folder, paths, labels)


def _listing(folder: Path, paths: list[Path], labels: list[int]) -> Listing:
    if not paths:
        raise DataError(f"{folder}: no images, expected files such as <class>/name.jpeg")
    return Listing(tuple(paths), tuple(labels))


def _decode(listing: Listing, size: int | None) -> Split:
    return decode_files(listing.paths, size), np.array(listing.labels, np.int64)
