"""How the node of C++ gets compiled, beside whatever else is going on, and what may go wrong."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import modenorm
from modenorm.kernels.c import mode_norm as c_mode_norm
from modenorm.kernels.cpp import module as cpp_module
from test_cpp_node import SHAPE, is_cpp

pytestmark = pytest.mark.skipif(
    not cpp_module.autograd_nodes().startswith("C++"), reason=cpp_module.autograd_nodes()
)


def builder(monkeypatch, tmp_path, **environment):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return cpp_module._Builder()


def test_it_can_be_switched_off(monkeypatch, tmp_path):
    found = builder(monkeypatch, tmp_path, MODENORM_CPP_NODE="0")
    assert found.module is None
    assert found.about == "MODENORM_CPP_NODE=0"


def test_without_a_compiler(monkeypatch, tmp_path):
    found = builder(monkeypatch, tmp_path, PATH="", CXX="")
    assert found.module is None
    assert "no C++ compiler" in found.about


def script(tmp_path, work):
    """A compiler that does some work; "$target" is the file that it should make."""
    path = tmp_path / "cxx"
    path.write_text(f'#!/bin/bash\ntarget="${{@: -5:1}}"\n{work}\n')
    path.chmod(0o755)
    return str(path)


FAULTS = {
    "fails": "echo 'error: no such header' >&2; exit 1",
    "makes nonsense": 'echo no > "$target"',
    "speaks another language": r"printf 'error: \xff' >&2; exit 1",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_compiler_that_is_of_no_use(fault, monkeypatch, tmp_path):
    found = builder(monkeypatch, tmp_path, CXX=script(tmp_path, FAULTS[fault]))
    found.wait()
    assert found.module is None
    assert "error: " in found.about or "ImportError" in found.about


def copying(tmp_path):
    """A compiler that is done at once."""
    return script(tmp_path, f'cp {cpp_module._builder().module.__file__} "$target"; echo copied')


def test_where_files_cannot_be_locked(monkeypatch, tmp_path):
    import fcntl

    def refuse(*args):
        raise OSError("Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    found = builder(monkeypatch, tmp_path, CXX=copying(tmp_path))
    found.wait()
    assert found.module is not None


def test_where_kept_files_cannot_be_executed(monkeypatch, tmp_path):
    opened, open_file = [], cpp_module._open

    def refusing(path):
        opened.append(path)
        if path.is_relative_to(tmp_path):
            raise ImportError("failed to map segment from shared object")
        return open_file(path)

    monkeypatch.setattr(cpp_module, "_open", refusing)
    found = builder(monkeypatch, tmp_path, CXX=copying(tmp_path))
    found.wait()
    assert found.module is not None
    assert len(opened) == 2


def test_what_a_compiler_says_is_not_for_the_user(monkeypatch, tmp_path, capfd):
    builder(monkeypatch, tmp_path, CXX=copying(tmp_path)).wait()
    assert capfd.readouterr() == ("", "")


def test_without_another_thread(monkeypatch, tmp_path):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    found = builder(monkeypatch, tmp_path)
    found.wait()
    assert found.module is None
    assert "can't start new thread" in found.about


def test_a_compiler_that_does_not_want_to_end(monkeypatch, tmp_path):
    work = f"trap '' TERM; touch {tmp_path}/begun; while true; do sleep 1; done"
    found = builder(monkeypatch, tmp_path, CXX=script(tmp_path, work))
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    found._stop()
    assert not found._thread.is_alive()


def test_a_program_that_ends_before_the_compiler_begins(monkeypatch, tmp_path):
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    found = builder(monkeypatch, tmp_path)
    found._stop()
    with pytest.raises(subprocess.SubprocessError):
        found._compile(("c++",), tmp_path / "library.so")
    assert found._process is None


def test_layers_do_not_wait_for_the_compiler(monkeypatch, tmp_path):
    layer, x = modenorm.ModeNorm2d(3), torch.randn(SHAPE, requires_grad=True)
    found = builder(monkeypatch, tmp_path, CXX=script(tmp_path, "sleep 600"))
    monkeypatch.setattr(cpp_module, "_builder", lambda: found)
    c_mode_norm._plans.clear()
    y = layer(x)
    y.backward(torch.randn(SHAPE))
    assert not is_cpp(y)
    found._stop()
    assert found.module is None
    monkeypatch.undo()
    assert is_cpp(layer(x))


ENDS = """
import torch, modenorm
layer, x = modenorm.ModeNorm2d(3), torch.randn(4, 3, 5, 5)
layer(x).sum().backward()
print("done")
"""


def test_a_program_that_ends_leaves_nothing_behind(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(scratch)}
    source = Path(modenorm.__file__).parents[1]
    environment["PYTHONPATH"] = str(source)
    begun = time.monotonic()
    command = [sys.executable, "-c", ENDS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "done\n"
    assert done.stderr == ""
    assert time.monotonic() - begun < 60
    assert list(scratch.iterdir()) == []
    kept = {path.suffix for path in (tmp_path / "modenorm").iterdir()}
    assert kept <= {".so", ".lock"}


def test_two_processes_share_one_compilation(tmp_path):
    counter, made = tmp_path / "count", cpp_module._builder().module.__file__
    compiler = script(tmp_path, f'echo one >> {counter}; sleep 3; cp {made} "$target"')
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CXX": compiler}
    environment["PYTHONPATH"] = str(Path(modenorm.__file__).parents[1])
    command = "import modenorm.kernels as k; print(k.autograd_nodes())"
    racers = [
        subprocess.Popen([sys.executable, "-c", command], env=environment, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    told = {racer.communicate()[0].decode() for racer in racers}
    assert len(told) == 1
    assert told.pop().startswith("C++: ")
    assert counter.read_text() == "one\n"
