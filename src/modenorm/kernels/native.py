"""The C code of this folder, compiled on first use and loaded; None where that can't be done.

The system's C compiler makes a shared library for this very processor, about a second's work, and
a folder of the user's keeps it. Its name holds a key of everything that made it and a digest of
what is in it: a file that is damaged, or was made elsewhere, is never loaded. There is no part of
torch in it: the one thing it gets from torch is the function that starts a team of threads.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "SWITCH",
    "Native",
    "address",
    "call",
    "call_at",
    "dense",
    "floats",
    "library",
    "takes",
]

SWITCH = "MODENORM_CPU_KERNELS"  # 0: torch operators run instead
NAMES = ("layer.c", "channels.c", "mixing.c", "passes.c", "switches.c", "common.h")
SOURCES = tuple(  # the first includes all
    Path(__file__).with_name(name) for name in (*(f"cpu_{name}" for name in NAMES), "gpu_launch.c")
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
        reason = _reason(error)
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
    """`call` with arrays at these addresses, as C expects them; who calls keeps them alive."""
    numbers = (*numbers, torch.get_num_threads())
    _function(name, len(addresses), tuple(map(type, numbers)))(*addresses, *numbers)


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
    """The command that compiles C: $CC, or what is usual."""
    try:
        given = shlex.split(os.environ.get("CC", ""))
    except ValueError:  # a quotation without end
        given = []
    for command in (given, *([name] for name in COMPILERS)):
        if command and (path := shutil.which(command[0])):
            return (path, *command[1:])
    return None


def _load(compiler: tuple[str, ...]) -> tuple[ctypes.CDLL, Path]:
    folder, key = _folder(), _key(compiler)
    for path in _kept(folder, key):
        try:
            return ctypes.CDLL(str(path)), path
        except OSError:  # a folder from which nothing may be executed, for one
            continue
    with tempfile.TemporaryDirectory() as private:
        built = _compile(compiler, Path(private) / "library.so")
        kept = _keep(built, folder, key)
        try:
            return ctypes.CDLL(str(kept or built)), kept or built
        except OSError:
            return ctypes.CDLL(str(built)), built


def _folder() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(caches) / "modenorm"


def _key(compiler: tuple[str, ...]) -> str:
    """Of source, flags, compiler and processor."""
    program = os.stat(compiler[0])
    parts = [*(source.read_bytes() for source in SOURCES)]
    for part in (FLAGS, TARGETS, compiler, program.st_size, program.st_mtime_ns, _processor()):
        parts.append(repr(part).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> str:
    """The processor's name and abilities, which `-march=native` goes by."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        first = []
    told = ("model name", "flags", "Features", "CPU part", "isa")
    lines = [line for line in first if line.startswith(told)]
    return "\n".join([platform.platform(terse=True), platform.machine(), *lines])


def _kept(folder: Path, key: str) -> list[Path]:
    """Libraries in the folder with this key that are whole and the user's own."""
    found = []
    for path in sorted(folder.glob(f"{key}-*.so")):
        try:
            own = path.stat().st_uid == os.getuid()
            if own and path.stem == f"{key}-{_digest(path)}":
                found.append(path)
        except OSError:
            continue
    return found


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _compile(compiler: tuple[str, ...], target: Path) -> Path:
    for native_flags in TARGETS:
        command = [*compiler, *FLAGS, *native_flags, str(SOURCES[0]), "-o", str(target), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE)
            return target
        except subprocess.CalledProcessError:
            if native_flags == TARGETS[-1]:
                raise
    raise AssertionError("there is always a last set of flags")


def _keep(built: Path, folder: Path, key: str) -> Path | None:
    """A copy in the user's folder, there at once or not at all; None where none can be made."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = folder / f"{key}-{_digest(built)}.so"
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as copy:
            copy.write(built.read_bytes())
        os.replace(copy.name, kept)
    except OSError:
        return None
    return kept


def _team() -> int | None:
    """The address of GOMP_parallel in the OpenMP runtime that torch uses, looked up as it does."""
    for name in (None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")):
        try:
            return ctypes.cast(ctypes.CDLL(name).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in error.stderr.splitlines() if "error" in line]
        return f"{error.cmd[0]}: {(lines or [f'exit status {error.returncode}'])[0]}"
    return f"{type(error).__name__}: {error}"
