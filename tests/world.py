"""Real processes with gloo between them, that run one test after the other, each on its part."""

from __future__ import annotations

import datetime
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

PRELOADED = ["modenorm", "pytest", "torch.distributed.fsdp", "torch._dynamo"]  # once for all ranks
SIZE = 3  # of the worlds that tests are given
SECONDS = 60  # for anything that is expected to end


def whole_batch(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """A batch and an upstream gradient, the same on all ranks."""
    return 2 * torch.randn(shape).to(dtype) + 3, torch.randn(shape).to(dtype)


def of_rank(rank: int, parts: tuple[int, ...], tensor: Tensor) -> Tensor:
    part = tensor.split(parts)[rank]
    return part.clone(memory_format=torch.preserve_format)


class World:
    """R processes, each of which runs the functions that it is sent and sends their results."""

    def __init__(self, size: int, store: str) -> None:
        self.size = size
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, store, there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of function(rank, *arguments) on every rank; exceptions are results too."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        results = []
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(SECONDS), f"rank {rank} hangs in {function.__name__}"
            results.append(pipe.recv())
        return results

    def check(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results, where no exception is expected."""
        results = self.run(function, *arguments)
        failed = [r for r in enumerate(results) if isinstance(r[1], BaseException)]
        text = "\n\n".join(f"rank {rank}: {error.trace}" for rank, error in failed)
        assert not failed, text
        return results

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _serve(rank: int, size: int, store: str, pipe: Any) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=SECONDS / 10),
    )
    while (task := pipe.recv()) is not None:
        function, arguments = task
        torch.manual_seed(0)
        try:
            result = function(rank, *arguments)
        except BaseException as error:
            error.trace = traceback.format_exc()
            result = error
        pipe.send(result)
    dist.destroy_process_group()
