"""From run directories to results/TABLE.jsonl, one line per training; nothing in it is typed."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from modenorm.lab.data.folder import STAND_INS, folder_path
from modenorm.lab.experiments.paper import (
    ILSVRC12_CLASSES,
    Cell,
    dataset_name,
    settings_key,
)
from modenorm.lab.experiments.tables import TABLES
from modenorm.lab.report.records import Record, find_directories, is_number, read_record
from modenorm.lab.training import Run, TrainConfig, Training
from modenorm.lab.training.files import alone_in, read_objects, write_lines

Line = dict[str, Any]
OF_RESULT = (
    "final_error", "top_error", "top5_error", "domain_errors", "samples_seen", "seconds",
    "torch", "commit", "date",
)  # fmt: skip

NEEDED = {"table", "settings", "seed", "gpu", *OF_RESULT}
"""What a line must have to be shown; what was added later may be missing."""
NUMBERS = ("final_error", "top_error", "top5_error", "samples_seen", "seconds", "pruned_error")
TEXTS = ("table", "settings", "gpu", "torch", "commit", "date")
OF_PRUNING = ("num_modes", "pruned_error", "pruned_domain_errors")


@dataclass
class Collection:
    """Lines of finished trainings, and a sentence for each run that gave none."""

    lines: list[Line] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def collect(cells: Sequence[Cell], runs_dir: Path) -> Collection:
    """Read the finished runs of one table's cells; runs of other experiments are passed over."""
    found = Collection()
    tables = {cell.key: cell.table for cell in cells}
    for folder in find_directories([runs_dir]) if runs_dir.is_dir() else []:
        record = read_record(folder)
        try:
            config = _config(record)
            if settings_key(config) not in tables:
                continue
            if record.state != "done":
                problem = "; ".join(record.problems) or "not finished"
                raise ValueError(problem)
            table = tables[settings_key(config)]
            found.lines.append(line(table, config, record.result, record.metrics))
        except ValueError as error:
            found.problems.append(f"{folder.name} is left out: {error}")
    return found


def _config(record: Record) -> TrainConfig:
    if not record.config:
        raise ValueError("; ".join(record.problems))
    return TrainConfig.from_json(json.dumps(record.config))


def line(
    table: str, config: TrainConfig, result: dict[str, Any], metrics: Sequence[dict[str, Any]]
) -> Line:
    """One line of results/TABLE.jsonl."""
    missing = [name for name in ("run", "device", *OF_RESULT) if name not in result]
    if missing:
        raise ValueError(f"result.json has no {missing[0]}")
    if result["run"] != config.run_id:
        raise ValueError(f"result.json is of the run {result['run']}")
    found = {
        "table": table,
        "model": config.model,
        "dataset": dataset_name(config),
        "norm": config.norm,
        "modes": config.modes if config.norm in ("mn", "mgn") else None,
        "groups": config.groups if config.norm == "gn" else None,
        "where": config.where,
        "batch": config.batch,
        "dtype": config.dtype,
        "channels_last": config.channels_last,
        "seed": config.seed,
        **{name: result[name] for name in OF_RESULT},
        **{name: result[name] for name in OF_PRUNING if name in result},
        "gates": _gates(metrics),
        "gpu": result["device"],
        "settings": settings_key(config),
        **_of_folders(config, result),
    }
    if odd := _odd(found):
        raise ValueError(f"result.json has {odd}")
    return found


def _odd(found: Line) -> str:
    """A value of a line that is not of the kind that it should be; empty if all are."""
    kinds: dict[str, tuple[tuple[str, ...], Callable[[Any], bool]]] = {
        "a finite number": (NUMBERS, is_number),
        "a whole number": (("seed",), _is_whole),
        "a text": (TEXTS, lambda value: isinstance(value, str)),
        "a date and time": (("date",), _is_date),
        "an object of numbers": (("domain_errors",), partial(_is_object_of, is_number)),
        "an object of whole numbers": (("num_modes",), partial(_is_object_of, _is_whole)),
        "an object of shares and entropies": (("gates",), partial(_is_object_of, _is_gate)),
    }
    for kind, (names, holds) in kinds.items():
        for name in names:
            if name in found and not holds(found[name]):
                return f"{name} {found[name]!r}, which is not {kind}"
    return ""


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _is_date(value: Any) -> bool:
    try:
        return bool(datetime.fromisoformat(value))
    except (TypeError, ValueError):
        return False


