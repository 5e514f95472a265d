"""`modenorm reproduce`: the paper's tables, trained and put beside the published numbers."""

import itertools
import time
from collections.abc import Iterable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from modenorm.lab.cli.shown import make_console, make_table, name_column
from modenorm.lab.experiments.automatic import MODES_HEADER, is_automatic, modes_rows
from modenorm.lab.experiments.collect import (
    Keeper,
    borrow,
    collect,
    has_ended,
    read_lines,
    results_file,
    update,
)
from modenorm.lab.experiments.figure import draw
from modenorm.lab.experiments.page import conditions, duration, with_results
from modenorm.lab.experiments.paper import FIGURE2, Figure
from modenorm.lab.experiments.plan import Plan, make_plan, steps_left, total_steps
from modenorm.lab.experiments.summary import HEADER, orders, rows, summarize
from modenorm.lab.experiments.tables import TABLES
from modenorm.lab.training import Run, Training, train_many
from modenorm.lab.training.files import check_folder, write_whole
from modenorm.lab.training.interrupts import exit_code
from modenorm.lab.training.ranks import started_ranks

PAGES = (Path("README.md"), Path("docs/reproduction.md"), Path("docs/automatic_modes_study.md"))
ALONE = ("figure2", "all", "pages")
TARGETS = (*TABLES, *ALONE)
PLAIN_SECONDS = 30.0
_machine = partial(typer.Option, rich_help_panel="Where")


def reproduce_command(
    targets: list[str] = typer.Argument(
        ...,
        metavar="TABLE",
        help=f"{', '.join(TABLES)}; or figure2, all, or pages: only rebuild the tables.",
    ),
    seeds: int = typer.Option(5, min=1, help="Seeds for each cell, counting up from 0."),
    limit: int | None = typer.Option(None, min=1, help="Train at most this many of what is left."),
    only: list[str] = typer.Option(
        [], help="Only runs with this in their name, such as vgg13-cifar10; may be repeated."
    ),
    dry_run: bool = typer.Option(False, help="Only list what is done and what is left."),
    retry_failed: bool = typer.Option(False, help="Train failed runs again."),
    again: bool = typer.Option(
        False, help="Also train what is in the results, of which new ones replace old ones."
    ),
    data: Path = _machine(
        Path("data"),
        help="Folder with the data sets' files, and imagenet/ for table4; or, for table4, the "
        "image folder itself. Tiny-ImageNet-200, Imagenette or any other folder is a stand-in.",
    ),
    runs: Path = _machine(Path("runs"), help="Folder of runs; each gets a folder in it."),
    results: Path = _machine(
        Path("results"), help="Folder of results: TABLE.jsonl, kept and added to."
    ),
    device: str | None = _machine(None, help="cuda or cpu; the GPU if there is one."),
    parallel: int | None = _machine(
        None, min=1, help="Trainings side by side at most; as many as fill a GPU."
    ),
    workers: int | None = _machine(
        None, min=0, help="Processes of each rank that decode what is streamed; one per core."
    ),
    checkpoint_every: float = _machine(60.0, min=0, help="Seconds between checkpoints."),
) -> None:
    """Reproduce tables of the paper: train what is missing, then show it beside the paper.

    Trainings that were interrupted go on; what is in the results already is not trained again,
    unless that is asked for (--again, with another folder of --runs). Those of several tables go on
    side by side too.

    figure2 is drawn from the run of Table 3 that it needs, into the folder of results.

    What is left to do:  modenorm reproduce all --dry-run

    On several GPUs:  torchrun --nproc-per-node=4 -m modenorm reproduce table4 --data IMAGENET
    """
    _check_targets(targets)
    if "pages" in targets:
        _rebuild_pages(results)
        return
    machine = {
        "data_dir": data,
        "device": device,
        "parallel": parallel,
        "workers": workers,
        "checkpoint_every": checkpoint_every,
    }
    if "figure2" in targets:
        _reproduce_figure(FIGURE2, dry_run, (runs, results), machine)
        return
    tables = list(TABLES) if "all" in targets else list(dict.fromkeys(targets))
    plan = make_plan(
        tables, range(seeds), data=data, runs_dir=runs, results=results, only=only, again=again
    )
    _warn(plan, tables)
    if only and not any(plan.runs.values()):
        names = " or ".join(map(repr, only))
        raise ValueError(
            f"no run of {' '.join(targets)} has {names} in its name: --dry-run lists them"
        )
    if dry_run:
        _show_plan(plan, make_console())
        return
    failures = _train(plan, plan.left(limit, retry_failed), tables, (runs, results), machine)
    for table in tables if started_ranks().leads else ():
        _show_table(table, results, make_console())
    if failures:
        raise typer.Exit(1)


