"""`modenorm bench`: how long norms and trainings take, beside torch's norms and the floor."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from modenorm.lab.bench.layer import CPU_SHAPES, GPU_SHAPES, Case, measure, norm_names
from modenorm.lab.bench.model import measure_model, model_names
from modenorm.lab.bench.page import with_tables
from modenorm.lab.bench.sparsity import SPARSITY_CASES, measure_sparsity
from modenorm.lab.bench.step import measure_step
from modenorm.lab.bench.sync import SYNC_CASES, measure_sync
from modenorm.lab.bench.train import CASES, measure_training
from modenorm.lab.cli.shown import make_console, make_table
from modenorm.lab.provenance import provenance
from modenorm.lab.training.files import write_lines, write_whole
from modenorm.lab.training.runner import choose_device

app = typer.Typer(help="Measure speed and memory against torch's norms.", no_args_is_help=True)

DOCS = ("speed.md", "scaling.md", "automatic_modes_study.md")
PAGES = [Path("README.md"), *map(Path("docs").joinpath, DOCS)]
LAYER_COLUMNS = {
    "device_us": "device µs",
    "to_bn": "× BN",
    "to_floor": "× floor",
    "gb_per_s": "GB/s",
    "eager_us": "eager µs",
    "eager_to_bn": "× BN",
    "eval_us": "eval µs",
    "memory_to_bn": "memory × BN",
}
MODEL_COLUMNS = {
    "step_us": "step µs",
    "to_bn": "× BN",
    "images_per_s": "images/s",
    "memory_to_bn": "memory × BN",
}
TRAIN_COLUMNS = {
    "step_us": "step µs",
    "images_per_s": "images/s",
    "speed_to_first": "speed × first",
    "eval_us": "eval µs",
    "record_gates_percent": "record_gates % of eval",
    "record_gates_percent_within": "±",
    "log_modes_percent_of_eval": "log modes % of eval",
    "log_modes_percent_of_training": "% of training",
}
SPARSITY_COLUMNS = {
    "plain_us": "step µs",
    "penalty_us": "penalty µs",
    "percent_of_step": "% of a step",
    "percent_of_step_within": "±",
}
SYNC_COLUMNS = {"local_us": "own µs", "shared_us": "shared µs", "bytes": "bytes given by a rank"}


@app.command("layer")
def layer_command(
    shapes: list[str] = typer.Option([], "--shape", help="N×C×H×W, such as 256x64x56x56."),
    dtypes: list[str] = typer.Option([], "--dtype", help="float32, bfloat16, float16."),
    layouts: list[str] = typer.Option(["NCHW", "NHWC"], "--layout", help="NCHW or NHWC."),
    modes: list[int] = typer.Option([1, 2, 4, 8], "--modes", min=1, help="K of the mode norms."),
    loop: bool = typer.Option(True, help="Also time a plain loop over K as people write it."),
    norms: list[str] = typer.Option([], "--norm", help="Only these, such as bn, mn2, mgn2, loop8."),
    output: Path | None = typer.Option(None, "--output", "-o", help="JSON lines to write."),
) -> None:
    """Forward and backward of one layer: device time, eager time, memory.

    Each norm is first compared with the reference, and not timed if it is wrong. Device time is by
    CUDA-graph replay; the floor is four copies of the tensor, eight reads and writes.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    default = GPU_SHAPES if device == "cuda" else CPU_SHAPES
    sizes = [_shape(text) for text in shapes] or list(default)
    kinds = dtypes or (["float32", "bfloat16"] if device == "cuda" else ["float32"])
    names = norms or norm_names(modes, loop)
    console = make_console()
    _report_conditions(console, device)
    rows: list[dict[str, Any]] = []
    for shape in sizes:
        for dtype in kinds:
            for layout in layouts:
                case = Case(shape, dtype, layout, device)
                measured = list(_with_provenance(measure(case, names), device))
                title = f"{'×'.join(map(str, shape))} {dtype} {layout}, floor "
                title += f"{measured[0]['floor_us']:.0f} µs"
                rows += measured
                _write(output, rows)
                console.print(_table(title, measured, LAYER_COLUMNS))


