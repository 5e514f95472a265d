"""Where a data set's files lie, and what tells one version of them from another."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from modenorm.lab.data.sets import DataError


class IncompleteError(DataError):
    """Some files of a set are there, but not all of them."""


@dataclass(frozen=True)
class Form:
    """One way in which a set is stored: all of `names` in one of the folders `places`."""

    names: tuple[str, ...]
    places: tuple[str, ...]

    def candidates(self, root: Path) -> list[list[Path]]:
        """The complete list of files for each place."""
        return [[root / place / name for name in self.names] for place in self.places]


def find(title: str, forms: Sequence[Form], root: Path) -> list[Path]:
    """The files of the first form that is complete below `root`."""
    candidates = [paths for form in forms for paths in form.candidates(root)]
    for paths in candidates:
        if all(path.is_file() for path in paths):
            return paths
    for paths in candidates:
        present = [path for path in paths if path.is_file()]
        if present:
            missing = next(path for path in paths if path not in present)
            needs = f"{title} needs it beside {present[0].name}"
            raise IncompleteError(f"{missing}: missing; {needs}")
    expected = " or ".join(str(paths[0]) for paths in (form.candidates(root)[0] for form in forms))
    raise DataError(f"no {title} in {root}: expected {expected} (see `modenorm data download`)")


def fingerprint(files: Iterable[Path], *details: object) -> str:
    """A key that changes when a file is added, removed, resized or written again."""
    digest = hashlib.sha256(repr(details).encode())
    for path in files:
        status = path.stat()
        digest.update(os.fsencode(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\n"))
    return digest.hexdigest()


def md5(path: Path) -> str:
    """The checksum by which these data sets are published."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
