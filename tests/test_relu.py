"""Layers that are asked for a ReLU too, on every path, against one apart."""

import copy

import pytest
import torch
from torch import nn

import modenorm
from modenorm.convert.substitutes import ModeNormAct2d


def gradients(function, layer, x, dy):
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    return [y, *torch.autograd.grad(y, [leaf, *layer.parameters()], dy)]


@pytest.mark.parametrize("backend", ["reference", "eager", "fused"])
@pytest.mark.parametrize("kind", ["gate", "mask", "given", "standardized", "eval"])
def test_same_as_apart(kind, backend):
    torch.manual_seed(0)
    x, dy = torch.randn(2, 5, 4, 3, 3)
    gate = modenorm.StandardizedGate if kind == "standardized" else None
    layer = modenorm.ModeNorm2d(4, 3, gate=gate).train(kind != "eval")
    nn.init.normal_(layer.weight)
    options = {}
    if kind == "mask":
        options["mask"] = torch.rand(5, 3, 3) < 0.7
    if kind == "given":
        options["gates"] = torch.softmax(torch.randn(5, 3), 1)
        layer.gate = nn.Identity()
    twin = copy.deepcopy(layer)
    with modenorm.use_backend(backend):
        found = gradients(lambda x: layer(x, relu=True, **options), layer, x, dy)
        wanted = gradients(lambda x: torch.relu(twin(x, **options)), twin, x, dy)
    for ours, apart in zip(found, wanted, strict=True):
        assert torch.equal(ours, apart)
    for ours, apart in zip(layer.buffers(), twin.buffers(), strict=True):
        assert torch.equal(ours, apart)


def test_an_empty_batch_and_one_of_nan():
    layer = modenorm.ModeNorm2d(4)
    assert layer(torch.zeros(0, 4, 2, 2), relu=True).shape == (0, 4, 2, 2)
    assert layer(torch.full((2, 4, 2, 2), float("nan")), relu=True).isnan().all()


@pytest.mark.parametrize("act", [nn.ReLU(), nn.ReLU(inplace=True), nn.SiLU(), nn.Identity()])
@pytest.mark.parametrize("relu", [False, True])
def test_activations_of_a_substitute(act, relu):
    torch.manual_seed(0)
    x = torch.randn(5, 4, 3, 3)
    layer = ModeNormAct2d(4, 2, drop=nn.Identity(), act=copy.deepcopy(act))
    plain = modenorm.ModeNorm2d(4, 2)
    plain.load_state_dict(layer.state_dict())
    wanted = act(plain(x))
    assert torch.equal(layer(x, relu=relu), torch.relu(wanted) if relu else wanted)
