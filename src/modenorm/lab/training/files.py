"""Files that are whole or not there at all, whatever happens while they are written."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

PARTIAL = ".partial"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that its name always stands for the whole old or the whole new content.

    A link stays, and what it leads to is written; so do a device and a pipe, such as /dev/null.

    Raises:
        OSError: It could not be written; the old file, if there was one, is untouched.
    """
    _check_no_folder(path)
    if path.is_char_device() or path.is_fifo():
        path.write_bytes(content)
        return
    path = path.resolve() if path.is_symlink() else path
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise describe(error, path, "what was saved before is kept") from None


def check_folder(folder: Path) -> None:
    """Make a folder, and say now rather than after the work why nothing can be written there.

    Raises:
        OSError: It can't be made, or nothing can be written there.
    """
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"{there} is a file, not a folder: choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise describe(error, folder, "nothing was done") from None


def check_file(path: Path) -> None:
    """Make a file's folder, and say now rather than after the work why it can't be written.

    Raises:
        OSError: It is a folder, or its own can't be made, or nothing can be written there.
    """
    _check_no_folder(path)
    if not (path.is_char_device() or path.is_fifo()):
        check_folder(path.resolve().parent)


def _check_no_folder(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file in it")


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON objects, one a line, as `write_whole` does."""
    write_whole(path, "".join(json.dumps(record) + "\n" for record in records).encode())


def read_objects(path: Path, names: Set[str] = frozenset()) -> list[dict[str, Any]]:
    """Read JSON objects, one a line, each with at least these names; none without the file.

    Raises:
        ValueError: A line is something else.
    """
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [
        _parse(line, names, f"{path}, line {number}") for number, line in enumerate(lines, start=1)
    ]


def _parse(line: bytes, names: Set[str], where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}): mend or remove it") from None
    if not isinstance(value, dict) or not value.keys() >= names:
        raise ValueError(f"{where} is no line of results: mend or remove it")
    return value


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make a folder, and wait until no other process is in this part of the code for it.

    For files that are read, added to and written again. The system lets go of the folder by itself
    if this process is killed; file systems and systems without such locks go without.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def remove_partial(folder: Path) -> None:
    """Remove what `write_whole` left in a folder when its process was killed."""
    for path in folder.glob(f".*{PARTIAL}"):
        path.unlink(missing_ok=True)


def append_line(path: Path, line: str) -> None:
    """Append one line to a file."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        raise describe(error, path, "what was saved before is kept") from None


def describe(error: OSError, path: Path, consequence: str) -> OSError:
    """Say in one sentence which file could not be written, why, and what to do."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return OSError(
        f"cannot write {path}: {reason}; {consequence}: make room or choose another folder, "
        "then give the same command again"
    )


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
