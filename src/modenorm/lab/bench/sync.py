"""What statistics over ranks cost: one layer's training step on R processes, shared and not.

Every rank has a batch of the given size, and all ranks step at the same time with and without the
exchange; so the difference is the exchange, waiting for the slowest rank included.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import modenorm

__all__ = ["SYNC_CASES", "exchanged_bytes", "measure_sync"]

SYNC_CASES = (((32, 64, 8, 8), 2), ((32, 512, 2, 2), 2), ((32, 512, 2, 2), 8))
Shape = tuple[int, int, int, int]


def exchanged_bytes(num_channels: int, num_modes: int) -> int:
    """What a rank gives in one step of a layer: K(2C+1) numbers forward and 2KC backward."""
    return 4 * (num_modes * (2 * num_channels + 1) + 2 * num_modes * num_channels)


def measure_sync(
    ranks: int,
    cases: tuple[tuple[Shape, int], ...] = SYNC_CASES,
    *,
    steps: int = 200,
) -> Iterator[dict[str, Any]]:
    """One row per case, from a world of processes that lives as long as this runs."""
    for shape, _ in cases:
        if shape[0] * shape[2] * shape[3] < 2:
            raise ValueError(
                f"shape is {'x'.join(map(str, shape))}; a channel must have more than one value"
            )
    backend = "nccl" if torch.cuda.device_count() >= ranks else "gloo"
    load = os.getloadavg()[0]  # what other programs take of the cores
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        arguments = (ranks, backend, store, cases, steps, results)
        mp.spawn(_rank, arguments, nprocs=ranks)
    for _ in cases:
        yield results.get() | {"load": load, "cores": os.cpu_count()}


def _rank(
    rank: int,
    ranks: int,
    backend: str,
    store: str,
    cases: tuple[tuple[Shape, int], ...],
    steps: int,
    results: Any,
) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(
        backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks
    )
    for shape, num_modes in cases:
        layer = modenorm.ModeNorm2d(shape[1], num_modes, device=device)
        x = torch.randn(shape, device=device, requires_grad=True)
        dy = torch.randn(shape, device=device)
        local = _fastest(lambda: layer(x).backward(dy), steps)  # noqa: B023
        modenorm.convert_sync_modenorm(layer)
        shared = _fastest(lambda: layer(x).backward(dy), steps)  # noqa: B023
        if rank == 0:
            row = {"shape": "x".join(map(str, shape)), "modes": num_modes, "ranks": ranks}
            row |= {"backend": backend, "bytes": exchanged_bytes(shape[1], num_modes)}
            results.put(row | {"local_us": local, "shared_us": shared})
    dist.destroy_process_group()


def _fastest(step: Callable[[], None], steps: int) -> float:
    """Microseconds of the fastest step; all ranks start each together and take the same number."""
    times = []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times) * 1e6
