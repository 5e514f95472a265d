"""Where the models' own kernels, in Triton, can run, and how to switch them off."""

import importlib.util
import os

import torch
from torch import Tensor

from modenorm.buffers import HALF_TYPES
from modenorm.kernels.layout import interpreting

__all__ = ["can_run", "computing_type", "switched_on"]

_DEVICES = ("cuda", "cpu") if interpreting() else ("cuda",)
_TRITON = importlib.util.find_spec("triton") is not None


def switched_on(name: str) -> bool:
    """Whether kernels are wanted: unless the environment has MODENORM_ and their name as 0."""
    return os.environ.get(f"MODENORM_{name}") != "0"


def can_run(x: Tensor) -> bool:
    """Whether there is Triton, and x is on a GPU, or anywhere in Triton's interpreter."""
    return _TRITON and x.device.type in _DEVICES


def computing_type(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """The half type that torch would convolve in; None if it would in another, or refuse."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x.dtype if x.dtype == weight.dtype and x.dtype in HALF_TYPES else None
    dtype, known = torch.get_autocast_dtype(device), (torch.float32, *HALF_TYPES)
    return dtype if dtype in HALF_TYPES and x.dtype in known and weight.dtype in known else None
