"""Architectures of torchvision and timm, where these can be imported: nothing is downloaded.

Converted with the same numbers, trained, saved and loaded; on the CPU, and on a GPU if possible.
"""

import copy
import importlib
import math

import pytest
import torch
from torch import nn

import modenorm
from compare import assert_close

NO_GPU = not torch.cuda.is_available()
CUDA = [pytest.mark.gpu, pytest.mark.skipif(NO_GPU, reason="needs a CUDA device")]

# Plain networks, squeeze and excitation, norms with activations, modules in branches.
MODELS = {
    ("torchvision", "resnet18"): 20,
    ("torchvision", "mobilenet_v3_small"): 34,
    ("torchvision", "regnet_y_400mf"): 53,
    ("timm", "resnet18"): 20,
    ("timm", "efficientnet_b0"): 49,
    ("timm", "regnety_002"): 44,
    ("timm", "skresnet18"): 36,
}


def create(library, name):
    """A model of five classes without dropout; skips where the library can't be imported."""
    try:
        module = importlib.import_module("timm" if library == "timm" else "torchvision.models")
    except Exception as error:  # a torchvision for another torch raises more than ImportError
        pytest.skip(f"{library} can't be imported: {str(error).splitlines()[0]}")
    model = (module.create_model if library == "timm" else module.get_model)(name, num_classes=5)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return model


def train(model, optimizer, x, labels, steps):
    model.train()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def in_double(model, x):
    """Evaluation without the roundings that dozens of layers amplify."""
    return copy.deepcopy(model).double().eval()(x.double())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
@pytest.mark.parametrize(("library", "name"), MODELS, ids=map("-".join, MODELS))
def test_models_of_others(library, name, device, tmp_path):
    model = create(library, name).to(device)
    x, labels = torch.randn(10, 3, 64, 64, device=device), torch.arange(10, device=device) % 5
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    train(model, optimizer, x, labels, steps=2)
    before = in_double(model, x)
    replaced = modenorm.replace_batchnorm(model, 2, optimizer=optimizer)
    assert len(replaced) == MODELS[library, name]
    assert {p.device.type for layer in replaced.values() for p in layer.parameters()} == {device}
    assert_close(in_double(model, x), before, 1e-10)
    gates = {name: layer.gate.weight.detach().clone() for name, layer in replaced.items()}
    losses = train(model, optimizer, x, labels, steps=6)
    assert all(map(math.isfinite, losses))
    assert min(losses) < losses[0]
    # Some networks start with residual branches of weight zero: hardly a gradient in there.
    moved = [not torch.equal(layer.gate.weight, gates[n]) for n, layer in replaced.items()]
    assert sum(moved) > len(moved) / 2
    torch.save(model.state_dict(), tmp_path / "model.pt")
    again = create(library, name).to(device)
    modenorm.replace_batchnorm(again, 2)
    again.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    # The same network on the same device; a convolution on a GPU may add in another order.
    assert_close(again.eval()(x), model.eval()(x), 0.0 if device == "cpu" else 1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
@pytest.mark.parametrize("name", ["efficientnet_b0", "skresnet18"])
def test_norms_of_timm_come_back(name, device):
    """Norms with activations return as what they were, and compute the same."""
    model = create("timm", name).to(device).eval()
    x = torch.randn(4, 3, 64, 64, device=device)
    kinds = {key: type(module) for key, module in model.named_modules()}
    before = in_double(model, x)
    replaced = modenorm.replace_batchnorm(model, 2)
    assert modenorm.to_batchnorm(model).keys() == replaced.keys()
    assert {key: type(module) for key, module in model.named_modules()} == kinds
    assert_close(in_double(model, x), before, 1e-10)