def _check_targets(targets: Sequence[str]) -> None:
    for target in targets:
        if target not in TARGETS:
            raise ValueError(f"unknown table {target!r}: expected {', '.join(TARGETS)}")
        if target in ALONE and len(targets) > 1:
            raise ValueError(f"{target} stands alone; got {' '.join(targets)}")


def _reproduce_figure(
    figure: Figure, dry_run: bool, folders: tuple[Path, Path], machine: dict[str, Any]
) -> None:
    """Draw a figure, after its training if there is none."""
    runs, results = folders
    run, output = Run.of(figure.cell.config(0), runs), results / "figure2.png"
    plan = Plan()
    plan.runs[run.state].append(run)
    if dry_run:
        _show_plan(plan, make_console())
        return
    if run.state != "done" and _train(plan, [run], [figure.cell.table], folders, machine):
        raise typer.Exit(1)
    if started_ranks().leads:
        draw(figure, run, machine["data_dir"], output)
        _say(f"{output} shows what the modes of {run.path.name} claim")


def _warn(plan: Plan, tables: list[str]) -> None:
    """Name what cannot be trained for want of data; an error if that is all there is."""
    for group, folder in plan.without_data.items():
        _say(f"{group} is left out: there is no folder {folder}")
    if plan.without_data and not any(plan.runs.values()):
        folders = ", ".join(map(str, plan.without_data.values()))
        raise ValueError(
            f"{' '.join(tables)} needs images as train/CLASS/IMAGE and val/CLASS/IMAGE in one of "
            f"{folders}: set --data"
        )


def _train(
    plan: Plan,
    left: list[Run],
    tables: list[str],
    folders: tuple[Path, Path],
    machine: dict[str, Any],
) -> list[str]:
    """Train, keep the results whatever happens, and return why trainings failed."""
    runs, results = folders
    if started_ranks().leads:
        check_folder(results)
    began, keeper = time.monotonic(), Keeper(tables, results)
    try:
        configs = [run.config for run in left]
        steps = sum(map(total_steps, configs))
        with OverallProgress(len(left), steps, _console()) as progress:

            def listen(training: Training) -> None:
                progress(training)
                keeper(training)

            outcomes = train_many(configs, runs, listener=listen, **machine)
    except KeyboardInterrupt as interrupt:
        _say(f"Interrupted. What was trained is kept in {runs}; give the same command to go on.")
        raise typer.Exit(exit_code(interrupt)) from None
    finally:
        _collect(tables, runs, results)
    if left:
        _say(duration(len(left), (time.monotonic() - began) / 60))
    failures = [outcome.failure for outcome in outcomes if outcome.failure]
    failures += [
        f"{run.path.name} failed before: see {run.path / 'failed'}, or set --retry-failed"
        for run in plan.runs["failed"]
        if run.state == "failed" and run not in left
    ]
    for failure in failures:
        _say(f"failed: {failure}")
    return failures


def _collect(tables: list[str], runs: Path, results: Path) -> None:
    if not started_ranks().leads:
        return
    problems: dict[str, None] = {}
    for table in tables:
        found = collect(TABLES[table], runs)
        problems |= dict.fromkeys(found.problems)
        lines = [*borrow(table, results), *found.lines]
        update(results_file(results, table), lines, TABLES[table])
    for problem in problems:
        _say(problem)


