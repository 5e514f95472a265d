"""Where the models' own kernels, in Triton, can run, and how to switch them off."""

import importlib.util
import os

from torch import Tensor

from modenorm.kernels.layout import interpreting

__all__ = ["can_run", "switched_on"]

_DEVICES = ("cuda", "cpu") if interpreting() else ("cuda",)
_TRITON = importlib.util.find_spec("triton") is not None


def switched_on(name: str) -> bool:
    """Whether kernels are wanted: unless the environment has MODENORM_ and their name as 0."""
    return os.environ.get(f"MODENORM_{name}") != "0"


def can_run(x: Tensor) -> bool:
    """Whether there is Triton, and x is on a GPU, or anywhere in Triton's interpreter."""
    return _TRITON and x.device.type in _DEVICES
