"""One training from its first step, or its last checkpoint, to its result.

A training is a coroutine: it gives up its turn after queueing some steps and while it waits for
the device, so that one thread can keep many of them going (see runner.py). Several ranks may train
one model together (see ranks.py): then each of them runs this with its part of every batch, and
they agree on everything at the end of every chunk of steps.
"""

import contextlib
import dataclasses
import json
import math
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from modenorm.lab.data.loader import derive_seed
from modenorm.lab.models import generator_states, generators, load_generator_states
from modenorm.lab.provenance import provenance
from modenorm.lab.training.checkpoint import Checkpoint, Position, copy_tensors, load_state
from modenorm.lab.training.closing import AT_THE_END, PRUNING_SAMPLES, close, pruned
from modenorm.lab.training.config import TrainConfig
from modenorm.lab.training.evaluate import count_errors, errors
from modenorm.lab.training.events import Events
from modenorm.lab.training.ranks import Ranks
from modenorm.lab.training.runs import Run
from modenorm.lab.training.schedule import Schedule
from modenorm.lab.training.sources import TrainingData
from modenorm.lab.training.step import Lane, Step, Turns, capture, compiles_on
from modenorm.lab.training.usage import ModeUsage

CHUNK = {"cuda": 256, "cpu": 16}
"""Steps prepared at once; the loss is looked at after each chunk."""
SHORT_CHUNK = 16
"""The same where steps are long: on images of files, or with other ranks that may want to stop."""
TURN = {"cuda": 16, "cpu": 1}
"""Steps queued before others have their turn."""
SAVING_SHARE = 0.02
"""Of the time: checkpoints at evaluations may take as much."""


class Diverged(RuntimeError):
    """A training whose loss or weights are no longer finite."""


class Listener(Protocol):
    """Whoever wants to know how trainings are getting on."""

    def __call__(self, training: "Training") -> None:
        """Look at a training between two of its turns."""


