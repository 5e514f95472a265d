"""What of the tables is done, and what is left to train."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from modenorm.lab.data.folder import OTHER, folder_path, index_folder
from modenorm.lab.experiments.collect import Line, borrow, read_lines, results_file
from modenorm.lab.experiments.paper import (
    TRAIN_IMAGES,
    Cell,
    dataset_name,
    is_image_folder,
    located,
    settings_key,
)
from modenorm.lab.experiments.tables import TABLES, configs
from modenorm.lab.training import Run, TrainConfig
from modenorm.lab.training.runs import State
from modenorm.lab.training.schedule import Schedule


@dataclass
class Plan:
    """Trainings of some tables by their state.

    Attributes:
        runs: done, failed, incomplete and missing ones.
        without_data: Groups of cells whose image folder is not there; none if one was given.
    """

    runs: dict[State, list[Run]] = field(
        default_factory=lambda: {"done": [], "failed": [], "incomplete": [], "missing": []}
    )
    without_data: dict[str, Path] = field(default_factory=dict)

    def left(self, limit: int | None = None, retry_failed: bool = False) -> list[Run]:
        """What to train next: begun runs first, at most `limit` of all."""
        again = self.runs["failed"] if retry_failed else []
        return [*self.runs["incomplete"], *self.runs["missing"], *again][:limit]


def make_plan(
    tables: Iterable[str],
    seeds: range,
    *,
    data: Path,
    runs_dir: Path,
    results: Path,
    only: Sequence[str] = (),
    again: bool = False,
) -> Plan:
    """Look at the results and the run directories; a training of two tables is planned once.

    Runs whose name contains nothing of `only` are passed over, unless that is empty. Results count
    unless all is wanted again.
    """
    plan = Plan()
    seen: set[Path] = set()
    for table in tables:
        lines = read_lines(results_file(results, table)) + borrow(table, results)
        measured = {(line["settings"], line["seed"]) for line in lines}
        _compare_stand_ins(lines, TABLES[table], data, results_file(results, table))
        absent = _without_data(TABLES[table], data)
        if len(absent) == len(_folders(TABLES[table], data)) or not is_image_folder(data):
            plan.without_data |= absent
        skipped = {cell.key for cell in TABLES[table] if cell.group in absent}
        for config in configs(table, seeds):
            run = Run.of(located(config, data), runs_dir)
            key = settings_key(config)
            if only and not any(part in run.path.name for part in only):
                continue
            if run.path in seen or (key in skipped and (key, config.seed) not in measured):
                continue
            seen.add(run.path)
            state = "done" if (key, config.seed) in measured and not again else run.state
            plan.runs[state].append(run)
    return plan


def _compare_stand_ins(
    lines: Iterable[Line], cells: Iterable[Cell], data: Path, file: Path
) -> None:
    """Refuse an image folder when the results are of another: both would go by one name."""
    places = [located(cell.config(0), data) for cell in cells]
    folder = next((folder_path(c.dataset) for c in places if dataset_name(c) == OTHER), None)
    measured = [line for line in lines if line.get("dataset") == OTHER]
    if folder is None or not measured or not folder.is_dir():
        return
    index = index_folder(folder)
    ours = (len(index.classes), len(index.train.paths))
    for line in measured:
        theirs = (line.get("classes"), line.get("train_images"))
        if theirs != ours:
            raise ValueError(
                f"{file} is of an image folder with {theirs[0]} classes and {theirs[1]} training "
                f"images, {folder} has {ours[0]} and {ours[1]}: set --results to another folder"
            )


def _without_data(cells: Iterable[Cell], data: Path) -> dict[str, Path]:
    return {group: path for group, path in _folders(cells, data).items() if not path.is_dir()}


def _folders(cells: Iterable[Cell], data: Path) -> dict[str, Path]:
    found = {cell.group: folder_path(located(cell.config(0), data).dataset) for cell in cells}
    return {group: path for group, path in found.items() if path is not None}


def total_steps(config: TrainConfig) -> int:
    """Steps of a training on the published data, or on the image folder."""
    images = TRAIN_IMAGES.get(dataset_name(config))
    folder = folder_path(config.dataset)
    if images is None and folder is not None:
        images = len(index_folder(folder).train.paths)
    return Schedule.of(config, images or 0).total


def steps_left(runs: Iterable[Run]) -> int:
    """Steps until the runs are done, counted from their last evaluations."""
    return sum(total_steps(run.config) - _last_step(run) for run in runs)


def _last_step(run: Run) -> int:
    metrics = run.metrics()
    return metrics[-1]["step"] if metrics else 0
