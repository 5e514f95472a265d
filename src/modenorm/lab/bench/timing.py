"""How long a step takes: device time by CUDA-graph replay, wall time of an eager call, memory.

And by how much two steps differ, when the difference is smaller than what a single time varies by.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

__all__ = [
    "Difference",
    "Step",
    "alternating",
    "captured",
    "device_time",
    "extra",
    "peak_memory",
    "wall_time",
]

Step = Callable[[], object]


def device_time(step: Step, seconds: float = 0.08) -> float:
    """Microseconds of device time, median over rounds of CUDA-graph replays; wall time on a CPU."""
    if not torch.cuda.is_available():
        return wall_time(step, seconds * 10)
    graph = _capture(step)
    graph.replay()
    once = _events(graph, 3)
    replays = max(3, min(200, int(seconds * 1e6 / 5 / max(once, 1))))
    times = [_events(graph, replays) for _ in range(5)]
    del graph
    return statistics.median(times)


def _capture(step: Step) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def captured(step: Step, replays: int = 1) -> Step:
    """The step as a CUDA graph, which costs the host nothing, replayed so many times in a call."""
    return partial(_replay, _capture(step), step, replays)


def _replay(graph: torch.cuda.CUDAGraph, _held: Step, replays: int) -> None:
    """Replay a graph; whoever holds this holds the step too, and so the tensors of the graph."""
    for _ in range(replays):
        graph.replay()


def _events(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(replays):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e3 / replays


def wall_time(step: Step, seconds: float = 0.2) -> float:
    """Microseconds of wall time of one eager call, the fastest of rounds that run back to back."""
    for _ in range(3):
        step()
    _synchronize()
    start = time.perf_counter()
    step()
    _synchronize()
    once = time.perf_counter() - start
    calls = max(1, min(100, int(seconds / 8 / max(once, 1e-6))))
    times = []
    for _ in range(8):
        start = time.perf_counter()
        for _ in range(calls):
            step()
        _synchronize()
        times.append((time.perf_counter() - start) / calls)
    return min(times) * 1e6


class Difference(NamedTuple):
    """A median difference; the true one lies `within` this distance in 19 of 20 measurements."""

    value: float
    within: float


def alternating(
    steps: Sequence[Step], seconds: float = 3.0, turns: int = 1000
) -> list[list[float]]:
    """Microseconds of wall time of each step in every turn, in turns of alternating order.

    Drifts meet all steps alike, and none always follows the same other one. Python's garbage
    collector waits, since it would meet whichever step fills its quota.

    Args:
        steps: What to time; each is done when the device has nothing left to do.
        seconds: For each step: turns end when all of it is spent, but not before the third.
        turns: At most.
    """
    times: list[list[float]] = [[] for _ in steps]
    order = list(zip(steps, times, strict=True))
    for step in steps:
        wall_once(step)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        began = time.perf_counter()
        while len(times[0]) < turns:
            for step, found in order:
                found.append(wall_once(step))
            order.reverse()
            if len(times[0]) >= 3 and time.perf_counter() - began > seconds * len(steps):
                break
    finally:
        if collecting:
            gc.enable()
    return times


def extra(times: Sequence[float], base: Sequence[float]) -> Difference:
    """What a step costs beyond another one of the same turns: the median over the turns."""
    differences = sorted(a - b for a, b in zip(times, base, strict=True))
    count = len(differences)
    away = math.ceil(0.98 * math.sqrt(count))  # ranks around the median, by the binomial law
    low, high = max(0, count // 2 - away), min(count - 1, (count - 1) // 2 + away)
    return Difference(statistics.median(differences), (differences[high] - differences[low]) / 2)


def wall_once(step: Step) -> float:
    """Microseconds of wall time of one call, until the device is done."""
    start = time.perf_counter()
    step()
    _synchronize()
    return 1e6 * (time.perf_counter() - start)


def peak_memory(step: Step) -> int | None:
    """Bytes that a step needs beyond what is allocated before it; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
