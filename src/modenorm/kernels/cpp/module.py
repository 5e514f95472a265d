"""What is written in C++: autograd nodes and operators, which cost the host more in Python.

The system's C++ compiler makes it, for this very torch, once and beside whatever else is going on,
in ten to twenty seconds; kernels/build.py keeps it. Until it is there, and where it can't be
made, Python serves.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import os
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from functools import partial
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import torch

from modenorm.kernels import build

__all__ = ["autograd_nodes", "cpp_module"]

SWITCH = "MODENORM_CPP_NODE"  # 0: Python serves
FOLDER = Path(__file__).parent
SOURCE = FOLDER / "module.cpp"
HEADERS = tuple(FOLDER / f"{name}.h" for name in ("node", "operator", "task"))
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-w")
LIBRARIES = ("torch_python", "torch", "torch_cpu", "c10")
COMPILERS = ("c++", "g++", "clang++")
NAME = "modenorm_cpp"
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


def cpp_module() -> Any:
    """The module, None if there is none (yet); the first call starts the compiler."""
    return _builder().module


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
        compiler = build.compiler_for("CXX", COMPILERS)
        if not sys.platform.startswith("linux") or compiler is None:
            self.about = "there is no C++ compiler"
            return
        key = build.key_of((SOURCE, *HEADERS), compiler, FLAGS, *_versions())
        if (found := build.load_kept(key, _open)) is not None:
            self.module, self.about = found[0], str(found[1])
            return
        self.about = "the compiler is at work"
        thread = threading.Thread(target=self._build, args=(compiler, key), daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # there are too many, or the program ends
            self.about = build.reason(error)
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
                module, path = build.load(key, compile_to, _open)
            self.module, self.about = module, str(path)
        except (OSError, ImportError, subprocess.SubprocessError) as error:
            self.about = build.reason(error)

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
            build.folder().mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = stack.enter_context((build.folder() / "node.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            # to close it is not enough: a forked process may still have it open
            stack.callback(fcntl.flock, lock, fcntl.LOCK_UN)
        yield
