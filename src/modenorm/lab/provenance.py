"""Where a number comes from: machine, versions, commit and date."""

import datetime
import functools
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import modenorm


def provenance(device: torch.device) -> dict[str, str]:
    """Say what a result was computed with, and when."""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "modenorm": modenorm.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def all_of(
    rows: Iterable[Mapping[str, Any]], name: str, length: int | None = None, *, sort: bool = False
) -> str:
    """The different texts of a field, each cut to a length; in the order of rows unless sorted.

    >>> all_of([{"torch": "2.13"}, {"torch": "2.11"}, {"torch": "2.13"}], "torch")
    '2.13, 2.11'
    """
    found = dict.fromkeys(row[name][:length] for row in rows)
    return ", ".join(sorted(found) if sort else found)


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the CPU as far as the system tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@functools.cache
def commit() -> str:
    """The commit of this package's checkout, "+" if it was changed; "unknown" if there is none.

    Where a copy of the tree runs without its history, MODENORM_COMMIT names the commit.
    """
    if named := os.environ.get("MODENORM_COMMIT"):
        return named
    git = ["git", "-C", str(Path(modenorm.__file__).parent)]
    try:
        name = _output([*git, "rev-parse", "--short=12", "HEAD"])
        changed = _output([*git, "status", "--porcelain", "--untracked-files=no"])
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("+" if changed else "")


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
