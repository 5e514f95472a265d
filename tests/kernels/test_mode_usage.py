"""The usage of the modes as an output of a layer's launches, and its entropy, as one launch."""

import copy

import pytest
import torch
from test_fused import assert_close, layer_for, tensor

import modenorm
from modenorm import ModeSparsity
from modenorm.kernels import choice, entropy
from modenorm.kernels.choice import runs_triton

SIZES = [((5, 6, 3, 4), 3), ((9, 40, 2, 2), 8), ((17, 3, 3, 3), 2), ((4, 20, 1, 1), 64)]
SIZES += [((3, 520, 2, 1), 4)]  # more than one tile


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def of_usage(layer, x, dy, dusage, dused=None):
    """Usage, output and all gradients of a step; those of None have no part in it."""
    layer, gates, usages = copy.deepcopy(layer), [], []
    layer.usage_listener = usages.append
    layer.gate_listener = gates.append if dused is not None else None
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = layer(leaf)
    (usage,) = usages
    outputs = [(y, dy), (usage, dusage), *((used, dused) for used in gates)]
    outputs = [(output, upstream) for output, upstream in outputs if upstream is not None]
    found = torch.autograd.grad(
        [output for output, _ in outputs],
        [leaf, *layer.parameters()],
        [upstream for _, upstream in outputs],
        allow_unused=True,
    )
    return [usage, y, *(g for g in found if g is not None)]


def compare(layer, x, *upstream, tolerance=3e-6):
    assert runs_triton(x)
    with modenorm.use_backend("eager"):
        doubles = (None if given is None else given.double() for given in upstream)
        wanted = of_usage(copy.deepcopy(layer).double(), x.double(), *doubles)
    found = of_usage(layer, x, *upstream)
    assert found[0].dtype == torch.float32
    assert found[0].shape == (layer.num_modes,)
    for value, other in zip(found, wanted, strict=True):
        assert_close(value, other, tolerance, "", floor=2e-6)


@pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize(("shape", "num_modes"), SIZES, ids=str)
def test_values_and_gradients(device, shape, num_modes, channels_last):
    x, dy = (tensor(shape, device, torch.float32, channels_last) for _ in range(2))
    compare(layer_for(shape, num_modes, device), x, dy, torch.randn(num_modes, device=device))


@pytest.mark.parametrize(
    ("channels", "num_modes", "parts"),
    [*((5, 3, parts) for parts in ("y", "u", "g", "yu", "yg", "ug", "yug")), (520, 3, "yug")],
)
def test_any_part_of_a_loss(device, channels, num_modes, parts):
    """The output, the usage and the gates: whichever a loss is made of."""
    shape = (6, channels, 3, 1)
    x, dy = (tensor(shape, device, torch.float32, False) for _ in range(2))
    dusage, dused = torch.randn(num_modes), torch.randn(6, num_modes)
    layer = layer_for(shape, num_modes, device, per_mode_affine=True)
    given = zip("yug", (dy, dusage.to(device), dused.to(device)), strict=True)
    compare(layer, x, *(upstream if part in parts else None for part, upstream in given))


@pytest.mark.parametrize("upstream", ["expanded", "shifted"])
def test_gradients_that_lie_elsewhere(device, upstream):
    """All at one address, or not at a multiple of 16 bytes."""
    x, dy = (tensor((6, 5, 3, 4), device, torch.float32, False) for _ in range(2))
    dusage = torch.randn(5, device=device)
    dusage = dusage[:1].expand(4) if upstream == "expanded" else dusage[1:]
    compare(layer_for(x.shape, 4, device), x, dy, dusage)


