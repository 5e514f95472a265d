"""Mode group normalization as one autograd node on the CPU: one call of C each way.

As kernels/c/mode_norm.py for mode normalization; the C code is mode_group_norm.c.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from modenorm.kernels import plain
from modenorm.kernels.c.library import address, call_at, dense, floats
from modenorm.kernels.choice import runs_c
from modenorm.kernels.cpp import node as cpp_node
from modenorm.kernels.layout import as_dense, dense_like, is_channels_last, laid_out
from modenorm.kernels.mode_group_norm_arrays import Given

__all__ = ["fits", "mode_group_norm"]

MOST_MODES = 1024
"""Some numbers of every mode lie on the stack of C."""


def fits(x: Tensor, given: Given) -> bool:
    """Whether C takes these; weight and bias have one number for each channel."""
    return len(given.gate_weight) <= MOST_MODES and runs_c(x, *given[:4])


def mode_group_norm(x: Tensor, given: Given, gates_matter: bool) -> tuple[Tensor, Tensor | None]:
    """y, and the gates (N, C, K), which are None if they don't matter to a node of C++."""
    x, inputs = as_dense(x.resolve_neg()), [*map(dense, given[:4])]
    if not gates_matter:
        node = _node_for(x, inputs, given.eps, given.pixel)
        if node is not None:
            return node(torch.get_num_threads(), x, *inputs), None
    y, gates = _node(x, *inputs, given.eps, given.pixel)
    return y, gates


class _Layer(ctypes.Structure):
    """As in mode_group_norm.c."""

    _fields_ = (
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int64) for name in (
            "pixel", "samples", "channels", "modes", "positions", "last"
        )),
    )  # fmt: skip


_nodes: dict[tuple[Any, ...], Callable[..., Tensor]] = {}


def _node_for(
    x: Tensor, inputs: list[Any], eps: float, pixel: bool
) -> Callable[..., Tensor] | None:
    """An autograd node of C++ for calls that look the same, if there is one."""
    shapes = (None if array is None else array.shape for array in inputs)
    key = (x.shape, x.is_contiguous(), eps, pixel, *shapes)
    node = _nodes.get(key)
    if node is None:
        num_modes = len(inputs[0])
        layer = _Layer(*_numbers(x, num_modes, eps, pixel))
        kept, scratch, backward_scratch = _sizes(x, num_modes, pixel)
        gates = x.shape[0] * x.shape[1] * num_modes
        node = cpp_node.make(
            cpp_node.MODE_GROUP_NORM,
            cpp_node.tasks_in_c("channels_", layer),
            (kept, scratch + gates, backward_scratch),
            inputs,
            (),
            partial(plain.mode_group_norm, eps=eps, pixel=pixel),
            can_omit_dx=True,
            owner=layer,
        )
        if node is not None:
            _nodes[key] = node
    return node


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
        num_modes = len(gate_weight)
        y, gates = torch.empty_like(x), floats((*x.shape[:2], num_modes))
        kept, scratch = map(floats, _sizes(x, num_modes, pixel)[:2])
        given = (x, gate_weight, gate_bias, weight, bias, y, gates, kept, scratch)
        call_at("channels_forward", [*map(address, given)], _numbers(x, num_modes, eps, pixel))
        ctx.save_for_backward(x, gate_weight, gate_bias, weight, bias, kept)
        ctx.eps, ctx.pixel, ctx.strides = eps, pixel, x.stride()
        ctx.set_materialize_grads(False)
        return y, gates

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dused: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, kept = ctx.saved_tensors  # once: checkpointing unpacks them once
        x, gate_weight, gate_bias, weight, _ = inputs
        needed, upstream = ctx.needs_input_grad, (dy, dused)
        if plain.only_plain(*upstream) or dy is None or not runs_c(x, *upstream):
            forward = partial(plain.mode_group_norm, eps=ctx.eps, pixel=ctx.pixel)
            return (*plain.differentiate(forward, inputs, needed, upstream), None, None)
        x = laid_out(x, ctx.strides)
        dy, num_modes = dense_like(dy, x), len(gate_weight)
        dx = torch.empty_like(x) if needed[0] else None
        found = [None if p is None else torch.empty_like(p) for p in inputs[1:]]
        scratch = floats(_sizes(x, num_modes, ctx.pixel)[2])
        given = (dy, x, kept, gate_weight, gate_bias, weight, dense(dused))
        numbers = _numbers(x, num_modes, ctx.eps, ctx.pixel)
        call_at("channels_backward", [*map(address, (*given, dx, *found, scratch))], numbers)
        return dx, *found, None, None


_node = plain.node(_ModeGroupNorm)


def _sizes(x: Tensor, num_modes: int, pixel: bool) -> tuple[int, int, int]:
    """Floats to keep, and scratch memory forward and backward."""
    rows, of_modes = x.shape[0] * x.shape[1], x.shape[0] * num_modes
    return (3 if pixel else 2) * rows + 3 * of_modes, rows, 4 * rows + 2 * of_modes


def _numbers(x: Tensor, num_modes: int, eps: float, pixel: bool) -> tuple[int | float, ...]:
    sizes = (*x.shape[:2], num_modes, math.prod(x.shape[2:]))
    return float(eps), int(pixel), *sizes, int(is_channels_last(x))
