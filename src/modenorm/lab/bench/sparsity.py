"""What the penalty on modes costs: a training step with `ModeSparsity` beside one without it.

The entropy may be had in every 16th step only (`every=16`); switches act on the gates in all steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from modenorm.lab.bench.model import model_names, network, training_step
from modenorm.lab.bench.timing import alternating, captured, extra
from modenorm.sparsity import METHODS, ModeSparsity

__all__ = ["SPARSITY_CASES", "SparsityCase", "measure_sparsity"]

SECONDS = 8.0
"""For each step: what the penalty adds is small beside what other programs disturb."""
EVERY = 16
"""Steps, of which one has the entropy: for a training that wants it to cost next to nothing."""


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
    steps = []
    for method in (None, *methods):
        model = network(case.model, f"mn{case.modes}", 40).to(device)
        penalty = ModeSparsity(model, method=method) if method else None
        step = training_step(model, images, labels, case.dtype, penalty=penalty)
        steps.append(captured(step))
    plain, *others = alternating(steps, SECONDS)
    plain_us = statistics.median(plain)
    for method, times in zip(methods, others, strict=True):
        more = extra(times, plain)
        percent = 100 * more.value / plain_us
        yield {
            "model": case.model,
            "batch": case.batch,
            "size": case.size,
            "dtype": case.dtype,
            "norm": f"mn{case.modes}",
            "method": method,
            "plain_us": plain_us,
            "penalty_us": more.value,
            "percent_of_step": percent,
            "percent_of_step_within": 100 * more.within / plain_us,
            "percent_of_training": percent / (EVERY if method == "entropy" else 1),
        }
