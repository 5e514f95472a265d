"""Layers under torch.compile and torch.export, with the same numbers."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import modenorm
from compare import assert_close, double, make_layer, one_hot, run
from marks import TORCH_JIT
from modenorm import functional

COMPILED = {
    "default": {},
    "momentum=None": {"momentum": None},
    "usage": {"momentum": None, "running_update": "usage"},
    "per_mode_affine": {"per_mode_affine": True},
    "no_running_stats": {"track_running_stats": False},
    "standardized": {"gate": modenorm.StandardizedGate},
    "custom_gate": {"gate": lambda c, k: nn.Sequential(nn.Linear(c, 4), nn.Linear(4, k))},
}


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    yield lambda function, backend="aot_eager": torch.compile(
        function, fullgraph=True, backend=backend
    )
    torch._dynamo.reset()


def assert_compiles(layer, compile_with, tolerance, x, **kwargs):
    other, upstream = copy.deepcopy(layer), torch.randn_like(x)
    compiled_layer = compile_with(layer)
    for training in (True, True, False):
        layer.train(training)
        other.train(training)
        results = []
        for function in (compiled_layer, other):
            leaf = x.detach().clone().requires_grad_()
            y = function(leaf, **kwargs)
            y.backward(upstream)
            results.append((y, leaf.grad))
        assert_close(*(y for y, _ in results), tolerance, "output")
        assert_close(*(g for _, g in results), tolerance, "gradient of x")
    for a, b in zip(layer.parameters(), other.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            assert_close(a.grad, b.grad, tolerance, "gradient of a parameter")
    for (name, a), b in zip(layer.named_buffers(), other.buffers(), strict=True):
        assert_close(a, b, tolerance, name)


@pytest.mark.parametrize("options", COMPILED.values(), ids=COMPILED)
def test_compile_without_graph_breaks(options, compiled):
    assert_compiles(make_layer(3, 2, **options), compiled, 1e-10, double(4, 3, 5, 5))


def test_compile_with_gates_and_mask(compiled):
    x = double(4, 3, 5, 5)
    assert_compiles(make_layer(3, 2), compiled, 1e-10, x, gates=one_hot([0, 1, 1, 0], 2))
    mask = torch.rand(4, 5, 5) < 0.7
    mask[2] = False
    for gate in (modenorm.LinearGate, modenorm.StandardizedGate):
        torch._dynamo.reset()
        assert_compiles(make_layer(3, 2, gate=gate), compiled, 1e-10, x, mask=mask)


@pytest.mark.parametrize("variance", ["pooled", "pixel"])
def test_compile_mode_group_norm(variance, compiled):
    layer = modenorm.ModeGroupNorm(3, variance=variance).double()
    assert_compiles(layer, compiled, 1e-10, double(4, 3, 5, 5))


@TORCH_JIT
@pytest.mark.slow
def test_compile_with_inductor(compiled):
    layer, x = make_layer(3, 2, momentum=None), double(4, 3, 5, 5).requires_grad_()
    other, upstream = copy.deepcopy(layer), double(4, 3, 5, 5)
    function = compiled(layer, "inductor")
    gradients = [
        torch.autograd.grad(f(x), [x, *f.parameters()], upstream) for f in (function, other)
    ]
    for actual, expected in zip(*gradients, strict=True):
        assert_close(actual, expected, 1e-10)
    for name, buffer in other.named_buffers():
        assert_close(layer.get_buffer(name), buffer, 1e-12, name)


def test_compile_under_autocast(compiled):
    layer, x = make_layer(3, 2, dtype=torch.float32), torch.randn(4, 3, 5, 5).bfloat16()
    expected = copy.deepcopy(layer)(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = compiled(layer)(x)
    assert y.dtype == torch.bfloat16
    assert_close(y, expected, 2**-7)


def test_compile_takes_other_batch_sizes(compiled):
    layer = make_layer(3, 2).eval()
    function = compiled(layer)
    for size in (4, 5, 9):
        x = double(size, 3, 5, 5)
        assert_close(function(x), layer(x), 1e-12)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", COMPILED.values(), ids=COMPILED)
def test_dynamic_shapes_compile_once(options, training, compiled):
    layer, counter = make_layer(6, 2, **options).train(training), CompileCounter()
    function = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for size in (4, 7, 3, 9):  # all axes differ: equal ones would be taken for the same
        function(double(size, 6, size + 1, 12))
    assert counter.frame_count == 1


@pytest.mark.parametrize("gate", [modenorm.LinearGate, modenorm.StandardizedGate])
def test_export_in_eval_with_a_dynamic_batch(gate):
    model = (
        nn.Sequential(nn.Conv2d(2, 3, 3), make_layer(3, 2, gate=gate), nn.ReLU()).double().eval()
    )
    batch = torch.export.Dim("batch", min=1)
    shapes = ({0: batch},)
    program = torch.export.export(model, (double(4, 2, 6, 6),), dynamic_shapes=shapes)
    for size in (1, 4, 7):
        x = double(size, 2, 6, 6)
        assert_close(program.module()(x), model(x), 1e-12)
    assert not program.graph_signature.buffers_to_mutate


def test_export_of_mode_group_norm():
    model = modenorm.ModeGroupNorm(3).double().eval()
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    program = torch.export.export(model, (double(4, 3, 5, 5),), dynamic_shapes=shapes)
    x = double(7, 3, 5, 5)
    assert_close(program.module()(x), model(x), 1e-12)


def test_checkpointing_inside_a_compiled_function(compiled):
    layer, x, upstream = make_layer(3, 2), double(4, 3, 2, 2), double(4, 3, 2, 2)
    expected = run(layer, x, upstream)
    leaf = x.clone().requires_grad_()
    compiled(lambda x: checkpoint(layer, x, use_reentrant=False))(leaf).backward(upstream)
    assert_close(leaf.grad, expected.gradients["x"], 1e-12)
    assert_close(layer.running_var, expected.buffers["running_var"], 1e-12)
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize("pixel", [False, True], ids=["mode_norm", "mode_group_norm"])
def test_compiled_moments_leave_out_var(pixel, compiled):
    """Inductor of torch 2.13 fails at its slope where sizes are dynamic expressions.

    So it did for a norm behind a convolution, in training, with images of another size.
    """
    layer = modenorm.ModeGroupNorm(3, variance="pixel") if pixel else make_layer(3, 2)
    called = []

    def backend(graph, _):
        called.extend(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward

    compiled(lambda x: layer(x[:, :, 1:]), backend)(double(4, 3, 5, 5))
    assert any("mean" in name for name in called)
    assert not any("var" in name for name in called)


def test_hooks_of_all_modules_do_not_break_the_graph(compiled):
    layer, x = make_layer(3, 2, dtype=torch.float32).eval(), torch.randn(4, 3, 5, 5)
    expected = layer(x)
    shift = nn.modules.module.register_module_forward_hook(
        lambda module, _, y: y + 1 if type(module) is modenorm.LinearGate else y
    )
    try:
        # one more for every mode's logit; 1e-5: float32 in another order
        assert_close(compiled(layer.forward)(x), expected, 1e-5)
    finally:
        shift.remove()
    assert_close(compiled(layer.forward)(x), expected, 1e-5)


def test_masks_and_parameters_of_sizes_that_became_dynamic(compiled):
    """A compiler guards no symbol that is looked for in a tuple."""
    layer = compiled(modenorm.ModeNorm1d(3))
    for samples in (8, 5):
        layer(torch.randn(samples, 3, 20))
    assert layer(torch.randn(5, 3, 20), mask=torch.ones(5, 20) > 0).shape == (5, 3, 20)

    @compiled
    def normalize(x, weight=None):
        return functional.mode_norm(x, x.new_full((8, 2), 0.5), weight=weight, training=True)

    for channels in (3, 4):
        normalize(torch.randn(8, channels, 20))
    assert normalize(torch.randn(8, 4, 20), torch.ones(4)).shape == (8, 4, 20)
