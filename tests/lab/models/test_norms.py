import pytest
import torch
from torch import nn

import modenorm
from modenorm.lab.models import NORMS, make_norm, norm_factory

KINDS = {
    "bn": nn.BatchNorm2d,
    "in": nn.GroupNorm,
    "ln": nn.GroupNorm,
    "gn": nn.GroupNorm,
}


@pytest.mark.parametrize("name", NORMS)
def test_every_norm_has_one_scale_and_shift_per_channel(name):
    layer = make_norm(name, 6)
    assert layer.weight.shape == layer.bias.shape == (6,)
    assert layer(torch.randn(3, 6, 4, 4)).shape == (3, 6, 4, 4)


@pytest.mark.parametrize("name", KINDS)
def test_torch_norms(name):
    assert type(make_norm(name, 6, eps=1e-3)) is KINDS[name]
    assert make_norm(name, 6, eps=1e-3).eps == 1e-3


def test_instance_norm_is_torchs():
    x, dy = torch.randn(2, 3, 6, 5, 4, dtype=torch.float64)
    found = []
    for layer in (make_norm("in", 6), nn.InstanceNorm2d(6, affine=True)):
        nn.init.normal_(layer.double().weight, generator=torch.Generator().manual_seed(0))
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        found.append([y, *torch.autograd.grad(y, [leaf, layer.weight, layer.bias], dy)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_mode_norms():
    layer = make_norm("mn", 6, modes=3, momentum=0.2, eps=1e-3)
    assert type(layer) is modenorm.ModeNorm2d
    assert (layer.num_modes, layer.momentum, layer.eps) == (3, 0.2, 1e-3)
    layer = make_norm("mgn", 6, modes=3, eps=1e-3, variance="pixel")
    assert type(layer) is modenorm.ModeGroupNorm
    assert (layer.num_modes, layer.eps, layer.variance) == (3, 1e-3, "pixel")


def test_groups():
    assert make_norm("ln", 6, groups=3).num_groups == 1
    assert make_norm("gn", 6, groups=3).num_groups == 3
    with pytest.raises(ValueError, match="set --groups"):
        make_norm("gn", 6, groups=4)


def test_a_factory_hands_its_settings_to_every_norm():
    factory = norm_factory("gn", groups=3, eps=1e-3)
    assert [(factory(c).num_groups, factory(c).eps) for c in (6, 9)] == [(3, 1e-3)] * 2


def test_first_means_once_per_factory():
    factory = norm_factory("in", where="first")
    assert [type(factory(4)) for _ in range(3)] == [
        nn.GroupNorm,
        nn.BatchNorm2d,
        nn.BatchNorm2d,
    ]


@pytest.mark.parametrize("make", [lambda name: make_norm(name, 4), norm_factory])
def test_unknown_norm(make):
    with pytest.raises(ValueError, match="unknown norm 'batch'; known: bn, in, ln, gn, mn, mgn"):
        make("batch")
