"""Models that `prune_modes` and `match_modes` meet: with switches, noise, and tensors of a step."""

import pytest
import torch
from torch import nn

import modenorm
from modenorm.pruning.resizing import set_num_modes


def small_model() -> nn.Sequential:
    norm = modenorm.ModeNorm2d(6, 4)
    return nn.Sequential(nn.Conv2d(3, 6, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(96, 5))


def images(count: int = 32) -> torch.Tensor:
    return torch.randn(count, 3, 6, 6)


@pytest.mark.parametrize("modes", [2, 8], ids="to {}".format)
def test_layers_with_switches_match_no_state(modes):
    """Their kernels go by the numbers of modes that there were."""
    model, other = small_model(), small_model()
    set_num_modes(other[1], modes)
    sparsity = modenorm.ModeSparsity(model, method="switch")
    with pytest.raises(ValueError, match=r"switches on 1, .*remove\(\) before match_modes"):
        modenorm.match_modes(model, other.state_dict())
    assert model[1].num_modes == 4
    sparsity.remove()
    assert modenorm.match_modes(model, other.state_dict()) == {"1": (4, modes)}


def test_switches_of_other_numbers_of_modes_are_refused():
    model = small_model()
    modenorm.ModeSparsity(model, method="switch")
    set_num_modes(model[1], 3)
    with pytest.raises(ValueError, match=r"gates have \[3\] modes, but .* made for \[4\]"):
        model(images())


class Noisy(nn.Module):
    def forward(self, x):
        return x + 0.1 * torch.randn_like(x)


def test_a_model_that_is_random_in_evaluation():
    model, x = small_model(), images(64)
    with torch.no_grad():
        for rows in (model[1].gate.weight, model[1].gate.bias):
            rows.fill_(0.0)
    model.append(Noisy())
    state = torch.get_rng_state()
    found = modenorm.prune_modes(model, [x])
    assert torch.equal(torch.get_rng_state(), state)
    assert found.layers[0].after == 1
    assert found.change < 1e-6


class Keeping(nn.Sequential):
    """Keeps what torch can't copy: tensors of its last step."""

    def forward(self, x):
        y = super().forward(x)
        if self.training:
            self.auxiliary, self.others = y.square().mean(), [y, (y * 2,)]
        return y


def test_a_model_that_keeps_tensors_of_its_last_step():
    model = Keeping(*small_model())
    kept = model(images()), model.auxiliary
    modenorm.prune_modes(model, [images()])
    assert model.auxiliary is kept[1]
    assert model.auxiliary.requires_grad


def test_under_another_default_device():
    model, x = small_model(), images()
    with torch.device("meta"):
        assert modenorm.mode_report(model, [x]).layers[0].num_samples == len(x)
        modenorm.prune_modes(model, [x], tolerance=1.0)
    assert model[1].num_modes < 4


def test_generators_of_other_devices_are_left_alone(monkeypatch):
    """They would not be put back."""
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    modenorm.prune_modes(small_model(), [images()])
    assert seeded == []
