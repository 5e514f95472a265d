"""How long a step takes: device time by CUDA-graph replay, wall time of an eager call, memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

__all__ = ["device_time", "peak_memory", "wall_time"]

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
