"""Norms as autograd nodes of C++ (node.h), for calls without anything unusual.

Where there are none yet, nodes of Python serve, those of gpu/ and c/, which run and save
the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from modenorm.kernels import plain
from modenorm.kernels.c.library import function_address
from modenorm.kernels.cpp.module import cpp_module
from modenorm.kernels.mode_group_norm_arrays import ChannelBackward, ChannelForward, Given
from modenorm.kernels.mode_norm_arrays import Backward, Forward, Inputs

__all__ = ["MODE_GROUP_NORM", "MODE_NORM", "Norm", "Task", "make", "tasks_in_c"]

MOST_NODES = 4096
_made = 0


class Task(NamedTuple):
    """A function of C that takes an argument, where to run, and arrays; as addresses."""

    run: int
    what: int
    enter_context: Callable[[], None] | None = None
    """What a thread without a context of the driver needs."""


def tasks_in_c(prefix: str, layer: ctypes.Structure) -> tuple[Task, Task]:
    """Forward and backward of a layer on a CPU, by functions of the C code."""
    what = ctypes.addressof(layer)
    names = (f"run_{prefix}{direction}" for direction in ("forward", "backward"))
    forward, backward = (Task(function_address(name), what) for name in names)
    return forward, backward


class Norm(NamedTuple):
    """What a node has to know of a norm: names of arrays."""

    name: str
    inputs: tuple[str, ...]
    """Of the norm in plain operators, which gradients flow to."""
    changed: tuple[str, ...]
    """In place."""
    forward: tuple[str, ...]
    """In the order in which the task takes them."""
    backward: tuple[str, ...]


ESTIMATES = ("running_mean", "running_var", "tracked", "share")
MODE_NORM = Norm("ModeNorm", ("x", *Inputs._fields), ESTIMATES, Forward._fields, Backward._fields)
MODE_GROUP_NORM = Norm(
    "ModeGroupNorm",
    ("x", *Given._fields[:4]),
    (),
    ChannelForward._fields,
    ChannelBackward._fields,
)


def make(
    norm: Norm,
    tasks: tuple[Task, Task],
    sizes: tuple[int, int, int],
    inputs: Sequence[Tensor | None],
    changed: Sequence[Tensor | None],
    plainly: Callable[..., Sequence[Tensor]],
    *,
    owner: object,
    can_omit_dx: bool = False,
) -> Callable[..., Tensor] | None:
    """A function of where to run, x, inputs and what is changed to y; None if there is none (yet).

    What is missing of the inputs is None there too. It is never freed, since graphs point to it,
    so there is a limit to their number.

    Args:
        norm: What is made a node of.
        tasks: Forward and backward.
        sizes: Of what is kept, of the forward's scratch memory and of the backward's, in floats.
        inputs: Of a call, beside x: which of them there are.
        changed: Of a call: which of them there are.
        plainly: The norm in plain operators, for what else autograd may ask.
        owner: Keeps alive what the tasks point to.
        can_omit_dx: Whether the backward does without a place for dx.
    """
    global _made
    module = cpp_module()
    if module is None or _made == MOST_NODES:
        return None
    _made += 1
    names = ["x", *_present(norm.inputs[1:], inputs)]
    moved = _present(norm.changed, changed) if changed else []
    forward = [*names, *moved, "kept", "scratch", "y"]
    backward = ["dy", *names, "kept", "scratch", *(f"d{name}" for name in names)]
    plan = module.plan(
        norm.name,
        (*tasks[0], _places(norm.forward, forward)),
        (*tasks[1], _places(norm.backward, backward)),
        len(names),
        *sizes,
        can_omit_dx,
        partial(_gradients, norm.inputs, names, plainly),
        owner,
    )
    return partial(module.norm, plan)


def _present(names: Sequence[str], arrays: Sequence[Tensor | None]) -> list[str]:
    return [name for name, array in zip(names, arrays, strict=True) if array is not None]


def _places(order: Sequence[str], given: list[str]) -> bytes:
    """Where each array of an order is among the given ones; 255, which is -1, if nowhere."""
    return bytes(given.index(name) if name in given else 255 for name in order)


def _gradients(
    every: tuple[str, ...],
    names: list[str],
    plainly: Callable[..., Sequence[Tensor]],
    inputs: list[Tensor],
    needed: list[bool],
    dy: Tensor,
) -> list[Tensor | None]:
    """The gradients of a node's inputs by plain operators, so that they can be differentiated."""
    given, needs = dict(zip(names, inputs, strict=True)), dict(zip(names, needed, strict=True))
    found = plain.differentiate(
        lambda *arrays: plainly(*arrays)[:1],
        [given.get(name) for name in every],
        [needs.get(name, False) for name in every],
        (dy,),
    )
    return [gradient for name, gradient in zip(every, found, strict=True) if name in given]
