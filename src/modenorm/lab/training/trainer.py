"""One training from its first step, or its last checkpoint, to its result.

A training is a coroutine: it gives up its turn after queueing some steps and while it waits for
the device, so that one thread can keep many of them going (see runner.py). Losses, evaluations and
checkpoints are sent to the host and looked at later (see lane.py). Several ranks may train one
model together (see ranks.py): then each of them runs this with its part of every batch, and they
agree on everything at the end of every chunk of steps.
"""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Generator
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from modenorm.lab.models import generator_states, generators, load_generator_states
from modenorm.lab.provenance import provenance
from modenorm.lab.training.checkpoint import Checkpoint, Position, copy_tensors, load_state
from modenorm.lab.training.closing import AT_THE_END, PRUNING_SAMPLES, close, pruned
from modenorm.lab.training.config import TrainConfig
from modenorm.lab.training.evaluate import Evaluation, count_errors, errors
from modenorm.lab.training.events import Events
from modenorm.lab.training.interrupts import Interruption
from modenorm.lab.training.lane import Inbox, Lane, Turns
from modenorm.lab.training.outcome import place, summary
from modenorm.lab.training.pace import Pace
from modenorm.lab.training.ranks import Ranks
from modenorm.lab.training.runs import Run
from modenorm.lab.training.schedule import Schedule
from modenorm.lab.training.sources import TrainingData
from modenorm.lab.training.step import Advance, Step, capture, is_compiled

