"""The four streaming passes in C (passes.c), float32. Same functions as kernels/torch_passes.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modenorm.kernels.c.library import call
from modenorm.kernels.layout import Planes, as_planes, planes_like

__all__ = ["apply", "apply_backward", "moments", "reduce_backward"]


def moments(x: Tensor, with_var: bool = True) -> tuple[Tensor, Tensor | None]:
    """Mean and biased variance over the positions, (N, C) each. Reads x once."""
    planes = as_planes(x)
    mean = x.new_empty(x.shape[:2])
    var = torch.empty_like(mean) if with_var else None
    _call("moments", planes, (planes.view,), (mean, var))
    return mean, var


def apply(x: Tensor, centre: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """y = (x − centre) · scale + shift. Reads x, writes y."""
    planes = as_planes(x)
    y = torch.empty_like(x)
    _call("apply", planes, (planes.view, centre, scale, shift), (y,))
    return y


def reduce_backward(dy: Tensor, x: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_l dy and Σ_l dy · (x − centre), (N, C) each. Reads dy and x."""
    planes = as_planes(x)
    upstream = planes_like(dy, planes).view
    total = x.new_empty(x.shape[:2])
    product = torch.empty_like(total)
    _call("reduce_backward", planes, (upstream, planes.view, centre), (total, product))
    return total, product


def apply_backward(
    dy: Tensor, x: Tensor, centre: Tensor, scale: Tensor, slope: Tensor, offset: Tensor
) -> Tensor:
    """dx = scale · dy + slope · (x − centre) + offset. Reads dy and x, writes dx."""
    planes = as_planes(x)
    upstream = planes_like(dy, planes).view
    dx = torch.empty_like(x)
    _call("apply_backward", planes, (upstream, planes.view, centre, scale, slope, offset), (dx,))
    return dx


def _call(
    name: str, planes: Planes, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]
) -> None:
    """Run a pass. Outputs lie as x does."""
    num_samples, *sizes = planes.view.shape
    last = planes.axis == 1
    num_positions, num_channels = sizes if last else reversed(sizes)
    call(name, inputs, outputs, num_samples, num_channels, num_positions, int(last))
