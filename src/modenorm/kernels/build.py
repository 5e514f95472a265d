"""Code that the system's compiler makes on first use: found again, or made, kept and loaded.

A folder of the user's keeps it. A file's name holds a key of everything that made it and a digest
of what is in it: a file that is damaged, or was made elsewhere, is never loaded.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

__all__ = ["compiler_for", "folder", "key_of", "load", "load_kept", "reason"]

Loaded = TypeVar("Loaded")


def compiler_for(variable: str, usual: Sequence[str]) -> tuple[str, ...] | None:
    """The command that compiles: of a variable of the environment, or what is usual."""
    try:
        given = shlex.split(os.environ.get(variable, ""))
    except ValueError:  # a quotation without end
        given = []
    for command in (given, *([name] for name in usual)):
        if command and (path := shutil.which(command[0])):
            return (path, *command[1:])
    return None


def key_of(sources: Iterable[Path], compiler: tuple[str, ...], *parts: object) -> str:
    """Of sources, compiler, and whatever else makes a difference."""
    program = os.stat(compiler[0])
    contents = [source.read_bytes() for source in sources]
    for part in (compiler, program.st_size, program.st_mtime_ns, *parts):
        contents.append(repr(part).encode())
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]


def folder() -> Path:
    """Where compiled code is kept; a place where nothing can be for a user without a home."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(caches if os.path.isabs(caches) else os.devnull) / "modenorm"


def load(
    key: str, compile_to: Callable[[Path], None], open_file: Callable[[Path], Loaded]
) -> tuple[Loaded, Path]:
    """What was kept under a key, or is compiled now, and its file."""
    if (found := load_kept(key, open_file)) is not None:
        return found
    with tempfile.TemporaryDirectory() as private:
        built = Path(private) / "library.so"
        compile_to(built)
        kept = _keep(built, key)
        try:
            return open_file(kept or built), kept or built
        except (OSError, ImportError):
            return open_file(built), built


def load_kept(key: str, open_file: Callable[[Path], Loaded]) -> tuple[Loaded, Path] | None:
    """What was kept under a key, and its file; None if there is nothing that can be loaded."""
    for path in _kept(key):
        try:
            return open_file(path), path
        except (OSError, ImportError):  # a folder from which nothing may be executed, for one
            continue
    return None


def _kept(key: str) -> list[Path]:
    """Files with this key that are whole and the user's own."""
    found = []
    try:
        paths = sorted(folder().glob(f"{key}-*.so"))
    except OSError:  # the home of someone else
        return []
    for path in paths:
        try:
            own = path.stat().st_uid == os.getuid()
            if own and path.stem == f"{key}-{_digest(path)}":
                found.append(path)
        except OSError:
            continue
    return found


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _keep(built: Path, key: str) -> Path | None:
    """A copy in the user's folder, there at once or not at all; None where none can be made."""
    try:
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = folder() / f"{key}-{_digest(built)}.so"
        with tempfile.TemporaryDirectory(dir=folder()) as private:
            copy = Path(private) / kept.name
            copy.touch(mode=0o600)
            copy.write_bytes(built.read_bytes())
            copy.replace(kept)
    except OSError:
        return None
    return kept


def reason(error: Exception) -> str:
    """Why something could not be compiled or loaded, in a line."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in error.stderr.splitlines() if "error" in line]
        return f"{error.cmd[0]}: {(lines or [f'exit status {error.returncode}'])[0]}"
    return f"{type(error).__name__}: {error}"
