"""How the C code gets compiled, kept and loaded, and what happens where it can't be."""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import modenorm
from modenorm.kernels import build, choice
from modenorm.kernels.c import library as c_library

pytestmark = pytest.mark.skipif(
    not choice.cpu_kernels().startswith("compiled"), reason=choice.cpu_kernels()
)
SOURCE = Path(modenorm.__file__).parents[1]


def forget():
    c_library.library.cache_clear()
    c_library._function.cache_clear()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, a compiler that is in a hurry, and nothing loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(c_library, "FLAGS", ("-O0", *c_library.FLAGS[1:]))
    forget()
    yield tmp_path / "modenorm"
    monkeypatch.undo()
    forget()


def path_of_library() -> Path:
    kind, _, path = choice.cpu_kernels().partition(": ")
    assert kind == "compiled", path
    return Path(path)


def assert_works():
    """A step is right, whatever runs it."""
    layer = modenorm.ModeNorm2d(3)
    x = torch.randn(4, 3, 5, 5, requires_grad=True)
    y = layer(x)
    with modenorm.use_backend("reference"):
        assert torch.allclose(y, modenorm.ModeNorm2d.forward(layer, x), atol=1e-5)
    y.square().sum().backward()
    assert x.grad.isfinite().all()


def counted(monkeypatch) -> list:
    commands = []

    def listening(command, *args, **kwargs):
        commands.append(command)
        return run(command, *args, **kwargs)

    run = subprocess.run
    monkeypatch.setattr(c_library.subprocess, "run", listening)
    return commands


def test_it_is_compiled_once(cache, monkeypatch):
    commands = counted(monkeypatch)
    first = path_of_library()
    assert first.parent == cache
    assert cache.stat().st_mode & 0o777 == 0o700
    assert_works()
    forget()
    assert path_of_library() == first
    assert len(commands) == 1
    assert [path.name for path in cache.iterdir()] == [first.name]  # nothing is left over


@pytest.mark.parametrize("what", ["FLAGS", "SOURCES", "processor", "compiler"])
def test_anything_new_makes_another_file(what, cache, tmp_path, monkeypatch):
    before = c_library._key(c_library._compiler())
    if what == "FLAGS":
        monkeypatch.setattr(c_library, "FLAGS", (*c_library.FLAGS, "-g"))
    elif what == "SOURCES":
        changed = tmp_path / "mode_norm.c"
        changed.write_bytes(c_library.SOURCES[0].read_bytes() + b" ")
        monkeypatch.setattr(c_library, "SOURCES", (changed, *c_library.SOURCES[1:]))
    elif what == "processor":
        monkeypatch.setattr(c_library, "_processor", lambda: "another")
    else:
        shutil.copy(c_library._compiler()[0], tmp_path / "cc")
        monkeypatch.setenv("CC", str(tmp_path / "cc"))
    assert c_library._key(c_library._compiler()) != before


@pytest.mark.parametrize("damage", ["truncated", "empty", "one byte", "not a library", "a folder"])
def test_a_damaged_file_is_never_loaded(damage, cache, monkeypatch):
    path = path_of_library()
    whole = path.read_bytes()
    path.unlink()  # what is loaded stays as it is
    if damage == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "one byte":
        middle = len(whole) // 2
        path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    elif damage == "not a library":  # whole, by its name, and made elsewhere
        path.write_bytes(b"something else")
        path.rename(path.with_name(f"{path.stem.split('-')[0]}-{build._digest(path)}.so"))
    else:
        path.mkdir()
    forget()
    commands = counted(monkeypatch)
    assert choice.cpu_kernels().startswith("compiled")
    assert len(commands) == 1
    assert_works()


def test_a_file_of_somebody_else_is_not_loaded(cache, monkeypatch):
    path = path_of_library()
    forget()
    monkeypatch.setattr(build.os, "getuid", lambda: path.stat().st_uid + 1)
    assert build._kept(path.stem.split("-")[0]) == []


def test_a_cache_that_cannot_be_written(cache, tmp_path):
    cache.write_text("a file where the folder should be")
    path = path_of_library()
    assert not path.exists()  # compiled for this process alone
    assert_works()


def test_the_home_of_somebody_else(cache, monkeypatch):
    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "glob", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert not path_of_library().exists()
    assert_works()


