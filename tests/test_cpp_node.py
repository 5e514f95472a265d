"""Autograd nodes of C++: the same numbers as those of Python, and all that autograd may ask."""

import copy
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import modenorm
from compare import make_layer
from modenorm.kernels.c import mode_norm as c_mode_norm
from modenorm.kernels.cpp import module as cpp_module
from modenorm.kernels.cpp import node as cpp_node
from test_cpu_kernels import OPTIONS

pytestmark = pytest.mark.skipif(
    not cpp_module.autograd_nodes().startswith("C++"), reason=cpp_module.autograd_nodes()
)
SHAPE = (6, 3, 4, 5)


def is_cpp(y: torch.Tensor) -> bool:
    return "modenorm::Norm" in y.grad_fn.name()


@pytest.fixture
def layer():
    return make_layer(3, 2, 4, torch.float32)


@pytest.fixture
def x():
    return torch.randn(SHAPE, requires_grad=True)


def everything(layer, x, upstream):
    layer, x = copy.deepcopy(layer), x.detach().requires_grad_()
    y = layer(x)
    gradients = torch.autograd.grad(y, [x, *layer.parameters()], upstream)
    return is_cpp(y), [y.detach(), *gradients, *layer.buffers()]


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("option", [name for name, given in OPTIONS.items() if "gate" not in given])
def test_same_bits_as_a_node_of_python(option, order, use_python_nodes):
    layer = make_layer(3, 2, 4, torch.float32, **OPTIONS[option])
    x = torch.randn(SHAPE).to(memory_format=order)
    upstream = torch.randn_like(x)
    cpp, found = everything(layer, x, upstream)
    use_python_nodes()
    python, expected = everything(layer, x, upstream)
    assert cpp
    assert not python
    assert [t.stride() for t in found] == [t.stride() for t in expected]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "none"])
@pytest.mark.parametrize("variance", ["pooled", "pixel"])
def test_same_bits_of_a_mode_group_norm(variance, affine, order, use_python_nodes):
    layer = modenorm.ModeGroupNorm(3, 4, variance=variance, affine=affine)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(SHAPE).to(memory_format=order)
    upstream = torch.randn_like(x)
    cpp, found = everything(layer, x, upstream)
    use_python_nodes()
    python, expected = everything(layer, x, upstream)
    assert (cpp, python) == (True, False)
    assert [t.stride() for t in found] == [t.stride() for t in expected]
    assert all(map(torch.equal, found, expected))


def test_a_mode_group_norm_that_is_heard_or_differentiated_twice(x):
    layer, heard = modenorm.ModeGroupNorm(3, 2), []
    y = layer(x)
    layer.gate_listener = heard.append
    assert torch.equal(layer(x), y)
    assert heard[0].shape == (*SHAPE[:2], 2)
    upstream = torch.randn(SHAPE)
    (first,) = torch.autograd.grad(y, x, upstream, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    with modenorm.use_backend("eager"):
        (expected,) = torch.autograd.grad(layer(x), x, upstream, create_graph=True)
        (twice,) = torch.autograd.grad(expected.square().sum(), x)
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(second, twice, rtol=1e-3, atol=1e-4)


def expanded(upstream):
    return upstream[:1, :1, :1, :1].expand(SHAPE)


def misaligned(upstream):
    return torch.cat([torch.zeros(1), upstream.flatten()])[1:].view(SHAPE)


def in_another_order(upstream):
    return upstream.to(memory_format=torch.channels_last)


def negated(upstream):
    return torch._neg_view(upstream)


@pytest.mark.parametrize("change", [expanded, misaligned, in_another_order, negated])
def test_gradients_that_lie_otherwise(change, layer, x, monkeypatch):
    upstream = change(torch.randn(SHAPE))
    _, found = everything(layer, x, upstream)
    _, expected = everything(layer, x, upstream.clone(memory_format=torch.contiguous_format))
    assert all(map(torch.equal, found, expected))


def test_double_backward(x):
    layer = make_layer(3, 2, 4, torch.float32)
    inputs = [x, *layer.parameters()]
    upstream = torch.randn(SHAPE, requires_grad=True)

    def second():
        y = layer(x)
        first = torch.autograd.grad(y, inputs, upstream, create_graph=True)
        total = sum(g.square().sum() for g in first)
        return torch.autograd.grad(total, [*inputs, upstream], materialize_grads=True)

    found = second()
    with modenorm.use_backend("eager"):
        expected = second()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))


def test_batched_gradients(layer, x):
    y, upstream = layer(x), torch.randn(4, *SHAPE)
    (found,) = torch.autograd.grad(y, x, upstream, is_grads_batched=True, retain_graph=True)
    for one, dx in zip(upstream, found, strict=True):
        (expected,) = torch.autograd.grad(y, x, one, retain_graph=True)
        torch.testing.assert_close(dx, expected, rtol=1e-4, atol=1e-5)


