"""`modenorm train` and `modenorm runs`."""

import dataclasses
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from modenorm.lab.cli.settings import (
    MAX_MODES,
    assignment,
    ignored,
    integers,
    modes_settings,
    settings_of_norm,
)
from modenorm.lab.cli.shown import make_console, make_table, name_column
from modenorm.lab.data import NAMES
from modenorm.lab.experiments.paper import located
from modenorm.lab.models import MODELS
from modenorm.lab.report import Record, read_records
from modenorm.lab.report.records import is_number
from modenorm.lab.training import Outcome, Run, TrainConfig, Training, recipe, train_many
from modenorm.lab.training.closing import DEFAULT_SPARSITY
from modenorm.lab.training.interrupts import exit_code
from modenorm.lab.training.ranks import started_ranks

_model = partial(typer.Option, rich_help_panel="What to train")
_schedule = partial(
    typer.Option, rich_help_panel="How long and how fast (the paper's recipe unless given)"
)
_machine = partial(typer.Option, rich_help_panel="Where")
MOST_SHOWN = 9
WIDE = 100
"""Columns of a terminal that has room for more than the error, the speed and the time left."""


def train_command(
    model: str = _model("lenet", help=f"One of {', '.join(MODELS)}."),
    dataset: str | None = _model(
        None,
        help=f"One of {', '.join(NAMES)} (builtin needs no files), or folder:PATH of images as "
        "train/CLASS/IMAGE and val/CLASS/IMAGE; the paper's for the model unless given, for "
        "resnet18 the folder imagenet in --data.",
    ),
    norm: str | None = _model(
        None,
        help="bn, in, ln, gn, mn (mode normalization) or mgn (mode group normalization); bn unless "
        "given, and mn with --modes.",
    ),
    modes: str | None = _model(
        None,
        help="Modes K of mn and mgn, 2 unless given; a number for each layer, such as "
        "'stage1.*=4,*=2' (the first pattern that matches decides); or auto: as many as each layer "
        "needs (mn).",
    ),
    max_modes: int | None = _model(
        None, min=2, help=f"Modes to begin with, for --modes auto; {MAX_MODES} unless given."
    ),
    sparsity: float | None = _model(
        None,
        help="How much taking modes away may change the outputs, for --modes auto; "
        f"{DEFAULT_SPARSITY:g} unless given.",
    ),
    groups: int | None = _model(None, help="Groups of gn, 2 unless given."),
    where: str = _model("all", help="Replace all norms of the model, or only the first."),
    gate: str | None = _model(
        None,
        help="Gating network of mn: linear (the paper's) or standardized; linear unless given.",
    ),
    variance: str | None = _model(
        None,
        help="Variance of mgn: pooled (the paper's text) or pixel; pooled unless given.",
    ),
    options: list[str] = _model(
        [],
        help="A further setting of the model, NAME=VALUE; may be repeated.",
        metavar="NAME=VALUE",
    ),
    image_size: int | None = _model(None, help="Side of the images, if those of a folder differ."),
    augment: bool | None = _model(None, help="Random crops and flips."),
    crop: str | None = _model(
        None, help="Crop images padded by four pixels (padded), or parts of random size (resized)."
    ),
    stream: bool | None = _model(
        None, help="Decode a folder's images in worker processes, instead of keeping all in memory."
    ),
    sync: bool = _model(
        True,
        help="Under torchrun: statistics of mn, and on GPUs of bn, over the whole batch. With "
        "--no-sync (and always for bn on CPUs) over each rank's part; rank 0's running estimates "
        "are kept.",
    ),
    seed: int = _model(0, help="Decides everything random."),
    seeds: int = _model(1, min=1, help="Train this many seeds, counting up from --seed."),
    batch: int | None = _schedule(None, help="Samples in a batch."),
    lr: float | None = _schedule(None, help="First learning rate."),
    momentum: float | None = _schedule(None, help="Of SGD."),
    weight_decay: float | None = _schedule(None, help="Of SGD."),
    running_momentum: float | None = _schedule(
        None, help="Weight of a new batch in running estimates."
    ),
    unit: str | None = _schedule(
        None, help="What the next three count: samples, epochs or updates."
    ),
    total: int | None = _schedule(None, help="Length."),
    milestones: str | None = _schedule(
        None, help="Where the learning rate drops to a tenth, such as 80,120."
    ),
    eval_every: int | None = _schedule(None, help="Distance between looks at the test set."),
    data: Path = _machine(Path("data"), help="Folder with the data sets' files."),
    runs: Path = _machine(Path("runs"), help="Folder of runs; each gets a folder in it."),
    device: str | None = _machine(None, help="cuda or cpu; the GPU if there is one."),
    dtype: str | None = _machine(None, help="float32, or bfloat16 for mixed precision."),
    channels_last: bool | None = _machine(None, help="Memory format; often faster on a GPU."),
    compile: bool = _machine(False, help="On a GPU, compile the model: a minute, then faster."),
    parallel: int | None = _machine(
        None, min=1, help="Trainings side by side at most; as many as fill a GPU."
    ),
    workers: int | None = _machine(
        None, min=0, help="Processes of each rank that decode what is streamed; one per core."
    ),
    checkpoint_every: float = _machine(60.0, min=0, help="Seconds between checkpoints."),
    tensorboard: bool = _machine(False, help="Also write TensorBoard events."),
) -> None:
    """Train a model, or go on with a training that was interrupted.

    The same command always names the same run: if it was interrupted, it goes on from its last
    checkpoint; if it is done, its result is shown.

    Try it without any files:  modenorm train --dataset builtin --norm mn --total 100000

    On several GPUs or machines:  torchrun --nproc-per-node=4 -m modenorm train ...
    --batch is that of all ranks together, and an interrupted training may go on with fewer or more.
    """
    given = {
        "dataset": dataset,
        "image_size": image_size,
        "augment": augment,
        "crop": crop,
        "stream": stream,
        "batch": batch,
        "lr": lr,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "running_momentum": running_momentum,
        "unit": unit,
        "total": total,
        "milestones": None if milestones is None else integers(milestones),
        "eval_every": eval_every,
        "dtype": dtype,
        "channels_last": channels_last,
    }
    of_norms = {"groups": groups, "gate": gate, "variance": variance}
    config = recipe(
        model,
        **settings_of_norm({**modes_settings(norm, modes, max_modes, sparsity), **of_norms}),
        where=where,
        sync=sync,
        compile=compile,
        seed=seed,
        options=dict(assignment(text) for text in options),
        **{name: value for name, value in given.items() if value is not None},
    )
    if dataset is None:
        config = located(config, data)
    told = make_console(stderr=True, quiet=not started_ranks().leads)
    for note in ignored(config, {"modes": modes, **of_norms}, device):
        told.print(note, soft_wrap=True)
    configs = [dataclasses.replace(config, seed=seed + i) for i in range(seeds)]
    for note in _finished(configs, runs):
        told.print(note, soft_wrap=True)
    machine = {
        "data_dir": data,
        "device": device,
        "parallel": parallel,
        "workers": workers,
        "checkpoint_every": checkpoint_every,
        "tensorboard": tensorboard,
    }
    outcomes = _train(configs, runs, machine)
    _show(outcomes, make_console(quiet=not started_ranks().leads))
    if any(outcome.failure for outcome in outcomes):
        raise typer.Exit(1)


