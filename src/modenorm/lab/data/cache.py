"""Decoded sets, kept as one memory-mapped file of uint8 beside their sources.

The file carries a key of its sources and a checksum: when either does not hold it is made again.
"""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from modenorm.lab.data.checks import Splits

Tensors = dict[str, tuple[Tensor, Tensor]]  # split -> images, labels
FOLDER = ".modenorm-cache"


class CacheWarning(UserWarning):
    """A data set is not kept: the next training decodes it again."""


def cached(path: Path, key: str, build: Callable[[], Splits]) -> Tensors:
    """What `build` returns, from `path` if it was stored there under the same key."""
    stored = read(path, key)
    if stored is not None:
        return stored
    tensors = {split: as_tensors(*arrays) for split, arrays in build().items()}
    try:
        write(path, key, tensors)
    except (OSError, SafetensorError) as error:
        warnings.warn(f"{path}: data set not cached ({error})", CacheWarning, stacklevel=3)
    return tensors


def as_tensors(images: object, labels: object) -> tuple[Tensor, Tensor]:
    """Tensors that own their memory, as arrays over read-only bytes cannot be shared."""
    return torch.tensor(images), torch.tensor(labels)


def read(path: Path, key: str) -> Tensors | None:
    """The stored tensors; None when there are none, they are older, or they are damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("key") != key:
                return None
            flat = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return None
    if metadata.get("crc32") != _checksum(flat):
        return None
    splits = sorted({name.split(".")[0] for name in flat})
    return {split: (flat[f"{split}.images"], flat[f"{split}.labels"]) for split in splits}


def write(path: Path, key: str, tensors: Tensors) -> None:
    """Store tensors so that a reader sees all of them or the former file."""
    flat = {f"{s}.{part}": t for s, pair in tensors.items() for part, t in _named(pair)}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        save_file(flat, temporary, {"key": key, "crc32": _checksum(flat)})
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _named(pair: tuple[Tensor, Tensor]) -> list[tuple[str, Tensor]]:
    return [("images", pair[0].contiguous()), ("labels", pair[1])]


def _checksum(flat: dict[str, Tensor]) -> str:
    value = 0
    for name in sorted(flat):
        value = zlib.crc32(flat[name].numpy().reshape(-1).view("uint8").data, value)
    return f"{value:08x}"
