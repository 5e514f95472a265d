"""Mode group normalization as one autograd node on the CPU: one call of C each way.

As kernels/native_node.py for mode normalization; the C code is cpu_channels.c.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from modenorm.kernels import plain, runs_native
from modenorm.kernels.channel_arrays import Given
from modenorm.kernels.layout import as_dense, dense_like, is_channels_last, laid_out
from modenorm.kernels.native import address, call_at, dense, floats

__all__ = ["fits", "mode_group_norm"]

MOST_MODES = 1024
"""Some numbers of every mode lie on the stack of C."""


def fits(x: Tensor, given: Given) -> bool:
    """Whether C takes these; weight and bias have one number for each channel."""
    return len(given.gate_weight) <= MOST_MODES and runs_native(x, *given[:4])


def mode_group_norm(x: Tensor, given: Given) -> tuple[Tensor, Tensor]:
    """Y and the gates (N, C, K)."""
    y, gates = _node(as_dense(x.resolve_neg()), *map(dense, given[:4]), given.eps, given.pixel)
    return y, gates


class _ModeGroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_weight: Tensor,
        gate_bias: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        pixel: bool,
    ) -> tuple[Tensor, Tensor]:
        (num_samples, num_channels), num_modes = x.shape[:2], len(gate_weight)
        rows = num_samples * num_channels
        y, gates = torch.empty_like(x), floats((num_samples, num_channels, num_modes))
        kept = floats((3 if pixel else 2) * rows + 3 * num_samples * num_modes)
        scratch = floats(rows)
        given = (x, gate_weight, gate_bias, weight, bias, y, gates, kept, scratch)
        call_at("channels_forward", [*map(address, given)], _numbers(x, num_modes, eps, pixel))
        ctx.save_for_backward(x, gate_weight, gate_bias, weight, bias, kept)
        ctx.eps, ctx.pixel, ctx.strides = eps, pixel, x.stride()
        ctx.set_materialize_grads(False)
        return y, gates

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dused: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, kept = ctx.saved_tensors  # once: checkpointing unpacks them once
        x, gate_weight, gate_bias, weight, bias = inputs
        needed, upstream = ctx.needs_input_grad, (dy, dused)
        if plain.only_plain(*upstream) or dy is None or not runs_native(x, *upstream):
            forward = partial(plain.mode_group_norm, eps=ctx.eps, pixel=ctx.pixel)
            return (*plain.differentiate(forward, inputs, needed, upstream), None, None)
        x = laid_out(x, ctx.strides)
        dy, num_modes = dense_like(dy, x), len(gate_weight)
        dx = torch.empty_like(x) if needed[0] else None
        dgate = floats((2, num_modes))
        dweight, dbias = (None if p is None else torch.empty_like(p) for p in (weight, bias))
        scratch = floats(4 * x.shape[0] * x.shape[1] + 2 * x.shape[0] * num_modes)
        given = (dy, x, kept, gate_weight, gate_bias, weight, dense(dused))
        found = (dx, dgate, dweight, dbias, scratch)
        numbers = _numbers(x, num_modes, ctx.eps, ctx.pixel)
        call_at("channels_backward", [*map(address, (*given, *found))], numbers)
        return dx, *dgate.unbind(), dweight, dbias, None, None


_node = plain.node(_ModeGroupNorm)


def _numbers(x: Tensor, num_modes: int, eps: float, pixel: bool) -> tuple[int | float, ...]:
    sizes = (*x.shape[:2], num_modes, math.prod(x.shape[2:]))
    return float(eps), int(pixel), *sizes, int(is_channels_last(x))
