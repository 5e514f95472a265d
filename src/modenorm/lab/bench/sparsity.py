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
    replays = case.replays if images.is_cuda else 1
    pairs = (_captured_steps if images.is_cuda else _steps)(case, images, labels)
    steps = list(dict.fromkeys(step for pair in pairs for step in pair))
    times = dict(zip(steps, alternating(steps, SECONDS[images.device.type]), strict=True))
    more = [extra(times[step], times[without]).value / replays for without, step in pairs]
    return statistics.median(times[steps[0]]) / replays, more


def _captured_steps(case: SparsityCase, images: Tensor, labels: Tensor) -> list[tuple[Step, Step]]:
    """A step without and one with nothing, then each penalty: CUDA graphs of one network."""
    model = network(case.model, f"mn{case.modes}", 40).to(images.device)
    plain = training_step(model, images, labels, case.dtype)
    without, again = (captured(plain, case.replays) for _ in range(2))
    pairs = [(without, again)]
    for method in METHODS:
        penalty = ModeSparsity(model, method=method)
        step = training_step(model, images, labels, case.dtype, penalty=penalty)
        pairs.append((without, captured(step, case.replays)))
        penalty.remove()
    return pairs


def _steps(case: SparsityCase, images: Tensor, labels: Tensor) -> list[tuple[Step, Step]]:
    """The same as they are, a network for each penalty, which is taken off for steps without it.

    Steps of different networks are not compared: they lie elsewhere in memory, and on a CPU that
    makes more difference than a penalty.
    """
    pairs: list[tuple[Step, Step]] = []
    for method in METHODS:
        model = network(case.model, f"mn{case.modes}", 40).to(images.device)
        plain = training_step(model, images, labels, case.dtype)
        penalty = ModeSparsity(model, method=method)
        without = partial(_without_penalty, model, plain)
        if not pairs:
            pairs.append((without, partial(_without_penalty, model, plain)))
        step = training_step(model, images, labels, case.dtype, penalty=penalty)
        pairs.append((without, step))
    return pairs


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
