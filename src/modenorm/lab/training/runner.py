"""Many trainings side by side in one process.

One thread gives each training its turn. On CUDA a turn queues replays of the training's captured
step on a stream of its own, so the device works on all of them at once; on the CPU they alternate.
Trainings share data sets and nothing else, so each gives the same result alone or in company.
Started by torchrun, all ranks train one configuration together, then the next.
"""

import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from modenorm.lab.data import DataSet
from modenorm.lab.training.ahead import compiling_ahead
from modenorm.lab.training.config import TrainConfig
from modenorm.lab.training.interrupts import Interruption, noticing_interrupts
from modenorm.lab.training.lane import Lane, Turns
from modenorm.lab.training.queue import Queue
from modenorm.lab.training.ranks import Ranks, joined
from modenorm.lab.training.runs import Run, State, sort_by_state
from modenorm.lab.training.sources import SharedData
from modenorm.lab.training.step import compiles_on
from modenorm.lab.training.trainer import Diverged, Listener, Training

IDLE_SECONDS = 50e-6
ROUNDS_BETWEEN_STARTS = {"cuda": 64, "cpu": 0}
"""Turns that all trainings have before another one starts."""
FAR_AHEAD_SECONDS = 2.0
"""Most for queueing what streams can take; if it takes longer the host waits for the device."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: with a result, or with the reason of its failure."""

    run: Run
    result: dict[str, Any] | None = None
    failure: str | None = None


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
    parallel: int | None = None,
    checkpoint_every: float = 60.0,
    listener: Listener | None = None,
    tensorboard: bool = False,
    workers: int | None = None,
    start_together: bool = False,
) -> list[Outcome]:
    """Train configurations side by side, each from where it stopped; done ones are not repeated.

    Under torchrun all ranks train each of them together, one after the other. Streamed data sets
    are trained on one after the other as well: their workers use all cores.

    Ctrl-C lets every training write a checkpoint and then raises KeyboardInterrupt; a second one
    stops at once. So does SIGTERM, with Terminated, a kind of KeyboardInterrupt. A training that
    diverges is marked as failed and the others go on.

    Args:
        configs: What to train; repeated ones are trained once.
        runs_dir: Folder of runs.
        data_dir: Folder with the published data files; see `modenorm.lab.data.load`.
        data: Data sets by name, to be used instead of loading them.
        device: "cuda", "cpu", or None for the best there is.
        parallel: Trainings in progress at the same time; None for as many as fill a GPU.
        checkpoint_every: Seconds between checkpoints; evaluations write more where that is cheap.
        listener: Called with a training after every chunk of its steps.
        tensorboard: Also write TensorBoard events into the runs' folders.
        workers: Processes of each rank that decode streamed images; None for as many as cores.
        start_together: Start what may go on side by side before any of it goes on, and let no
            process compile for it meanwhile, so that its time can be measured.

    Returns:
        The outcomes, in the order of `configs`, without repetitions.
    """
    if parallel is not None and parallel < 1:
        raise ValueError(f"parallel is {parallel}, but must be at least 1: set --parallel")
    target = choose_device(device)
    with joined(target) as ranks:
        return _train_many(
            list(configs),
            runs_dir,
            SharedData(target, data_dir, data, workers, ranks),
            target,
            parallel,
            start_together,
            checkpoint_every=checkpoint_every,
            listener=listener if ranks.leads else None,
            tensorboard=tensorboard,
            ranks=ranks,
        )


def _train_many(
    configs: list[TrainConfig],
    runs_dir: Path,
    shared: SharedData,
    target: torch.device,
    parallel: int | None,
    start_together: bool,
    ranks: Ranks,
    **options: Any,
) -> list[Outcome]:
    ranks.compare("what to train", ", ".join(config.run_id for config in configs) or "nothing")
    for config in configs:
        if config.batch < ranks.size:
            raise ValueError(
                f"batch is {config.batch}, less than one sample for each of {ranks.size} ranks: "
                "set --batch or start fewer"
            )
    runs = {run.path: run for run in (Run.of(config, runs_dir) for config in configs)}
    done = ranks.first(lambda: {p: r.result() for p, r in runs.items() if r.state == "done"})
    outcomes = {path: Outcome(runs[path], result) for path, result in done.items()}
    alone = ranks.size == 1
    if not alone or any(config.stream for config in configs):
        parallel = 1
    rest = [run for path, run in runs.items() if path not in outcomes]
    queue = Queue(rest, parallel, alone and compiles_on(target))
    rounds_between = 0 if start_together else ROUNDS_BETWEEN_STARTS[target.type]
    later = [run.config for run in queue.waiting] if alone and not start_together else ()
    compiling = compiling_ahead(later, shared, target)
    with noticing_interrupts() as interrupted, compiling as ahead:

        def start(run: Run) -> Training:
            data = shared.get(run.config)
            return Training(
                run, data, Lane(target), ranks=ranks, interrupted=interrupted, **options
            )

        def ready(run: Run) -> bool:
            return ahead.has(run.config)

        stop = interrupted if alone else Interruption()  # ranks have to stop together
        for outcome in _alternate(queue, start, ready, stop, rounds_between):
            outcomes[outcome.run.path] = outcome
    return [outcomes[path] for path in runs]


