"""Gates of one's own: the mixing between two streaming nodes, made of the fused node's launches."""

import contextlib
import copy

import pytest
import torch
from test_fused import MODES, assert_close, gradients, layer_for, tensor
from torch import nn

import modenorm
from modenorm.kernels import mixing_node, torch_mixing
from modenorm.kernels.gpu import device as devices
from modenorm.kernels.gpu import mixing as gpu_mixing
from modenorm.kernels.gpu.launch import Launch
from modenorm.kernels.mixing_arrays import Affine, Samples

PARTS = ("statistics", "coefficients", "mode_gradients", "sample_gradients")
AFFINE = {"shared": {}, "per mode": {"per_mode_affine": True}, "none": {"affine": False}}
SIZES = [(5, 3), (6, 40), (33, 7), (1, 4), (9, 130)]


class TwoLayers(nn.Sequential):
    """A gate that is not linear."""

    def __init__(self, num_features, num_modes, **kind):
        hidden = nn.Linear(num_features, 7, **kind), nn.Tanh()
        super().__init__(*hidden, nn.Linear(7, num_modes, **kind))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def called(monkeypatch):
    """The names of the parts that ran in Triton."""
    names = []

    def listening(name, part):
        def call(*args):
            names.append(name)
            return part(*args)

        return call

    for name in PARTS:
        part = getattr(gpu_mixing, name)
        monkeypatch.setattr(gpu_mixing, name, listening(name, part))
    return names


def arrays(device, num_samples, num_channels, num_modes, affine="shared"):
    """Mean, var, gates, weight, bias, and gradients of scale and shift."""
    rows, modes = (num_samples, num_channels), (num_modes, num_channels)
    shape = modes if affine == "per mode" else modes[1:]
    weight, bias = (None, None) if affine == "none" else torch.randn(2, *shape, device=device)
    gates = torch.softmax(3 * torch.randn(num_samples, num_modes, device=device), 1)
    mean, dscale, dshift = torch.randn(3, *rows, device=device)
    return 3 * mean + 5, torch.rand(rows, device=device), gates, weight, bias, dscale, dshift


def run_parts(of, mean, var, gates, weight, bias, *upstream):
    samples, affine = Samples(mean, var, gates), Affine(weight, bias, 1e-5)
    modes = of.statistics(samples)
    pair = of.coefficients(samples, modes, affine)
    u, s, handed, *rest = of.mode_gradients(*upstream, samples, modes, affine)
    last = of.sample_gradients(*upstream, samples, modes, affine, u, s, handed)
    return *modes, *pair, u, s, *rest, *last


def compare_parts(given):
    doubles = (None if t is None else t.double() for t in given)
    before = [None if t is None else t.clone() for t in given]
    found, wanted = run_parts(gpu_mixing, *given), run_parts(torch_mixing, *doubles)
    for i, (value, expected) in enumerate(zip(found, wanted, strict=True)):
        assert (value is None) == (expected is None)
        if value is not None:
            assert_close(value, expected, 1e-4, f"result {i}", floor=1e-5)
    for value, expected in zip(given, before, strict=True):
        assert value is expected is None or torch.equal(value, expected), "an input was changed"


@pytest.mark.parametrize("affine", AFFINE)
@pytest.mark.parametrize("num_modes", MODES, ids="K{}".format)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_each_part(device, size, num_modes, affine):
    compare_parts(arrays(device, *size, num_modes, affine))


def test_a_mode_without_samples(device):
    mean, var, gates, *rest = arrays(device, 6, 5, 3)
    gates = nn.functional.one_hot(torch.tensor([0, 2, 2, 0, 2, 0], device=device), 3).float()
    compare_parts((mean, var, gates, *rest))


def test_unaligned_memory(device):
    for start in (0, 1, 0, 3):
        moved = []
        for array in arrays(device, 6, 5, 3):
            memory = torch.empty(array.numel() + start, device=device)
            moved.append(memory[start:].view(array.shape).copy_(array))
        compare_parts(moved)


def compare_layer(layer, twin, x, dy, called):
    """A layer against its twin in float64 and plain operators."""
    y, found = gradients(layer, x, dy)
    assert called == list(PARTS)
    with modenorm.use_backend("eager"):
        truth, wanted = gradients(twin, x.double(), dy.double())
    assert y.stride() == x.stride()
    assert_close(y, truth, 5e-6, "y", floor=5e-6)
    names = ["x", *(name for name, _ in layer.named_parameters())]
    for name, value, expected in zip(names, found, wanted, strict=True):
        assert_close(value, expected, 5e-5, name, floor=5e-5)
    for (name, value), expected in zip(layer.named_buffers(), twin.buffers(), strict=True):
        assert_close(value, expected, 1e-6, name)


@pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("affine", AFFINE)
@pytest.mark.parametrize("num_modes", MODES, ids="K{}".format)
def test_a_gate_of_ones_own(device, num_modes, affine, channels_last, called):
    shape = (7, 5, 3, 5)
    layer = layer_for(shape, num_modes, device, gate=TwoLayers, **AFFINE[affine])
    x, dy = (tensor(shape, device, torch.float32, channels_last, mean) for mean in (1.0, 0.0))
    compare_layer(layer, copy.deepcopy(layer).double(), x, dy, called)


@pytest.mark.parametrize("shape", [(9, 33), (4, 17, 3), (3, 6, 2, 3, 2)], ids=str)
def test_a_standardized_gate(device, shape, called):
    layer = layer_for(shape, 3, device, gate=modenorm.StandardizedGate)
    x, dy = (tensor(shape, device, torch.float32, False) for _ in range(2))
    compare_layer(layer, copy.deepcopy(layer).double(), x, dy, called)


