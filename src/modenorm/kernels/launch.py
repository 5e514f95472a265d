"""Launch a Triton kernel again and again without Triton's dispatch.

For every call Triton looks at all arguments to find the compiled form; that costs more than batch
norm's whole forward. A `Launch` belongs to a plan whose sizes and types never change, so it finds
its compiled form once and then hands pointers straight to the driver.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Launch", "Slab", "interpreting"]

Pointer = Tensor | int


@functools.cache
def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Launch:
    """One kernel with its grid, sizes and constants; call it with pointers, in the kernel's order.

    Args:
        kernel: takes pointers, then sizes, then constants.
        grid: number of programs along up to three axes.
        sizes: the arguments after the pointers.
        constants: the `tl.constexpr` arguments, in order.
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
        self.tail = (*sizes, *constants)
        self.num_warps = num_warps
        self.direct = direct and not interpreting()
        self.compiled: Any = None

    def __call__(self, *pointers: Pointer) -> None:
        """Launch on the current stream; the first call compiles and needs tensors."""
        compiled = self.compiled
        if compiled is None:
            done = self.kernel[self.grid](*pointers, *self.tail, num_warps=self.num_warps)
            self.compiled = done if self.direct else None
            return
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        compiled.run(
            *self.grid,
            stream,
            compiled.function,
            compiled.packed_metadata,
            None,
            None,
            None,
            *pointers,
            *self.tail,
        )


class Slab:
    """Many small float32 arrays in one allocation, each starting at a multiple of 64 bytes."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        self.shapes = shapes
        self.starts = []
        self.size = 0
        for shape in shapes:
            self.starts.append(self.size)
            self.size += -(-torch.Size(shape).numel() // 16) * 16

    def allocate(self, device: torch.device) -> Tensor:
        """Memory for all arrays, uninitialised."""
        return torch.empty(self.size, device=device, dtype=torch.float32)

    def tensors(self, memory: Tensor) -> list[Tensor]:
        """The arrays, as views."""
        return [
            memory[start : start + torch.Size(shape).numel()].view(shape)
            for start, shape in zip(self.starts, self.shapes, strict=True)
        ]

    def addresses(self, memory: Tensor) -> list[int]:
        """The arrays, as addresses: what a launch takes once it is compiled."""
        base = memory.data_ptr()
        return [base + 4 * start for start in self.starts]
