"""A fixed sequence of launches: one by one the first time, then replayed by one call of C.

From Python every launch costs several microseconds, more than small kernels take. A `Stage` lets
its launches go one by one while their kernels have to be compiled, and records them once with
slots in the place of arrays. From then on it hands the arrays' addresses to kernels/c/gpu_launch.c.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

import torch

from modenorm.kernels.c.library import function_address, library
from modenorm.kernels.cpp import node as cpp_node
from modenorm.kernels.cpp.node import Task
from modenorm.kernels.gpu.device import current_stream, is_elsewhere
from modenorm.kernels.gpu.launch import DRIVER_IS_KNOWN, Launch, Recorder
from modenorm.kernels.gpu.slab import Slab, Slot
from modenorm.kernels.layout import interpreting

__all__ = ["Part", "Sequence", "Split", "Stage", "Stream", "node_of"]

DRIVER = "libcuda.so.1"
INVALID_CONTEXT = 201
"""The driver's error where a thread has no context."""
PACKED = {"i32": "<i4x", "i64": "<q", "fp32": "<f4x"}
"""A number as a kernel reads it, in the lowest of eight bytes."""
BITS = {"i32": 32, "fp32": 32}
"""Of numbers; i64 and addresses have 64."""
Arrays = Any
"""A named tuple of tensors, or None where there is none; or of the slots that stand for them."""
Stream = int | Recorder
Split = Callable[[Slab, Any], list[Any]]
"""How a slab of memory becomes its arrays."""
Part = Callable[[Any, Split, Arrays], None]
"""Launches on a stream."""


class Stage:
    """Parts of a call that run without a pause between them.

    Args:
        direct: whether addresses may be kept apart from their tensors; see `Launch`.
        parts: the launches, in order.
    """

    def __init__(self, direct: bool, *parts: Part) -> None:
        self.direct = direct and not interpreting()
        self.parts = parts
        self.warm = False
        self.sequence: Sequence | None = None

    def __call__(self, arrays: Arrays) -> None:
        """Launch on the current stream of the first array's device."""
        first = arrays[0]
        if is_elsewhere(first):
            with torch.cuda.device(first.get_device()):
                return self(arrays)
        stream = current_stream(first)
        if self.sequence is not None:
            self.sequence(stream, [0 if a is None else a.data_ptr() for a in arrays])
            return
        addresses = self.warm and self.direct and DRIVER_IS_KNOWN
        split = Slab.addresses if addresses else Slab.tensors
        for part in self.parts:
            part(stream, split, arrays)
        if self.direct and not self.warm:
            self.sequence = self._record(arrays)
        self.warm = True

    def _record(self, arrays: Arrays) -> Sequence | None:
        """The launches of a call with these arrays or others like them."""
        slots = (None if a is None else Slot(i, 0, a.ndim) for i, a in enumerate(arrays))
        places = type(arrays)._make(slots)
        recorder = Recorder()
        for part in self.parts:
            part(recorder, Slab.slots, places)
        return Sequence.of(recorder, len(places))


def node_of(
    norm: cpp_node.Norm,
    forward: Stage,
    backward: Stage,
    slabs: tuple[Slab, Slab, Slab],
    inputs: tuple[Any, ...],
    changed: tuple[Any, ...],
    plainly: Callable[..., Any],
) -> Callable[..., torch.Tensor] | None:
    """An autograd node of C++ of two stages; None while their launches are not recorded.

    Slabs are what is kept, and the scratch memory forward and backward; for the rest see `make`.
    """
    sequences = forward.sequence, backward.sequence
    if sequences[0] is None or sequences[1] is None:
        return None
    return cpp_node.make(
        norm,
        (sequences[0].task, sequences[1].task),
        (slabs[0].size, slabs[1].size, slabs[2].size),
        inputs,
        changed,
        plainly,
        owner=sequences,
    )


class _Argument(ctypes.Structure):
    _fields_ = (("base", ctypes.c_int64), ("value", ctypes.c_uint64))


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32),
        ("shared", ctypes.c_uint32),
        ("overlaps", ctypes.c_uint32),
        ("count", ctypes.c_int64),
    )


class _Sequence(ctypes.Structure):
    _fields_ = (
        ("driver", ctypes.c_void_p),
        ("kernels", ctypes.POINTER(_Kernel)),
        ("count", ctypes.c_int64),
        ("arguments", ctypes.POINTER(_Argument)),
    )


