"""`modenorm mixtures`: how often the right number of modes is found where it is known."""

from pathlib import Path
from typing import Any

import typer

from modenorm.lab.cli.shown import make_console, make_table
from modenorm.lab.experiments import mixtures
from modenorm.lab.experiments.mixtures import CANDIDATES, METHODS, NEEDED, TOLERANCES, TUNING_SEED
from modenorm.lab.training.files import alone_in, read_objects, write_lines

NAMES = {False: "automatic_mixtures.jsonl", True: "automatic_tuning.jsonl"}


def mixtures_command(
    seeds: int | None = typer.Option(None, min=1, help="Seeds of each mixture: 20, to tune 5."),
    tune: bool = typer.Option(
        False, help="Compare strengths and tolerances, on seeds that are not used otherwise."
    ),
    method: str | None = typer.Option(None, help="Only none, entropy or switch."),
    steps: int = typer.Option(mixtures.STEPS, min=1, help="Steps of each training."),
    results: Path = typer.Option(
        Path("results"), help=f"Folder for {' and '.join(NAMES.values())}."
    ),
) -> None:
    """Find the number of modes of made-up mixtures, and compare with what it is.

    Runs on the CPU in some minutes. Lines of other methods in the file of results are kept.
    """
    first, count = (TUNING_SEED, seeds or 5) if tune else (0, seeds or 20)
    chosen = [m for m in (CANDIDATES if tune else METHODS) if method in (None, m.kind)]
    if not chosen:
        raise ValueError(f"unknown method {method!r}: expected none, entropy or switch")
    file, options = results / NAMES[tune], {"steps": steps}
    tolerances = {"tolerances": TOLERANCES} if tune else {}
    read_objects(file, NEEDED)  # rather now than after minutes
    for lines in mixtures.study(range(first, first + count), chosen, **options, **tolerances):
        _keep(file, lines)
        make_console(stderr=True).print(f"{lines[0]['method']} {lines[0]['strength']}: in {file}")
    found = read_objects(file, NEEDED)
    for header, rows in (mixtures.summary(found), mixtures.errors(found)):
        table = make_table(*header)
        for row in rows:
            table.add_row(*row)
        make_console().print(table)


def _keep(file: Path, new: list[dict[str, Any]]) -> None:
    """Put lines in the place of those of the same method, strength and closing."""

    def key(line: dict[str, Any]) -> tuple[str, float, float]:
        return line["method"], line["strength"], line["closing"]

    with alone_in(file.parent):
        lines = [line for line in read_objects(file, NEEDED) if key(line) != key(new[0])] + new
        lines.sort(key=lambda line: (line["method"] != "none", key(line)))
        write_lines(file, lines)
