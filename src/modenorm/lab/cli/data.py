"""`modenorm data`: which data sets are there, get them, check them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Annotated, ParamSpec

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from modenorm.lab.cli.shown import make_console, make_table
from modenorm.lab.data import DataError
from modenorm.lab.data.cache import FOLDER
from modenorm.lab.data.catalog import MULTITASK, PUBLISHED
from modenorm.lab.data.download import download as get
from modenorm.lab.data.verify import Verdict, incomplete, present, write_json
from modenorm.lab.data.verify import verify as check
from modenorm.lab.training.files import check_file

app = typer.Typer(help="List, download and verify data sets.", no_args_is_help=True)
P = ParamSpec("P")

Folder = Annotated[Path, typer.Option("--data", metavar="DIR", help="Folder with the data sets.")]
Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NAME]...", help=f"Of {', '.join(PUBLISHED)}.", show_default=False),
]


def one_sentence(command: Callable[P, None]) -> Callable[P, None]:
    """End with exit code 2 and the message when the data are at fault."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except (DataError, OSError) as error:
            make_console(stderr=True, soft_wrap=True).print(str(error), style="red")
            raise typer.Exit(2) from None

    return run


@app.command("list")
@one_sentence
def list_sets(data: Folder = Path("data")) -> None:
    """Show which data sets are in the folder."""
    if data.exists() and not data.is_dir():
        raise DataError(f"{data} is a file: --data is the folder with the data sets")
    headings = ("name", "images", "classes", "files", "cached")
    table = make_table(*headings, right=("images", "classes"), title=f"Data sets in {data}")
    there, broken = present(data), incomplete(data)
    for name, published in PUBLISHED.items():
        images = " + ".join(str(sum(counts)) for counts in published.histograms.values())
        state = Text("incomplete", style="red") if name in broken else Text("not there", "dim")
        where = str(published.find(data)[0].parent) if name in there else state
        cached = (data / FOLDER / f"{name}.safetensors").exists()
        classes = str(len(published.classes))
        table.add_row(name, images, classes, where, "yes" if cached else "")
    lacking = ", ".join(name for name in MULTITASK if name not in there)
    parts = Text(f"without {lacking}", "dim") if lacking else ", ".join(MULTITASK)
    table.add_row("multitask", "243257 + 56032", "40", parts, "")
    table.add_row("builtin", "12000 + 4000", "40", "made by code", "")
    make_console().print(table)
    for name, missing in broken.items():
        make_console(soft_wrap=True).print(f"{name} is incomplete: {missing}")


@app.command()
@one_sentence
def download(
    names: Names = None,
    data: Folder = Path("data"),
    force: Annotated[bool, typer.Option(help="Replace files of another content.")] = False,
) -> None:
    """Get data sets from their usual addresses; without names, all of them."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    for name in names or PUBLISHED:
        with Progress(*columns, console=make_console(stderr=True)) as progress:
            paths = get(name, data, _reporter(progress, name), force)
        typer.echo(f"{name}: {len(paths)} files in {paths[0].parent}")


def _reporter(progress: Progress, name: str) -> Callable[[str, int, int], None]:
    tasks = {}

    def report(file: str, done: int, total: int) -> None:
        if file not in tasks:
            tasks[file] = progress.add_task(f"{name} {file}")
        progress.update(tasks[file], completed=done, total=total or None)

    return report


@app.command()
@one_sentence
def verify(
    names: Names = None,
    data: Folder = Path("data"),
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the findings.")] = None,
) -> None:
    """Compare counts, shapes and labels with the published ones; without names, all there is."""
    chosen = names or present(data)
    broken = {} if names else incomplete(data)
    if not chosen and not broken:
        raise DataError(f"no data set in {data}: expected one of {', '.join(PUBLISHED)}")
    if json is not None:
        check_file(json)
    verdicts: list[Verdict] = []
    unreadable: dict[str, None] = {}
    with make_console(stderr=True).status("") as status:
        for name in chosen:
            status.update(f"reading {name}")
            try:
                verdicts += check(name, data)
            except DataError as error:
                unreadable[str(error)] = None  # of the set itself and of the mixture
    if verdicts:
        make_console().print(_table(verdicts))
    if json is not None:
        write_json(json, verdicts)
    wrong = [f"{v.dataset} {v.split}: {problem}" for v in verdicts for problem in v.problems]
    wrong += unreadable
    wrong += [f"{name} is incomplete: {missing}" for name, missing in broken.items()]
    if wrong:
        raise DataError("\n".join(wrong))


def _table(verdicts: Iterable[Verdict]) -> Table:
    headings = ("set", "split", "images", "shape", "per class", "files", "verdict")
    table = make_table(*headings, right=("images",), title="Data sets against what is published")
    for v in verdicts:
        low, high = min(v.histogram), max(v.histogram)
        table.add_row(
            v.dataset,
            v.split,
            str(v.count),
            "×".join(map(str, v.shape)),
            str(low) if low == high else f"{low}–{high}",
            "original" if v.original_files else "rewritten",
            Text("differs", style="red") if v.problems else Text("ok", style="green"),
        )
    return table