SAVING_SHARE = 0.002
"""Of the time: checkpoints at evaluations may take as much, also those of others beside it."""


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
        interrupted: Interruption | None = None,
    ) -> None:
        config = run.config
        self.run, self.data, self.lane = run, data, lane
        self.ranks = ranks = ranks or Ranks()
        self._interrupted = interrupted or Interruption()
        self.schedule = Schedule.of(config, len(data.train))
        self.position = Position()
        self.train_loss = math.nan
        self._checkpoint_every, self._listener = checkpoint_every, listener
        self._compiled = is_compiled(config, lane.device)
        self._pace = Pace.of(config, lane.device.type, ranks, compiled=self._compiled)
        self._inbox = Inbox(lane, self._pace.room)
        self._save_seconds = 0.0  # what the last checkpoint took
        self._evaluated = 0  # the step of the last evaluation
        self._sent = self._saved = (-1, 0)  # step and last evaluation of a checkpoint

        self._step = Step.of(
            config, data, self.schedule.total, self._pace.chunk, lane.device, ranks
        )
        self.model, self._dtype = self._step.model, self._step.dtype
        given = (data.test, data.about.domain_names, self._dtype, lane, ranks)
        self._evaluation = Evaluation(
            self.model, *given, distinct=bool(config.sparsity), compile=self._compiled
        )
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
            for end in (self._inbox.forget, self.lane.synchronize, self._step.loader.close):
                stack.callback(end)  # memory of queued work must not be given away
            self._resume()
            if self._tensorboard and self.ranks.leads:
                self._events = Events(self.run.path, self.position.metrics)
                stack.callback(self._events.close)
            advance = self._prepare()
            while True:
                evaluated = self._evaluation_due()
                if evaluated:
                    self._evaluate()
                yield from self._inbox.opened()
                ended = self.position.step == self.schedule.total
                if ended or self._checkpoint_due(evaluated):
                    self._send_checkpoint()
                yield from self._inbox.opened(to_the_last=ended)
                if ended:
                    break
                yield from self._train(advance)
            if self.ranks.leads:
                smaller = (yield from self._prune()) if self.run.config.sparsity else {}
                self.run.set_metrics(self.position.metrics)
                self.run.finish(self._result() | smaller)

    def queue_far_ahead(self, far: bool) -> None:
        """Let the next turns queue as much as a stream takes, or no more than usual."""
        self._inbox.room = self._pace.far if far else self._pace.room

    def leave_out(self, seconds: float) -> None:
        """Don't count a time in which this training had no turns."""
        self._began += seconds

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
            raise self._interrupted.reason
        return due

    def save(self) -> None:
        """Write a checkpoint of this moment, unless there is one.

        Raises:
            Diverged: The state is not finite; the last checkpoint is kept.
            OSError: It could not be written; the last checkpoint is kept.
        """
        self._send_checkpoint()
        self._inbox.open_all()

    def _send_checkpoint(self) -> None:
        mark = (self.position.step, self._evaluated)
        if self._sent == mark:
            return
        self._match_estimates()
        with self.lane.enter():
            tensors = {name: tensor.detach() for name, tensor in self._tensors().items()}

        def write(arrived: list[Tensor]) -> None:
            self._write_checkpoint(mark, dict(zip(tensors, arrived, strict=True)))

        self._inbox.expect(list(tensors.values()), write)
        self._sent, self._saved_at = mark, time.monotonic()

    def _write_checkpoint(self, mark: tuple[int, int], tensors: dict[str, Tensor]) -> None:
        began = time.monotonic()
        self._check_finite(tensors, mark[0])
        position = replace(self.position, step=mark[0], seconds=self.seconds)
        checkpoint = self._checkpoint(self.run.config, position, tensors)
        if self.ranks.leads:
            checkpoint.save(self.run.checkpoint)
        self._saved, self._save_seconds = mark, time.monotonic() - began

    def _checkpoint(
        self, config: TrainConfig, position: Position, tensors: dict[str, Tensor]
    ) -> Checkpoint:
        return Checkpoint(config, self.data.about, position, tensors, self.data.description)

    def _check_finite(self, tensors: dict[str, Tensor], step: int) -> None:
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise Diverged(self._diverged(f"{name} is no longer finite", step))

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
        self._sent, self._evaluated = self._saved, self._saved[1]
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
            saved = (position.step, position.metrics[-1]["step"] if position.metrics else 0)
        self.run.set_metrics(position.metrics)
        return position, saved

    def _match_estimates(self) -> None:
        """Take the running estimates of rank 0, in case every rank has its own."""
        if not self.run.config.sync or self.lane.device.type == "cpu":
            self.ranks.take(list(self.model.buffers()))

    def _prepare(self) -> Advance:
        """What takes steps."""
        self.lane.join()
        if self.position.step == self.schedule.total:
            return self._step.take_one
        with self.lane.enter():
            self._step.forward = self.ranks.parallel(self.model)
        if self._compiled:
            self._step.compile()
        if self.lane.stream is None or self.ranks.size > 1:
            return self._step.take_one
        self._load_chunk()
        advance = capture(self._step, generators(self.model), self.lane, self._pace.together)
        if self._compiled:
            self._evaluation.queue()  # so that it is traced now, not in the midst of others
        return advance

    def _train(self, advance: Advance) -> Turns:
        """Train until the chunk ends or something else is due, and ask for the loss."""
        stop, drawing = self._load_chunk(), generators(self.model)
        while self.position.step < stop:
            turn = min(self.position.step + self._pace.turn, stop)
            with self.lane.enter():
                while self.position.step < turn:
                    self.ranks.draw_apart(drawing, self.run.config.seed, self.position.step)
                    self._step.loader.feed()
                    self.position.step += advance(turn - self.position.step)
            if self.position.step == self.schedule.closing:
                self._close()  # before anybody can write a checkpoint of this step
            yield True
        self._send_loss()

    def _send_loss(self) -> None:
        step, steps = self.position.step, self.position.step - self._evaluated

        def look(arrived: list[Tensor]) -> None:
            loss_sum = float(arrived[0])
            if not math.isfinite(loss_sum):
                raise Diverged(self._diverged("the training loss is no longer finite", step))
            self.train_loss = loss_sum / steps
            self._tell()

        with self.lane.enter():
            self._inbox.expect([self.ranks.total(self._step.loss_sum)], look)

    def _load_chunk(self) -> int:
        start = self.position.step
        stop = min(start + self._pace.chunk, self.schedule.next_stop(start))
        with self.lane.enter():
            self._step.loader.load(start, stop)
            self._step.lr.fill_(self.schedule.lr_at(start))
        return stop

    def _evaluation_due(self) -> bool:
        step = self.position.step
        return self.schedule.evaluates_at(step) and self._evaluated != step

    def _evaluate(self) -> None:
        step, steps = self.position.step, self.position.step - self._evaluated

        def note(arrived: list[Tensor]) -> None:
            counts, totals, loss_sum = arrived
            self._note(step, counts, totals, float(loss_sum) / steps)

        with self.lane.enter():
            self._match_estimates()
            found = self._evaluation.queue()
            self._inbox.expect([*found, self.ranks.total(self._step.loss_sum)], note)
            self._step.loss_sum.zero_()
        self._evaluated = step

    def _note(self, step: int, counts: Tensor, totals: Tensor, train_loss: float) -> None:
        names = self.data.about.domain_names
        record = {
            **place(self.run.config, self.schedule, step, len(self.data.train)),
            "train_loss": train_loss,
            **errors(counts, names).record(),
            "modes": self._evaluation.usage.describe(totals, names),
            "seconds": round(self.seconds, 3),
        }
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
        self._check_finite(self._tensors(), self.position.step)
        given = (self._step.loader, self._pruning_batches(), self.run.config.sparsity)
        buffers = self._step.momentum_buffers
        with self.lane.enter():
            self.ranks.first(lambda: close(self.model, *given, buffers))
            self.ranks.take([*self.model.state_dict().values(), *buffers.values()])

    def _pruning_batches(self) -> int:
        count = -(-PRUNING_SAMPLES // self.run.config.batch)
        return min(count, self._pace.chunk, self.schedule.total)

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
        return {
            **summary(self.run.config, self.position.metrics),
            "seconds": round(self.seconds, 3),
            "train_images": len(self.data.train),
            "classes": len(self.data.about.classes),
            "ranks": self.ranks.size,
            **provenance(self.lane.device),
        }

    def _diverged(self, what: str, step: int) -> str:
        kept = self._saved[0]
        keeps = f"the checkpoint of step {kept} is kept" if kept >= 0 else "no checkpoint was due"
        return (
            f"{self.run.path.name}: {what} at step {step} (learning rate "
            f"{self.schedule.lr_at(step - 1):g}); {keeps}: try a smaller --lr"
        )

    def _tell(self) -> None:
        if self._listener:
            self._listener(self)
