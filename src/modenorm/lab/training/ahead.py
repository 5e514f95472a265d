"""What trainings need compiled, ahead of them, by processes of their own.

Inductor and Triton keep what they compile on disk. While the first training compiles its kernels
and trains, these processes compile those of later ones: their networks, which then start in seconds
instead of half a minute, and of networks that aren't compiled the layers' own kernels.
A process that fails costs nothing but that: the training compiles for itself.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from modenorm.lab.data import DataSet, ImageSet
from modenorm.lab.training.config import TrainConfig
from modenorm.lab.training.evaluate import Evaluation, batch_size
from modenorm.lab.training.lane import Lane
from modenorm.lab.training.ranks import Ranks
from modenorm.lab.training.sources import SharedData
from modenorm.lab.training.step import Step, compiles_on

__all__ = ["Ahead", "Form", "compile_form", "compiling_ahead"]

PROCESSES = 6
LEAST_CORES = 16
"""With fewer, processes would take from the training what they give."""


class Form(NamedTuple):
    """What compiled code depends on: a configuration, and the images it is given."""

    config: TrainConfig
    classes: int
    size: tuple[int, int]
    evaluated: int
    """Images in a batch of an evaluation."""
    trained: bool = True
    """Whether there is something to compile for training too, not for evaluations alone."""


class Ahead:
    """What processes compile, of which each leaves a mark in a folder.

    Args:
        folder: Of the marks.

    Attributes:
        processes: Those that compile, or have ended.
    """

    def __init__(self, folder: Path) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self._folder = folder

    def has(self, config: TrainConfig) -> bool:
        """Whether all that is compiled for a training is on disk by now."""
        return (self._folder / config.kind).exists()

    def start(self, forms: list[Form], device: torch.device) -> None:
        """Let another process compile these."""
        self.processes.append(_start(forms, device, self._folder))

    def end(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def compiling_ahead(
    configs: Iterable[TrainConfig], shared: SharedData, device: torch.device
) -> Iterator[Ahead]:
    """Let all that is needed later be compiled in the background for as long as this lasts.

    Args:
        configs: In the order in which they are going to be trained.
        shared: Their data.
        device: Where they are trained.
    """
    forms = list[Form]()
    if compiles_on(device) and (os.cpu_count() or 1) >= LEAST_CORES:
        forms = _forms(configs, shared)
        # the first one can't wait; if it is compiled, its evaluation comes later
        forms[:1] = [form._replace(trained=False) for form in forms[:1] if form.config.compile]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        ahead = Ahead(Path(folder))
        try:
            with contextlib.suppress(OSError):  # no process, no memory for one
                for part in filter(None, _parts(forms)):
                    ahead.start(part, device)
            yield ahead
        finally:
            ahead.end()


def compile_form(form: Form, device: torch.device) -> None:
    """Evaluate a network on noise, and take the first step of its training."""
    name, config = form.config.dataset, form.config
    noise = DataSet(name, _noise(form, config.batch), _noise(form, form.evaluated))
    data = SharedData(device, None, {name: noise}).get(config)
    step = Step.of(config, data, total=1, capacity=1, device=device, ranks=Ranks())
    lane = Lane(device)
    lane.join()
    given = (data.test, ("noise",), step.dtype, lane, Ranks())
    Evaluation(step.model, *given, compile=config.compile).queue()
    if form.trained:
        if config.compile:
            step.compile()
        with lane.enter():
            step.loader.load(0, 1)
            step.loader.feed()
            step()
    lane.synchronize()


def _forms(configs: Iterable[TrainConfig], shared: SharedData) -> list[Form]:
    distinct: dict[str, TrainConfig] = {}
    for config in configs:
        if not config.stream:
            distinct.setdefault(config.kind, config)
    forms = []
    for config in distinct.values():
        data = shared.get(config)
        classes, evaluated = len(data.about.classes), batch_size(data.test)
        forms.append(Form(config, classes, data.train.size, evaluated))
    return forms


def _parts(forms: list[Form]) -> list[list[Form]]:
    """What each process compiles: kernels of layers, if there are some, don't wait for networks."""
    layers = [form for form in forms if not form.config.compile]
    networks = [form for form in forms if form.config.compile]
    if not layers or not networks:
        return [forms[i::PROCESSES] for i in range(PROCESSES)]
    others = PROCESSES - 1
    return [layers, *(networks[i::others] for i in range(others))]


def _start(forms: list[Form], device: torch.device, folder: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(device), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        json.dump([[form.config.to_json(), *form[1:]] for form in forms], pipe)
    return process


def _noise(form: Form, count: int) -> ImageSet:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, *form.size), dtype=torch.uint8, generator=generator)
    labels = torch.randint(form.classes, (count,), generator=generator)
    names = tuple(map(str, range(form.classes)))
    return ImageSet(images, labels, torch.zeros_like(labels), names, ("noise",))


def main() -> None:
    """Compile the forms given as JSON, one after the other, and leave a mark for each."""
    os.nice(10)  # who feeds the device comes first
    device, folder = torch.device(sys.argv[1]), Path(sys.argv[2])
    for config, classes, size, *others in json.load(sys.stdin):
        form = Form(TrainConfig.from_json(config), classes, tuple(size), *others)
        compile_form(form, device)
        if form.trained:
            (folder / form.config.kind).touch()


if __name__ == "__main__":
    main()
