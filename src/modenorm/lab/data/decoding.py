"""Decode many image files: by threads, or by processes if they are many.

Of small images most of the work is done in Python, which threads do one after the other.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from modenorm.lab.data import decoding_process
from modenorm.lab.data.decoding_process import open_image
from modenorm.lab.data.sets import DataError

PER_PROCESS = 2500
"""Images for which a process is worth its start."""
RUN = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
"""Starts a module without the package around it, which would import torch."""


def decode_files(paths: Sequence[Path], size: int | None) -> np.ndarray:
    """The images of files, uint8 (N, 3, height, width); without `size` all must have one size."""
    first = _pixels(paths[0], size)
    images = np.empty((len(paths), 3, *first.shape[:2]), np.uint8)

    def decode(i: int) -> None:
        pixels = _pixels(paths[i], size)
        if pixels.shape != first.shape:
            got, want = pixels.shape[1::-1], first.shape[1::-1]
            raise DataError(
                f"{paths[i]}: {got[0]}×{got[1]} pixels, expected {want[0]}×{want[1]} as the first "
                "image; give a size"
            )
        images[i] = pixels.transpose(2, 0, 1)

    left = _decode_by_processes(paths, size, images)
    for i in left[:1]:  # where a process stopped, most likely because of the file
        decode(i)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(decode, left[1:], chunksize=64):
            pass
    return images


def _pixels(path: Path, size: int | None) -> np.ndarray:
    try:
        return np.asarray(open_image(path, size))
    # Decoders raise SyntaxError, struct.error and others beside OSError.
    except Exception as error:
        raise DataError(f"{path}: expected a complete image file ({error})") from error


def _decode_by_processes(
    paths: Sequence[Path], size: int | None, images: np.ndarray
) -> Sequence[int]:
    """Decode files, each process a part of them; returns which are left, in order.

    A process stops at the first file that is not right. None may be started at all.
    """
    count = min(os.cpu_count() or 1, len(paths) // PER_PROCESS)
    if count < 2 or not sys.executable:
        return range(len(paths))
    parts = list(itertools.pairwise(len(paths) * i // count for i in range(count + 1)))
    with ThreadPoolExecutor(count) as pool, contextlib.ExitStack() as stack:
        processes = []
        with contextlib.suppress(OSError):  # no process, no memory for one
            for _ in parts:
                processes.append(stack.enter_context(_start()))
                stack.callback(processes[-1].kill)
        tasks = [
            pool.submit(_hand_over, process, paths[start:stop], size, images[start:stop])
            for process, (start, stop) in zip(processes, parts, strict=False)
        ]
        decoded = [task.result() for task in tasks]
    decoded += [0] * (count - len(decoded))
    pairs = zip(parts, decoded, strict=True)
    return [i for (start, stop), done in pairs for i in range(start + done, stop)]


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", RUN, decoding_process.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _hand_over(
    process: subprocess.Popen[bytes], paths: Sequence[Path], size: int | None, images: np.ndarray
) -> int:
    """Let a process decode files into an array; returns how many it did."""
    task = [[str(path) for path in paths], size, images.shape[:1:-1]]
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(json.dumps(task).encode())
    received: int = process.stdout.readinto(images.data.cast("B"))  # type: ignore[attr-defined]
    return received // images[0].nbytes
