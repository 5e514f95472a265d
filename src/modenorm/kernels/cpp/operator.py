"""Operators for `torch.compile` that C++ repeats (operator.h).

An operator looks at its arguments, finds a plan, allocates and launches. In Python that takes the
host longer than the launches do. So C++ remembers a call by what its arguments look like, and does
the same again for others like them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from modenorm.kernels.cpp.module import cpp_module
from modenorm.kernels.gpu.device import current_stream, is_elsewhere

if TYPE_CHECKING:
    from modenorm.kernels.gpu.stage import Arrays, Stage

__all__ = ["Work", "operator"]

MOST_CALLS = 4096
LIBRARY = torch.library.Library("modenorm", "FRAGMENT")
_numbers, _remembered = itertools.count(), itertools.count()


class Work(NamedTuple):
    """What an operator has to do, for results that are allocated already."""

    results: tuple[Tensor, ...]
    """Of float32."""
    stage: Stage
    arrays: Arrays


def operator(schema: str, like: Callable[..., Any]) -> Callable[[Callable[..., Work]], Any]:
    """A decorator that makes torch.ops.modenorm.NAME of a function that finds the work of a call.

    By hand: what torch.library.custom_op puts around an operator takes longer than its launches.

    Args:
        schema: Name, arguments and results, as torch writes them.
        like: Allocates the results of a call and does nothing else, for tracing.
    """
    name = schema.partition("(")[0]

    def registered(find_work: Callable[..., Work]) -> Any:
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(LIBRARY, name, "CompositeExplicitAutograd")(_repeated(find_work))
        torch.library.register_fake(f"modenorm::{name}", like, lib=LIBRARY)
        return getattr(torch.ops.modenorm, name).default

    return registered


def _repeated(find_work: Callable[..., Work]) -> Callable[..., tuple[Tensor, ...]]:
    """A function that does the work of a call, by C++ where that knows such a call.

    What a call does must follow from its numbers and how its tensors look, as the `Look` of C++
    sees them: sizes, strides, types, devices, and whether addresses suit the kernels.
    """
    number = next(_numbers)

    @functools.wraps(find_work)
    def run(*arguments: Any) -> tuple[Tensor, ...]:
        first = arguments[0]
        module = None if is_elsewhere(first) else cpp_module()
        if module is not None:
            found = module.repeat(current_stream(first), number, *arguments)
            if found is not None:
                return found
        work = find_work(*arguments)
        work.stage(work.arrays)
        if module is not None:
            _remember(module, number, arguments, work)
        return work.results

    return run


def _remember(module: Any, number: int, arguments: tuple[Any, ...], work: Work) -> None:
    """Have C++ repeat the call, unless its launches are not recorded or copies were made for it."""
    sequence, places = work.stage.sequence, _places(work.arrays, (*arguments, *work.results))
    if sequence is None or places is None or next(_remembered) >= MOST_CALLS:
        return
    task = (*sequence.task, places)
    shapes = tuple(tuple(result.shape) for result in work.results)
    module.remember(task, shapes, sequence, number, *arguments)


def _places(arrays: Sequence[Tensor | None], given: tuple[Any, ...]) -> bytes | None:
    """Where each array is among what is given, -1 if there is none; None if that is not clear."""
    tensors = {place: id(each) for place, each in enumerate(given) if isinstance(each, Tensor)}
    where = {found: place for place, found in tensors.items()}
    if len(where) < len(tensors) or any(a is not None and id(a) not in where for a in arrays):
        return None  # one is given twice, where another call may have two; or a copy was made
    return bytes(255 if array is None else where[id(array)] for array in arrays)