def _finished(configs: Iterable[TrainConfig], runs: Path) -> Iterator[str]:
    """A sentence for each run that is done: its result is of another day, and maybe other data."""
    for run in (Run.of(config, runs) for config in configs):
        if run.state == "done":
            day = str(run.result().get("date", "some time"))[:10]
            yield (
                f"{run.path.name} is done since {day}: nothing was trained; delete {run.path} to "
                "train it again."
            )


def _train(configs: list[TrainConfig], runs: Path, machine: dict[str, Any]) -> list[Outcome]:
    console = make_console(stderr=True, quiet=not started_ranks().leads)
    try:
        with ProgressReport(console) as report:
            return train_many(configs, runs, listener=report, **machine)
    except KeyboardInterrupt as interrupt:
        console.print(
            f"Interrupted. What was trained is kept in {runs}; give the same command to go on.",
            soft_wrap=True,
        )
        raise typer.Exit(exit_code(interrupt)) from None


def list_runs(
    folder: Path = typer.Argument(Path("runs"), help="The folder that was --runs in training."),
) -> None:
    """List the runs in a folder: done, failed, incomplete or broken, and their errors."""
    table = make_table("run", "state", "samples", "final error %", "top error %")
    records = read_records([folder])
    for record in records:
        samples, errors = _errors(record)
        shown = [f"{error:.2f}" for error in errors] or ["", ""]
        table.add_row(record.name, record.state, f"{samples:,}", *shown)
    console = make_console()
    console.print(table)
    for record in records:
        for problem in record.problems:
            console.print(f"{record.name}: {problem}", soft_wrap=True)


