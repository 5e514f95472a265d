"""Many trainings side by side in one process.

One thread gives each training its turn. On CUDA a turn queues replays of the training's captured
step on a stream of its own, so the device works on all of them at once; on the CPU they alternate.
Trainings share data sets and nothing else, so each gives the same result alone or in company.
"""

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from modenorm.lab.data import DataSet, load
from modenorm.lab.data.loader import PADDING, DeviceImages
from modenorm.lab.training.checkpoint import About
from modenorm.lab.training.config import TrainConfig
from modenorm.lab.training.runs import Run, State, sort_by_state
from modenorm.lab.training.step import Lane, Turns
from modenorm.lab.training.trainer import Diverged, Listener, Training, TrainingData

IDLE_SECONDS = 50e-6


@dataclass(frozen=True)
class Outcome:
    """How a run ended: with a result, or with the reason of its failure."""

    run: Run
    result: dict[str, Any] | None = None
    failure: str | None = None


class SharedData:
    """Data sets on a device, each loaded once.

    Args:
        device: Where they go.
        root: Folder with the published files.
        given: Data sets by name that need not be loaded.
    """

    def __init__(
        self, device: torch.device, root: Path | None, given: Mapping[str, DataSet] | None = None
    ) -> None:
        self._device, self._root, self._given = device, root, given or {}
        self._sets: dict[tuple[str, int | None], DataSet] = {}
        self._placed: dict[tuple[str, int | None, bool, bool], TrainingData] = {}

    def get(self, config: TrainConfig) -> TrainingData:
        """The data of a training, in the form its loader needs."""
        key = (config.dataset, config.image_size, config.augment, config.channels_last)
        if key not in self._placed:
            self._placed[key] = self._place(self._load(config), config)
        return self._placed[key]

    def _load(self, config: TrainConfig) -> DataSet:
        if config.dataset in self._given:
            return self._given[config.dataset]
        key = (config.dataset, config.image_size)
        if key not in self._sets:
            self._sets[key] = load(config.dataset, self._root, size=config.image_size)
        return self._sets[key]

    def _place(self, data: DataSet, config: TrainConfig) -> TrainingData:
        padding = PADDING if config.augment else 0
        layout = config.channels_last
        train = DeviceImages(data.train, self._device, padding=padding, channels_last=layout)
        test = DeviceImages(data.test, self._device, scaling=train.scaling, channels_last=layout)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # other streams are going to read it
        about = About(data.train.classes, data.train.domain_names, *train.scaling)
        return TrainingData(train, test, about)


def train(config: TrainConfig, runs_dir: Path, **options: Any) -> dict[str, Any]:
    """Train one configuration, or go on where it stopped, and return its result.

    Args:
        config: What to train.
        runs_dir: Folder of runs; this one gets its own folder in it.
        options: As for `train_many`.

    Raises:
        Diverged: The loss or a weight is no longer finite.
    """
    (outcome,) = train_many([config], runs_dir, **options)
    if outcome.result is None:
        raise Diverged(outcome.failure)
    return outcome.result


