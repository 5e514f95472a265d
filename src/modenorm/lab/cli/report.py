"""`modenorm report` and `modenorm modes`."""

import dataclasses
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from torch import nn

from modenorm.lab.cli.shown import make_console
from modenorm.lab.data import NAMES, load
from modenorm.lab.data.folder import folder_path
from modenorm.lab.data.streaming import StreamedImages
from modenorm.lab.experiments.published import published_numbers
from modenorm.lab.models import check_size
from modenorm.lab.report import (
    Gallery,
    Page,
    Record,
    contact_sheet,
    make_gallery,
    read_record,
    read_records,
    write_page,
)
from modenorm.lab.report.gallery import write_picture
from modenorm.lab.report.streamed_gallery import make_streamed_gallery
from modenorm.lab.training import Checkpoint, load_model
from modenorm.lab.training.files import check_file, write_whole
from modenorm.lab.training.runner import choose_device
from modenorm.lab.training.sources import SharedData
from modenorm.modes.findings import ModeReport

PICTURES = (".png", ".jpg", ".webp")


def report_command(
    runs: list[Path] = typer.Argument(help="Folders of runs, or single runs."),
    output: Path = typer.Option(Path("report.html"), "--output", "-o", help="The page to write."),
    results: list[Path] = typer.Option(
        [], help="A file of JSON lines, such as a benchmark's, or a folder; may be repeated."
    ),
    title: str = typer.Option(Page.title, help="The heading of the page."),
) -> None:
    """Write one page about runs: tables, curves, modes, galleries, and where the numbers come from.

    The page needs no network. Broken and incomplete runs are shown as such.
    """
    check_file(output)
    records = read_records(runs)
    tables = [file for path in results for file in _tables(path)]
    page = Page(title, results=tables, paper=published_numbers())
    size = write_page(output, records, page)
    states = [record.state for record in records]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    number = f"{len(records)} run{'' if len(records) == 1 else 's'}"
    make_console().print(
        f"{output}: {number} ({counts or 'none'}), {size / 1e6:.1f} MB", soft_wrap=True
    )


def _tables(path: Path) -> list[Path]:
    if not path.exists():
        raise ValueError(f"--results is {path}, and there is no such file or folder")
    return sorted(path.glob("*.jsonl")) if path.is_dir() else [path]


def modes_command(
    path: Path = typer.Argument(help="A run's folder, or a checkpoint.", metavar="RUN|CHECKPOINT"),
    dataset: str | None = typer.Option(
        None, help=f"One of {', '.join(NAMES)} or folder:PATH; the run's own if not given."
    ),
    data: Path = typer.Option(Path("data"), help="Folder with the data sets' files."),
    layer: list[str] = typer.Option([], help="A layer's name; may be repeated."),
    count: int = typer.Option(24, min=1, help="Images for each mode."),
    output: Path = typer.Option(
        Path("modes.html"), "--output", "-o", help="A page (.html) or a picture (.png)."
    ),
    json: Path | None = typer.Option(None, help="Also write the numbers as JSON."),
    device: str = typer.Option("cpu", help="cuda or cpu."),
) -> None:
    """Show which test images each mode of a trained model claims, and what its modes are used for.

    With a run's folder, and without --layer, the gallery is also kept there, for `modenorm report`
    to show.
    """
    kind = output.suffix.lower()
    if kind not in (".html", *PICTURES):
        raise ValueError(f"--output is {output}; its name must end in .html or .png")
    for written in filter(None, (output, json)):
        check_file(written)
    file = _checkpoint_at(path)
    model, checkpoint = load_model(file, choose_device(device))
    name = dataset or checkpoint.config.dataset
    gallery, report = _look(model, checkpoint, name, data, layers=layer, count=count)
    console = make_console()
    if path.is_dir() and not layer:
        _keep(gallery, path, console)
    if json is not None:
        write_whole(json, report.to_json().encode())
    console.print(report.table())
    if kind == ".html":
        write_page(output, [_record(path, checkpoint, gallery)], _page(name, file, report))
    else:
        write_picture(contact_sheet(gallery), output)
    console.print(f"{output} shows what each mode claims", soft_wrap=True)


def _checkpoint_at(path: Path) -> Path:
    """The checkpoint of a run's folder, or the file itself, unless it can't be one."""
    wanted = "give a run's folder or its checkpoint.safetensors"
    if path.is_dir():
        file = path / "checkpoint.safetensors"
        if not file.exists():
            raise ValueError(f"{path} is not the folder of a run with a checkpoint: {wanted}")
        return file
    if path.is_file() and path.suffix != ".safetensors":
        with path.open("rb") as opened:
            start = opened.read(9)
        if start[8:] != b"{":  # after the header's length
            raise ValueError(f"{path} is not a checkpoint: {wanted}")
    return path


def _look(
    model: nn.Module, checkpoint: Checkpoint, name: str, data: Path, **options: Any
) -> tuple[Gallery, ModeReport]:
    """Look at the test images; those of a streamed run are cut as in its evaluations."""
    if checkpoint.config.stream and folder_path(name):
        config = dataclasses.replace(checkpoint.config, dataset=name)
        found = SharedData(next(model.parameters()).device, data).get(config)
        assert isinstance(found.test, StreamedImages)
        names = (found.about.classes, found.about.domain_names)
        return make_streamed_gallery(model, found.test, name, *names, **options)
    images = load(name, data, size=checkpoint.config.image_size).test
    height, width = images.images.shape[2:]
    check_size(checkpoint.config.model, (height, width), name, "set another --dataset")
    scaling = (checkpoint.about.mean, checkpoint.about.std)
    return make_gallery(model, images, name, scaling, **options)


def _keep(gallery: Gallery, folder: Path, console: Console) -> None:
    try:
        gallery.save(folder)
    except OSError as error:
        console.print(f"The gallery is not kept for the report: {error}", soft_wrap=True)


def _record(path: Path, checkpoint: Checkpoint, gallery: Gallery) -> Record:
    if path.is_dir():
        return dataclasses.replace(read_record(path), gallery=gallery)
    config, metrics = dataclasses.asdict(checkpoint.config), checkpoint.position.metrics
    return Record(path, config=config, metrics=metrics, gallery=gallery)


def _page(dataset: str, file: Path, report: ModeReport) -> Page:
    layers: dict[str, list[str]] = {}
    for finding in report.findings():
        layer, _, what = finding.removeprefix("layer ").partition(": ")
        layers.setdefault(what, []).append(layer)
    found = [f"{', '.join(names)}: {what}." for what, names in layers.items()]
    intro = f"The modes of {file}, looked at with the test images of {dataset}."
    none = "No mode is dead, a duplicate or constant."
    return Page("What each mode claims", [intro, *(found or [none])])
