"""The command line: one typer app, whose commands live in the modules of this package."""

import io
import re
import sys
import warnings
from typing import NoReturn

import typer

from modenorm.lab.cli.bench import app as bench_app
from modenorm.lab.cli.data import app as data_app
from modenorm.lab.cli.demo import demo_command
from modenorm.lab.cli.mixtures import mixtures_command
from modenorm.lab.cli.report import modes_command, report_command
from modenorm.lab.cli.reproduce import reproduce_command
from modenorm.lab.cli.train import list_runs, train_command
from modenorm.lab.data.cache import CacheWarning

NO_MEMORY = re.compile(
    "not enough memory|allocate memory|out of memory|Storage size calculation overflowed"
)
"""How torch says that memory is too small; it has no exception of its own for that on a CPU."""

_usual_format = warnings.formatwarning
app = typer.Typer(
    name="modenorm",
    help="Mode Normalization (ICLR 2019): data, trainings and results.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo_command)
app.add_typer(data_app, name="data")
app.command("train")(train_command)
app.command("runs")(list_runs)
app.command("reproduce")(reproduce_command)
app.command("mixtures")(mixtures_command)
app.command("report")(report_command)
app.command("modes")(modes_command)
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Run the command line; what a user can mend is told in one sentence, with exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a table is better with ? for × than lost
            stream.reconfigure(errors="replace")
    warnings.formatwarning = _format_warning
    try:
        app()
    except (ValueError, OSError) as error:
        _give_up(str(error))
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not NO_MEMORY.search(str(error)):
            raise
        _give_up(_describe_memory(str(error)))


def _format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Warnings of ours in one sentence, others with the line of code they are about."""
    if issubclass(category, CacheWarning):
        return f"modenorm: {message}\n"
    return _usual_format(message, category, filename, lineno, line)


def _give_up(reason: str) -> NoReturn:
    print(f"modenorm: {reason}", file=sys.stderr)
    sys.exit(2)


def _describe_memory(message: str) -> str:
    """What torch or NumPy say of memory that they don't get, as one sentence.

    >>> _describe_memory("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.")
    'there is not enough memory for 8 bytes more: use a smaller batch, smaller images, ...'
    """
    size = re.search(r"allocate ([\d.]+ \w+)", message)
    return (
        f"there is not enough memory{f' for {size[1]} more' if size else ''}: use a smaller batch, "
        "smaller images, or fewer trainings side by side"
    )
