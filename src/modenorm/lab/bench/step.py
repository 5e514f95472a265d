"""Where the time of a training step goes: its kernels on a GPU, its operators on a CPU.

The step is the one of `modenorm train`: compiled where the recipe says so, captured as a CUDA
graph. A kernel that is launched early, to be there when the one before it ends, counts from then
on, so that kernels may add up to more than the step.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from modenorm.lab.bench.train import TrainCase
from modenorm.lab.models import generators
from modenorm.lab.training.lane import Lane
from modenorm.lab.training.ranks import Ranks
from modenorm.lab.training.sources import SharedData
from modenorm.lab.training.step import Step, capture, compiles_on

__all__ = ["measure_step"]

WARM_UP_STEPS = 5


def measure_step(
    case: TrainCase, norm: str, *, steps: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    """One row per kernel or operator, those that take longest first.

    Args:
        case: What to train, alone.
        norm: Such as bn or mn2.
        steps: Steps to look at.
        device: Where to train.
    """
    take = _step(case, norm, steps, device)
    alone = []
    for _ in range(WARM_UP_STEPS + steps):
        began = time.perf_counter()
        take()
        alone.append(1e6 * (time.perf_counter() - began))
    kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[kind], acc_events=True) as found:
        for _ in range(steps):
            take()
    microseconds, launches = Counter[str](), Counter[str]()
    for event in found.events() or ():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if on_device == (device.type == "cuda"):
            took = event.device_time if on_device else event.self_cpu_time_total
            microseconds[event.name] += took / steps
            launches[event.name] += 1
    for name, took in microseconds.most_common():
        yield {
            "model": case.settings["model"],
            "batch": case.settings["batch"],
            "norm": norm,
            "step_us": statistics.median(alone[WARM_UP_STEPS:]),
            "kernel": name,
            "kernel_us": took,
            "launches": launches[name] / steps,
        }


def _step(case: TrainCase, norm: str, steps: int, device: torch.device) -> Callable[[], None]:
    """What takes a step, and waits for it."""
    total = WARM_UP_STEPS + 2 * steps
    config = case.config(norm, total)
    data = SharedData(device, None, case.data()).get(config)
    step, lane = Step.of(config, data, total, total, device, Ranks()), Lane(device)
    lane.join()
    if config.compile and compiles_on(device):
        step.compile()
    with lane.enter():
        step.loader.load(0, total)
        step.lr.fill_(config.lr)
    captures = lane.stream is not None
    advance = capture(step, generators(step.model), lane) if captures else step.take_one

    def take() -> None:
        with lane.enter():
            advance(1)
        lane.synchronize()

    return take
