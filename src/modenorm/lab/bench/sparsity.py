"""What the penalty on modes costs: a training step with `ModeSparsity` beside one without it.

The training has the entropy in every 16th step only, and only in a part of its length; switches act
on the gates in all steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from modenorm.lab.bench.model import model_names, network, training_step
from modenorm.lab.bench.timing import device_time
from modenorm.lab.training.schedule import PENALTY_EVERY
from modenorm.sparsity import METHODS, ModeSparsity

__all__ = ["SPARSITY_CASES", "SparsityCase", "measure_sparsity"]

TURNS = 5
"""How often each step is timed; the fastest counts, as programs of others disturb it."""


@dataclass(frozen=True)
class SparsityCase:
    """A training step to measure."""

    model: str
    batch: int
    size: int
    dtype: str
    modes: int = 8


SPARSITY_CASES = (
    SparsityCase("lenet", 128, 32, "float32"),
    SparsityCase("resnet18", 256, 224, "bfloat16"),
    SparsityCase("resnet50", 256, 224, "bfloat16"),
)


def measure_sparsity(
    cases: Iterable[SparsityCase], methods: Iterable[str] = METHODS, *, device: str
) -> Iterator[dict[str, Any]]:
    """One row per case and method; networks that can't be built here are left out."""
    known, methods = ("lenet", *model_names()), list(methods)
    for case in cases:
        if case.model in known:
            yield from _measure(case, methods, device)


def _measure(case: SparsityCase, methods: list[str], device: str) -> Iterator[dict[str, Any]]:
    images = torch.randn(case.batch, 3, case.size, case.size, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(0, 40, (case.batch,), device=device)
    steps = {}
    for method in (None, *methods):
        model = network(case.model, f"mn{case.modes}", 40).to(device)
        penalty = ModeSparsity(model, method=method) if method else None
        steps[method] = training_step(model, images, labels, case.dtype, penalty=penalty)
    times = dict.fromkeys(steps, float("inf"))
    for _ in range(TURNS):
        for method, step in steps.items():
            times[method] = min(times[method], device_time(step, 0.04))
    for method in methods:
        percent = 100 * (times[method] / times[None] - 1)
        yield {
            "model": case.model,
            "batch": case.batch,
            "size": case.size,
            "dtype": case.dtype,
            "norm": f"mn{case.modes}",
            "method": method,
            "plain_us": times[None],
            "penalty_us": times[method],
            "percent_of_step": percent,
            "percent_of_training": percent / (PENALTY_EVERY if method == "entropy" else 1),
        }