@pytest.mark.parametrize("gate", [None, TwoLayers], ids=["linear", "two layers"])
@pytest.mark.parametrize("num_modes", [2, 5], ids="K{}".format)
def test_switches(device, num_modes, gate, called):
    """A linear gate has them in its bias and stays one node; others have a hook."""
    shape = (8, 6, 3, 4)
    layer = layer_for(shape, num_modes, device, gate=gate)
    twin = copy.deepcopy(layer).double()
    x, dy = (tensor(shape, device, torch.float32, False) for _ in range(2))
    found = []
    for norm, dtype in ((layer, torch.float32), (twin, torch.float64)):
        sparsity = modenorm.ModeSparsity(norm, method="switch").to(device)
        leaf = x.to(dtype).requires_grad_()
        torch.manual_seed(1)  # the same switches
        with modenorm.use_backend("eager" if norm is twin else "auto"):
            y = norm(leaf)
        learnt = (leaf, sparsity.log_odds, *norm.parameters())
        found.append((y, *torch.autograd.grad(y, learnt, dy.to(dtype))))
    assert called == ([] if gate is None else list(PARTS))
    for value, wanted in zip(*found, strict=True):
        assert_close(value, wanted, 5e-5, "value or gradient", floor=5e-5)


def test_half_types(device, called):
    shape = (6, 12, 5, 5)
    layer = layer_for(shape, 2, device, gate=TwoLayers)
    x, dy = (tensor(shape, device, torch.bfloat16, True) for _ in range(2))
    y, found = gradients(layer, x, dy)
    assert called == list(PARTS)
    with modenorm.use_backend("eager"):
        truth, wanted = gradients(copy.deepcopy(layer).double(), x.double(), dy.double())
    for value, expected in zip((y, *found), (truth, *wanted), strict=True):
        # y and dx are rounded to 8 bits, the rest is float32
        tolerance = 4e-3 if value.dtype == torch.bfloat16 else 1e-4
        assert_close(value, expected, tolerance, "value or gradient", floor=1e-4)


def test_double_backward(device, called):
    shape = (4, 3, 2, 3)
    layer = layer_for(shape, 2, device, gate=TwoLayers)
    x = tensor(shape, device, torch.float32, False)
    penalties = {}
    for backend in ("fused", "eager"):
        with modenorm.use_backend(backend):
            leaf = x.clone().requires_grad_()
            gradient = torch.autograd.grad(layer(leaf).sin().sum(), leaf, create_graph=True)[0]
            penalties[backend] = torch.autograd.grad(gradient.square().sum(), leaf)[0]
    assert called == list(PARTS)  # backward, once: in the second derivative
    torch.testing.assert_close(penalties["fused"], penalties["eager"], atol=1e-4, rtol=1e-4)


UNUSUAL = {
    "bias per mode": lambda given: (*given[:3], given[3], given[4].repeat(3, 1)),
    "no bias": lambda given: (*given[:4], None),
    "float64": lambda given: tuple(t.double() for t in given),
    "gates in columns": lambda given: (*given[:2], given[2].t().contiguous().t(), *given[3:]),
    "weight that is broadcast": lambda given: (*given[:3], given[3][:1], given[4]),
}


@pytest.mark.parametrize("changed", UNUSUAL.values(), ids=UNUSUAL)
def test_what_the_kernels_do_not_take_is_left_to_torch(device, changed, called):
    *given, dscale, dshift = arrays(device, 6, 5, 3)
    given = [t if t is None else t.detach().requires_grad_() for t in changed(given)]
    learnt = [t for t in given if t is not None]
    scale, shift, _ = mixing_node.mix(*given, 1e-5)
    upstream = [d.to(scale.dtype) for d in (dscale, dshift)]
    found = torch.autograd.grad((scale, shift), learnt, upstream)
    assert called == []
    plain = mixing_node._plain_mix(*given, 1e-5, None)
    wanted = torch.autograd.grad(plain, learnt, upstream)
    for value, expected in zip((scale, shift, *found), (*plain, *wanted), strict=True):
        assert_close(value, expected, 1e-5, "value or gradient", floor=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter always repeats")
def test_results_repeat(device):
    x = tensor((32, 40, 9, 9), device, torch.float32, True)
    layer = layer_for(x.shape, 4, device, gate=TwoLayers)
    first, second = (gradients(layer, x, x.sin()) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


@pytest.mark.parametrize("training", [True, False])
def test_another_gpu(device, monkeypatch, training):
    """Launches go to the GPU that the tensors are on, not to the current one."""
    inside, launched, launch = [], [], Launch.__call__

    @contextlib.contextmanager
    def on_other_device(x):
        inside.append(x)
        yield devices.current_stream(x)
        inside.pop()

    def listening(this, stream, *pointers):
        launched.append(bool(inside))
        launch(this, stream, *pointers)

    monkeypatch.setattr(devices, "is_elsewhere", lambda x: True)
    monkeypatch.setattr(devices, "_on_other_device", on_other_device)
    monkeypatch.setattr(Launch, "__call__", listening)
    x = torch.randn(5, 6, 3, 4, device=device, requires_grad=True)
    layer = modenorm.ModeNorm2d(6, 3, gate=TwoLayers).to(device).train(training)
    layer(x).square().sum().backward()
    assert len(launched) == (9 if training else 4)
    assert all(launched)
