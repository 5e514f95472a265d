"""Where the time of a training step goes: its kernels on a GPU, its operators on a CPU.

The step is the one of `modenorm train`: compiled where the recipe says so, captured as a CUDA
graph. A kernel that is launched early, to be there when the one before it ends, counts from then
on, and kernels of trainings side by side share the GPU, so that they may add up to more than the
step.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from modenorm.lab.bench.train import TrainCase
from modenorm.lab.models import generators
from modenorm.lab.training.config import TrainConfig
from modenorm.lab.training.lane import Lane
from modenorm.lab.training.ranks import Ranks
from modenorm.lab.training.sources import SharedData, TrainingData
from modenorm.lab.training.step import Advance, Step, capture, is_compiled

__all__ = ["measure_step"]

WARM_UP_STEPS = 5


def measure_step(
    case: TrainCase, norm: str, *, steps: int, device: torch.device, parallel: int = 1
) -> Iterator[dict[str, Any]]:
    """One row per kernel or operator, those that take longest first.

    Args:
        case: What to train.
        norm: Such as bn or mn2.
        steps: Steps of every training to look at.
        device: Where to train.
        parallel: Trainings side by side; a step's time is its share of theirs.
    """
    take = _steps(case, norm, WARM_UP_STEPS + 2 * steps, parallel, device)
    take(WARM_UP_STEPS)
    began, count = time.perf_counter(), steps * parallel
    take(steps)
    step_us = 1e6 * (time.perf_counter() - began) / count
    kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[kind], acc_events=True) as found:
        take(steps)
    microseconds, launches = Counter[str](), Counter[str]()
    for event in found.events() or ():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if on_device == (device.type == "cuda"):
            took = event.device_time if on_device else event.self_cpu_time_total
            microseconds[event.name] += took / count
            launches[event.name] += 1
    for name, took in microseconds.most_common():
        yield {
            "model": case.settings["model"],
            "batch": case.settings["batch"],
            "norm": norm,
            "parallel": parallel,
            "step_us": step_us,
            "kernel": name,
            "kernel_us": took,
            "launches": launches[name] / count,
        }


def _steps(
    case: TrainCase, norm: str, total: int, parallel: int, device: torch.device
) -> Callable[[int], None]:
    """What lets every training take some steps, and waits for them."""
    config = case.config(norm, total)
    data = SharedData(device, None, case.data()).get(config)
    trainings = [_training(config, data, total, device) for _ in range(parallel)]

    def take(steps: int) -> None:
        for _ in range(steps):
            for lane, advance in trainings:
                with lane.enter():
                    advance(1)
        for lane, _ in trainings:
            lane.synchronize()

    return take


def _training(
    config: TrainConfig, data: TrainingData, total: int, device: torch.device
) -> tuple[Lane, Advance]:
    """Where a training queues its work, and what takes its steps."""
    step, lane = Step.of(config, data, total, total, device, Ranks()), Lane(device)
    lane.join()
    if is_compiled(config, device):
        step.compile()
    with lane.enter():
        step.loader.load(0, total)
        step.lr.fill_(config.lr)
    captures = lane.stream is not None
    return lane, capture(step, generators(step.model), lane) if captures else step.take_one
