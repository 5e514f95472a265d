"""What plans depend on, and how tensors reach their launches."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from modenorm.kernels.gpu.launch import Pointer
from modenorm.kernels.gpu.passes import Geometry
from modenorm.kernels.layout import is_channels_last
from modenorm.mixing import RunningEstimates

__all__ = [
    "AffineKind",
    "MixingKind",
    "RunningKind",
    "affine_kind",
    "aligned",
    "geometry_of",
    "pointer",
    "running_kind",
]


class AffineKind(NamedTuple):
    """Which affine parameters a norm has; in the order in which kernels take them."""

    weight: bool
    bias: bool
    per_mode: bool = False


class RunningKind(NamedTuple):
    """What happens to running estimates; in the order in which kernels take it."""

    updates: bool = False
    by_usage: bool = False
    counts_batches: bool = False
    sums_shares: bool = False


class MixingKind(NamedTuple):
    """What a mode norm's mixing depends on beside its sizes.

    Attributes:
        eps: Added to the variances.
        affine: Which affine parameters there are.
        has_gate: The linear gate's parameters are given, not the gates.
        momentum: The weight of the batch in the running estimates.
        running: What happens to these.
        has_usage: Whether to write the usage of the modes down.
    """

    eps: float
    affine: AffineKind
    has_gate: bool = False
    momentum: float = 0.0
    running: RunningKind = RunningKind()
    has_usage: bool = False


def geometry_of(x: Tensor) -> Geometry:
    """Size and order of a dense tensor."""
    num_samples, num_channels = x.shape[:2]
    num_positions = x.numel() // (num_samples * num_channels)
    return Geometry(num_samples, num_channels, num_positions, is_channels_last(x), x.dtype)


def affine_kind(weight: Tensor | None, bias: Tensor | None) -> AffineKind:
    """What these parameters are."""
    per_mode = weight is not None and weight.ndim == 2
    return AffineKind(weight is not None, bias is not None, per_mode)


def running_kind(estimates: RunningEstimates | None, by_usage: bool) -> RunningKind:
    """What happens to these estimates in training; nothing if there are none."""
    if estimates is None:
        return RunningKind()
    _, _, tracked, share = estimates
    return RunningKind(True, by_usage, tracked is not None, share is not None)


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
