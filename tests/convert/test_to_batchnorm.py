"""Mode norms that act as batch norms go back to batch norms, with the same numbers."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import fusion

import modenorm
from compare import assert_close
from modenorm import replace_batchnorm, to_batchnorm
from small_models import BATCHNORMS, images, small_model, trained


@pytest.mark.parametrize("per_mode", [False, True], ids=["shared", "per_mode"])
@pytest.mark.parametrize("num_modes", [1, 2, 3])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_there_and_back(rank, num_modes, per_mode):
    original = trained(BATCHNORMS[rank](3, eps=1e-3, momentum=0.2))
    model = nn.Sequential(original).eval()
    replace_batchnorm(model, num_modes, per_mode_affine=per_mode)
    norm = to_batchnorm(model)["0"]
    assert model[0] is norm
    assert type(norm) is BATCHNORMS[rank]
    assert (norm.eps, norm.momentum, norm.training) == (1e-3, 0.2, False)
    for name, tensor in original.state_dict().items():
        assert torch.equal(norm.state_dict()[name], tensor), name


def test_one_mode_after_training_is_the_same_batch_norm():
    model, x = small_model().double(), images().double()
    replace_batchnorm(model, 1)
    model(x)
    expected = model.eval()(x)
    assert list(to_batchnorm(model)) == ["1", "4"]
    assert_close(model(x), expected, 1e-12)


def test_modes_that_differ_are_left():
    model, x = small_model(), images()
    replace_batchnorm(model, 2)
    model(x)
    model[4].running_mean[1] = model[4].running_mean[0]
    model[4].running_var[1] = model[4].running_var[0]
    expected = model.eval()(x)
    assert list(to_batchnorm(model)) == ["4"]
    assert type(model[1]) is modenorm.ModeNorm2d
    assert_close(model(x), expected, 1e-5)


@pytest.mark.parametrize("name", ["running_mean", "running_var", "weight", "bias"])
def test_one_difference_keeps_the_modes(name):
    model = small_model()
    layer = replace_batchnorm(model, 2, per_mode_affine=True)["1"]
    with torch.no_grad():
        getattr(layer, name)[1, 2] *= 1.01
    assert list(to_batchnorm(copy.deepcopy(model))) == ["4"]
    assert list(to_batchnorm(model, tolerance=0.05)) == ["1", "4"]


def test_modes_within_the_tolerance_are_averaged():
    layer = modenorm.ModeNorm2d(3).eval()
    layer.running_mean[1] = 0.01
    norm = to_batchnorm(layer, tolerance=0.02)[""]
    assert_close(norm.running_mean, torch.full((3,), 0.005), 1e-6)
    assert to_batchnorm(layer, tolerance=0.005) == {}


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2], [2, 1, 0]], ids=str)
@pytest.mark.parametrize(
    ("name", "values", "largest"),
    [
        ("running_mean", [0.0, 1.0, 2.0], 2.0),
        ("running_var", [1.0, 2.0, 4.0], 3.0),
        ("weight", [-1.0, -2.0, -3.0], 2.0),
        ("bias", [1.0, -0.5, 1.0], 3.0),
    ],
)
def test_the_tolerance_is_between_any_two_modes(name, values, largest, order):
    layer = modenorm.ModeNorm2d(3, 3, eps=1e-12, per_mode_affine=True)
    with torch.no_grad():
        getattr(layer, name)[:, 1] = torch.tensor(values)[order]
    assert to_batchnorm(layer, tolerance=0.99 * largest) == {}
    assert list(to_batchnorm(layer, tolerance=1.01 * largest)) == [""]


def test_means_differ_in_the_smallest_standard_deviation():
    layer = modenorm.ModeNorm2d(3)
    for var in ([1.0, 0.25], [0.25, 1.0]):
        layer.running_var.copy_(torch.tensor(var)[:, None])
        for mean, merged in ((1.5, True), (1.6, False)):
            layer.running_mean[1] = mean
            assert bool(to_batchnorm(layer, tolerance=3.1)) == merged


def test_modes_without_running_estimates_are_left():
    assert to_batchnorm(modenorm.ModeNorm2d(3, track_running_stats=False)) == {}
    assert list(to_batchnorm(modenorm.ModeNorm2d(3, 1, track_running_stats=False))) == [""]


def test_frozen_statistics_are_mentioned_on_the_way_back():
    model = small_model()
    replace_batchnorm(model, 1)
    modenorm.freeze_statistics(model)
    with pytest.warns(UserWarning, match="statistics of 1, 4 were frozen"):
        to_batchnorm(model)


def test_a_negative_tolerance():
    with pytest.raises(ValueError, match="tolerance is -1"):
        to_batchnorm(small_model(), tolerance=-1)


def test_folding_into_the_convolution():
    model, x = small_model().double(), images().double()
    replace_batchnorm(model, 1)
    model(x)
    expected = model.eval()(x)
    to_batchnorm(model)
    folded = nn.Sequential(
        fusion.fuse_conv_bn_eval(model[0], model[1]),
        model[2],
        fusion.fuse_conv_bn_eval(model[3], model[4]),
    )
    assert_close(folded(x), expected, 1e-12)


@pytest.mark.parametrize("per_mode", [False, True], ids=["shared", "per_mode"])
def test_statistics_too_large_for_float16(per_mode):
    layer = modenorm.ModeNorm2d(3, 1, per_mode_affine=per_mode).half().eval()
    layer.running_var.fill_(1e6)
    layer.weight.requires_grad_(False)
    model, x = nn.Sequential(layer), 1000 * images().half()
    expected = model(x)
    norm = to_batchnorm(model)["0"]
    assert norm.weight.dtype == norm.running_var.dtype == torch.float32
    assert (norm.weight.requires_grad, norm.bias.requires_grad) == (False, True)
    assert model(x).dtype == torch.float16
    assert_close(model(x).float(), expected.float(), 1e-3)


def test_modes_on_the_meta_device_cannot_be_compared():
    model = nn.Sequential(modenorm.ModeNorm2d(3, 2, device="meta"))
    with pytest.raises(ValueError, match="0 is on the meta device"):
        to_batchnorm(model)
    model = nn.Sequential(modenorm.ModeNorm2d(3, 1, device="meta"))
    assert to_batchnorm(model)["0"].weight.is_meta


def test_parameters_that_norms_have_in_common_stay_so():
    model = nn.Sequential(*(modenorm.ModeNorm2d(3, per_mode_affine=True) for _ in range(2)))
    model[1].weight = model[0].weight
    to_batchnorm(model)
    assert model[1].weight is model[0].weight
    assert model[1].weight.shape == (3,)
    assert model[1].bias is not model[0].bias


@pytest.mark.parametrize("kind", ["per mode", "half"])
def test_an_optimizer_goes_on_with_new_parameters(kind):
    layer = modenorm.ModeNorm1d(4, 2, per_mode_affine=kind == "per mode")
    model = nn.Sequential(layer)
    if kind == "half":
        model.half()
        layer.running_var.fill_(1e6)  # too large for float16
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, eps=1e-4)
    model(torch.randn(8, 4).to(layer.weight)).square().mean().backward()
    optimizer.step()
    norm = to_batchnorm(model, tolerance=math.inf, optimizer=optimizer)["0"]
    assert norm.weight is not layer.weight
    before = norm.weight.detach().clone()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(norm.weight, before)
    assert optimizer.state[norm.weight]["exp_avg"].dtype == norm.weight.dtype


@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
def test_parameters_that_another_layer_keeps_stay_in_the_optimizer(back):
    make = modenorm.ModeNorm1d if back else nn.BatchNorm1d
    options = {"num_modes": 2, "per_mode_affine": True} if back else {}
    model = nn.Sequential(make(4, **options), nn.ReLU(), make(4, **options))
    model[2].weight, model[2].bias = model[0].weight, model[0].bias
    optimizer = torch.optim.SGD(model.named_parameters(), 0.0, momentum=0.9)
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    if back:  # the modes of the second layer differ
        model[0].reset_running_stats()
    shared = model[2].weight
    momentum = optimizer.state[shared]["momentum_buffer"].clone()
    if back:
        assert list(to_batchnorm(model, optimizer=optimizer)) == ["0"]
    else:
        replace_batchnorm(model, where="0", per_mode_affine=True, optimizer=optimizer)
    (group,) = optimizer.param_groups
    held = list(map(id, group["params"]))
    assert (
        len(held) == len(set(held)) == len(group["param_names"]) == len(set(group["param_names"]))
    )
    assert {id(p) for p in model.parameters()} <= set(held)
    assert torch.equal(optimizer.state[shared]["momentum_buffer"], momentum)
    found = optimizer.state[model[0].weight]["momentum_buffer"]
    assert torch.equal(found, momentum.sum(0) if back else momentum.expand(2, 4))