class Training:
    """A training in progress.

    Args:
        run: What to train, and the directory to keep it in.
        data: The data set, padded if the configuration augments.
        lane: Where to queue the work.
        checkpoint_every: Seconds between checkpoints; evaluations write more where that is cheap.
        listener: Called after every chunk of steps and every evaluation.
        tensorboard: Also write TensorBoard events into the run's directory.
        ranks: The processes that train the model together.
        interrupted: Set to let all ranks write a checkpoint and stop.

    Attributes:
        position: Finished steps, seconds and metrics.
        schedule: What happens when.
        train_loss: Mean over the steps since the last evaluation, as far as known.
    """

    def __init__(
        self,
        run: Run,
        data: TrainingData,
        lane: Lane,
        *,
        checkpoint_every: float = 60.0,
        listener: Listener | None = None,
        tensorboard: bool = False,
        ranks: Ranks | None = None,
        interrupted: threading.Event | None = None,
    ) -> None:
        config, kind = run.config, lane.device.type
        self.run, self.data, self.lane = run, data, lane
        self.ranks = ranks = ranks or Ranks()
        self._interrupted = interrupted or threading.Event()
        self.schedule = Schedule.of(config, len(data.train))
        self.position = Position()
        self.train_loss = math.nan
        self._checkpoint_every, self._listener = checkpoint_every, listener
        plain = ranks.size == 1 and not config.stream
        self._chunk, self._turn = CHUNK[kind] if plain else SHORT_CHUNK, TURN[kind]
        self._save_seconds = 0.0  # what the last checkpoint took
        self._saved = (-1, 0)  # step and number of evaluations in the last checkpoint

        self._step = Step.of(config, data, self.schedule.total, self._chunk, lane.device, ranks)
        self.model, self._dtype = self._step.model, self._step.dtype
        self._tensorboard = tensorboard
        self._events: Events | None = None
        self._began = self._saved_at = time.monotonic()

    @property
    def seconds(self) -> float:
        """Time spent on this training, earlier processes included."""
        return self.position.seconds + time.monotonic() - self._began

    def turns(self) -> Turns:
        """Train to the end, from the last checkpoint if there is one, giving up turns in between.

        Raises:
            CheckpointError: The checkpoint in the run's directory is broken or of another training.
            Diverged: The loss or a weight is no longer finite.
            OSError: A file could not be written; the last checkpoint is kept.
        """
        with contextlib.ExitStack() as stack:
            self.ranks.first(lambda: stack.enter_context(self.run.hold()))
            stack.callback(self.lane.synchronize)  # memory of queued work must not be given away
            stack.callback(self._step.loader.close)
            self._resume()
            if self._tensorboard and self.ranks.leads:
                self._events = Events(self.run.path, self.position.metrics)
                stack.callback(self._events.close)
            advance = self._prepare()
            while True:
                evaluated = self._evaluation_due()
                if evaluated:
                    yield from self._evaluate()
                ended = self.position.step == self.schedule.total
                if ended or self._checkpoint_due(evaluated):
                    self.save()
                if ended:
                    break
                yield from self._train(advance)
            if self.ranks.leads:
                smaller = (yield from self._prune()) if self.run.config.sparsity else {}
                self.run.set_metrics(self.position.metrics)
                self.run.finish(self._result() | smaller)

    def _checkpoint_due(self, evaluated: bool) -> bool:
        """Whether time has come, or an evaluation was made and writing is cheap beside the rest.

        The clock of rank 0 decides.

        Raises:
            KeyboardInterrupt: Ranks that train together were interrupted; there is a checkpoint.
        """
        elapsed = time.monotonic() - self._saved_at
        affordable = elapsed * SAVING_SHARE >= self._save_seconds
        due = elapsed >= self._checkpoint_every or (evaluated and affordable)
        stop = self._interrupted.is_set() and self.ranks.size > 1
        due, stop = self.ranks.any(due and self.ranks.leads, stop)
        if stop:
            self.save()
            raise KeyboardInterrupt
        return due

    def save(self) -> None:
        """Write a checkpoint of this moment, unless there is one.

        Raises:
            Diverged: The state is not finite; the last checkpoint is kept.
            OSError: It could not be written; the last checkpoint is kept.
        """
        mark = (self.position.step, len(self.position.metrics))
        if self._saved == mark:
            return
        self.lane.synchronize()
        began = time.monotonic()
        self._match_estimates()
        tensors = self._finite_tensors()
        position = replace(self.position, seconds=self.seconds)
        checkpoint = self._checkpoint(self.run.config, position, tensors)
        if self.ranks.leads:
            checkpoint.save(self.run.checkpoint)
        self._saved, self._saved_at = mark, time.monotonic()
        self._save_seconds = self._saved_at - began

    def _checkpoint(
        self, config: TrainConfig, position: Position, tensors: dict[str, Tensor]
    ) -> Checkpoint:
        return Checkpoint(config, self.data.about, position, tensors, self.data.description)

    def _finite_tensors(self) -> dict[str, Tensor]:
        tensors = {name: tensor.detach().cpu() for name, tensor in self._tensors().items()}
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise Diverged(self._diverged(f"{name} is no longer finite"))
        return tensors

    def _tensors(self) -> dict[str, Tensor]:
        parts = {
            "model": self.model.state_dict(),
            "momentum": self._step.momentum_buffers,
            "generator": generator_states(self.model),
            "loss": {"sum": self.ranks.total(self._step.loss_sum)},
        }
        return {f"{part}.{name}": t for part, named in parts.items() for name, t in named.items()}

    def _resume(self) -> None:
        """Take up the checkpoint, if there is one; rank 0 reads it for all."""
        self.position, self._saved = self.ranks.first(self._read_checkpoint)
        self.ranks.take([*self.model.state_dict().values(), *self._step.momentum_buffers.values()])

    def _read_checkpoint(self) -> tuple[Position, tuple[int, int]]:
        path, position, saved = self.run.checkpoint, Position(), self._saved
        if path.exists():
            checkpoint = Checkpoint.load(path)
            checkpoint.check_config(self.run.config, path)
            checkpoint.check_data(self.data.about, self.data.description, path)
            checkpoint.check_length(self.schedule.total, path)
            load_state(self.model, checkpoint.part("model"), path)
            copy_tensors(self._step.momentum_buffers, checkpoint.part("momentum"), path)
            copy_tensors({"sum": self._step.loss_sum}, checkpoint.part("loss"), path)
            load_generator_states(self.model, checkpoint.part("generator"))
            position = checkpoint.position
            saved = (position.step, len(position.metrics))
        self.run.set_metrics(position.metrics)
        return position, saved

    def _match_estimates(self) -> None:
        """Take the running estimates of rank 0, in case every rank has its own."""
        if not self.run.config.sync or self.lane.device.type == "cpu":
            self.ranks.take(list(self.model.buffers()))

    def _prepare(self) -> Callable[[], None]:
        """What takes a step."""
        self.lane.join()
        if self.position.step == self.schedule.total:
            return self._step
        with self.lane.enter():
            self._step.forward = self.ranks.parallel(self.model)
        if self.run.config.compile and compiles_on(self.lane.device):
            self._step.compile()
        if self.lane.stream is None or self.ranks.size > 1:
            return self._step
        self._load_chunk()
        return capture(self._step, generators(self.model), self.lane)

    def _train(self, advance: Callable[[], None]) -> Turns:
        """Train until the chunk ends or something else is due, and look at the loss."""
        stop = self._load_chunk()
        while self.position.step < stop:
            count = min(self._turn, stop - self.position.step)
            with self.lane.enter():
                for step in range(self.position.step, self.position.step + count):
                    self._draw_apart(step)
                    self._step.loader.feed()
                    advance()
            self.position.step += count
            if self.position.step == self.schedule.closing:
                self._close()  # before anybody can write a checkpoint of this step
            yield True
        loss_sum = yield from self._loss_sum()
        if not math.isfinite(loss_sum):
            raise Diverged(self._diverged("the training loss is no longer finite"))
        self.train_loss = loss_sum / (self.position.step - self._last_evaluation())
        self._tell()

    def _draw_apart(self, step: int) -> None:
        """Let the dropout of each rank draw its own numbers; they depend on the step alone."""
        if self.ranks.size > 1:
            for i, generator in enumerate(generators(self.model)):
                purpose = f"dropout {i} of rank {self.ranks.rank} at step {step}"
                generator.manual_seed(derive_seed(self.run.config.seed, purpose))

    def _loss_sum(self) -> Generator[bool, None, float]:
        """Sum of the losses since the last evaluation, over all ranks."""
        with self.lane.enter():
            total = self.ranks.total(self._step.loss_sum)
        return float((yield from self.lane.fetch(total)))

    def _load_chunk(self) -> int:
        start = self.position.step
        stop = min(start + self._chunk, self.schedule.next_stop(start))
        with self.lane.enter():
            self._step.loader.load(start, stop)
            self._step.lr.fill_(self.schedule.lr_at(start))
        return stop

    def _evaluation_due(self) -> bool:
        return self.schedule.evaluates_at(self.position.step) and not self._evaluated_here()

    def _evaluated_here(self) -> bool:
        return self._last_evaluation() == self.position.step

    def _last_evaluation(self) -> int:
        metrics = self.position.metrics
        return metrics[-1]["step"] if metrics else 0

    def _evaluate(self) -> Turns:
        usage = ModeUsage(self.model, distinct=bool(self.run.config.sparsity))
        names = self.data.about.domain_names
        test, ranks = self.data.test, self.ranks
        part = ranks.share(len(test))
        with self.lane.enter(), usage.recording():
            self._match_estimates()
            counts = ranks.total(count_errors(self.model, test, len(names), self._dtype, part))
            totals = ranks.total(usage.totals(test.domains[part], len(names), len(test)))
        found = errors((yield from self.lane.fetch(counts)), names)
        modes = usage.describe((yield from self.lane.fetch(totals)), names)
        loss_sum = yield from self._loss_sum()
        step, config = self.position.step, self.run.config
        record = {
            "step": step,
            "samples": step * config.batch,
            "epoch": step * config.batch / len(self.data.train),
            "lr": self.schedule.lr_at(step - 1),
            "train_loss": loss_sum / (step - self._last_evaluation()),
            "test_error": found.top1,
            "top5_error": found.top5,
            "domain_errors": found.by_domain,
            "modes": modes,
            "seconds": round(self.seconds, 3),
        }
        with self.lane.enter():
            self._step.loss_sum.zero_()
        if self.ranks.leads:
            self.run.add_metrics(record)
        self.position.metrics.append(record)
        if self._events:
            self._events.write(record)
        self._tell()

    def _close(self) -> None:
        """Close modes that make little difference; the rest of the training does without them.

        Raises:
            Diverged: The state is not finite.
        """
        self.lane.synchronize()
        self._finite_tensors()
        given = (self._step.loader, self._pruning_batches(), self.run.config.sparsity)
        buffers = self._step.momentum_buffers
        with self.lane.enter():
            self.ranks.first(lambda: close(self.model, *given, buffers))
            self.ranks.take([*self.model.state_dict().values(), *buffers.values()])

    def _pruning_batches(self) -> int:
        count = -(-PRUNING_SAMPLES // self.run.config.batch)
        return min(count, self._chunk, self.schedule.total)

    def _prune(self) -> Generator[bool, None, dict[str, Any]]:
        """Take away modes that are not needed, keep the smaller model, and say how it does."""
        self.lane.synchronize()
        config = self.run.config
        with self.lane.enter():
            given = (self._step.loader, self._pruning_batches(), AT_THE_END * config.sparsity)
            model, report = pruned(self.model, *given)
            names = self.data.about.domain_names
            counts = count_errors(model, self.data.test, len(names), self._dtype)
        found = errors((yield from self.lane.fetch(counts)), names)
        tensors = {f"model.{name}": t.detach().cpu() for name, t in model.state_dict().items()}
        smaller = dataclasses.replace(config, modes=report.num_modes, sparsity=0.0)
        self._checkpoint(smaller, self.position, tensors).save(self.run.pruned)
        return {
            "num_modes": report.num_modes,
            "pruned_error": found.top1,
            "pruned_domain_errors": found.by_domain,
            "pruning": json.loads(report.to_json()),
        }

    def _result(self) -> dict[str, Any]:
        metrics = self.position.metrics
        best = min(metrics, key=lambda record: record["test_error"])
        return {
            "run": self.run.config.run_id,
            "final_error": metrics[-1]["test_error"],
            "top_error": best["test_error"],
            "top_step": best["step"],
            "top5_error": metrics[-1]["top5_error"],
            "domain_errors": metrics[-1]["domain_errors"],
            "steps": self.position.step,
            "samples_seen": self.position.step * self.run.config.batch,
            "seconds": round(self.seconds, 3),
            "train_images": len(self.data.train),
            "classes": len(self.data.about.classes),
            "ranks": self.ranks.size,
            **provenance(self.lane.device),
        }

    def _diverged(self, what: str) -> str:
        step, kept = self.position.step, self._saved[0]
        keeps = f"the checkpoint of step {kept} is kept" if kept >= 0 else "no checkpoint was due"
        return (
            f"{self.run.path.name}: {what} at step {step} (learning rate "
            f"{self.schedule.lr_at(step - 1):g}); {keeps}: try a smaller --lr"
        )

    def _tell(self) -> None:
        if self._listener:
            self._listener(self)
