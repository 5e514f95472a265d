"""Which device and stream launches go to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["current_stream", "is_elsewhere", "on_device"]


def is_elsewhere(x: Tensor) -> bool:
    """Whether x is on another GPU than the current one."""
    return x.is_cuda and x.get_device() != torch._C._cuda_getDevice()


def current_stream(x: Tensor) -> int:
    """The stream that kernels on x's device go to."""
    return torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else 0


def on_device(x: Tensor) -> contextlib.AbstractContextManager[int]:
    """The stream to launch on, with x's device as the current one."""
    if is_elsewhere(x):
        return _on_other_device(x)
    return contextlib.nullcontext(current_stream(x))


@contextlib.contextmanager
def _on_other_device(x: Tensor) -> Iterator[int]:
    with torch.cuda.device(x.get_device()):
        yield current_stream(x)
