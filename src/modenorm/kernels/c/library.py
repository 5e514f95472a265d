"""The C code of this folder, compiled on first use and loaded; None where that can't be done.

The system's C compiler makes a shared library for this very processor, about a second's work, and
kernels/build.py keeps it. There is no part of torch in it: the one thing it gets from torch is
the function that starts a team of threads.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import subprocess
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modenorm.kernels import build

__all__ = [
    "SWITCH",
    "Native",
    "address",
    "call",
    "call_at",
    "dense",
    "floats",
    "function_address",
    "library",
    "takes",
]

SWITCH = "MODENORM_CPU_KERNELS"  # 0: torch operators run instead
NAMES = ("mode_norm", "mode_group_norm", "mixing", "passes", "switches", "gpu_launch")
SOURCES = tuple(  # the first includes all
    Path(__file__).with_name(name) for name in (*(f"{name}.c" for name in NAMES), "common.h")
)
FLAGS = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fvisibility=hidden", "-shared", "-fPIC")
TARGETS = (("-march=native",), ())  # the second for compilers that don't know the first
COMPILERS = ("cc", "gcc", "clang")
PATIENCE = 120  # seconds for the compiler
KINDS = (Tensor, torch.nn.Parameter)


class Native(NamedTuple):
    """The library, or why there is none."""

    library: Any  # ctypes.CDLL
    about: str
    shares: bool = False  # whether it uses as many threads as torch does


@functools.cache
def library() -> Native:
    """The compiled passes; warns once if there is a compiler that fails."""
    if os.environ.get(SWITCH) == "0":
        return Native(None, f"{SWITCH}=0")
    compiler = _compiler()
    if os.name != "posix" or compiler is None:
        return Native(None, "there is no C compiler")
    try:
        loaded, path = _load(compiler)
    except (OSError, subprocess.SubprocessError) as error:
        reason = build.reason(error)
        warnings.warn(
            f"modenorm runs torch operators on the CPU, which are slower, because its C code can't "
            f"be compiled or loaded; {SWITCH}=0 silences this ({reason})",
            stacklevel=2,
        )
        return Native(None, reason)
    team = None if _after_fork else _team()
    _set_team(loaded, team)
    return Native(loaded, str(path), _after_fork or team is not None)


_after_fork = False


def _forget_team() -> None:
    """A forked process has none of its parent's threads, and would wait for them for ever."""
    global _after_fork
    _after_fork = True
    if library.cache_info().currsize and library().library is not None:
        _set_team(library().library, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_team)


def _set_team(loaded: Any, team: int | None) -> None:
    loaded.modenorm_set_team.argtypes = [ctypes.c_void_p]
    loaded.modenorm_set_team.restype = None
    loaded.modenorm_set_team(team)


def takes(*arrays: Tensor | None) -> bool:
    """Whether C can take these: float32 numbers in this computer's memory, nothing cleverer."""
    for array in arrays:
        if array is None:
            continue
        if not array.is_cpu or array.dtype != torch.float32 or type(array) not in KINDS:
            return False
    return True


def call(
    name: str,
    inputs: Sequence[Tensor | None],
    outputs: Sequence[Tensor | None],
    *numbers: int | float,
    first: Sequence[Tensor] = (),
) -> None:
    """Call a function of the library: its arrays, its numbers, and as many threads as torch uses.

    Inputs are made dense; outputs have to be, and those that come first in an order of their own.
    """
    arrays = (*first, *map(dense, inputs), *outputs)
    call_at(name, [*map(address, arrays)], numbers)


def call_at(name: str, addresses: Sequence[int | None], numbers: Sequence[int | float]) -> None:
    """`call` with arrays at these addresses, as C expects them; the caller keeps them alive."""
    numbers = (*numbers, torch.get_num_threads())
    _function(name, len(addresses), tuple(map(type, numbers)))(*addresses, *numbers)


def function_address(name: str) -> int:
    """Where a function of the library begins."""
    function = getattr(library().library, f"modenorm_{name}")
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found


def floats(shape: int | tuple[int, ...]) -> Tensor:
    """Memory for numbers, uninitialised."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def address(array: Tensor | None) -> int | None:
    """Where an array begins, for `call_at`."""
    return None if array is None else array.data_ptr()


def dense(array: Tensor | None) -> Tensor | None:
    """The same numbers in a row, without a sign that is only noted."""
    if array is None or (array.is_contiguous() and not array.is_neg()):
        return array
    return array.resolve_neg().contiguous()


@functools.cache
def _function(name: str, num_arrays: int, kinds: tuple[type, ...]) -> Callable[..., None]:
    function: Any = getattr(library().library, f"modenorm_{name}")
    numbers = [ctypes.c_float if kind is float else ctypes.c_int64 for kind in kinds]
    function.argtypes = [*[ctypes.c_void_p] * num_arrays, *numbers]
    function.restype = None
    return function


def _compiler() -> tuple[str, ...] | None:
    return build.compiler_for("CC", COMPILERS)


def _load(compiler: tuple[str, ...]) -> tuple[ctypes.CDLL, Path]:
    return build.load(_key(compiler), partial(_compile, compiler), _open)


def _open(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


def _key(compiler: tuple[str, ...]) -> str:
    """Of source, flags, compiler and processor."""
    return build.key_of(SOURCES, compiler, FLAGS, TARGETS, _processor())


def _processor() -> str:
    """The processor's name and abilities, which `-march=native` goes by."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        first = []
    told = ("model name", "flags", "Features", "CPU part", "isa")
    lines = [line for line in first if line.startswith(told)]
    return "\n".join([platform.platform(terse=True), platform.machine(), *lines])


def _compile(compiler: tuple[str, ...], target: Path) -> None:
    for native_flags in TARGETS:
        command = [*compiler, *FLAGS, *native_flags, str(SOURCES[0]), "-o", str(target), "-lm"]
        try:
            subprocess.run(
                command,
                check=True,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=PATIENCE,
            )
            return
        except subprocess.CalledProcessError:
            if native_flags == TARGETS[-1]:
                raise


def _team() -> int | None:
    """The address of GOMP_parallel in the OpenMP runtime that torch uses, looked up as it does."""
    for name in (None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")):
        try:
            return ctypes.cast(ctypes.CDLL(name).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None
