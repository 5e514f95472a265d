"""Run directories as they are found: whole, incomplete or broken, never fatal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modenorm.lab.report.gallery import Gallery

FILES = (
    "config.json", "metrics.jsonl", "result.json", "checkpoint.safetensors", "done", "failed",
    "lock",
)  # fmt: skip


@dataclass
class Record:
    """What a run directory holds.

    Attributes:
        path: The directory.
        state: done, incomplete, failed or broken.
        problems: What is wrong with it, a sentence each.
        config: The configuration, as far as it can be read.
        metrics: The evaluations that can be read.
        result: The result, if the run is done.
        gallery: What its modes claim, if somebody looked.
    """

    path: Path
    state: str = "incomplete"
    problems: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    gallery: Gallery | None = None

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.name


def find_directories(roots: Iterable[Path]) -> list[Path]:
    """Run directories at or below the roots.

    Those with a file of a run, empty ones, and those that cannot be read.
    """
    found: dict[Path, None] = {}
    for root in roots:
        if not root.is_dir():
            raise ValueError(f"{root} is not a folder: give a run or the folder that was --runs")
        below = [Path(place, name) for place, names, _ in os.walk(root) for name in names]
        for folder in [root, *sorted(below)]:
            hidden = any(part.startswith(".") for part in folder.relative_to(root).parts)
            if not hidden and _is_run(folder):
                found[folder] = None
    return list(found)


def _is_run(folder: Path) -> bool:
    try:
        return any((folder / name).exists() for name in FILES) or _is_empty(folder)
    except OSError:
        return True


def _is_empty(folder: Path) -> bool:
    return next(folder.iterdir(), None) is None


def read_records(roots: Iterable[Path]) -> list[Record]:
    """Read every run directory at or below the roots."""
    return [read_record(folder) for folder in find_directories(roots)]


def read_record(folder: Path) -> Record:
    """Read a run directory; what is wrong with it goes into `problems`."""
    try:
        return _read(folder)
    except OSError as error:
        return Record(folder, "broken", [f"the directory cannot be read ({_brief(error)})"])


def _read(folder: Path) -> Record:
    record = Record(folder)
    if _is_empty(folder):
        return Record(folder, "broken", ["the directory is empty"])
    record.config = _read_object(record, "config.json") or {}
    _read_metrics(record)
    done, failed = (folder / "done").exists(), (folder / "failed").exists()
    if done:
        _read_result(record)
        _check_end(record)
    try:
        record.gallery = Gallery.load(folder)
    except ValueError as error:
        record.problems.append(str(error))
    if record.problems:
        record.state = "broken"
    elif done or failed:
        record.state = "done" if done else "failed"
    if failed:
        reason = (folder / "failed").read_text(errors="replace").strip()
        reason = reason.removeprefix(f"{folder.name}: ")  # which is told beside it
        record.problems.append(f"the training failed: {reason}")
    return record


def _read_object(record: Record, name: str) -> dict[str, Any] | None:
    try:
        value = json.loads((record.path / name).read_text())
    except FileNotFoundError:
        record.problems.append(f"{name} is missing")
    except (ValueError, OSError, RecursionError) as error:
        record.problems.append(f"{name} cannot be read ({_brief(error)})")
    else:
        if isinstance(value, dict):
            return value
        record.problems.append(f"{name} is not a JSON object")
    return None


def _read_metrics(record: Record) -> None:
    try:
        lines = (record.path / "metrics.jsonl").read_text().split("\n")
    except FileNotFoundError:
        return
    except (ValueError, OSError) as error:
        record.problems.append(f"metrics.jsonl cannot be read ({_brief(error)})")
        return
    for number, line in enumerate(lines[:-1], start=1):  # a last line without end was cut off
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            record.problems.append(f"metrics.jsonl, line {number}: {_brief(error)}")
            continue
        if _is_evaluation(entry):
            record.metrics.append(entry)
        else:
            record.problems.append(f"metrics.jsonl, line {number}: no evaluation with numbers")


def _read_result(record: Record) -> None:
    result = _read_object(record, "result.json")
    if result is None:
        return
    if not (is_number(result.get("final_error")) and is_number(result.get("top_error"))):
        record.problems.append("result.json has no final_error and top_error")
    elif not isinstance(result.get("domain_errors", {}), dict):
        record.problems.append("result.json has domain_errors that are not a JSON object")
    else:
        record.result = result


def _check_end(record: Record) -> None:
    """Note if the evaluations of a result are not all there."""
    steps = record.result.get("steps")
    last = record.metrics[-1].get("step") if record.metrics else 0
    if steps is not None and last != steps:
        record.problems.append(
            f"metrics.jsonl ends at step {last}, but the training took {steps} steps"
        )


def _is_evaluation(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and is_number(entry.get("samples"))
        and is_number(entry.get("test_error"))
        and isinstance(entry.get("domain_errors", {}), dict)
        and isinstance(entry.get("modes", {}), dict)
    )


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, as a float too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # some integers are more than any float


def _brief(error: Exception) -> str:
    return str(error).split("\n")[0][:120]
