"""What the fused nodes share: what a plan depends on, and how tensors reach its launches."""

from __future__ import annotations

from torch import Tensor

from modenorm.kernels.gpu.launch import Pointer
from modenorm.kernels.gpu.passes import Geometry
from modenorm.kernels.layout import is_channels_last

__all__ = ["affine_kind", "aligned", "geometry_of", "pointer"]


def geometry_of(x: Tensor) -> Geometry:
    """Size and order of a dense tensor."""
    num_samples, num_channels = x.shape[:2]
    num_positions = x.numel() // (num_samples * num_channels)
    return Geometry(num_samples, num_channels, num_positions, is_channels_last(x), x.dtype)


def affine_kind(weight: Tensor | None, bias: Tensor | None) -> tuple[bool, bool, bool]:
    """Whether there is a weight, a bias, and one per mode."""
    return weight is not None, bias is not None, weight is not None and weight.ndim == 2


def pointer(tensor: Tensor | None, other: Pointer) -> Pointer:
    """A pointer for the kernel, which does not follow it where there is no tensor."""
    return other if tensor is None else tensor


def aligned(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether all addresses are multiples of 16, as direct launches need."""
    bits = 0
    for tensor in tensors:
        if tensor is not None:
            bits |= tensor.data_ptr()
    return bits % 16 == 0
