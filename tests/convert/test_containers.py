"""Norms in containers: lists, tuples and dicts of a model's own, and torch's."""

import torch
from torch import nn

import modenorm
from modenorm import replace_batchnorm
from small_models import images, small_model


class Steps(nn.Module):
    """Calls its modules from a list, a tuple and a dict, which torch doesn't look into."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.steps, self.pair = [self.conv, self.norm, torch.relu], (self.norm, "a name")
        self.named = {"last": self.last, "other": 3}

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return self.named["last"](self.pair[0](x))


def test_norms_in_plain_containers_are_replaced_too():
    model, x = Steps(), images()
    before = model.eval()(x)
    steps = model.steps
    found = replace_batchnorm(model)
    assert model.steps is steps
    assert model.steps[1] is model.pair[0] is found["norm"]
    assert model.named == {"last": found["last"], "other": 3}
    torch.testing.assert_close(model(x), before)
    with modenorm.record_gates(model) as gates:
        model.train()(x)
    assert {name: len(entries) for name, entries in gates.items()} == {"norm": 2, "last": 1}
    modenorm.to_batchnorm(model, tolerance=float("inf"))
    assert type(model.pair[0]) is type(model.steps[1]) is nn.BatchNorm2d


def test_norms_in_containers_that_torch_made_anew():
    """After `del` and `pop` they keep their modules in an OrderedDict."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout())
    del model[-1]
    several = nn.ModuleList([nn.BatchNorm2d(8), nn.ReLU()])
    several.pop(1)
    for module in (model, several):
        found = replace_batchnorm(module)
        assert list(module.modules()).count(*found.values()) == 1
        assert not any(isinstance(part, nn.BatchNorm2d) for part in module.modules())


class Sealed(dict):
    """As some libraries' outputs are, which models may keep."""

    def update(self, *_):
        raise TypeError("not to be updated")


def test_containers_without_norms_are_left_alone():
    model = small_model()
    model.output, model.sizes = Sealed(y=torch.ones(1)), (1, 2)
    kept = model.output, model.sizes
    replace_batchnorm(model)
    assert (model.output, model.sizes) == kept
    assert model.sizes is kept[1]