def test_only_what_is_needed(layer):
    x = torch.randn(SHAPE)
    layer(x).sum().backward()
    assert x.grad is None
    assert all(p.grad is not None for p in layer.parameters())
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    assert layer(x).grad_fn is None
    x.requires_grad_()
    layer(x).backward(torch.randn(SHAPE))
    assert x.grad.abs().sum() > 0


def test_a_graph_is_used_once_unless_it_is_kept(layer, x):
    y, upstream = layer(x), torch.randn(SHAPE)
    first = torch.autograd.grad(y, x, upstream, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(y, x, upstream)[0], first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x, upstream)


def test_an_input_that_was_changed_is_noticed(layer, x):
    changed = x * 1
    y = layer(changed)
    changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_output_may_be_changed(layer, x):
    y = layer(x)
    torch.relu_(y)
    y.backward(torch.randn(SHAPE))
    assert x.grad.isfinite().all()


def test_saved_tensors_may_be_packed(layer, x):
    upstream, packed = torch.randn(SHAPE), []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.clone(memory_format=torch.contiguous_format).numpy()

    x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    (expected,) = torch.autograd.grad(layer(x), x, upstream)
    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        y = layer(x)
    (found,) = torch.autograd.grad(y, x, upstream)
    assert packed[0] == x.shape
    assert len(packed) == 6  # x, four parameters, what is kept
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("first", ["Python", "C++"])
def test_a_checkpoint_may_be_repeated_by_the_other_node(first, layer, x, monkeypatch):
    """The compiler may end between a forward and its repetition."""
    upstream, make = torch.randn(SHAPE), cpp_node.make
    expected = torch.autograd.grad(layer(x), x, upstream)[0]
    estimates = layer.running_mean.clone()

    def use(kind):
        chosen = make if kind == "C++" else lambda *args, **kwargs: None
        monkeypatch.setattr(cpp_node, "make", chosen)
        c_mode_norm._plans.clear()

    use(first)
    y = checkpoint(layer, x, use_reentrant=False)
    moved = layer.running_mean.clone()
    use("Python" if first == "C++" else "C++")
    found = torch.autograd.grad(y, x, upstream)[0]
    assert torch.equal(found, expected)
    assert not torch.equal(moved, estimates)
    assert torch.equal(layer.running_mean, moved)


def test_compiled_autograd(layer, x):
    from torch._dynamo import compiled_autograd

    upstream = torch.randn(SHAPE)
    expected = torch.autograd.grad(layer(x), x, upstream)[0]
    with compiled_autograd._enable(torch.compile(backend="eager")):
        layer(x).backward(upstream)
    assert torch.equal(x.grad, expected)


def test_graphs_outlive_plans(layer, x):
    y, upstream = layer(x), torch.randn(SHAPE)
    expected = torch.autograd.grad(y, x, upstream, retain_graph=True)[0]
    c_mode_norm._plans.clear()
    assert torch.equal(torch.autograd.grad(y, x, upstream)[0], expected)


def test_the_number_of_nodes_is_limited(layer, x, monkeypatch):
    c_mode_norm._plans.clear()
    monkeypatch.setattr(cpp_node, "_made", cpp_node.MOST_NODES)
    assert not is_cpp(layer(x))


def test_threads(layer, x):
    upstream = torch.randn(SHAPE)
    expected, found = torch.autograd.grad(layer(x), x, upstream)[0], []

    def work():
        for _ in range(50):
            found.append(torch.autograd.grad(layer(x), x, upstream)[0])

    layer.momentum = 0.0
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 200
    assert all(torch.equal(one, expected) for one in found)


@pytest.mark.filterwarnings("ignore:Error detected in")
def test_anomalies_are_traced_to_the_layer(layer, x):
    with torch.autograd.set_detect_anomaly(True):
        y = layer(x)
        with pytest.raises(RuntimeError, match=r"modenorm::Norm.*returned nan"):
            y.backward(torch.full(SHAPE, float("nan")))


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_profilers_see_it(layer, x):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        layer(x).sum().backward()
    names = {event.name for event in profiler.events()}
    assert "ModeNorm" in names
    assert any("modenorm::Norm" in name for name in names)


def test_a_node_that_is_called_by_hand(layer, x):
    """C would read whatever lies behind a gradient of another type or size."""
    y, upstream = layer(x), torch.randn(SHAPE)
    with torch.no_grad():
        expected = y.grad_fn(upstream)[0]
        torch.testing.assert_close(y.grad_fn(upstream.double())[0], expected, rtol=1e-4, atol=1e-5)
        for wrong in (upstream[:1], upstream[:0], upstream.to("meta")):
            with pytest.raises(RuntimeError):
                y.grad_fn(wrong)


def test_a_copy_that_is_made_when_written_to(layer, x):
    before = layer.running_mean
    layer.running_mean = torch._lazy_clone(before)
    expected = before.clone()
    assert is_cpp(layer(x))
    assert torch.equal(before, expected)
    assert not torch.equal(layer.running_mean, expected)
