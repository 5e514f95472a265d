"""What all commands do alike: output that every stream takes, names in one line, quiet ends."""

import io
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from modenorm import __main__
from modenorm.lab import cli
from modenorm.lab.bench import layer
from modenorm.lab.cli.shown import make_console, make_table
from modenorm.lab.data.cache import CacheWarning

Command = Callable[..., tuple[int, str, str]]
LAYER = ("bench", "layer", "--shape", "4x3x5x5", "--norm", "bn", "--layout", "NCHW")


def test_an_output_of_few_characters_loses_nothing_else(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii", write_through=True))
    monkeypatch.setattr(layer, "CPU_SECONDS", 0.01)
    code, _, errors = command(*LAYER, "-o", "layer.jsonl")
    assert (code, errors) == (0, "")
    assert b"4?3?5?5 float32 NCHW" in written.getvalue()
    assert Path("layer.jsonl").read_text().count("\n") == 1


def test_results_are_written_before_they_are_shown(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise ValueError("this table cannot be shown")

    monkeypatch.setattr(layer, "CPU_SECONDS", 0.01)
    monkeypatch.setattr(cli.bench, "_table", fail)
    code, _, errors = command(*LAYER, "-o", "layer.jsonl")
    assert (code, errors) == (2, "modenorm: this table cannot be shown\n")
    assert Path("layer.jsonl").read_text().count("\n") == 1


def test_pages_are_utf8_wherever_they_are_rebuilt(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("3 × 3\n", "utf-8")
    arguments = ["bench", "page", "--page", str(page), "--results", str(tmp_path)]
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "modenorm", *arguments]
    subprocess.run(command, env={**os.environ, **plain}, check=True, capture_output=True)
    assert page.read_text("utf-8") == "3 × 3\n"


@pytest.mark.parametrize(("columns", "lines"), [(None, 1), ("80", 2)])
def test_a_name_stays_in_one_line_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: str | None, lines: int
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    file, table = io.StringIO(), make_table("run")
    table.add_row("x" * 100)
    make_console(file=file).print(table)
    assert sum("x" in line for line in file.getvalue().splitlines()) == lines


def test_a_set_that_is_not_cached_is_told_in_a_sentence(command: Command) -> None:
    command("runs", "nowhere")
    told = warnings.formatwarning("not cached", CacheWarning, "cache.py", 1)
    assert told == "modenorm: not cached\n"
    other = warnings.formatwarning("odd", UserWarning, "other.py", 7)
    assert other == "other.py:7: UserWarning: odd\n"


@pytest.mark.parametrize("moment", ["import", "run"])
def test_an_early_interrupt_leaves_no_traceback(
    monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    class Interrupted:
        @property
        def main(self) -> object:
            if moment == "import":
                raise KeyboardInterrupt
            return self.run

        def run(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "modenorm.lab.cli", Interrupted())
    with pytest.raises(SystemExit) as end:
        __main__.main()
    assert end.value.code == 130
