"""The kernels' tests: on a GPU, or anywhere in Triton's interpreter with TRITON_INTERPRET=1.

Memory that a kernel forgets to write shows, because torch.empty gives NaN here.
"""

import copy
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if not INTERPRETED and DEVICE == "cpu":
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items):
    for item in items:
        if "kernels" in item.path.parts and DEVICE == "cuda":
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device():
    return torch.device(DEVICE)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    empty, empty_like = torch.empty, torch.empty_like

    def poison(tensor):
        numbers = tensor.is_floating_point() and not tensor.requires_grad
        return tensor.fill_(float("nan")) if numbers else tensor

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))


@pytest.fixture
def counted(monkeypatch):
    """A function that lists the calls of a module's function from now on."""

    def count(module, name):
        calls, function = [], getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: calls.append(args) or function(*args))
        return calls

    return count


@pytest.fixture
def capture():
    """A function that captures a step: its graph, and the results that replays write anew."""

    def captured(step):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        return graph, found

    return captured


@pytest.fixture
def compare_traced():
    """A function that compares a model as one graph, under autocast, with the model uncompiled."""

    def compare(model, x, dy):
        twin = copy.deepcopy(model)
        compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
        found = []
        for function, owner in ((compiled, model), (twin, twin)):
            leaf = x.detach().requires_grad_()
            with torch.autocast(x.device.type, torch.bfloat16):
                y = function(leaf)
            found.append([y, *torch.autograd.grad(y, [leaf, *owner.parameters()], dy)])
        for value, wanted in zip(*found, strict=True):
            torch.testing.assert_close(value, wanted, rtol=2e-2, atol=2e-2)  # of bfloat16

    return compare
