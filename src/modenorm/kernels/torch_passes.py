"""The four streaming passes on the CPU.

Work goes chunk by chunk through a buffer that stays in cache, so a tensor is read from memory as
often as the pass needs it and temporaries never reach it; where one operator does a pass, that one.
Same four functions as kernels/gpu/passes.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from modenorm.kernels.layout import Planes, as_planes, planes_like, statistics_dtype

__all__ = ["apply", "apply_backward", "moments", "reduce_backward"]

CHUNK = 1 << 18  # elements: 1 MiB of float32, small enough for a core's second-level cache
NEAR = 8.0  # standard deviations, about: how far from zero a channel's mean may lie


def moments(x: Tensor, with_var: bool = True) -> tuple[Tensor, Tensor | None]:
    """Mean and biased variance over the positions, (N, C) each. Reads x once."""
    planes = as_planes(x)
    num_positions = planes.view.shape[planes.axis]
    dtype = statistics_dtype(x)
    if not with_var:
        return planes.view.mean(planes.axis, dtype=dtype), None
    mean = planes.view.new_empty(x.shape[:2], dtype=dtype)
    var = torch.empty_like(mean)
    for part, buffer in _chunks(planes, dtype):
        torch.mean(planes.view[part], planes.axis, dtype=dtype, out=mean[part])
        torch.sub(planes.view[part], planes.rows(mean[part]), out=buffer)
        if planes.axis == 2:
            torch.linalg.vector_norm(buffer, dim=2, out=var[part]).square_()
        else:  # the norm along an axis that is not the last is slow
            torch.sum(buffer.mul_(buffer), 1, out=var[part])
    return mean, var.div_(num_positions)


def apply(x: Tensor, centre: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """y = (x − centre) · scale + shift. Reads x, writes y."""
    planes = as_planes(x)
    y = torch.empty_like(x)
    out = planes_like(y, planes).view
    if _in_one(x, centre, scale):
        _map(planes, centre, scale, shift, out)
        return y
    for part, buffer in _chunks(planes, statistics_dtype(x)):
        torch.sub(planes.view[part], planes.rows(centre[part]), out=buffer)
        buffer.mul_(planes.rows(scale[part]))
        torch.add(buffer, planes.rows(shift[part]), out=out[part])
    return y


def _in_one(x: Tensor, centre: Tensor, scale: Tensor) -> bool:
    """Whether x · scale + constant loses nothing against (x − centre) · scale: no far centres."""
    return x.dtype == centre.dtype and bool((centre * scale).abs().max() <= NEAR)


def _map(planes: Planes, centre: Tensor, scale: Tensor, shift: Tensor, out: Tensor) -> None:
    """The map as one operator, x · scale + (shift − centre · scale)."""
    if planes.axis == 1:
        constant = torch.addcmul(shift, centre, scale, value=-1)
        torch.addcmul(planes.rows(constant), planes.view, planes.rows(scale), out=out)
        return
    weight, bias, mean = (values.reshape(-1) for values in (scale, shift, centre))
    var, unused = torch.ones_like(mean), mean.new_empty(0)
    torch.ops.aten.native_batch_norm.out(
        _as_rows(planes.view), weight, bias, mean, var, False, 0.0, 0.0,
        out=_as_rows(out), save_mean=unused, save_invstd=unused,
    )  # fmt: skip


def _as_rows(view: Tensor) -> Tensor:
    """(N, C, L) as (1, N·C, L): to batch norm's kernels each row is a channel."""
    return view.view(1, -1, view.shape[2])


def reduce_backward(dy: Tensor, x: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_l dy and Σ_l dy · (x − centre), (N, C) each. Reads dy and x."""
    planes = as_planes(x)
    upstream = planes_like(dy, planes).view
    dtype = statistics_dtype(x)
    if planes.axis == 2 and x.dtype == dtype:
        return _row_sums(upstream, planes.view, centre)
    total = planes.view.new_empty(x.shape[:2], dtype=dtype)
    product = torch.empty_like(total)
    for part, buffer in _chunks(planes, dtype):
        torch.sum(upstream[part], planes.axis, dtype=dtype, out=total[part])
        torch.sub(planes.view[part], planes.rows(centre[part]), out=buffer)
        torch.sum(buffer.mul_(upstream[part]), planes.axis, out=product[part])
    return total, product


def _row_sums(dy: Tensor, x: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """The sums, as batch norm's kernel makes them for its bias and weight."""
    mean = centre.reshape(-1)
    _, product, total = torch.ops.aten.native_batch_norm_backward(
        _as_rows(dy),
        _as_rows(x),
        None,
        None,
        None,
        mean,
        torch.ones_like(mean),
        True,
        0.0,
        [False, True, True],
    )
    return total.view_as(centre), product.view_as(centre)


def apply_backward(
    dy: Tensor, x: Tensor, centre: Tensor, scale: Tensor, slope: Tensor, offset: Tensor
) -> Tensor:
    """dx = scale · dy + slope · (x − centre) + offset. Reads dy and x, writes dx."""
    planes = as_planes(x)
    upstream = planes_like(dy, planes).view
    dx = torch.empty_like(x)
    out = planes_like(dx, planes).view
    if _in_one(x, centre, scale):
        _map(planes, centre, slope, offset, out)
        out.addcmul_(upstream, planes.rows(scale))
        return dx
    for part, buffer in _chunks(planes, statistics_dtype(x)):
        torch.sub(planes.view[part], planes.rows(centre[part]), out=buffer)
        buffer.mul_(planes.rows(slope[part])).add_(planes.rows(offset[part]))
        out[part].copy_(buffer.addcmul_(upstream[part], planes.rows(scale[part])))
    return dx


def _chunks(planes: Planes, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Slices of samples, each with a buffer of its shape; the buffer's memory is used again."""
    num_samples = planes.view.shape[0]
    step = max(1, CHUNK // max(1, planes.view[:1].numel()))
    memory = planes.view.new_empty((min(step, num_samples), *planes.view.shape[1:]), dtype=dtype)
    for start in range(0, num_samples, step):
        stop = min(start + step, num_samples)
        yield slice(start, stop), memory[: stop - start]
