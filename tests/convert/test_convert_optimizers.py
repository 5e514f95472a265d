"""Optimizers go on after a conversion: they hold the gates, and their momenta count."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import modenorm
from modenorm import replace_batchnorm
from small_models import images, small_model


def step(model, optimizer, x):
    optimizer.zero_grad()
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y) ** 3).sum().backward()
    optimizer.step()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
}


@pytest.mark.parametrize("per_mode", [False, True], ids=["shared", "per_mode"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_goes_on(make, per_mode):
    """Everything learns after the conversion, and momenta of before count."""
    model, x = small_model(), images()
    optimizer = make(model.parameters())
    step(model, optimizer, x)
    replaced = replace_batchnorm(model, 2, optimizer=optimizer, per_mode_affine=per_mode)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    assert {id(p) for p in optimizer.state} <= held
    momenta = [v for v in optimizer.state[replaced["1"].weight].values() if v.ndim]
    assert all(v.shape == replaced["1"].weight.shape and v.abs().sum() > 0 for v in momenta)
    for layer in replaced.values():  # nearly equal gates have gradients of a rounding error's size
        nn.init.normal_(layer.gate.weight)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(model, optimizer, x)
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[name]), name


def test_gates_join_the_group_of_their_norm():
    model = small_model()
    norms, _, others = modenorm.norm_parameters(model)
    optimizer = torch.optim.SGD(
        [
            {"params": list(others.items()), "weight_decay": 0.1},
            {"params": list(norms.items()), "weight_decay": 0.0, "lr": 0.5},
        ],
        lr=0.1,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    replace_batchnorm(model, optimizer=optimizer)
    first, second = optimizer.param_groups
    assert [id(p) for p in first["params"]] == [id(p) for p in others.values()]
    names = second["param_names"]
    assert names[4:] == ["1.gate.weight", "1.gate.bias", "4.gate.weight", "4.gate.bias"]
    assert all(model.get_parameter(n) is p for n, p in zip(names, second["params"], strict=True))
    step(model, optimizer, images())
    scheduler.step()


def test_gates_of_norms_that_the_optimizer_does_not_hold_join_the_first_group():
    model = small_model(affine=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replaced = replace_batchnorm(model, optimizer=optimizer)
    assert any(p is replaced["1"].gate.weight for p in optimizer.param_groups[0]["params"])


def test_without_the_argument_an_optimizer_keeps_the_norms_parameters():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replaced = replace_batchnorm(model)
    before = replaced["1"].weight.detach().clone()
    step(model, optimizer, images())
    assert not torch.equal(replaced["1"].weight, before)


def test_lbfgs_that_has_a_history_is_refused():
    model = small_model()
    optimizer = torch.optim.LBFGS(model.parameters())

    def loss():
        optimizer.zero_grad()
        value = model(images()).square().mean()
        value.backward()
        return value

    optimizer.step(loss)
    with pytest.raises(ValueError, match="LBFGS that has made a step"):
        replace_batchnorm(model, optimizer=optimizer)
    assert type(model[1]) is nn.BatchNorm2d


@pytest.mark.parametrize("num_modes", [2, {"1": 2, "4": 3}], ids=["same", "different"])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad])
def test_norms_with_a_weight_in_common(make, num_modes):
    """With a weight for each mode they still have one in common if their modes are as many."""
    model = nn.Sequential(*(nn.BatchNorm2d(3) if i in (1, 4) else nn.ReLU() for i in range(5)))
    model[4].weight = model[1].weight
    optimizer = make(model.named_parameters(), lr=0.1)
    step(model, optimizer, images())
    first, second = replace_batchnorm(
        model, num_modes, optimizer=optimizer, per_mode_affine=True
    ).values()
    assert (first.weight is second.weight) == (num_modes == 2)
    assert torch.equal(first.weight[0], second.weight[1])
    (group,) = optimizer.param_groups
    assert {id(p) for p in group["params"]} == {id(p) for p in model.parameters()}
    assert len(group["params"]) == len(list(model.parameters()))
    pairs = zip(group["param_names"], group["params"], strict=True)
    assert all(model.get_parameter(name) is p for name, p in pairs)
    step(model, optimizer, images())


def test_parametrized_norms_and_gates_are_sorted_as_ever():
    model = nn.Sequential(modenorm.ModeNorm2d(3), modenorm.ModeGroupNorm(3), nn.Conv2d(3, 3, 1))
    for module in (model[0], model[0].gate, model[1], model[2]):
        parametrizations.weight_norm(module)
    parametrizations.weight_norm(model[1], "gate_weight")
    norms, gates, others = modenorm.norm_parameters(model)
    assert {name.partition(".")[0] for name in others} == {"2"}
    assert len(others) == len(norms) // 2 == 3
    assert {name.partition(".")[0] for name in gates} == {"0", "1"}
    assert len(gates) == 6


@pytest.mark.parametrize("call", ["replace_batchnorm", "prune_modes", "to_batchnorm"])
def test_the_optimizer_of_another_model_is_refused(call):
    model, other = small_model(), nn.Linear(2, 2)
    if call != "replace_batchnorm":
        replace_batchnorm(model)
    arguments = [model, [images()]] if call == "prune_modes" else [model]
    with pytest.raises(ValueError, match="has no parameter of this model that learns"):
        getattr(modenorm, call)(*arguments, optimizer=torch.optim.SGD(other.parameters(), 0.1))
    with pytest.raises(ValueError, match="optimizer is 'sgd'; expected one of torch"):
        getattr(modenorm, call)(*arguments, optimizer="sgd")


def test_gates_of_a_frozen_part_join_the_optimizer_of_the_rest():
    backbone, head = small_model().requires_grad_(False), nn.Linear(5, 2)
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    with pytest.warns(UserWarning, match="their new gates learn"):
        found = replace_batchnorm(backbone, optimizer=optimizer)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert all(id(layer.gate.weight) in held for layer in found.values())
