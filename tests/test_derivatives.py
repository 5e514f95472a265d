"""Derivatives of the layers: numerical, second, forward mode, of one tensor alone."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import jvp

import modenorm
from compare import assert_close, double, make_layer, run
from marks import TORCH_JIT, TRAINING
from modenorm import functional
from modenorm.convert.substitutes import ModeNormNd

# Numerical derivatives. The gradient of a plain sum is zero: every check has random weights.

SHAPE = (4, 2, 3)


def weighted(function):
    """A scalar with a random upstream gradient."""
    upstream = double(*SHAPE)
    return lambda *args: (function(*args) * upstream).sum()


def mode_norm_function(training, mask=None):
    """`mode_norm` of tensors only: x, gates or gate parameters, weight, bias."""
    mean, var = double(2, 2), double(2, 2).exp()

    def function(x, first, second, weight, bias):
        gates = torch.softmax(first, 1) if second is None else _linear(first, second)
        state = mean.clone(), var.clone()
        return functional.mode_norm(
            x, gates, *state, weight, bias, training=training, mask=mask, eps=1e-2
        )

    return function


def _linear(weight, bias):
    return lambda features: nn.functional.linear(features, weight, bias)


def inputs(kind, per_mode):
    affine = (2, 2) if per_mode else (2,)
    first, second = (double(4, 2), None) if kind == "gates" else (double(2, 2), double(2))
    tensors = double(*SHAPE), first, second, double(*affine), double(*affine)
    return tuple(None if t is None else t.requires_grad_() for t in tensors)


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck], ids=["first", "second"])
@pytest.mark.parametrize("per_mode", [False, True], ids=["shared", "per_mode"])
@pytest.mark.parametrize("kind", ["gates", "network"])
@TRAINING
def test_numerical_derivatives(training, kind, per_mode, check, backend):
    function = weighted(mode_norm_function(training))
    assert check(function, inputs(kind, per_mode))


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck], ids=["first", "second"])
def test_numerical_derivatives_with_a_mask(check):
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 1, 1]]).bool()
    function = weighted(mode_norm_function(True, mask=mask))
    assert check(function, inputs("network", False))


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck], ids=["first", "second"])
@pytest.mark.parametrize("variance", ["pooled", "pixel"])
def test_numerical_derivatives_of_mode_group_norm(variance, check, backend):
    def function(*tensors):
        return functional.mode_group_norm(*tensors, eps=1e-2, variance=variance)

    tensors = double(*SHAPE), double(3), double(3), double(2), double(2)
    assert check(weighted(function), tuple(t.requires_grad_() for t in tensors))


@TRAINING
def test_a_gradient_penalty(training, backend):
    """Double backward through a model, as in WGAN-GP, agrees with plain operators."""
    layer, x, upstream = make_layer(3, 2).train(training), double(4, 3, 2, 2), double(4, 3, 2, 2)

    def penalty(name):
        other, leaf = copy.deepcopy(layer), x.clone().requires_grad_()
        with modenorm.use_backend(name):
            (gradient,) = torch.autograd.grad(other(leaf), leaf, upstream, create_graph=True)
            gradient.square().sum().backward()
        return [leaf.grad, *(p.grad for name, p in other.named_parameters() if name != "bias")]

    for actual, expected in zip(penalty(backend), penalty("eager"), strict=True):
        assert_close(actual, expected, 1e-10)


def test_backward_twice_through_one_graph(backend):
    layer, x = make_layer(3, 2), double(4, 3, 2, 2).requires_grad_()
    y, upstream = layer(x), double(4, 3, 2, 2)
    first = torch.autograd.grad(y, x, upstream, retain_graph=True)[0]
    exact = torch.autograd.grad(y, x, upstream, create_graph=True)[0]
    again = torch.autograd.grad(y, x, upstream)[0]
    assert_close(exact, first, 1e-12)
    assert_close(again, first, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(4, 3, 2, 2), (4, 3)], ids=str)
@pytest.mark.parametrize("kind", ["train", "eval", "custom gate", "group"])
def test_a_vectorised_backward(kind, shape, dtype, backend):
    """As `jacobian(vectorize=True)` makes it: many upstream gradients at once."""
    layer = ModeNormNd(3, 2, gate=nn.Linear(3, 2) if kind == "custom gate" else None)
    layer = modenorm.ModeGroupNorm(3, variance="pixel") if kind == "group" else layer
    layer = layer.to(dtype).train(kind != "eval")
    x, upstream = torch.randn(shape, dtype=dtype), torch.randn(5, *shape, dtype=dtype)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    inputs = [x.requires_grad_(), *layer.parameters()]
    y = layer(x)
    each = [torch.autograd.grad(y, inputs, one, retain_graph=True) for one in upstream]
    both = torch.autograd.grad(y, inputs, upstream, retain_graph=True, is_grads_batched=True)
    by_func = torch.func.vmap(lambda one: torch.autograd.grad(y, inputs, one, retain_graph=True))
    for found in (both, by_func(upstream)):
        for actual, *expected in zip(found, *each, strict=True):
            # gradients of gates are small differences of large sums
            assert_close(actual, torch.stack(expected), 1e-3 if dtype == torch.float32 else 1e-11)


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "gate.weight"])
def test_gradient_of_one_tensor_alone(wanted, backend):
    layer, x, upstream = make_layer(3, 2), double(4, 3, 2, 2), double(4, 3, 2, 2)
    expected = run(layer, x, upstream).gradients[wanted]
    layer.requires_grad_(False)
    leaf = x.requires_grad_() if wanted == "x" else layer.get_parameter(wanted).requires_grad_()
    assert_close(torch.autograd.grad(layer(x), leaf, upstream)[0], expected, 1e-12)


@TORCH_JIT
def test_forward_mode_differentiation(backend):
    layer = make_layer(3, 2, rank=3, track_running_stats=False)
    x, tangent = double(4, 3, 2), double(4, 3, 2)
    with forward_ad.dual_level():
        actual = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent))).tangent
    expected = (layer(x + 1e-6 * tangent) - layer(x - 1e-6 * tangent)) / 2e-6
    assert_close(actual, expected, 1e-7)
    assert_close(jvp(layer, (x,), (tangent,))[1], actual, 1e-12)


def test_plain_operators_keep_digits_far_from_zero():
    """Sums of means around 100 would lose them."""
    layer, far = modenorm.ModeNorm1d(8), 100.0
    with torch.no_grad():
        layer.gate.weight.normal_(std=8**-0.5)
        layer.gate.bias.copy_(-far * layer.gate.weight.sum(1))
    x = far + torch.randn(64, 8, 1) + torch.randn(64, 8, 16)
    dy = torch.randn_like(x)
    found = []
    for dtype in (torch.float32, torch.float64):
        twin, leaf = copy.deepcopy(layer).to(dtype), x.to(dtype).requires_grad_()
        with modenorm.use_backend("eager"):
            y = twin(leaf)
        found.append([y.detach(), *torch.autograd.grad(y, [leaf, twin.weight], dy.to(dtype))])
    # 7e-6, 1e-6 and 6e-6 by plain sums; 1.3e-6, 4e-7 and 1e-6 around a mean
    for value, truth, allowed in zip(*found, (3e-6, 8e-7, 3e-6), strict=True):
        assert float((value.double() - truth).norm() / truth.norm()) < allowed


HALF_CASES = {
    "mode_norm": lambda x: (modenorm.ModeNorm2d(4), {}),
    "mask": lambda x: (modenorm.ModeNorm2d(4), {"mask": torch.ones_like(x[:, 0])}),
    "pooled": lambda x: (modenorm.ModeGroupNorm(4), {}),
    "pixel": lambda x: (modenorm.ModeGroupNorm(4, variance="pixel"), {}),
}


@pytest.mark.parametrize("case", HALF_CASES.values(), ids=HALF_CASES)
def test_plain_operators_hold_no_part_of_a_gradient_in_float16(case):
    """x gets two, by the moments and by the map: 100 000 each, and they cancel."""
    x = (0.01 * torch.randn(16, 4, 5, 5)).half().requires_grad_()
    upstream = (1000 + 10 * torch.randn(x.shape)).half()
    layer, options = case(x)
    with modenorm.use_backend("eager"):
        actual = torch.autograd.grad(layer(x, **options), x, upstream)[0]
        y = layer.double()(x.double(), **options)
        expected = torch.autograd.grad(y, x, upstream.double())[0]
    assert_close(actual, expected, 2**-10)  # the rounding to float16, here and there


@pytest.mark.parametrize("path", ["fused", "eager", "masked"])
def test_gradients_of_gates_keep_their_digits_amid_large_means(path):
    torch.manual_seed(0)
    x = torch.randn(64, 16, 8, 8) + 30 + torch.randn(64, 16, 1, 1)
    dy = torch.randn_like(x) + 1
    layer = modenorm.ModeNorm2d(16, 2)
    exact = copy.deepcopy(layer).double()
    exact(x.double()).backward(dy.double())
    mask = torch.ones(64, 8, 8) if path == "masked" else None
    with modenorm.use_backend("eager" if path == "eager" else "auto"):
        layer(x, mask=mask).backward(dy)
    truth = exact.gate.weight.grad
    assert (layer.gate.weight.grad - truth).norm() < 0.01 * truth.norm()
