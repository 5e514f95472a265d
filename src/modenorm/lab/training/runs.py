"""Runs are directories: what a training is, how far it came and how it ended, as files.

config.json, metrics.jsonl (one line per evaluation), checkpoint.safetensors, and at the end
result.json and an empty `done`, or `failed` with the reason; pruned.safetensors if modes were
pruned. `lock` is held while it is trained.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from modenorm.lab.training.config import TrainConfig
from modenorm.lab.training.files import (
    append_line,
    describe,
    remove_partial,
    write_lines,
    write_whole,
)

State = Literal["done", "failed", "incomplete", "missing"]
RESULT = {"run", "final_error", "top_error", "domain_errors", "samples_seen", "seconds"}
"""What every result tells."""


@dataclass(frozen=True)
class Run:
    """One training and its directory."""

    config: TrainConfig
    path: Path

    @classmethod
    def of(cls, config: TrainConfig, runs_dir: Path) -> "Run":
        """The run of a configuration; its directory may not exist yet."""
        return cls(config, runs_dir / config.run_id)

    @classmethod
    def open(cls, path: Path) -> "Run":
        """Open the run in an existing directory."""
        file = path / "config.json"
        try:
            return cls(TrainConfig.from_json(file.read_text()), path)
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} is no configuration of a run ({error})") from None

    @property
    def state(self) -> State:
        """Whether the run is done, failed, incomplete or missing."""
        if (self.path / "done").exists():
            return "done"
        if (self.path / "failed").exists():
            return "failed"
        return "incomplete" if (self.path / "config.json").exists() else "missing"

    @property
    def checkpoint(self) -> Path:
        """Where the run's checkpoint is or will be."""
        return self.path / "checkpoint.safetensors"

    @property
    def pruned(self) -> Path:
        """Where the smaller model of a run with automatic modes is or will be."""
        return self.path / "pruned.safetensors"

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Make the directory, or take up one that exists, and keep other processes out of it.

        A mark of failure is taken back, and what a killed process left half written is removed. The
        system lets go of the directory by itself if this process is killed.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise describe(error, self.path, "nothing was trained") from None
        with (self.path / "lock").open("w") as file, _closed_in_children(file):
            _lock(file, self.path)
            (self.path / "failed").unlink(missing_ok=True)
            remove_partial(self.path)
            write_whole(self.path / "config.json", (self.config.to_json() + "\n").encode())
            yield

    def set_metrics(self, records: Iterable[dict[str, Any]]) -> None:
        """Make metrics.jsonl hold these records alone, as after a resume."""
        write_lines(self.path / "metrics.jsonl", records)

    def add_metrics(self, record: dict[str, Any]) -> None:
        """Append one record to metrics.jsonl."""
        append_line(self.path / "metrics.jsonl", json.dumps(record))

    def metrics(self) -> list[dict[str, Any]]:
        """Read metrics.jsonl; a last line that was cut off is left out."""
        file = self.path / "metrics.jsonl"
        try:
            lines = file.read_text().split("\n")[:-1]
            return [_object(line, {"step", "samples", "test_error"}) for line in lines]
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise ValueError(f"{file} holds no evaluations ({error}): mend or delete it") from None

    def finish(self, result: dict[str, Any]) -> None:
        """Write the result and mark the run as done."""
        write_whole(self.path / "result.json", (json.dumps(result, indent=1) + "\n").encode())
        write_whole(self.path / "done", b"")

    def fail(self, reason: str) -> None:
        """Mark the run as failed."""
        write_whole(self.path / "failed", (reason + "\n").encode())

    def result(self) -> dict[str, Any]:
        """Read the result of a run that is done."""
        file = self.path / "result.json"
        try:
            return _checked_result(_object(file.read_text(), RESULT))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{file} is no result of a training ({error}): delete {self.path / 'done'} and "
                "give the same command again"
            ) from None


def _object(text: str, names: set[str]) -> dict[str, Any]:
    """Read a JSON object that has these names."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    if missing := names - value.keys():
        raise ValueError(f"it has no {min(missing)}")
    return value


def _checked_result(result: dict[str, Any]) -> dict[str, Any]:
    """A result whose values are of the kinds that are shown."""
    for name in sorted(RESULT - {"run", "domain_errors"}):
        if type(result[name]) not in (int, float):
            raise ValueError(f"its {name} is {result[name]!r}, which is not a number")
    errors = result["domain_errors"]
    if not isinstance(errors, dict) or any(type(e) not in (int, float) for e in errors.values()):
        raise ValueError("its domain_errors are not numbers with names")
    return result


_held: set[IO[str]] = set()


@contextlib.contextmanager
def _closed_in_children(file: IO[str]) -> Iterator[None]:
    """Keep forked processes, such as a loader's workers, from holding a lock beyond our death."""
    _held.add(file)
    try:
        yield
    finally:
        _held.discard(file)


def _close_held() -> None:
    for file in _held:
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_held)


def _lock(file: IO[str], path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows goes without
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ValueError(
            f"{path} is being trained by another process: wait until it ends"
        ) from None


def find_runs(runs_dir: Path) -> list[Run]:
    """List the runs below a directory, by name."""
    if not runs_dir.is_dir():
        raise ValueError(f"{runs_dir} is not a folder: give the folder that was --runs in training")
    return [Run.open(file.parent) for file in sorted(runs_dir.glob("*/config.json"))]


def sort_by_state(configs: Iterable[TrainConfig], runs_dir: Path) -> dict[State, list[Run]]:
    """Sort the runs of configurations by their state."""
    states: dict[State, list[Run]] = {"done": [], "failed": [], "incomplete": [], "missing": []}
    for config in configs:
        run = Run.of(config, runs_dir)
        states[run.state].append(run)
    return states