def test_a_user_without_a_home(cache, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    assert not path_of_library().exists()
    assert list(tmp_path.iterdir()) == []  # no folder named ~
    assert_works()


def test_a_disk_that_is_full(cache, monkeypatch):
    def refuse(path, contents):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    assert not path_of_library().exists()
    assert list(cache.iterdir()) == []
    assert_works()


def test_without_a_compiler_torch_operators_run(cache, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(cache))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choice.cpu_kernels() == "torch operators: there is no C compiler"
        assert_works()


def test_a_compiler_that_is_no_command_is_passed_over(cache, monkeypatch):
    monkeypatch.setenv("CC", 'cc "-O2')
    assert path_of_library().exists()
    assert_works()


def test_switched_off(cache, monkeypatch):
    monkeypatch.setenv(c_library.SWITCH, "0")
    assert choice.cpu_kernels() == f"torch operators: {c_library.SWITCH}=0"
    assert_works()
    assert not cache.exists()


FAULTS = (
    "echo error: no such header >&2; exit 1",
    r"printf 'error: \377' >&2; exit 1",  # in no known language
    "exit 0",
    "kill $$",
)


@pytest.mark.parametrize("script", FAULTS)
def test_a_compiler_that_fails_is_reported_once(script, cache, tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    broken.write_text(f"#!/bin/sh\n{script}\n")
    broken.chmod(0o700)
    monkeypatch.setenv("CC", str(broken))
    with pytest.warns(UserWarning, match="torch operators"):
        choice.cpu_kernels()
    assert choice.cpu_kernels().startswith("torch operators: ")
    assert_works()


def test_a_compiler_that_does_not_know_this_processor(cache, tmp_path, monkeypatch):
    picky = tmp_path / "picky"
    compiler = c_library._compiler()[0]
    picky.write_text(f'#!/bin/sh\ncase "$*" in *native*) exit 1;; esac\nexec {compiler} "$@"\n')
    picky.chmod(0o700)
    monkeypatch.setenv("CC", str(picky))
    path_of_library()
    assert_works()


def test_where_torch_has_no_openmp(cache, monkeypatch):
    monkeypatch.setattr(c_library, "_team", lambda: None)
    assert choice.runs_c(torch.ones(2, 2))
    torch.set_num_threads(2)
    try:
        assert not choice.runs_c(torch.ones(2, 2))  # torch's operators have two
        assert choice.cpu_kernels() == "torch operators: one thread only"
    finally:
        torch.set_num_threads(1)


def start(code: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SOURCE), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


RACE = """
import torch, modenorm
from modenorm.kernels import cpu_kernels
from modenorm.kernels.c import library
library.FLAGS = ("-O0", *library.FLAGS[1:])
modenorm.ModeNorm2d(3)(torch.randn(4, 3, 5, 5)).sum().backward()
print(cpu_kernels())
"""


def test_two_processes_compile_at_once(cache, tmp_path):
    alone = {"XDG_CACHE_HOME": str(tmp_path), "MODENORM_CPP_NODE": "0"}
    racers = [start(RACE, **alone) for _ in range(2)]
    told = [racer.communicate(timeout=120) for racer in racers]
    assert all(racer.returncode == 0 for racer in racers), told
    assert all(out.startswith("compiled: ") for out, _ in told)
    assert all(path.suffix == ".so" for path in cache.iterdir())
    assert path_of_library() in list(cache.iterdir())


FORK = """
import os, signal, torch, modenorm
torch.set_num_threads(3)
layer, x = modenorm.ModeNorm2d(8), torch.randn(8, 8, 40, 40, requires_grad=True)
upstream = torch.ones_like(x)  # by three threads
if {before}:
    layer(x)
child = os.fork()
signal.alarm(60)
y = layer(x)
y.backward(upstream)
if child == 0:
    torch.set_num_threads(1)  # torch's own operators would wait for the parent's threads
    os._exit(0 if y.isfinite().all() and x.grad.isfinite().all() else 1)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("before", [True, False], ids=["loaded before", "loaded after"])
def test_a_fork_hangs_nobody(before):
    with start(FORK.format(before=before)) as process:
        out, errors = process.communicate(timeout=120)
    assert out.strip() == "0", errors
