"""What the usage of the modes costs, found inside a layer's launches, against plain operators."""

import copy

import pytest
import torch
from test_fused import assert_close, layer_for, tensor

import modenorm
from modenorm import ModeSparsity
from modenorm.kernels import operators, runs_triton

SIZES = [((5, 6, 3, 4), 3), ((9, 40, 2, 2), 8), ((17, 3, 3, 3), 2), ((4, 20, 1, 1), 64)]
SIZES += [((5, 600, 2, 1), 8)]  # whose gates' gradients are sums of parts


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Penalty:
    """As `ModeSparsity` is on one layer."""

    def __init__(self, layer, strength=0.3):
        self.strength = torch.tensor(strength, device=next(layer.parameters()).device)
        self.costs = []
        layer.usage_penalty = self

    def hear(self, cost):
        self.costs.append(cost)


def of_cost(layer, x, dy, dcost, dused=None):
    """Cost, output and all gradients of a step; those of None have no part in it."""
    layer, heard = copy.deepcopy(layer), []
    penalty = Penalty(layer)
    layer.gate_listener = heard.append if dused is not None else None
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = layer(leaf)
    (cost,) = penalty.costs
    outputs = [(y, dy), (cost, dcost), *((gates, dused) for gates in heard)]
    outputs = [(output, upstream) for output, upstream in outputs if upstream is not None]
    found = torch.autograd.grad(
        [output for output, _ in outputs],
        [leaf, *layer.parameters()],
        [upstream for _, upstream in outputs],
        allow_unused=True,
    )
    return [cost, y, *(g for g in found if g is not None)]


def compare(layer, x, *upstream, tolerance=3e-6):
    assert runs_triton(x)
    with modenorm.use_backend("eager"):
        doubles = (None if given is None else given.double() for given in upstream)
        wanted = of_cost(copy.deepcopy(layer).double(), x.double(), *doubles)
    found = of_cost(layer, x, *upstream)
    assert found[0].dtype == torch.float32
    assert found[0].shape == ()
    for value, other in zip(found, wanted, strict=True):
        assert_close(value, other, tolerance, "", floor=2e-6)


@pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize(("shape", "num_modes"), SIZES, ids=str)
def test_values_and_gradients(device, shape, num_modes, channels_last):
    x, dy = (tensor(shape, device, torch.float32, channels_last) for _ in range(2))
    compare(layer_for(shape, num_modes, device), x, dy, torch.tensor(1.7, device=device))


@pytest.mark.parametrize("with_cost", [False, True], ids=["", "cost"])
@pytest.mark.parametrize("with_gates", [False, True], ids=["", "gates"])
@pytest.mark.parametrize("with_output", [False, True], ids=["", "output"])
def test_any_part_of_a_loss(device, with_output, with_gates, with_cost):
    dcost = torch.tensor(-0.6, device=device)
    for channels, modes in ((5, 3), (600, 8)):
        if not (with_output or with_gates or with_cost):
            continue
        shape, dused = (6, channels, 3, 1), torch.randn(6, modes, device=device)
        x, dy = (tensor(shape, device, torch.float32, False) for _ in range(2))
        layer = layer_for(x.shape, modes, device, per_mode_affine=True)
        parts = zip((dy, dcost, dused), (with_output, with_cost, with_gates), strict=True)
        compare(layer, x, *(given if there else None for given, there in parts))


def test_a_mode_without_samples_has_no_gradient(device):
    x, dy = (tensor((6, 5, 3, 4), device, torch.float32, False) for _ in range(2))
    layer = layer_for(x.shape, 3, device)
    with torch.no_grad():
        layer.gate.bias[1] = -1e4
    compare(layer, x, dy, torch.tensor(2.0, device=device))
    found = of_cost(layer, x, torch.zeros_like(dy), torch.tensor(1.0, device=device))
    names = ["cost", "y", "x", *dict(layer.named_parameters())]
    bias = dict(zip(names, found, strict=True))["gate.bias"]
    assert float(bias[1]) == 0
    assert float(bias.abs().max()) > 0


@pytest.mark.filterwarnings("ignore:invalid value")
def test_not_a_number_is_seen(device):
    x = tensor((6, 5, 3, 4), device, torch.float32, False)
    x[2, 1, 0, 0] = float("nan")
    layer = layer_for(x.shape, 3, device)
    penalty = Penalty(layer)
    layer(x)
    assert penalty.costs[0].isnan()


def test_second_derivatives(device):
    x, dy = (tensor((4, 3, 2, 3), device, torch.float32, False) for _ in range(2))
    layer = layer_for(x.shape, 2, device)
    found = []
    for backend in ("fused", "eager"):
        with modenorm.use_backend(backend):
            penalty, leaf = Penalty(layer), x.clone().requires_grad_()
            y = layer(leaf)
            loss = (y * dy).sum() + penalty.costs[0].square()
            (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
            found.append(torch.autograd.grad(slope.square().sum(), [leaf, layer.gate.weight]))
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("given", [False, True], ids=["gate", "gates"])
def test_evaluation_and_given_gates(device, given):
    """Where the kernels find no cost, operators do."""
    x = tensor((6, 5, 3, 4), device, torch.float32, False)
    layer = layer_for(x.shape, 3, device).train(given)
    gates = torch.softmax(torch.randn(6, 3, device=device), 1).requires_grad_() if given else None
    penalty = Penalty(layer)
    layer(x, gates=gates)
    learnt = [gates] if given else list(layer.gate.parameters())
    found = [penalty.costs[0], *torch.autograd.grad(penalty.costs[0], learnt)]
    used = gates if given else torch.softmax(layer.gate(x.mean((2, 3))), 1)
    usage = used.mean(0)
    cost = -0.3 * (usage * usage.log()).sum()
    for value, wanted in zip(found, [cost, *torch.autograd.grad(cost, learnt)], strict=True):
        assert_close(value, wanted, 1e-5, "")


def test_no_cost_without_gradients(device):
    layer = layer_for((6, 5, 3, 4), 3, device)
    penalty = Penalty(layer)
    with torch.no_grad():
        layer(tensor((6, 5, 3, 4), device, torch.float32, False))
    assert penalty.costs == []


def model_of(device):
    parts = (layer_for((5, c, 3, 3), 4, device) for c in (6, 8, 4))
    first, second, third = parts
    conv = torch.nn.Conv2d
    return torch.nn.Sequential(first, conv(6, 8, 1), second, conv(8, 4, 1), third).to(device)


@pytest.mark.parametrize("how", ["eager", "compiled", "recomputed"])
def test_a_training_step(device, how, monkeypatch):
    """Gradients of all parameters, by the loss of several layers beside that of the output."""
    monkeypatch.setattr(operators, "available", lambda x: True)
    model = model_of(device)
    x, upstream = torch.randn(5, 6, 3, 3, device=device), torch.randn(5, 4, 3, 3, device=device)
    twin, found = copy.deepcopy(model), []
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    calls = {
        "eager": model,
        "compiled": compiled,
        "recomputed": lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False),
    }
    for module, call, backend in ((model, calls[how], "auto"), (twin, twin, "eager")):
        penalty = ModeSparsity(module, 0.5)
        with modenorm.use_backend(backend):
            loss = (call(x) * upstream).sum() + penalty()
            found.append([loss, *torch.autograd.grad(loss, [*module.parameters()])])
    for ours, plain in zip(*found, strict=True):
        assert_close(ours, plain, 1e-4, "", floor=1e-4)
