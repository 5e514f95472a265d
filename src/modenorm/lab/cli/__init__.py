"""The command line: one typer app, whose commands live in the modules of this package."""

import sys

import typer

from modenorm.lab.cli.bench import app as bench_app
from modenorm.lab.cli.data import app as data_app
from modenorm.lab.cli.demo import demo_command
from modenorm.lab.cli.mixtures import mixtures_command
from modenorm.lab.cli.report import modes_command, report_command
from modenorm.lab.cli.reproduce import reproduce_command
from modenorm.lab.cli.train import list_runs, train_command

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
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"modenorm: {error}", file=sys.stderr)
        sys.exit(2)
