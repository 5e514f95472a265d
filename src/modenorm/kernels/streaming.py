"""Two autograd nodes around the mixing: moments before it, the affine map after it.

    x ──Moments──► mean, var ──mixing (any differentiable code)──► scale, shift ──Affine──► y
    └───────────────────────── x itself, handed on ───────────────────────────────┘

Backward, Affine reduces dy to (N, C) sums and hands dy on unscaled; Moments, which runs last,
knows everything and writes dx = scale·dy + slope·(x − mean) + offset in one pass. So the pair costs
eight reads and writes of the tensor, whatever the mixing is. The gradient that flows between the
two is private to them, and a double or vectorised backward switches to true ones (`_Link.exact`).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from modenorm.kernels import layout, plain, torch_passes
from modenorm.kernels.c import passes as c_passes
from modenorm.kernels.choice import choose_kernels

__all__ = ["affine", "moments"]


class _Link:
    """What Affine tells Moments: the scale that dy was not yet multiplied by."""

    def __init__(self) -> None:
        self.scale: Tensor | None = None
        self.exact = False  # True: dy was multiplied already


def moments(x: Tensor, with_var: bool = True) -> tuple[Tensor, Tensor | None, Tensor, _Link]:
    """Mean and variance, (N, C); x and a link, to be handed to `affine` and to nothing else."""
    link = _Link()
    mean, var, handed = _Moments.apply(layout.as_dense(x), link, with_var)
    return mean, var, handed, link


def affine(
    x: Tensor, centre: Tensor, scale: Tensor, shift: Tensor, link: _Link | None = None
) -> Tensor:
    """y = (x − centre) · scale + shift; with the link, x and centre come from `moments`."""
    return _Affine.apply(layout.as_dense(x), centre, scale, shift, link)


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, link: _Link, with_var: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        mean, var = _passes(x).moments(x, with_var)
        ctx.save_for_backward(x, mean)
        ctx.link = link
        ctx.set_materialize_grads(False)
        return mean, var, x

    @staticmethod
    def backward(
        ctx: Any, dmean: Tensor | None, dvar: Tensor | None, dy: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        x, mean = ctx.saved_tensors
        num_positions = x[0, 0].numel()
        zeros = torch.zeros_like(mean)
        offset = zeros if dmean is None else dmean / num_positions
        slope = zeros if dvar is None else dvar * (2 / num_positions)
        if ctx.link.exact or dy is None or plain.only_plain(dmean, dvar, dy):
            return _plain_backward(x, mean, slope, offset, dy), None, None
        return _passes(x, dy).apply_backward(dy, x, mean, ctx.link.scale, slope, offset), None, None


class _Affine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, centre: Tensor, scale: Tensor, shift: Tensor, link: _Link | None
    ) -> Tensor:
        ctx.save_for_backward(x, centre, scale)
        ctx.link = link
        return _passes(x, centre, scale, shift).apply(x, centre, scale, shift)

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, None]:
        x, centre, scale = ctx.saved_tensors
        needs_x, needs_centre, needs_scale, needs_shift, _ = ctx.needs_input_grad
        linked = ctx.link is not None
        total: Tensor | None = None
        product: Tensor | None = None
        if plain.only_plain(dy):
            if linked:
                ctx.link.exact = True
            total, product = _plain_reduce(dy, x, centre)
        elif needs_centre or needs_scale or needs_shift:
            total, product = _passes(x, dy).reduce_backward(dy, x, centre)
        dx = None
        if needs_x:
            if linked and not ctx.link.exact:
                ctx.link.scale = scale.detach()
                dx = dy
            else:
                dx = (dy * _along(scale, x)).to(x.dtype)
        dcentre = -scale * total if needs_centre and total is not None else None
        return dx, dcentre, product, total, None


def _passes(x: Tensor, *others: Tensor) -> ModuleType:
    kernels = choose_kernels(x, *others)
    if kernels == "gpu":
        from modenorm.kernels.gpu import passes as gpu_passes

        return gpu_passes
    return c_passes if kernels == "c" else torch_passes


def _along(values: Tensor, x: Tensor) -> Tensor:
    return values.reshape(x.shape[:2] + (1,) * (x.ndim - 2))


def _plain_reduce(dy: Tensor, x: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    dy = dy.to(layout.statistics_dtype(x))
    product = dy * (x - _along(centre, x))
    positions = tuple(range(2, x.ndim))
    return (dy.sum(positions), product.sum(positions)) if positions else (dy, product)


def _plain_backward(
    x: Tensor, mean: Tensor, slope: Tensor, offset: Tensor, dy: Tensor | None
) -> Tensor:
    dx = _along(slope, x) * (x - _along(mean, x)) + _along(offset, x)
    return (dx if dy is None else dx + dy).to(x.dtype)
