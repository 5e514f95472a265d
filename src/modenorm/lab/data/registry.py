"""Data sets by name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from modenorm.lab.data import builtin, cache
from modenorm.lab.data.catalog import MULTITASK, PUBLISHED
from modenorm.lab.data.files import fingerprint
from modenorm.lab.data.folder import folder_name, folder_path, index_folder, read_folder
from modenorm.lab.data.sets import DataError, DataSet, ImageSet

NAMES = (*PUBLISHED, "multitask", "builtin")
SIDE = 32
FORMAT = 2  # part of every cache key: raise it when decoding changes


def load(
    name: str | os.PathLike[str],
    root: Path | str | None = None,
    *,
    size: int | None = None,
    use_cache: bool = True,
) -> DataSet:
    """Load a data set.

    Args:
        name: One of `NAMES`, or an image folder as `folder:PATH` or as a path.
        root: Folder with the published files; `./data` when not given. Not used by image folders
            and by the built-in set.
        size: Side of the images of an image folder; needed when they differ in size.
        use_cache: Keep the decoded images beside the files and use them the next time.
    """
    folder = _folder(name)
    if folder is not None:
        given = folder_name(os.fspath(name))
        title = folder.resolve().name if given == folder.name else given
        return _load_folder(title, folder, size, use_cache)
    if name == "builtin":
        return builtin.make()
    root = Path("data" if root is None else root)
    if name == "multitask":
        return _load_published("multitask", MULTITASK, root, use_cache)
    if name in PUBLISHED:
        return _load_published(str(name), (str(name),), root, use_cache)
    raise DataError(f"unknown data set {str(name)!r}: expected {', '.join(NAMES)} or folder:PATH")


def _folder(name: str | os.PathLike[str]) -> Path | None:
    """The path, if the name stands for an image folder."""
    if isinstance(name, str) and (path := folder_path(name)):
        return path
    if (
        isinstance(name, os.PathLike)
        or os.sep in name
        or (name not in NAMES and Path(name).is_dir())
    ):
        return Path(name)
    return None


def _decoded(name: str, root: Path, use_cache: bool) -> cache.Tensors:
    published = PUBLISHED[name]
    files = published.find(root)

    def build() -> cache.Splits:
        return published.read(files, len(published.classes))

    if not use_cache:
        return {split: cache.as_tensors(*arrays) for split, arrays in build().items()}
    key = fingerprint(files, FORMAT, name)
    return cache.cached(root / cache.FOLDER / f"{name}.safetensors", key, build)


def _load_published(title: str, names: Sequence[str], root: Path, use_cache: bool) -> DataSet:
    """One published set, or several mixed with their labels kept apart."""
    parts = [_decoded(name, root, use_cache) for name in names]
    classes = tuple(
        f"{n}/{c}" if len(names) > 1 else c for n in names for c in PUBLISHED[n].classes
    )
    first = [0]
    for name in names:
        first.append(first[-1] + len(PUBLISHED[name].classes))

    def mix(split: str) -> ImageSet:
        pairs = [part[split] for part in parts]
        counts = torch.tensor([len(labels) for _, labels in pairs])
        return ImageSet(
            images=_colour_images([images for images, _ in pairs]),
            labels=torch.cat([y + offset for offset, (_, y) in zip(first, pairs, strict=False)]),
            domains=torch.repeat_interleave(torch.arange(len(names)), counts),
            classes=classes,
            domain_names=tuple(names),
        )

    return DataSet(title, mix("train"), mix("test"))


def _colour_images(parts: Sequence[Tensor]) -> Tensor:
    """One (N, 3, 32, 32) tensor: grey images repeated to three channels, small ones zero-padded."""
    if len(parts) == 1 and parts[0].shape[1:] == (3, SIDE, SIDE):
        return parts[0]
    images = torch.zeros(sum(len(part) for part in parts), 3, SIDE, SIDE, dtype=torch.uint8)
    start = 0
    for part in parts:
        stop, pad = start + len(part), (SIDE - part.shape[-1]) // 2
        images[start:stop, :, pad : SIDE - pad, pad : SIDE - pad] = part
        start = stop
    return images


def _load_folder(title: str, folder: Path, size: int | None, use_cache: bool) -> DataSet:
    if size is not None and size < 1:
        raise DataError(f"size {size} for {folder}: expected at least 1 pixel")
    index = index_folder(folder)
    if use_cache:
        key = fingerprint(index.paths, FORMAT, size, index)
        path = folder / cache.FOLDER / f"images-{size or 'own'}.safetensors"
        splits = cache.cached(path, key, lambda: read_folder(index, size))
    else:
        splits = {s: cache.as_tensors(*pair) for s, pair in read_folder(index, size).items()}

    def one(split: str) -> ImageSet:
        images, labels = splits[split]
        return ImageSet(images, labels, torch.zeros_like(labels), index.classes, (title,))

    return DataSet(title, one("train"), one("test"))
