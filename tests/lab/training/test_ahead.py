"""Networks compiled ahead: which ones, by whom, and that nothing depends on it."""

import contextlib
import os
from pathlib import Path

import pytest
import torch
from fake_data import fake_config, fake_data
from torch import nn

from modenorm.lab.training import ahead, evaluate, step, train_many
from modenorm.lab.training.sources import SharedData
from modenorm.lab.training.usage import with_gates

CPU = torch.device("cpu")


@pytest.fixture
def many_cores(monkeypatch):
    monkeypatch.setattr(ahead, "compiles_on", lambda device: True)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)


def shared() -> SharedData:
    return SharedData(CPU, None, fake_data())


def configs(*norms: str, seeds: int = 2, **changes: object):
    return [
        fake_config(norm=norm, seed=seed, compile=True, **changes)
        for seed in range(seeds)
        for norm in norms
    ]


def watched(forward, seen):
    def watching(self, x, *others):
        seen.append(tuple(x.shape))
        return forward(self, x, *others)

    return watching


@pytest.mark.parametrize("others", [0, 1])
def test_every_form_is_compiled_once(many_cores, monkeypatch, others):
    """For training too, but for a network that is trained at once."""
    started = []

    class Process:
        ended = False

        def kill(self):
            self.ended = True

        def wait(self):
            assert self.ended

    def start(forms, device, folder):
        started.append(forms)
        return Process()

    monkeypatch.setattr(ahead, "_start", start)
    plain = [fake_config(norm=norm, compile=False) for norm in ("ln", "mgn")] * others
    wanted = [*plain, *configs("bn", "mn", "gn", "mgn", "in")]
    wanted += configs("mn", modes=3) + configs("mn", sparsity=0.1)
    with ahead.compiling_ahead(wanted, shared(), CPU) as compiling:
        assert len(compiling.processes) == ahead.PROCESSES
    assert all(process.ended for process in compiling.processes)
    forms = [form for part in started for form in part]
    assert all(len({form.config.compile for form in part}) == 1 for part in started)
    apart = [form for form in forms if not form.config.compile]
    assert [(form.config.norm, form.trained) for form in apart] == [("mgn", True)][:others]
    forms = [form for form in forms if form.config.compile]
    norms = [(f.config.norm, f.config.modes, f.config.sparsity) for f in forms]
    assert set(norms) == {
        ("bn", 2, 0), ("mn", 2, 0), ("gn", 2, 0), ("mgn", 2, 0), ("in", 2, 0), ("mn", 3, 0),
        ("mn", 2, 0.1),
    }  # fmt: skip
    assert len(forms) == 7
    assert [form.config.norm for form in forms if not form.trained] == ["bn"][others:]
    assert {(form.classes, form.size, form.evaluated) for form in forms} == {(4, (8, 8), 33)}


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_processes_end_if_another_can_not_be_started(many_cores, monkeypatch, error):
    started, start = [], ahead._start

    def start_one(forms, device, folder):
        if started:
            raise error
        started.append(start(forms, device, folder))
        return started[0]

    monkeypatch.setattr(ahead, "_start", start_one)
    expected = contextlib.nullcontext() if error is OSError else pytest.raises(error)
    wanted = configs("bn", "mn", "gn", seeds=1)
    with expected, ahead.compiling_ahead(wanted, shared(), CPU) as compiling:
        assert compiling.processes == started
    assert started[0].poll() is not None


@pytest.mark.parametrize("cores", [1, 64])
def test_no_processes_without_need(monkeypatch, cores):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(ahead, "compiles_on", lambda device: cores == 1)
    with ahead.compiling_ahead(configs("bn", "mn"), shared(), CPU) as compiling:
        assert compiling.processes == []


@pytest.mark.parametrize(("compile", "trained"), [(True, True), (True, False), (False, True)])
def test_a_form_is_evaluated_and_takes_a_step_of_a_training(monkeypatch, compile, trained):
    shapes = []

    def compiled(function):
        def forward(*given):
            shapes.append((tuple(given[-1].shape), torch.is_autocast_enabled("cpu")))
            return function(*given)

        return forward if isinstance(function, nn.Module) or function is with_gates else function

    for module in (step, evaluate):
        monkeypatch.setattr(module, "compiled", compiled)
    config = fake_config(compile=compile, dtype="bfloat16")
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(nn.Conv2d, "_conv_forward", watched(nn.Conv2d._conv_forward, seen))
    ahead.compile_form(ahead.Form(config, 4, (8, 8), 33, trained), CPU)
    expected = [(33, 3, 8, 8), (4, 3, 8, 8)][: 1 + trained]
    assert [shape for shape in seen if shape[1] == 3] == expected
    assert shapes == [(shape, True) for shape in expected if compile]


def test_a_process_says_what_it_has_compiled(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # then it is only run
    one, other, seed = *configs("mn", "bn", seeds=1), fake_config(norm="mn", compile=True, seed=7)
    forms = [ahead.Form(config, 4, (8, 8), 33) for config in (one, other)]
    compiling = ahead.Ahead(tmp_path)
    compiling.start([forms[0]._replace(trained=False), forms[1], forms[0]], CPU)
    compiling.start([forms[0]._replace(size=(0, 0))], CPU)
    right, wrong = compiling.processes
    assert wrong.wait(timeout=120) != 0
    while right.poll() is None:
        assert compiling.has(other) or not compiling.has(one)  # in their order
    assert right.poll() == 0
    assert all(map(compiling.has, (one, other, seed)))
    assert not compiling.has(fake_config(norm="gn", compile=True))


def test_trainings_do_not_mind_processes_that_fail(many_cores, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "nowhere")
    monkeypatch.setattr(ahead.sys, "executable", "/bin/false")
    wanted = configs("bn", "mn", seeds=1, total=2, eval_every=2, milestones=())
    found = train_many(wanted, tmp_path, data=fake_data(), device="cpu")
    assert all(outcome.result for outcome in found)


def test_nothing_is_compiled_beside_what_is_measured(many_cores, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(ahead, "_start", None)  # can't be called
    wanted = configs("bn", "mn", seeds=1, total=2, eval_every=2, milestones=())
    found = train_many(wanted, tmp_path, data=fake_data(), device="cpu", start_together=True)
    assert all(outcome.result for outcome in found)