class Sequence:
    """Compiled kernels, with their sizes filled in and their arrays left open."""

    def __init__(self, driver: int, launches: list[tuple[Launch, tuple[Any, ...]]], arrays: int):
        kernels = [_kernel(launch, slots) for launch, slots in launches]
        arguments = [a for launch, slots in launches for a in _arguments(launch, slots)]
        self._launches = launches  # Triton unloads kernels that nobody holds
        self._kernels = (_Kernel * len(kernels))(*kernels)
        self._arguments = (_Argument * len(arguments))(*arguments)
        self._sequence = _Sequence(driver, self._kernels, len(kernels), self._arguments)
        self._address = ctypes.addressof(self._sequence)
        self._pack = struct.Struct(f"{arrays}Q").pack
        self._launch = _launcher()

    @classmethod
    def of(cls, recorder: Recorder, arrays: int) -> Sequence | None:
        """What was recorded, if the driver and the C code can run it."""
        driver = _driver()
        if driver is None or library().library is None:
            return None
        if not all(_is_plain(launch.compiled) for launch, _ in recorder.launches):
            return None
        return cls(driver, recorder.launches, arrays)

    @property
    def task(self) -> Task:
        """The same for C++."""
        return Task(function_address("launch"), self._address, _enter_context)

    def __call__(self, stream: int, addresses: list[int]) -> None:
        """Launch on a stream, with the arrays at these addresses."""
        packed = self._pack(*addresses)
        error = self._launch(self._address, stream, packed)
        if error == INVALID_CONTEXT:  # of the first kernel: nothing was launched
            _enter_context()
            error = self._launch(self._address, stream, packed)
        if error:
            raise RuntimeError(f"the CUDA driver refused to launch a kernel: error {error}")


def _enter_context() -> None:
    """Give this thread the device's context; autograd's threads may have none yet.

    By the driver's own calls, which are allowed while a CUDA graph is captured.
    """
    cuda, device, context = ctypes.CDLL(DRIVER), ctypes.c_int(), ctypes.c_void_p()
    cuda.cuDeviceGet(ctypes.byref(device), torch.cuda.current_device())
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    cuda.cuCtxSetCurrent(context)


def _is_plain(compiled: Any) -> bool:
    """Whether a kernel takes just its arguments and two addresses of scratch memory, unused.

    Some versions of Triton may add to that; the kernel's code tells.
    """
    try:
        data, code = compiled.metadata, compiled.asm["ptx"]
        special = data.global_scratch_size or data.profile_scratch_size
        special = special or data.launch_cooperative_grid or data.num_ctas > 1
    except (AttributeError, KeyError):
        return False
    head = code.partition(".entry")[2].partition(")")[0]
    taken = [int(bits) for bits in re.findall(r"\.param \.[a-z]+(\d+)", head)]
    kinds = [kind for kind in compiled.src.signature.values() if kind != "constexpr"]
    return not special and taken == [*(BITS.get(kind, 64) for kind in kinds), 64, 64]


def _kernel(launch: Launch, slots: tuple[Any, ...]) -> _Kernel:
    compiled, grid = launch.compiled, (ctypes.c_uint32 * 3)(*launch.grid)
    data, count = compiled.metadata, sum(1 for _ in _arguments(launch, slots))
    threads, overlaps = 32 * data.num_warps, bool(data.launch_pdl)
    return _Kernel(compiled.function, grid, threads, data.shared, overlaps, count)


def _arguments(launch: Launch, slots: tuple[Any, ...]) -> Iterator[_Argument]:
    """What the compiled kernel takes: what is not constant, and two addresses of scratch memory."""
    kinds = launch.compiled.src.signature.values()
    for kind, value in zip(kinds, (*slots, *launch.tail), strict=True):
        if isinstance(value, Slot):
            yield _Argument(value.base, value.offset)
        elif kind != "constexpr":
            packed = struct.pack(PACKED[kind], value)
            yield _Argument(-1, int.from_bytes(packed, "little"))
    yield _Argument(-1, 0)
    yield _Argument(-1, 0)


@functools.cache
def _driver() -> int | None:
    """The address of the driver's function that launches a kernel."""
    try:
        return ctypes.cast(ctypes.CDLL(DRIVER).cuLaunchKernelEx, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


@functools.cache
def _launcher() -> Callable[..., int]:
    """`modenorm_launch`, called without letting other threads of Python go first."""
    kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    return ctypes.PYFUNCTYPE(ctypes.c_int, *kinds)(function_address("launch"))