@app.command("model")
def model_command(
    models: list[str] = typer.Option([], "--model", help="resnet18, resnet50 (torchvision's)."),
    batch: int = typer.Option(256, min=1, help="Images in a batch."),
    size: int = typer.Option(224, min=1, help="Side of the images."),
    dtype: str = typer.Option("bfloat16", help="Autocast to this type."),
    norms: list[str] = typer.Option(["bn", "mn2", "mn8", "mgn2"], "--norm", help="Norms and K."),
    eager: bool = typer.Option(True, help="Measure the step as it is."),
    compiled: bool = typer.Option(True, help="Measure it under torch.compile."),
    output: Path | None = typer.Option(None, "--output", "-o", help="JSON lines to write."),
) -> None:
    """A whole training step of a network, channels_last: wall time and memory."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    console = make_console()
    _report_conditions(console, device)
    rows: list[dict[str, Any]] = []
    for name in models or model_names():
        for mode in [False] * eager + [True] * compiled:
            measured = []
            found = measure_model(
                name,
                batch=batch,
                size=size,
                dtype=dtype,
                norms=norms,
                compiled=[mode],
                device=device,
            )
            for row in _with_provenance(found, device):
                measured.append(row)
                _write(output, [*rows, *measured])
            title = f"{name}, N={batch}, {size}×{size}, {dtype}, "
            title += "torch.compile" if mode else "eager"
            console.print(_table(title, measured, MODEL_COLUMNS))
            rows += measured


@app.command("train")
def train_command(
    models: list[str] = typer.Option(list(CASES), "--model", help=f"Of {', '.join(CASES)}."),
    norms: list[str] = typer.Option(["bn", "mn2"], "--norm", help="Norms and K; the first counts."),
    batch: int | None = typer.Option(None, min=1, help="Samples in a batch, if not the recipe's."),
    size: int | None = typer.Option(None, min=8, help="Side of the images, such as 224."),
    parallel: int | None = typer.Option(None, min=1, help="Trainings side by side."),
    images: int | None = typer.Option(None, min=1, help="Images to train on at most."),
    folder: Path | None = typer.Option(
        None, help="Decode these images (train/CLASS, val/CLASS) instead of training on noise."
    ),
    compile: bool | None = typer.Option(None, help="Compile the networks, if not as the recipe."),
    steps: int = typer.Option(2560, help="Steps of every training."),
    rounds: int = typer.Option(3, min=1, help="How often each norm has its turn."),
    device: str | None = typer.Option(None, help="cuda or cpu; the GPU if there is one."),
    output: Path | None = typer.Option(None, "--output", "-o", help="JSON lines to write."),
) -> None:
    """The laboratory's trainings as `modenorm train` runs them, and the cost of watching modes.

    Those of the paper: N=128 and 32×32, but N=256 and 64×64 for resnet18; as many side by side as
    fill a GPU. The step time is that of one step of one training when all of them together have
    the device.
    """
    _check_cases(models)
    console = make_console()
    where = choose_device(device).type
    _report_conditions(console, where)
    rows: list[dict[str, Any]] = []
    for name in models:
        case = CASES[name]
        changed = {"batch": batch, "compile": compile}
        settings = case.settings | {k: v for k, v in changed.items() if v is not None}
        changes: dict[str, Any] = {
            "beside": parallel,
            "size": size,
            "images": images,
            "folder": folder,
        }
        given = {field: value for field, value in changes.items() if value is not None}
        case = dataclasses.replace(case, settings=settings, **given)
        measured = measure_training(case, norms, steps=steps, rounds=rounds, device=where)
        found = list(_with_provenance(measured, where))
        title = f"{name}, N={settings['batch']}, {case.size}×{case.size}, {found[0]['dtype']}, "
        title += "compiled, " if found[0]["compile"] else ""
        title += f"files of {folder.name}" if folder else f"{case.parallel} side by side"
        rows += found
        _write(output, rows)
        console.print(_table(title, found, TRAIN_COLUMNS))


@app.command("step")
def step_command(
    models: list[str] = typer.Option(["resnet20"], "--model", help=f"Of {', '.join(CASES)}."),
    norms: list[str] = typer.Option(["bn", "mn2"], "--norm", help="Norms and K."),
    batch: int | None = typer.Option(None, min=1, help="Samples in a batch, if not the recipe's."),
    parallel: int = typer.Option(1, min=1, help="Trainings side by side."),
    steps: int = typer.Option(10, min=1, help="Steps of every training to look at."),
    most: int = typer.Option(20, min=1, help="Kernels to show."),
    device: str | None = typer.Option(None, help="cuda or cpu; the GPU if there is one."),
    output: Path | None = typer.Option(None, "--output", "-o", help="JSON lines to write."),
) -> None:
    """Where the time of a training step goes: its kernels, or on a CPU its operators."""
    _check_cases(models)
    console, target = make_console(), choose_device(device)
    _report_conditions(console, target.type)
    rows: list[dict[str, Any]] = []
    for model, norm in itertools.product(models, norms):
        case = CASES[model]
        if batch is not None:
            case = dataclasses.replace(case, settings=case.settings | {"batch": batch})
        measured = measure_step(case, norm, steps=steps, parallel=parallel, device=target)
        found = list(_with_provenance(measured, target.type))
        rows += found
        _write(output, rows)
        launches = sum(row["launches"] for row in found)
        where = "alone" if parallel == 1 else f"with {parallel} side by side"
        title = f"{model} {norm}, N={found[0]['batch']}: {found[0]['step_us']:,.0f} µs a step "
        title += f"{where}, {launches:.0f} launches"
        console.print(title)
        table = make_table("µs", "launches", "kernel", right=("µs", "launches"))
        for row in found[:most]:
            table.add_row(f"{row['kernel_us']:.1f}", f"{row['launches']:g}", row["kernel"])
        console.print(table)


def _check_cases(models: Iterable[str]) -> None:
    unknown = [name for name in models if name not in CASES]
    if unknown:
        raise ValueError(f"unknown model {unknown[0]!r}: expected {', '.join(CASES)}")


@app.command("sparsity")
def sparsity_command(
    models: list[str] = typer.Option(
        [], "--model", help=f"Of {', '.join(case.model for case in SPARSITY_CASES)}."
    ),
    output: Path | None = typer.Option(None, "--output", "-o", help="JSON lines to write."),
) -> None:
    """A training step with the penalty on modes, and without it.

    On a CPU only lenet is measured unless others are named.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    known = [case.model for case in SPARSITY_CASES]
    names = models or (known if device == "cuda" else ["lenet"])
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"unknown model {unknown[0]!r}: expected {', '.join(known)}")
    console = make_console()
    _report_conditions(console, device)
    cases = [case for case in SPARSITY_CASES if case.model in names]
    rows = list(_with_provenance(measure_sparsity(cases, device=device), device))
    _write(output, rows)
    shown = [row | {"norm": f"{row['model']} {row['norm']}, {row['method']}"} for row in rows]
    console.print(_table("penalty on modes", shown, SPARSITY_COLUMNS))