def _is_object_of(holds: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, dict) and all(map(holds, value.values()))


def _is_gate(value: Any) -> bool:
    if not isinstance(value, dict) or not is_number(value.get("entropy")):
        return False
    shares = value.get("shares")
    return isinstance(shares, list) and bool(shares) and all(map(is_number, shares))


def _of_folders(config: TrainConfig, result: dict[str, Any]) -> Line:
    """What has to be known of image folders, which may hold anything."""
    if folder_path(config.dataset) is None:
        return {}
    name, classes = dataset_name(config), result.get("classes")
    other = name == "imagenet" and classes != ILSVRC12_CLASSES
    return {
        "stand_in": name in STAND_INS or other,
        "classes": classes,
        "train_images": result.get("train_images"),
        "ranks": result.get("ranks", 1),
        "sync": config.sync,
    }


def _gates(metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shares of the modes and entropy of the gates of every layer, at the last evaluation."""
    layers = metrics[-1].get("modes", {}) if metrics else {}
    for name, found in layers.items():
        if not isinstance(found, dict) or not found.keys() >= {"shares", "entropy"}:
            raise ValueError(f"metrics.jsonl tells no shares and entropy of {name}")
    return {
        name: {"shares": found["shares"], "entropy": found["entropy"]}
        for name, found in layers.items()
    }


class Keeper:
    """A listener that writes the lines of trainings soon after they end.

    What was measured is then safe even if the process is killed and the run directories are lost.

    Args:
        tables: Tables whose results are wanted.
        results: Folder of results.
    """

    def __init__(self, tables: Sequence[str], results: Path) -> None:
        self._results, self._ended = results, list[Run]()
        self._cells = {table: {cell.key for cell in TABLES[table]} for table in tables}

    def __call__(self, training: Training) -> None:
        """Remember a training at its end, and write those that left their results since."""
        for run in [run for run in self._ended if run.state == "done"]:
            self._ended.remove(run)
            self._write(run)
        if has_ended(training):
            self._ended.append(training.run)

    def _write(self, run: Run) -> None:
        for table, keys in self._cells.items():
            if settings_key(run.config) in keys:
                new = line(table, run.config, run.result(), run.metrics())
                update(results_file(self._results, table), [new], TABLES[table])


def has_ended(training: Training) -> bool:
    """Whether a training has made its last evaluation."""
    metrics = training.position.metrics
    return bool(metrics) and metrics[-1]["step"] == training.schedule.total


def results_file(results: Path, table: str) -> Path:
    """Where a table's lines are kept."""
    return results / f"{table}.jsonl"


def read_lines(path: Path) -> list[Line]:
    """Read a file of results; none if it is not there.

    Raises:
        ValueError: A line is not one of results.
    """
    lines = read_objects(path, NEEDED)
    for number, found in enumerate(lines, start=1):
        if odd := _odd(found):
            raise ValueError(f"{path}, line {number} has {odd}: mend or remove it")
    return lines


def borrow(table: str, results: Path) -> list[Line]:
    """Lines of trainings that a table has in common with others and that only those hold."""
    keys = {cell.key for cell in TABLES[table]}
    own = {(each["settings"], each["seed"]) for each in read_lines(results_file(results, table))}
    return [
        each | {"table": table}
        for other in TABLES
        for each in read_lines(results_file(results, other))
        if other != table
        and each["settings"] in keys
        and (each["settings"], each["seed"]) not in own
    ]


def merge(old: Iterable[Line], new: Iterable[Line], cells: Sequence[Cell]) -> list[Line]:
    """Old and new lines in the order of the cells and seeds; a new line replaces the same one."""
    lines = {(each["settings"], each["seed"]): each for each in (*old, *new)}
    place = {cell.key: number for number, cell in enumerate(cells)}

    def order(key: tuple[str, int]) -> tuple[int, str, int]:
        return place.get(key[0], len(place)), *key

    return [lines[key] for key in sorted(lines, key=order)]


def update(path: Path, new: Iterable[Line], cells: Sequence[Cell]) -> list[Line]:
    """Merge lines into a file of results, which others may add to, and return all it then holds."""
    new = list(new)
    if not new:
        return read_lines(path)
    with alone_in(path.parent):
        old = read_lines(path)
        lines = merge(old, new, cells)
        if lines != old:
            write_lines(path, lines)
    return lines
