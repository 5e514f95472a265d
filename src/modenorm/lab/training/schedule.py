"""When the learning rate drops, when the test set is looked at, and when a training ends."""

from bisect import bisect_right
from dataclasses import dataclass

from modenorm.lab.training.config import TrainConfig

CLOSING = 0.7
"""Part of the training before modes are closed; the rest of it makes up for what that changed."""
BEFORE_DROP = 0.9
"""Part of the first learning rate's time before they are closed: a lower one makes up for less."""


@dataclass(frozen=True)
class Schedule:
    """A configuration's distances, counted in steps.

    Attributes:
        total: Number of steps; the samples seen never exceed what was asked for.
        milestones: Steps before which the learning rate drops.
        evaluations: Numbers of finished steps after which the test set is looked at.
        closing: Number of finished steps after which modes that make little difference are closed,
            if their number is looked for; else 0.
    """

    lr: float
    factor: float
    total: int
    milestones: tuple[int, ...]
    evaluations: tuple[int, ...]
    closing: int = 0

    @classmethod
    def of(cls, config: TrainConfig, num_samples: int) -> "Schedule":
        """Count the distances of `config` in steps over a set of `num_samples`."""
        samples = {"samples": 1, "epochs": num_samples, "updates": config.batch}[config.unit]
        total = config.total * samples // config.batch
        if total < 1:
            raise ValueError(
                f"total is {config.total} {config.unit}, less than one batch of {config.batch}: "
                "train longer or make the batch smaller"
            )

        def steps_until(distance: int) -> int:
            return -(-distance * samples // config.batch)

        points = range(config.eval_every, config.total, config.eval_every)
        evaluations = {min(steps_until(point), total) for point in points} | {total}
        milestones = tuple(steps_until(point) for point in config.milestones)
        closing = min([CLOSING * total, *(BEFORE_DROP * step for step in milestones)])
        return cls(
            lr=config.lr,
            factor=config.factor,
            total=total,
            milestones=milestones,
            evaluations=tuple(sorted(evaluations)),
            closing=max(1, int(closing)) if config.sparsity else 0,
        )

    def lr_at(self, step: int) -> float:
        """The learning rate of the step that follows `step` finished ones."""
        return self.lr * self.factor ** bisect_right(self.milestones, step)

    def evaluates_at(self, step: int) -> bool:
        """Whether the test set is looked at after `step` finished steps."""
        return step in self.evaluations

    def next_stop(self, step: int) -> int:
        """The next step at which something other than plain training happens."""
        return min(s for s in (*self.milestones, *self.evaluations, self.closing) if s > step)