def _errors(record: Record) -> tuple[int, list[float]]:
    """Samples that were trained on, and the final and the lowest error, if there is one."""
    metrics, result = record.metrics, record.result
    samples = metrics[-1]["samples"] if metrics else 0
    if result:
        samples = result["samples_seen"] if is_number(result.get("samples_seen")) else samples
        return samples, [result["final_error"], result["top_error"]]
    errors = [entry["test_error"] for entry in metrics]
    return samples, [errors[-1], min(errors)] if errors else []


class ProgressReport:
    """A bar per training with its error, speed and time left; plain lines without a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            *_columns(wide=console.width >= WIDE),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._began: dict[str, tuple[float, int]] = {}
        self._evaluations: dict[str, int] = {}

    def __enter__(self) -> "ProgressReport":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def __call__(self, training: Training) -> None:
        """Show how far a training is."""
        name, step = training.run.path.name, training.position.step
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(
                name, total=training.schedule.total, loss="", error="", modes="", speed=""
            )
            self._began[name] = (time.monotonic(), step)
            self._evaluations[name] = len(training.position.metrics)
        fields = self._fields(training)
        self._progress.update(self._tasks[name], completed=step, **fields)
        if len(training.position.metrics) > self._evaluations[name]:
            self._evaluations[name] = len(training.position.metrics)
            if not self._console.is_terminal:
                parts = [name, f"step {step}/{training.schedule.total}", *fields.values()]
                line = "  ".join(filter(None, parts))
                self._console.print(line, soft_wrap=True)

    def _fields(self, training: Training) -> dict[str, Any]:
        began, first = self._began[training.run.path.name]
        config = training.run.config
        samples = (training.position.step - first) * config.batch
        elapsed = time.monotonic() - began
        metrics = training.position.metrics
        return {
            "loss": f"loss {training.train_loss:.3f}",
            "error": f"error {metrics[-1]['test_error']:.2f} %" if metrics else "error -",
            "modes": _mode_numbers(metrics[-1]["modes"]) if config.sparsity and metrics else "",
            "speed": f"{samples / elapsed:,.0f} samples/s" if samples else "- samples/s",
        }


def _columns(wide: bool) -> list[ProgressColumn]:
    fields = ("loss", "error", "modes", "speed") if wide else ("error", "speed")
    texts = [TextColumn(f"{{task.fields[{field}]}}") for field in fields]
    times = [TimeElapsedColumn(), TimeRemainingColumn()]
    return [name_column(), BarColumn(40 if wide else 8), *texts, *times[0 if wide else 1 :]]


def _mode_numbers(modes: dict[str, Any]) -> str:
    """The distinct modes of every layer, in their order; of many layers the range.

    >>> _mode_numbers({"stage1.norm": {"distinct": 4}, "stage2.norm": {"distinct": 2}})
    'modes 4 2'
    """
    numbers = [layer["distinct"] for layer in modes.values()]
    few = len(numbers) <= MOST_SHOWN
    return "modes " + (" ".join(map(str, numbers)) if few else f"{min(numbers)}–{max(numbers)}")


def _show(outcomes: list[Outcome], console: Console) -> None:
    table = make_table("run", "final error %", "top error %", "by domain", "samples", "seconds")
    for outcome in outcomes:
        if outcome.result is None:
            console.print(f"failed: {outcome.failure}", soft_wrap=True)
            continue
        result = outcome.result
        if "num_modes" in result:
            numbers = ", ".join(f"{layer} {k}" for layer, k in result["num_modes"].items())
            console.print(
                f"{result['run']} needs these modes: {numbers}; with them alone "
                f"(pruned.safetensors) its error is {result['pruned_error']:.2f} %",
                soft_wrap=True,
            )
        domains = result["domain_errors"].items()
        table.add_row(
            result["run"],
            f"{result['final_error']:.2f}",
            f"{result['top_error']:.2f}",
            "\n".join(f"{name} {error:.2f}" for name, error in domains),
            f"{result['samples_seen']:,}",
            f"{result['seconds']:.1f}",
        )
    if table.row_count:
        console.print(table)
