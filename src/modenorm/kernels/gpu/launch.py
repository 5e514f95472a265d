"""Launch a Triton kernel again and again without Triton's dispatch.

For every call Triton looks at all arguments to find the compiled form; that costs more than batch
norm's whole forward. A `Launch` belongs to a plan whose sizes and types never change, so it finds
its compiled form once and then hands pointers straight to the driver.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import triton
from torch import Tensor

from modenorm.kernels.gpu.common import can_overlap
from modenorm.kernels.gpu.slab import Slot
from modenorm.kernels.layout import interpreting

__all__ = ["DRIVER_IS_KNOWN", "Launch", "Pointer", "Recorder"]

DRIVER_IS_KNOWN = triton.__version__.startswith("3.6.")
"""Whether single kernels are handed to the driver directly, and arrays as addresses."""
MOST_SMALL_PROGRAMS = 1 << 14
"""More programs than this, of few warps each, start faster if they do not overlap others."""


Pointer = Tensor | int | Slot


class Recorder:
    """Stands in for a stream, and notes what is launched on it."""

    def __init__(self) -> None:
        self.launches: list[tuple[Launch, tuple[Pointer, ...]]] = []


class Launch:
    """One kernel with its grid, sizes and constants; call it with pointers, in the kernel's order.

    Args:
        kernel: takes pointers, then sizes, then constants.
        grid: number of programs along up to three axes.
        sizes: the arguments after the pointers.
        constants: the `tl.constexpr` arguments, in order, but for the last, OVERLAPS.
        num_warps: of each program.
        direct: keep the compiled form; only right if every pointer is always a multiple of 16.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        sizes: Sequence[float],
        constants: Sequence[object],
        num_warps: int = 4,
        direct: bool = True,
    ) -> None:
        self.kernel = kernel
        self.grid = (*grid, 1, 1)[:3]
        few = num_warps >= 4 or math.prod(grid) <= MOST_SMALL_PROGRAMS
        overlaps = few and can_overlap()
        self.tail = (*sizes, *constants, overlaps)
        # Triton 3.9 warns that a later one makes fused multiply-adds only if asked to
        self.options: dict[str, object] = {"num_warps": num_warps, "enable_fp_fusion": True}
        if overlaps:
            self.options["launch_pdl"] = True
        self.direct = direct and not interpreting()
        self.compiled: Any = None
        self.start: Callable[[int, tuple, tuple], None] | None = None

    def __call__(self, stream: int | Recorder, *pointers: Pointer) -> None:
        """Launch on a stream; the first call compiles and needs tensors."""
        if isinstance(stream, Recorder):
            stream.launches.append((self, pointers))
        elif self.start is not None:
            self.start(stream, pointers, self.tail)
        else:
            self.compiled = self.kernel[self.grid](*pointers, *self.tail, **self.options)
            if self.direct:
                self.start = _starter(self.compiled, self.grid)


def _starter(compiled: Any, grid: tuple[int, ...]) -> Callable[[int, tuple, tuple], None]:
    """A function that hands a compiled kernel to the driver.

    Triton's own wrapper around the driver's call first looks for scratch memory and hooks, which
    these kernels don't have; with Triton 3.6, whose call is known, the wrapper is passed by.
    """
    if not DRIVER_IS_KNOWN or compiled.run.global_scratch_size:
        launch = compiled[grid]
        return lambda stream, pointers, tail: launch(*pointers, *tail, stream=stream)
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    call, flags = run.launch, (run.launch_cooperative_grid, run.launch_pdl)

    def start(stream: int, pointers: tuple, tail: tuple) -> None:
        call(
            *grid, stream, function, *flags, None, None, metadata, None, None, None,
            *pointers, *tail,
        )  # fmt: skip

    return start
