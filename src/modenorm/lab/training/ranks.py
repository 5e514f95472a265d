"""The processes that train one model together: who they are, and how they agree.

torchrun starts them and tells each its rank in the environment; alone, all of this does nothing.
Each rank takes a share of every batch and of the test set. Rank 0 writes files and speaks.
"""

import atexit
import contextlib
import datetime
import gc
import inspect
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

# DDP imports it, and defaults of its functions would hold a group that exists by then
import torch.distributed.nn.functional
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import modenorm
from modenorm.lab.data.loader import derive_seed

TIMEOUT = datetime.timedelta(minutes=10)
"""How long a rank waits for the others before it gives up."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together.

    Attributes:
        rank: Number of this process, from 0.
        size: Number of processes.
    """

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """This rank's part of `count` things; the parts of all ranks are all of them, once."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, the same on all of them."""
        if self.size == 1:
            return tensor
        total = tensor.clone()
        distributed.all_reduce(total)
        return total

    def any(self, *flags: bool) -> list[bool]:
        """For each flag, whether it is set on any rank."""
        if self.size == 1:
            return list(flags)
        return [bool(count) for count in self.total(torch.tensor(flags, dtype=torch.int64))]

    def take(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors by those of rank 0."""
        if self.size > 1:
            for tensor in tensors:
                distributed.broadcast(tensor, 0)

    def draw_apart(self, generators: Iterable[torch.Generator], seed: int, step: int) -> None:
        """Let the dropout of each rank draw its own numbers; they depend on the step alone."""
        if self.size > 1:
            for i, generator in enumerate(generators):
                purpose = f"dropout {i} of rank {self.rank} at step {step}"
                generator.manual_seed(derive_seed(seed, purpose))

    def first(self, call: Callable[[], Value]) -> Value:
        """Let rank 0 call, and return its value on every rank.

        Raises:
            ValueError: It failed on rank 0; the error is raised there, and told on the others.
        """
        if self.size == 1:
            return call()
        value, failure = _attempt(call) if self.leads else (None, None)
        box = [value, failure and str(failure)]
        distributed.broadcast_object_list(box, 0)
        if failure is not None:
            raise failure
        if box[1] is not None:
            raise ValueError(f"rank 0 failed: {box[1]}")
        return box[0]  # type: ignore[return-value]

    def each(self, call: Callable[[], Value]) -> Value:
        """Let every rank call, and go on only if none of them failed.

        Raises:
            ValueError: It failed on a rank; the error is raised there, and told on the others.
        """
        value, failure = _attempt(call)
        failures = self._gather(failure and str(failure))
        if failure is not None:
            raise failure
        for rank, text in enumerate(failures):
            if text is not None:
                raise ValueError(f"rank {rank} failed: {text}")
        return value  # type: ignore[return-value]

    def compare(self, what: str, value: str) -> None:
        """Require that something is the same on all ranks.

        Raises:
            ValueError: It is not; raised on every rank.
        """
        values = self._gather(value)
        if len(set(values)) > 1:
            listed = "; ".join(f"rank {rank} has {each}" for rank, each in enumerate(values))
            raise ValueError(f"{what} must be the same on every rank, but {listed}")

    def _gather(self, value: Value) -> list[Value]:
        values: list[Value] = [value] * self.size
        if self.size > 1:
            distributed.all_gather_object(values, value)
        return values

    def synchronise(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Let batch norms and mode norms take their statistics over the batches of all ranks.

        torch has no synchronised batch norm on the CPU: there, batch norms keep those of each rank.
        """
        if self.size == 1:
            return model
        if device.type == "cuda":
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return modenorm.convert_sync_modenorm(model)

    def parallel(self, model: nn.Module) -> nn.Module:
        """The model, with gradients averaged over ranks after every backward."""
        if self.size == 1:
            return model
        # buffers stay as they are; torch 2.13 renamed the option
        known = inspect.signature(DistributedDataParallel).parameters
        name = next(n for n in ("forward_sync_buffers", "broadcast_buffers") if n in known)
        option: dict[str, Any] = {name: False}
        return DistributedDataParallel(model, init_sync=False, **option)


def _attempt(call: Callable[[], Value]) -> tuple[Value | None, Exception | None]:
    try:
        return call(), None
    except (ValueError, OSError) as error:
        return None, error


def started_ranks() -> Ranks:
    """The rank that torchrun gave to this process; the only one if it did not start it."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    return Ranks(int(os.environ["RANK"]), size) if size > 1 else Ranks()


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """Meet the other ranks, by nccl on GPUs and gloo on CPUs; they part when the process ends.

    Raises:
        ConnectionError: Another rank has died or gone; torchrun can start all of them again.
        ValueError: This is a worker of a rank, which imports the program that it belongs to.
    """
    ranks = started_ranks()
    if ranks.size > 1 and not distributed.is_initialized():
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise ValueError(
                "a worker that decodes images imported the program and thereby began to train: put "
                'what the program does under `if __name__ == "__main__":`'
            )
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        distributed.init_process_group(
            backend, timeout=TIMEOUT, store=_store(), rank=ranks.rank, world_size=ranks.size
        )
        atexit.register(_part)
    try:
        yield ranks
    except RuntimeError as error:
        if ranks.size == 1 or not _is_loss(error):
            raise
        atexit.unregister(_part)  # there is nobody to part from
        raise ConnectionError(
            f"rank {ranks.rank} lost the others, which have stopped or cannot be reached "
            f"({str(error).splitlines()[0]}): the training goes on from its last checkpoint when "
            "all ranks are started again, as torchrun --max-restarts does"
        ) from error


def _part() -> None:
    """Leave the group and end its threads, before Python does.

    When a collective is done and others know it, a thread of gloo's drops its tensors, for which it
    may have to wait for its turn to run Python. If Python ends meanwhile, the process is aborted.
    The threads end with the last reference to the group; models have some, and are in cycles.
    """
    gc.collect()
    if distributed.is_initialized():  # the program may have left it already
        distributed.destroy_process_group()


def _store() -> distributed.Store:
    """Where ranks find each other's addresses, apart from those of killed ranks.

    torchrun keeps one store for all restarts. A rank that finds an address of the time before waits
    in vain, so each attempt has its own names. With several machines their counts of restarts may
    differ; there torchrun makes new stores if TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    """
    store, _, _ = next(distributed.rendezvous("env://", timeout=TIMEOUT))
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        return store
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return distributed.PrefixStore(f"attempt {attempt}", store)


def _is_loss(error: RuntimeError) -> bool:
    words = ("gloo", "NCCL", "Connection closed", "Connection reset", "which didn't come")
    return isinstance(error, distributed.DistError) or any(word in str(error) for word in words)
