"""Norms as autograd nodes of C++ (node.cpp), for calls without anything unusual.

An autograd node of Python costs the host more than a small layer's work. The system's C++ compiler
makes one that doesn't, for this very torch, once and beside whatever else is going on, in ten to
twenty seconds; kernels/compiled.py keeps it. Until it is there, and where it can't be made, nodes
of Python serve (fused.py, fused_channels.py, native_node.py), which run and save the same.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib.util
import os
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modenorm.kernels import compiled, plain
from modenorm.kernels.channel_arrays import ChannelBackward, ChannelForward, Given
from modenorm.kernels.mode_arrays import Backward, Forward, Inputs
from modenorm.kernels.native import function_address

__all__ = ["MODE_GROUP_NORM", "MODE_NORM", "Norm", "Task", "autograd_nodes", "make", "tasks_in_c"]

SWITCH = "MODENORM_CPP_NODE"  # 0: nodes of Python serve
SOURCE = Path(__file__).with_name("node.cpp")
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-w")
LIBRARIES = ("torch_python", "torch", "torch_cpu", "c10")
COMPILERS = ("c++", "g++", "clang++")
NAME = "modenorm_node"
MOST_NODES = 4096
PATIENCE = 5  # seconds for a compiler that was stopped


def autograd_nodes() -> str:
    """What puts norms into the graph of autograd, in words; waits until that is decided.

    Example:
        >>> autograd_nodes().partition(":")[0] in ("C++", "Python")
        True
    """
    builder = _builder()
    builder.wait()
    return f"{'Python' if builder.module is None else 'C++'}: {builder.about}"


class _Builder:
    """Finds the module, or has it compiled beside whatever else is going on."""

    def __init__(self) -> None:
        self.module: Any = None
        self.about = f"{SWITCH}=0"
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[str] | None = None
        self._starting, self._ends, self._owner = threading.Lock(), False, os.getpid()
        if os.environ.get(SWITCH) == "0":
            return
        compiler = compiled.compiler_for("CXX", COMPILERS)
        if not sys.platform.startswith("linux") or compiler is None:
            self.about = "there is no C++ compiler"
            return
        key = compiled.key_of((SOURCE,), compiler, FLAGS, *_versions())
        if (found := compiled.load_kept(key, _open)) is not None:
            self.module, self.about = found[0], str(found[1])
            return
        self.about = "the compiler is at work"
        thread = threading.Thread(target=self._build, args=(compiler, key), daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # there are too many, or the program ends
            self.about = compiled.reason(error)
            return
        self._thread = thread
        atexit.register(self._stop)

    def wait(self, seconds: float | None = None) -> None:
        """Until the compiler has ended."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _build(self, compiler: tuple[str, ...], key: str) -> None:
        try:
            with _one_at_a_time():
                compile_to = partial(self._compile, compiler)
                module, path = compiled.load(key, compile_to, _open)
            self.module, self.about = module, str(path)
        except (OSError, ImportError, subprocess.SubprocessError) as error:
            self.about = compiled.reason(error)

    def _compile(self, compiler: tuple[str, ...], target: Path) -> None:
        command = [*compiler, *FLAGS, *_paths(), str(SOURCE), "-o", str(target)]
        command += [f"-l{library}" for library in LIBRARIES]
        with self._starting:
            if self._ends:
                raise subprocess.SubprocessError("the program ends")
            process = self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # whoever reads the program's need not wait for it
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # to be stopped with what it starts
                env={**os.environ, "TMPDIR": str(target.parent)},
            )
        _, errors = process.communicate()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command, None, errors)

    def _stop(self) -> None:
        """A program that ends doesn't wait for the compiler, and leaves nothing behind."""
        if os.getpid() != self._owner:  # forked: the compiler is another's
            return
        with self._starting:
            self._ends = True
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(self._process.pid, signal.SIGKILL)
            self.wait(PATIENCE)


@functools.cache
def _builder() -> _Builder:
    return _Builder()


def _versions() -> tuple[object, ...]:
    """What the module is made for."""
    return torch.__version__, torch.version.git_version, sysconfig.get_config_var("EXT_SUFFIX")


def _paths() -> Iterator[str]:
    """Where headers and libraries lie, and how torch's strings do."""
    root = Path(torch.__file__).parent
    headers = (root / "include", root / "include" / "torch" / "csrc" / "api" / "include")
    for folder in (*headers, sysconfig.get_path("include")):
        yield f"-I{folder}"
    yield f"-L{root / 'lib'}"
    yield f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"


def _open(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(
        NAME, path, loader=ExtensionFileLoader(NAME, str(path))
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Of several processes that start together, one compiles and the others wait for its file."""
    import fcntl

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # where nothing can be locked, each compiles for itself
            compiled.folder().mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = stack.enter_context((compiled.folder() / "node.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            # to close it is not enough: a forked process may still have it open
            stack.callback(fcntl.flock, lock, fcntl.LOCK_UN)
        yield


_made = 0


class Task(NamedTuple):
    """A function of C that takes an argument, where to run, and arrays; as addresses."""

    run: int
    what: int


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
    enter_context: Callable[[], None] | None = None,
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
        enter_context: What a thread without a context of the driver needs.
    """
    global _made
    module = _builder().module  # the first call starts the compiler
    if module is None or _made == MOST_NODES:
        return None
    _made += 1
    names = ["x", *_present(norm.inputs[1:], inputs)]
    moved = _present(norm.changed, changed) if changed else []
    forward = [*names, *moved, "kept", "scratch", "y"]
    backward = ["dy", *names, "kept", "scratch", *(f"d{name}" for name in names)]
    plan = module.plan(
        norm.name, *tasks[0], *tasks[1], len(names), *sizes, can_omit_dx,
        _places(norm.forward, forward), _places(norm.backward, backward),
        partial(_gradients, norm.inputs, names, plainly), enter_context, owner,
    )  # fmt: skip
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