def _rebuild_pages(results: Path) -> None:
    if not results.is_dir():
        raise ValueError(f"{results} is not a folder: set --results to that of TABLE.jsonl")
    pages = list(filter(Path.exists, PAGES))
    if not pages:
        raise ValueError(f"no {PAGES[0]} here: give this command in a checkout of the project")
    texts = [with_results(page.read_text("utf-8"), results) for page in pages]  # none, if one fails
    for page, text in zip(pages, texts, strict=True):
        write_whole(page, text.encode())
        _say(f"rebuilt the tables of {page}")


def _show_plan(plan: Plan, console: Console) -> None:
    table = make_table("run", "state", "steps left")
    for state, runs in plan.runs.items():
        for run in runs:
            left = 0 if state == "done" else steps_left([run])
            table.add_row(run.path.name, state, f"{left:,}")
    console.print(table)
    counts = ", ".join(f"{len(runs)} {state}" for state, runs in plan.runs.items())
    console.print(f"{counts}; {steps_left(plan.left()):,} steps left")


def _show_table(name: str, results: Path, console: Console) -> None:
    lines = read_lines(results_file(results, name))
    summaries = summarize(TABLES[name], lines)
    _show_rows(name, HEADER, rows(summaries), console)
    if any(map(is_automatic, TABLES[name])):
        found = modes_rows(TABLES[name], lines)
        _show_rows(f"{name}, numbers of modes", MODES_HEADER, found, console)
    for sentence in [*orders(summaries), *([conditions(lines)] if lines else [])]:
        console.print(sentence, soft_wrap=True)


def _show_rows(
    title: str, header: Sequence[str], found: Iterable[Sequence[str]], console: Console
) -> None:
    """A table for each experiment, which the first cells of the rows name."""
    for group, members in itertools.groupby(found, key=itemgetter(0)):
        table = make_table(*header[1:], title=f"{title}: {group}")
        for row in members:
            table.add_row(*row[1:])
        console.print(table)


def _say(text: str) -> None:
    _console().print(text, soft_wrap=True)


def _console() -> Console:
    return make_console(stderr=True, quiet=not started_ranks().leads)


class OverallProgress:
    """A bar of all steps and one for each training in progress; plain lines without a terminal.

    Args:
        runs: Number of trainings.
        steps: Steps of all of them together, those of earlier processes included.
        console: Where to show it.
    """

    def __init__(self, runs: int, steps: int, console: Console) -> None:
        self._console, self._runs, self._steps = console, runs, steps
        self._progress = Progress(
            name_column(),
            BarColumn(),
            TextColumn("{task.percentage:3.0f} %  {task.fields[error]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._all = self._progress.add_task("all", total=steps, error="")
        self._tasks: dict[str, TaskID] = {}
        self._places: dict[str, int] = {}
        self._advanced = self._finished = 0
        self._told = time.monotonic()

    def __enter__(self) -> "OverallProgress":
        if self._runs:
            self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def __call__(self, training: Training) -> None:
        """Show how far a training is."""
        name, step, total = training.run.path.name, training.position.step, training.schedule.total
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total, error="")
            self._places[name] = 0
        metrics = training.position.metrics
        error = f"error {metrics[-1]['test_error']:.2f} %" if metrics else ""
        self._advanced += step - self._places[name]
        self._places[name] = step
        ended = has_ended(training)
        self._progress.update(self._tasks[name], completed=step, error=error)
        if ended:
            self._finished += 1
            self._progress.update(self._tasks[name], visible=False)
        count = f"{self._finished}/{self._runs} done"
        self._progress.update(self._all, completed=self._advanced, description=count)
        if ended or time.monotonic() - self._told > PLAIN_SECONDS:
            self._tell(f"{count}  step {self._advanced:,}/{self._steps:,}  {name}  {error}")

    def _tell(self, text: str) -> None:
        self._told = time.monotonic()
        if not self._console.is_terminal:
            self._console.print(text, soft_wrap=True)