def test_second_derivatives(device):
    x, dy = (tensor((4, 3, 2, 3), device, torch.float32, False) for _ in range(2))
    layer = layer_for(x.shape, 2, device)
    found = []
    for backend in ("fused", "eager"):
        with modenorm.use_backend(backend):
            usages, leaf = [], x.clone().requires_grad_()
            layer.usage_listener = usages.append
            loss = (layer(leaf) * dy).sum() + usages[0].square().sum()
            (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
            found.append(torch.autograd.grad(slope.square().sum(), [leaf, layer.gate.weight]))
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("given", [False, True], ids=["gate", "gates"])
def test_evaluation_and_given_gates(device, given):
    """Where the kernels find no usage, operators do."""
    x = tensor((6, 5, 3, 4), device, torch.float32, False)
    layer, usages = layer_for(x.shape, 3, device).train(given), []
    gates = torch.softmax(torch.randn(6, 3, device=device), 1).requires_grad_() if given else None
    layer.usage_listener = usages.append
    layer(x, gates=gates)
    learnt, pull = [gates] if given else [*layer.gate.parameters()], torch.randn(3, device=device)
    found = [usages[0], *torch.autograd.grad(usages[0], learnt, pull)]
    used = gates if given else torch.softmax(layer.gate(x.mean((2, 3))), 1)
    usage = used.mean(0)
    wanted = [usage, *torch.autograd.grad(usage, learnt, pull)]
    for value, other in zip(found, wanted, strict=True):
        assert_close(value, other, 1e-5, "")


def test_nothing_is_heard_without_gradients(device):
    layer, usages = layer_for((6, 5, 3, 4), 3, device), []
    layer.usage_listener = usages.append
    with torch.no_grad():
        layer(tensor((6, 5, 3, 4), device, torch.float32, False))
    assert usages == []


def entropy_of(usages, upstream=1.7):
    strength = torch.tensor(0.3, device=usages[0].device)
    value = entropy.usage_entropy(usages, strength)
    return value, *torch.autograd.grad(value * upstream, usages)


@pytest.mark.parametrize("sizes", [(3,), (8, 8), (3,) * 8, (2, 5, 1), (64,) * 20], ids=str)
def test_entropies(sizes, device):
    shares = [torch.softmax(2 * torch.randn(size), 0).to(device) for size in sizes]
    with torch.no_grad():
        shares[0][0] = 0.0  # a mode without samples, which has no gradient
    usages = [u.requires_grad_() for u in shares]
    found = entropy_of(usages)
    wanted = entropy_of([u.detach().double().requires_grad_() for u in usages])
    for value, other in zip(found, wanted, strict=True):
        assert value.dtype == torch.float32
        assert_close(value, other, 1e-6, "", floor=1e-7)
    assert float(found[1][0]) == 0


def test_not_a_number_is_seen(device):
    usage = torch.tensor([0.25, float("nan"), 0.75], device=device, requires_grad=True)
    value, found = entropy_of([usage])
    assert value.isnan()
    assert found.isnan().tolist() == [False, True, False]


def test_second_derivatives_of_the_entropy(device):
    usage = torch.tensor([0.2, 0.3, 0.5], device=device, requires_grad=True)
    value = entropy.usage_entropy([usage], torch.tensor(0.3, device=device))
    (slopes,) = torch.autograd.grad(value, usage, create_graph=True)
    (found,) = torch.autograd.grad(slopes.square().sum(), usage)
    least = usage.detach()
    assert_close(found, 2 * 0.3**2 * (least.log() + 1) / least, 1e-5, "")


def model_of(device):
    parts = (layer_for((5, c, 3, 3), 4, device) for c in (6, 8, 4))
    first, second, third = parts
    conv = torch.nn.Conv2d
    return torch.nn.Sequential(first, conv(6, 8, 1), second, conv(8, 4, 1), third).to(device)


@pytest.mark.parametrize("how", ["eager", "compiled", "recomputed"])
def test_a_training_step(device, how, monkeypatch):
    """Gradients of all parameters, by the loss of several layers beside that of the output."""
    monkeypatch.setattr(choice, "runs_operators", lambda x: True)
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
