"""Autograd nodes of C++ on a GPU: once launches are recorded, and with the same bits."""

import copy

import pytest
import torch
from test_fused import layer_for, tensor

import modenorm
from modenorm.kernels.cpp import module as cpp_module
from modenorm.kernels.cpp import operator as cpp_operator
from modenorm.kernels.gpu import mode_group_norm_plan, mode_norm_plan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHAPES = [(6, 8, 5, 5), (4, 16, 8, 8), (7, 3)]
DTYPES = [torch.float32, torch.bfloat16]


def is_cpp(y):
    return "modenorm::Norm" in y.grad_fn.name()


@pytest.fixture(autouse=True)
def nodes():
    if not cpp_module.autograd_nodes().startswith("C++"):
        pytest.skip(cpp_module.autograd_nodes())


@pytest.fixture(autouse=True)
def _empty_memory_is_nan():
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before


def everything(layer, x, upstream):
    layer, x = copy.deepcopy(layer), x.detach().requires_grad_()
    y = layer(x)
    gradients = torch.autograd.grad(y, [x, *layer.parameters()], upstream)
    return is_cpp(y), [y.detach(), *gradients, *layer.buffers()]


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_bits_from_the_second_step_on(shape, dtype, last, device):
    mode_norm_plan._plans.clear()
    layer, x = layer_for(shape, 3, device), tensor(shape, device, dtype, last)
    upstream = torch.randn_like(x)
    first, expected = everything(layer, x, upstream)
    second, found = everything(layer, x, upstream)
    assert not first
    assert second
    assert [t.stride() for t in found] == [t.stride() for t in expected]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("variance", ["pooled", "pixel"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mode_group_norm(dtype, variance, device):
    mode_group_norm_plan._plan.cache_clear()
    layer = modenorm.ModeGroupNorm(8, 3, variance=variance).to(device)
    x = tensor((6, 8, 5, 5), device, dtype, False)
    upstream = torch.randn_like(x)
    first, expected = everything(layer, x, upstream)
    second, found = everything(layer, x, upstream)
    assert (first, second) == (False, True)
    assert all(map(torch.equal, found, expected))


@pytest.fixture
def warm(device):
    """A layer, an input and a gradient that a node of C++ serves."""
    layer, x = (
        layer_for((6, 8, 5, 5), 2, device),
        tensor((6, 8, 5, 5), device, torch.float32, False),
    )
    upstream = torch.randn_like(x)
    everything(layer, x, upstream)
    cpp, expected = everything(layer, x, upstream)
    assert cpp
    return layer, x, upstream, expected


def test_on_another_stream(warm):
    layer, x, upstream, expected = warm
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late = x + 0
        _, found = everything(layer, late, upstream)
    torch.cuda.current_stream().wait_stream(stream)
    assert all(map(torch.equal, found, expected))


def test_in_a_graph(warm):
    layer, x, upstream, expected = warm
    layer, x = copy.deepcopy(layer), x.detach().requires_grad_()
    start = copy.deepcopy(layer.state_dict())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
        gradients = torch.autograd.grad(y, [x, *layer.parameters()], upstream)
    assert is_cpp(y)
    layer.load_state_dict(start)
    graph.replay()
    found = [y, *gradients, *layer.buffers()]
    assert all(map(torch.equal, found, expected))


def test_double_backward(warm):
    layer, x, upstream, expected = warm
    x = x.detach().requires_grad_()
    y = layer(x)
    assert is_cpp(y)
    (dx,) = torch.autograd.grad(y, x, upstream, create_graph=True)
    torch.testing.assert_close(dx, expected[1], rtol=1e-3, atol=1e-4)
    dx.square().sum().backward()
    assert x.grad.isfinite().all()


def test_without_threads_of_the_engine(warm):
    layer, x, upstream, expected = warm
    with torch.autograd.set_multithreading_enabled(False):
        _, found = everything(layer, x, upstream)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["mode", "group"])
def test_operators_of_a_compiled_layer(kind, dtype, monkeypatch):
    """From the second step on C++ runs them, with the same bits, also in a CUDA graph."""
    layer = {"mode": modenorm.ModeNorm2d, "group": modenorm.ModeGroupNorm}[kind](8, 3).cuda()
    x, dy = (tensor((6, 8, 5, 7), "cuda", dtype, True) for _ in range(2))
    x.requires_grad_()
    leaves = [x, *layer.parameters()]
    compiled = torch.compile(layer, fullgraph=True, dynamic=False)
    module, repeated = cpp_module.cpp_module(), []

    class Counting:
        remember = staticmethod(module.remember)

        @staticmethod
        def repeat(*arguments):
            results = module.repeat(*arguments)
            repeated.append(results is not None)
            return results

    monkeypatch.setattr(cpp_operator, "cpp_module", lambda: Counting)
    start = copy.deepcopy(layer.state_dict())

    def step():
        layer.load_state_dict(start)
        y = compiled(x)
        found = torch.autograd.grad(y, leaves, dy)
        # a graph that lives on would tie the capture to this stream
        return [y.detach(), *found, *(b.clone() for b in layer.buffers())]

    first, second = step(), step()
    assert repeated == [False, False, True, True]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        third = step()
    graph.replay()
    for wanted, *others in zip(first, second, third, strict=True):
        for other in others:
            assert torch.equal(wanted, other)
    torch.compiler.reset()