@app.command("page")
def page_command(
    results: Path = typer.Option(Path("results"), help="Folder with bench_*.jsonl."),
    pages: list[Path] = typer.Option(PAGES, "--page", help="Pages with tables to rebuild."),
) -> None:
    """Rebuild the tables of README.md and of pages in docs/ from the measured results."""
    if not results.is_dir():
        raise ValueError(f"{results} is not a folder: set --results to that of bench_*.jsonl")
    for page in pages:
        write_whole(page, with_tables(page.read_text("utf-8"), results).encode())
        typer.echo(f"rebuilt the tables of {page}")


@app.command("sync")
def sync_command(
    ranks: list[int] = typer.Option([1, 2, 4], "--ranks", help="Numbers of processes."),
    shapes: list[str] = typer.Option([], "--shape", help="N×C×H×W of every rank."),
    modes: list[int] = typer.Option([2], "--modes", min=1, help="K, for the shapes given."),
    steps: int = typer.Option(200, min=1, help="The fastest of this many steps counts."),
    output: Path | None = typer.Option(None, "--output", "-o", help="JSON lines to write."),
) -> None:
    """A layer's training step with statistics over several processes, and with its own.

    Processes on GPUs with nccl where there are enough, otherwise on the CPU with gloo.
    """
    cases = tuple((_shape(text), k) for text in shapes for k in modes) or SYNC_CASES
    if any(count < 1 for count in ranks):
        raise ValueError(f"ranks are {ranks}; each must be at least 1")
    device = "cuda" if torch.cuda.device_count() >= max(ranks) else "cpu"
    console = make_console()
    _report_conditions(console, device)
    rows: list[dict[str, Any]] = []
    for count in ranks:
        measured = list(_with_provenance(measure_sync(count, cases, steps=steps), device))
        for row in measured:
            row["norm"] = f"{row['shape']} K={row['modes']}"
        title = f"{count} ranks, {measured[0]['backend']}"
        rows += measured
        _write(output, rows)
        console.print(_table(title, measured, SYNC_COLUMNS))


def _shape(text: str) -> tuple[int, int, int, int]:
    parts = text.lower().replace("×", "x").split("x")
    if len(parts) != 4 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"shape is {text!r}; it must be four sizes such as 256x64x56x56")
    n, c, h, w = map(int, parts)
    return n, c, h, w


def _with_provenance(rows: Iterable[dict[str, Any]], device: str) -> Iterator[dict[str, Any]]:
    about = provenance(torch.device(device))
    for row in rows:
        yield row | about


def _report_conditions(console: Console, device: str) -> None:
    about = provenance(torch.device(device))
    console.print(f"{about['device']}, torch {about['torch']}, commit {about['commit']}")


def _table(title: str, rows: list[dict[str, Any]], columns: dict[str, str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("norm")
    shown = [name for name in columns if any(row.get(name) is not None for row in rows)]
    for name in shown:
        table.add_column(columns[name], justify="right")
    for row in rows:
        table.add_row(row["norm"], *(_number(row.get(name)) for name in shown))
    return table


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if abs(value) < 20 else f"{value:,.0f}"


def _write(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """Write what there is so far: a long benchmark that is stopped keeps its results."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_lines(path, rows)