def train_many(
    configs: Sequence[TrainConfig],
    runs_dir: Path,
    *,
    data_dir: Path | None = None,
    data: Mapping[str, DataSet] | None = None,
    device: torch.device | str | None = None,
    parallel: int = 10,
    checkpoint_every: float = 60.0,
    listener: Listener | None = None,
    tensorboard: bool = False,
) -> list[Outcome]:
    """Train configurations side by side, each from where it stopped; done ones are not repeated.

    Ctrl-C lets every training write a checkpoint and then raises KeyboardInterrupt; a second one
    stops at once. A training that diverges is marked as failed and the others go on.

    Args:
        configs: What to train; repeated ones are trained once.
        runs_dir: Folder of runs.
        data_dir: Folder with the published data files; see `modenorm.lab.data.load`.
        data: Data sets by name, to be used instead of loading them.
        device: "cuda", "cpu", or None for the best there is.
        parallel: Trainings in progress at the same time.
        checkpoint_every: Seconds between checkpoints; evaluations write more where that is cheap.
        listener: Called with a training after every chunk of its steps.
        tensorboard: Also write TensorBoard events into the runs' folders.

    Returns:
        The outcomes, in the order of `configs`, without repetitions.
    """
    if parallel < 1:
        raise ValueError(f"parallel is {parallel}, but must be at least 1: set --parallel")
    target = choose_device(device)
    shared = SharedData(target, data_dir, data)
    runs = {run.path: run for run in (Run.of(config, runs_dir) for config in configs)}
    outcomes = {path: Outcome(r, r.result()) for path, r in runs.items() if r.state == "done"}

    def start(run: Run) -> Training:
        return Training(
            run,
            shared.get(run.config),
            Lane(target),
            checkpoint_every=checkpoint_every,
            listener=listener,
            tensorboard=tensorboard,
        )

    trainings = (start(run) for path, run in runs.items() if path not in outcomes)
    with _noticing_interrupts() as interrupted:
        for outcome in _alternate(trainings, parallel, interrupted):
            outcomes[outcome.run.path] = outcome
    return [outcomes[path] for path in runs]


def _alternate(
    trainings: Iterator[Training], parallel: int, interrupted: threading.Event
) -> Iterator[Outcome]:
    """Give every training its turn until all have ended."""
    active: dict[Training, Turns] = {}
    try:
        while True:
            for training in itertools.islice(trainings, parallel - len(active)):
                active[training] = training.turns()
            if not active:
                return
            busy = False
            for training, turns in list(active.items()):
                try:
                    busy |= next(turns)
                except (StopIteration, Diverged) as end:
                    del active[training]
                    yield _outcome(training.run, end)
            if interrupted.is_set():
                _save_all(active)
                raise KeyboardInterrupt
            if not busy:
                time.sleep(IDLE_SECONDS)
    finally:
        for turns in active.values():
            turns.close()


def _outcome(run: Run, end: StopIteration | Diverged) -> Outcome:
    if isinstance(end, StopIteration):
        return Outcome(run, result=run.result())
    run.fail(str(end))
    return Outcome(run, failure=str(end))


def _save_all(trainings: Iterable[Training]) -> None:
    for training in trainings:
        with contextlib.suppress(Diverged):
            training.save()


@contextlib.contextmanager
def _noticing_interrupts() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C into an event; the second one interrupts as usual."""
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return

    def notice(signum: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, usual)

    usual = signal.signal(signal.SIGINT, notice)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, usual)


def choose_device(device: torch.device | str | None) -> torch.device:
    """The device asked for, or CUDA if there is one; it becomes torch's current one."""
    # as many hardware queues as there can be; streams that share one wait for each other
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        target = torch.device(device)
    except RuntimeError:
        raise ValueError(f"unknown device {device!r}: use cuda or cpu") from None
    if target.type not in ("cuda", "cpu"):
        raise ValueError(f"device {device!r} is not supported: use cuda or cpu")
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' asked for, but torch finds none: use --device cpu")
    if target.type == "cuda" and target.index is None:
        target = torch.device("cuda", torch.cuda.current_device())
    if target.type == "cuda":
        torch.cuda.set_device(target)
    return target


def sweep(
    configs: Sequence[TrainConfig],
    runs_dir: Path,
    *,
    retry_failed: bool = False,
    **options: Any,
) -> dict[State, list[Run]]:
    """Train what is incomplete or missing, and return the runs sorted by state.

    Args:
        configs: The runs that are wanted.
        runs_dir: Folder of runs.
        retry_failed: Train failed runs again, from their last checkpoint.
        options: As for `train_many`.
    """
    states = sort_by_state(configs, runs_dir)
    rest = states["incomplete"] + states["missing"] + (states["failed"] if retry_failed else [])
    train_many([run.config for run in rest], runs_dir, **options)
    return sort_by_state(configs, runs_dir)
