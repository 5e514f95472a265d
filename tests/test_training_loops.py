"""The ways in which training loops run a layer, each with numbers."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import modenorm
from compare import assert_close, double, make_layer, run
from marks import TRAINING

# Mixed precision.


@TRAINING
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_leaves_the_statistics_in_float32(dtype, training, backend):
    layer = make_layer(64, 2, dtype=torch.float32).train(training)
    x, upstream = torch.randn(8, 64, 3, 3).to(dtype), torch.randn(8, 64, 3, 3).to(dtype)
    expected = run(layer, x, upstream)
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(leaf)
    y.backward(upstream)
    assert y.dtype == dtype
    assert torch.equal(y, expected.y)
    assert torch.equal(leaf.grad, expected.gradients["x"])
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, expected.gradients[name]), name
    for name, buffer in expected.buffers.items():
        assert torch.equal(layer.get_buffer(name), buffer), name


def test_backward_inside_autocast_stays_in_float32():
    layer, x, upstream = make_layer(64, 2, dtype=torch.float32), *torch.randn(2, 8, 64, 3, 3)
    gates = torch.rand(8, 2).softmax(1)
    found = []
    for inside in (False, True):
        leaves = [x.clone().requires_grad_(), gates.clone().requires_grad_()]
        with modenorm.use_backend("fused"), torch.autocast("cpu", torch.bfloat16, enabled=inside):
            y = layer(leaves[0], gates=leaves[1])
            found.append(torch.autograd.grad(y, [*leaves, layer.weight, layer.bias], upstream))
    for value, expected in zip(*found, strict=True):
        assert torch.equal(value, expected)


def test_autocast_in_a_model(backend):
    model = nn.Sequential(nn.Conv2d(2, 4, 3), modenorm.ModeNorm2d(4), nn.Conv2d(4, 4, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(torch.randn(4, 2, 8, 8))
    y.float().square().mean().backward()
    assert y.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_autocast_with_a_custom_gate():
    gate = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    layer, x = modenorm.ModeNorm2d(4, gate=gate), torch.randn(4, 4, 3, 3)
    expected = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x), expected)


# Activation checkpointing.


@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None}, {"running_update": "usage"}, {"gate": modenorm.StandardizedGate}],
    ids=["default", "momentum=None", "usage", "standardized"],
)
def test_checkpointing_updates_the_statistics_once(options, reentrant, backend):
    plain = nn.Sequential(nn.Conv2d(2, 3, 3), make_layer(3, 2, **options), nn.ReLU()).double()
    saving = copy.deepcopy(plain)
    x, upstream = double(4, 2, 6, 6), double(4, 3, 4, 4)
    gradients = []
    for model, recompute in ((plain, False), (saving, True)):
        leaf = x.clone().requires_grad_()
        y = checkpoint(model, leaf, use_reentrant=reentrant) if recompute else model(leaf)
        y.backward(upstream)
        gradients.append([leaf.grad, *(p.grad for p in model.parameters())])
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, saving.get_buffer(name)), name
    assert plain[1].num_batches_tracked == 1
    for actual, expected in zip(*gradients, strict=True):
        assert_close(actual, expected, 1e-12)


def test_a_forward_after_backward_updates_again(backend):
    layer, x = make_layer(3, 2), double(4, 3, 2, 2).requires_grad_()
    for _ in range(3):
        layer(x).sum().backward()
    assert layer.num_batches_tracked == 3


# Training loops.


def test_gradient_accumulation(backend):
    layer, parts = make_layer(3, 2), [double(4, 3, 2, 2) for _ in range(3)]
    upstream = [double(4, 3, 2, 2) for _ in parts]
    expected = None
    for x, weights in zip(parts, upstream, strict=True):
        gradient = run(layer, x, weights).gradients["gate.weight"]
        expected = gradient if expected is None else expected + gradient
    for x, weights in zip(parts, upstream, strict=True):
        layer(x).backward(weights)
    assert_close(layer.gate.weight.grad, expected, 1e-12)
    assert layer.num_batches_tracked == 3


def test_two_forwards_one_backward(backend):
    """As a GAN's discriminator sees real and made samples before one backward."""
    layer, real, made = make_layer(3, 2), double(4, 3, 2, 2), double(4, 3, 2, 2)
    upstream = double(4, 3, 2, 2), double(4, 3, 2, 2)
    expected = (
        run(layer, real, upstream[0]).gradients["weight"]
        + run(layer, made, upstream[1]).gradients["weight"]
    )
    y = layer(real), layer(made)
    ((y[0] * upstream[0]).sum() + (y[1] * upstream[1]).sum()).backward()
    assert_close(layer.weight.grad, expected, 1e-12)


@pytest.mark.parametrize("outside", [False, True], ids=["gate", "gates="])
def test_backward_after_the_buffers_have_moved(outside, backend):
    """Evaluation with gradients, then a training step, then backward: no buffer may be kept."""
    layer = make_layer(3, 2, gate=modenorm.StandardizedGate)
    x, upstream = double(4, 3, 2, 2), double(4, 3, 2, 2)
    gates = torch.softmax(double(4, 2), 1).requires_grad_() if outside else None
    expected = run(layer.eval(), x, upstream, gates).gradients["weight"]
    y = layer(x, gates=gates)
    layer.train()(double(4, 3, 2, 2))
    layer.zero_grad()
    y.backward(upstream)
    assert_close(layer.weight.grad, expected, 1e-12)


def test_in_place_operations_after_the_layer(backend):
    layer, x, upstream = make_layer(3, 2), double(4, 3, 2, 2), double(4, 3, 2, 2)
    results = []
    for inplace in (False, True):
        leaf = x.clone().requires_grad_()
        nn.ReLU(inplace)(layer(leaf)).backward(upstream)
        results.append(leaf.grad)
    assert torch.equal(*results)


def test_deterministic_mode(backend):
    layer, x, upstream = make_layer(3, 4), double(6, 3, 5, 5), double(6, 3, 5, 5)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = run(layer, x, upstream), run(layer, x, upstream)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first.y, second.y)
    assert all(torch.equal(second.gradients[name], g) for name, g in first.gradients.items())
    assert all(torch.equal(second.buffers[name], b) for name, b in first.buffers.items())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context, backend):
    layer, x = make_layer(3, 2), double(4, 3, 2, 2)
    expected = copy.deepcopy(layer)(x)
    with context():
        y = layer(x)
    assert torch.equal(y, expected)
    assert not y.requires_grad
    assert layer.num_batches_tracked == 1


def test_frozen_input(backend):
    """A first layer: its input needs no gradient, its parameters do."""
    layer, x, upstream = make_layer(3, 2), double(4, 3, 2, 2), double(4, 3, 2, 2)
    layer(x).backward(upstream)
    expected = run(layer, x, upstream).gradients
    for name, parameter in layer.named_parameters():
        assert_close(parameter.grad, expected[name], 1e-12, name)
