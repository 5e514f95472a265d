"""The command line in a folder of its own, with built-in data so small that trainings are short."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from modenorm.lab.cli import main
from modenorm.lab.data import DataSet, ImageSet
from modenorm.lab.training import sources

Command = Callable[..., tuple[int, str, str]]


def images(count: int) -> ImageSet:
    generator = torch.Generator().manual_seed(count)
    labels = torch.randint(4, (count,), generator=generator)
    pixels = torch.randint(0, 256, (count, 3, 32, 32), generator=generator).to(torch.uint8)
    return ImageSet(pixels, labels, labels % 2, tuple("abcd"), ("even", "odd"))


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    """Run the command line; gives exit code, output and errors."""
    real = sources.load

    def load(name: str, *args: object, **kwargs: object) -> DataSet:
        if name == "builtin":
            return DataSet(name, images(40), images(30))
        return real(name, *args, **kwargs)

    monkeypatch.setattr(sources, "load", load)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["modenorm", *arguments])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return run