class Begun(NamedTuple):
    """A training that was begun early, and waits for room since then."""

    training: Training
    turns: Turns
    since: float

    @classmethod
    def of(cls, run: Run, start: Callable[[Run], Training]) -> "Begun | None":
        """Begin; None if that fails, which will be met again when there is room."""
        turns: Turns | None = None
        try:
            training = start(run)
            turns = training.turns()
            next(turns)
        except Exception:  # such as too little memory for one more
            if turns is not None:
                turns.close()
            return None
        return cls(training, turns, time.monotonic())

    def go_on(self) -> tuple[Training, Turns]:
        """Leave the waiting out of the training's time."""
        self.training.leave_out(time.monotonic() - self.since)
        return self.training, self.turns


def _alternate(
    queue: Queue,
    start: Callable[[Run], Training],
    ready: Callable[[Run], bool],
    interrupted: Interruption,
    rounds_between: int,
) -> Iterator[Outcome]:
    """Give every training its turn until all have ended.

    Between two starts all have some rounds of turns, unless they have enough queued before. Before
    one that keeps the host from them for long, all queue as much as they can; if its kernels are on
    disk it is begun while others fill the GPU, and waits.
    """
    active: dict[Training, Turns] = {}
    early: dict[Path, Begun] = {}
    rounds = 0
    try:
        while True:
            while not rounds and (run := queue.take(training.run for training in active)):
                if run.path not in early and queue.takes_long(run):
                    yield from _queue_far_ahead(active)
                # no variable holds a training here: its memory is to be given back when it ends
                active |= [_started(run, early.pop(run.path, None), start)]
                rounds = rounds_between
            if not active:
                return
            if not rounds and (run := queue.take_early(ready)):
                yield from _queue_far_ahead(active)
                _begin_early(run, start, early)
                rounds = rounds_between
            busy = yield from _round(active)
            if interrupted.is_set():
                _save_all(active)
                raise interrupted.reason
            rounds = rounds - 1 if rounds and busy else 0
            if not busy:
                time.sleep(IDLE_SECONDS)
    finally:
        for turns in [*active.values(), *(begun.turns for begun in early.values())]:
            turns.close()


def _begin_early(run: Run, start: Callable[[Run], Training], early: dict[Path, Begun]) -> None:
    if begun := Begun.of(run, start):
        early[run.path] = begun


def _started(
    run: Run, begun: Begun | None, start: Callable[[Run], Training]
) -> tuple[Training, Turns]:
    if begun is not None:
        return begun.go_on()
    training = start(run)
    return training, training.turns()


def _round(active: dict[Training, Turns]) -> Generator[Outcome, None, bool]:
    """Give every training its turn; whether there was something to queue."""
    busy = False
    for training, turns in list(active.items()):
        try:
            busy |= next(turns)
        except (StopIteration, Diverged) as end:
            del active[training]
            yield _outcome(training, end)
        except Exception:  # such as a broken checkpoint, or a full disk
            del active[training]
            _save_all(active, Exception)
            raise
    return busy


def _queue_far_ahead(active: dict[Training, Turns]) -> Iterator[Outcome]:
    """Let all queue as much as they can."""
    for training in active:
        training.queue_far_ahead(True)
    end = time.monotonic() + FAR_AHEAD_SECONDS
    while (yield from _round(active)) and time.monotonic() < end:
        pass
    for training in active:
        training.queue_far_ahead(False)


def _outcome(training: Training, end: StopIteration | Diverged) -> Outcome:
    run = training.run
    if isinstance(end, StopIteration):
        return Outcome(run, result=training.ranks.first(run.result))
    if training.ranks.leads:
        run.fail(str(end))
    return Outcome(run, failure=str(end))


def _save_all(trainings: Iterable[Training], passed_over: type[Exception] = Diverged) -> None:
    """Let trainings keep what they have done, but for those that can't."""
    for training in trainings:
        with contextlib.suppress(passed_over):
            training.save()


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
        index = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
        if index >= torch.cuda.device_count():
            raise ValueError(
                f"this is process {index} of this machine, but torch finds only "
                f"{torch.cuda.device_count()} GPUs: set torchrun's --nproc-per-node"
            )
        target = torch.device("cuda", index)
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
