"""What is written down of a training: where it was at each evaluation, and how it ended."""

from collections.abc import Sequence
from typing import Any

from modenorm.lab.training.config import TrainConfig
from modenorm.lab.training.schedule import Schedule


def place(config: TrainConfig, schedule: Schedule, step: int, num_samples: int) -> dict[str, Any]:
    """Where a training on `num_samples` is after `step` steps."""
    return {
        "step": step,
        "samples": step * config.batch,
        "epoch": step * config.batch / num_samples,
        "lr": schedule.lr_at(step - 1),
    }


def summary(config: TrainConfig, metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the evaluations of a training say of it in the end."""
    best, last = min(metrics, key=lambda record: record["test_error"]), metrics[-1]
    return {
        "run": config.run_id,
        "final_error": last["test_error"],
        "top_error": best["test_error"],
        "top_step": best["step"],
        "top5_error": last["top5_error"],
        "domain_errors": last["domain_errors"],
        "steps": last["step"],
        "samples_seen": last["samples"],
    }
