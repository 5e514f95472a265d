"""What the penalty on modes costs: a training step with `ModeSparsity` beside one without it."""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modenorm.gates import LinearGate
from modenorm.lab.bench.model import model_names, network, training_step
from modenorm.lab.bench.timing import Step, alternating, captured, extra
from modenorm.layers import ModeNorm
from modenorm.sparsity import METHODS, ModeSparsity

__all__ = ["SPARSITY_CASES", "SparsityCase", "measure_sparsity"]

CONTROL = "nothing"
"""The step without a penalty once more: what is measured where nothing is added."""
SECONDS = {"cuda": 0.5, "cpu": 4.0}
"""For each step in a round: on a CPU other programs disturb more than what the penalty adds."""


@dataclass(frozen=True)
class SparsityCase:
    """A training step to measure."""

    model: str
    batch: int
    size: int
    dtype: str
    modes: int = 8
    rounds: int = 5  # each with new networks
    replays: int = 1  # of a CUDA graph, one after the other


SPARSITY_CASES = (
    SparsityCase("lenet", 128, 32, "float32", rounds=8, replays=20),
    SparsityCase("resnet18", 256, 224, "bfloat16"),
    SparsityCase("resnet50", 256, 224, "bfloat16", rounds=8),
)


def measure_sparsity(cases: Iterable[SparsityCase], *, device: str) -> Iterator[dict[str, Any]]:
    """One row per case and method, and one for no penalty; networks unknown here are left out."""
    known = ("lenet", *model_names())
    for case in cases:
        if case.model in known:
            yield from _measure(case, device)


def _measure(case: SparsityCase, device: str) -> Iterator[dict[str, Any]]:
    images = torch.randn(case.batch, 3, case.size, case.size, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(0, 40, (case.batch,), device=device)
    rounds = [_round(case, images, labels) for _ in range(case.rounds)]
    plain_us = statistics.fmean(plain for plain, _ in rounds)
    for i, method in enumerate((CONTROL, *METHODS)):
        found = [more[i] for _, more in rounds]
        within = 2 * statistics.stdev(found) / math.sqrt(len(found))
        yield {
            "model": case.model,
            "batch": case.batch,
            "size": case.size,
            "dtype": case.dtype,
            "norm": f"mn{case.modes}",
            "method": method,
            "rounds": case.rounds,
            "plain_us": plain_us,
            "penalty_us": statistics.fmean(found),
            "percent_of_step": 100 * statistics.fmean(found) / plain_us,
            "percent_of_step_within": 100 * within / plain_us,
        }


def _round(case: SparsityCase, images: Tensor, labels: Tensor) -> tuple[float, list[float]]:
    """Microseconds of the step without a penalty, and what none and each penalty add."""
    if images.is_cuda:
        replays, steps, bases = case.replays, _captured_steps(case, images, labels), (0, 0, 0)
    else:
        replays, steps, bases = 1, _steps(case, images, labels), (0, 0, 3)
    times = alternating(steps, SECONDS[images.device.type])
    more = [
        extra(times[i], times[base]).value / replays
        for i, base in zip((1, 2, -1), bases, strict=True)
    ]
    return statistics.median(times[0]) / replays, more


def _captured_steps(case: SparsityCase, images: Tensor, labels: Tensor) -> list[Step]:
    """Without a penalty, the same again, and with each: all of one network, as CUDA graphs."""
    model = network(case.model, f"mn{case.modes}", 40).to(images.device)
    without = training_step(model, images, labels, case.dtype)
    steps = [captured(without, case.replays) for _ in range(2)]
    for method in METHODS:
        penalty = ModeSparsity(model, method=method)
        step = training_step(model, images, labels, case.dtype, penalty=penalty)
        steps.append(captured(step, case.replays))
        penalty.remove()
    return steps


def _steps(case: SparsityCase, images: Tensor, labels: Tensor) -> list[Step]:
    """The same as they are: without, again without, the entropy; without, switches.

    What is compared are steps of one network: another lies elsewhere in memory, and on a CPU that
    makes more difference than a penalty.
    """
    steps: list[Step] = []
    for method in METHODS:
        model = network(case.model, f"mn{case.modes}", 40).to(images.device)
        plain = training_step(model, images, labels, case.dtype)
        penalty = ModeSparsity(model, method=method)
        steps += [partial(_without_penalty, model, plain)] * (1 if steps else 2)
        steps.append(training_step(model, images, labels, case.dtype, penalty=penalty))
    return steps


def _without_penalty(model: nn.Module, step: Step) -> None:
    """A step with nothing on the model; what was on it comes back."""
    layers = [module for module in model.modules() if isinstance(module, ModeNorm)]
    gates = [module for module in model.modules() if isinstance(module, LinearGate)]
    listeners, changes = [a.usage_listener for a in layers], [a.bias_changes for a in gates]
    hooks, model._forward_pre_hooks = model._forward_pre_hooks, OrderedDict()
    for layer in layers:
        layer.usage_listener = None
    for gate in gates:
        gate.bias_changes = ()
    step()
    model._forward_pre_hooks = hooks
    for layer, listener in zip(layers, listeners, strict=True):
        layer.usage_listener = listener
    for gate, change in zip(gates, changes, strict=True):
        gate.bias_changes = change
