"""`modenorm demo`."""

import time
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from modenorm.lab.cli.shown import make_console
from modenorm.lab.cli.train import ProgressReport
from modenorm.lab.data import DataSet, load
from modenorm.lab.demo import (
    add_gallery,
    demo_configs,
    demo_experiment,
    demo_page,
    mode_rows,
    separation,
)
from modenorm.lab.report import Record, read_record, write_page
from modenorm.lab.report.page import plotly_script
from modenorm.lab.training import Outcome, train_many
from modenorm.lab.training.interrupts import exit_code
from modenorm.threads import one_thread


def demo_command(
    output: Path = typer.Option(
        Path("demo"), "--output", "-o", help="Folder for the trainings and the page."
    ),
    epochs: int = typer.Option(4, min=1, help="Length of each training."),
    seeds: int = typer.Option(1, min=1, help="Trainings of each norm; more take longer."),
    device: str | None = typer.Option(None, help="cuda or cpu; the GPU if there is one."),
) -> None:
    """Train BN, MN, GN and MGN on a built-in mixture of four domains and show what they do.

    Takes about a minute on two CPU cores. An interrupted demo goes on where it stopped.

    Without the package plotly there are tables, but no page, and the exit code is 2.
    """
    console, began = make_console(), time.monotonic()
    try:
        plotly_script()
    except ValueError as error:  # rather now than after minutes
        console.print(f"There will be tables alone: {error}.", soft_wrap=True)
    console.print("Drawing 16,000 pictures of four domains ...")
    data = load("builtin")
    outcomes = _train(data, output / "runs", epochs, seeds, device)
    failures = [outcome.failure for outcome in outcomes if outcome.failure]
    with console.status("Looking at what each mode claims"):
        for outcome in outcomes:
            if outcome.result:
                add_gallery(outcome.run, data)
    records = [read_record(outcome.run.path) for outcome in outcomes]
    show(records, console)
    for failure in failures:
        console.print(f"failed: {failure}", style="red")
    page = output / "report.html"
    write_page(page, records, demo_page(data, epochs))
    seconds = time.monotonic() - began
    console.print(f"\n{seconds:.0f} s in all. Open {page} in a browser to see it.", soft_wrap=True)
    if failures:
        raise typer.Exit(1)


def _train(data: DataSet, runs: Path, epochs: int, seeds: int, device: str | None) -> list[Outcome]:
    console, configs = make_console(stderr=True), demo_configs(epochs, range(seeds))
    try:
        with ProgressReport(console) as report, one_thread():
            return train_many(
                configs,
                runs,
                data={"builtin": data},
                device=device,
                parallel=len(configs),
                listener=report,
            )
    except KeyboardInterrupt as interrupt:
        console.print(
            f"Interrupted. {runs} keeps what was trained; `modenorm demo` goes on there.",
            soft_wrap=True,
        )
        raise typer.Exit(exit_code(interrupt)) from None


def show(records: Sequence[Record], console: Console) -> None:
    """Print the errors by domain, who uses which mode, and what that means."""
    experiment = demo_experiment(records)
    table = Table("norm", title="Test error in percent")
    for heading in ("all", *experiment.domains):
        table.add_column(heading, justify="right")
    for variant in experiment.variants:
        means = [variant.mean("final_error"), *map(variant.domain, experiment.domains)]
        table.add_row(variant.label, *("-" if mean is None else str(mean) for mean in means))
    console.print(table)
    console.print(*experiment.sentences(), sep="\n")
    console.print(_modes_table(records, experiment.domains))
    for label, layer, by_domain in mode_rows(records):
        console.print(f"{label}, {layer}: {separation(by_domain)}.")


def _modes_table(records: Sequence[Record], domains: Sequence[str]) -> Table:
    title = "Share of each mode in each domain, in percent"
    table = Table("norm", "layer", title=title, show_edge=False)
    for heading in domains:
        table.add_column(heading, justify="right")
    for label, layer, by_domain in mode_rows(records):
        cells = [
            " ".join(f"{100 * share:.0f}" for share in by_domain.get(name, ())) for name in domains
        ]
        table.add_row(label, layer, *cells)
    return table
