"""The entropy of the batch usage as one node: of many layers in Triton, or in C on a CPU."""

import pytest
import torch
from test_fused import assert_close as assert_near

import modenorm
from modenorm import ModeNorm2d, ModeSparsity
from modenorm.kernels import entropy, gpu_entropy, native_mixing, runs_native
from modenorm.modes import SMALLEST_GATE

SIZES = [
    ((5, 3), (5, 3)),
    ((128, 8),) * 4,
    ((1, 1),),
    ((7, 64),) * 20,
    ((300, 33),) * 3,
    ((6, 2), (6, 5), (6, 2)),
]


def assert_close(found, wanted, tolerance=1e-5, floor=1e-7):
    assert_near(found, wanted, tolerance, "", floor)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def gates_of(sizes, device):
    logits = (3 * torch.randn(size, device=device) for size in sizes)
    return [torch.softmax(values, 1).requires_grad_() for values in logits]


def value_and_gradients(gates, upstream=1.7):
    strength = torch.tensor(0.3, device=gates[0].device)
    value = entropy.usage_entropy(gates, strength, SMALLEST_GATE)
    return value, *torch.autograd.grad(value * upstream, gates)


def expected(gates, *args):
    doubles = [g.detach().double().requires_grad_() for g in gates]
    with modenorm.use_backend("eager"):
        return value_and_gradients(doubles, *args)


def compare(found, wanted):
    for value, other in zip(found, wanted, strict=True):
        assert value.dtype == torch.float32
        assert_close(value, other)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)}x{sizes[0]}")
def test_values_and_gradients(sizes, device):
    gates = gates_of(sizes, device)
    compare(value_and_gradients(gates), expected(gates))


@pytest.mark.parametrize("of", [gpu_entropy, native_mixing, entropy], ids=lambda m: m.__name__)
def test_all_forms_are_one(of, device):
    gates = gates_of([(9, 5)] * 3, device)
    if of is native_mixing and not runs_native(gates[0]):
        pytest.skip("C is for CPUs, and needs a compiler")
    form = getattr(of, "entropies", entropy._entropies)
    strength = torch.tensor(0.3, device=device)
    with torch.no_grad():
        value, slopes = form(gates, strength, SMALLEST_GATE)
    wanted, *gradients = expected(gates, 1.0)
    assert_close(value, wanted)
    for slope, gradient in zip(slopes, gradients, strict=True):
        assert_close(slope.expand_as(gradient), gradient)


def test_modes_without_samples(device):
    gates = torch.tensor([[0.0, 0.25, 0.75], [0.0, 0.5, 0.5]], device=device, requires_grad=True)
    found = value_and_gradients([gates])
    compare(found, expected([gates]))
    assert float(found[1][:, 0].abs().max()) == 0


def test_not_a_number_is_seen(device):
    gates = gates_of([(4, 3), (4, 3)], device)
    with torch.no_grad():
        gates[1][2, 1] = float("nan")
    value, *found = value_and_gradients(gates)
    assert value.isnan()
    assert found[0].isfinite().all()
    assert found[1][:, 1].isnan().all()
    assert found[1][:, ::2].isfinite().all()


def test_second_derivatives(device):
    gates = gates_of([(4, 3)] * 2, device)
    strength = torch.tensor(0.3, device=device)
    value = entropy.usage_entropy(gates, strength, SMALLEST_GATE)
    slopes = torch.autograd.grad(value, gates, create_graph=True)
    found = torch.autograd.grad(sum(s.square().sum() for s in slopes), gates)
    usage = gates[0].detach().mean(0)
    # of Σ_n (−0.3 (ln u + 1) / N)² by every gate
    wanted = 2 * 0.3**2 * (usage.log() + 1) / usage / 4**2
    assert_close(found[0], wanted.expand_as(found[0]), 1e-4, floor=1e-6)


def test_a_training_step(device):
    """Gradients of the model's parameters, with a random upstream gradient beside the penalty."""
    model = torch.nn.Sequential(ModeNorm2d(6, 4), torch.nn.Conv2d(6, 8, 1), ModeNorm2d(8, 4))
    model.to(device)
    x, upstream = torch.randn(5, 6, 3, 3, device=device), torch.randn(5, 8, 3, 3, device=device)
    penalty = ModeSparsity(model, 0.5)
    found = []
    for backend in ("auto", "eager"):
        with modenorm.use_backend(backend):
            loss = (model(x) * upstream).sum() + penalty()
            found.append(torch.autograd.grad(loss, [*model.parameters()]))
    for ours, plain in zip(*found, strict=True):
        assert_close(ours, plain, 1e-4, floor=1e-4)
