"""What the penalty on modes costs: a training step with `ModeSparsity` beside one without it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modenorm.lab.bench.model import model_names, network, training_step
from modenorm.lab.bench.timing import alternating, captured, extra
from modenorm.sparsity import METHODS, ModeSparsity

__all__ = ["SPARSITY_CASES", "SparsityCase", "measure_sparsity"]

SECONDS = 0.5
"""For each step in a round: what the penalty adds is small beside what other programs disturb."""


@dataclass(frozen=True)
class SparsityCase:
    """A training step to measure."""

    model: str
    batch: int
    size: int
    dtype: str
    modes: int = 8
    rounds: int = 3  # each with new networks: where they lie in memory makes a difference
    replays: int = 1  # of a CUDA graph, one after the other


SPARSITY_CASES = (
    SparsityCase("lenet", 128, 32, "float32", rounds=8, replays=20),
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
    count = case.rounds if device == "cuda" else 4 * case.rounds  # other programs disturb more
    rounds = [_round(case, methods, images, labels) for _ in range(count)]
    plain_us = statistics.fmean(plain for plain, _ in rounds)
    for i, method in enumerate(methods):
        found = [more[i] for _, more in rounds]
        within = 2 * statistics.stdev(found) / math.sqrt(len(found))
        yield {
            "model": case.model,
            "batch": case.batch,
            "size": case.size,
            "dtype": case.dtype,
            "norm": f"mn{case.modes}",
            "method": method,
            "rounds": count,
            "plain_us": plain_us,
            "penalty_us": statistics.fmean(found),
            "percent_of_step": 100 * statistics.fmean(found) / plain_us,
            "percent_of_step_within": 100 * within / plain_us,
        }


def _round(
    case: SparsityCase, methods: list[str], images: Tensor, labels: Tensor
) -> tuple[float, list[float]]:
    """Microseconds of the step without a penalty, and what each penalty adds."""
    steps, replays = [], case.replays if images.is_cuda else 1
    for method in (None, *methods):
        model = network(case.model, f"mn{case.modes}", 40).to(images.device)
        penalty = ModeSparsity(model, method=method) if method else None
        step = training_step(model, images, labels, case.dtype, penalty=penalty)
        steps.append(captured(step, replays) if images.is_cuda else step)
    plain, *others = alternating(steps, SECONDS)
    more = [extra(times, plain).value / replays for times in others]
    return statistics.median(plain) / replays, more
