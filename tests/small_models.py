"""Small models: with batch norm in the middle of training, and with modes."""

import torch
from torch import nn

import modenorm

INPUTS = {1: (6, 3, 4), 2: (6, 3, 4, 4), 3: (6, 3, 2, 4, 4)}
BATCHNORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def trained(norm):
    """A norm in the middle of training: no parameter or buffer at its start."""
    with torch.no_grad():
        for tensor in (norm.weight, norm.bias, norm.running_mean):
            if tensor is not None:
                tensor.normal_()
        if norm.running_var is not None:
            norm.running_var.uniform_(0.5, 2)
            norm.num_batches_tracked.fill_(7)
    return norm


def small_model(norm=nn.BatchNorm2d, **options):
    convs = nn.Conv2d(3, 4, 3, bias=False), nn.Conv2d(4, 5, 3, bias=False)
    layers = [convs[0], norm(4, **options), nn.ReLU(), convs[1]]
    model = nn.Sequential(*layers, norm(5, **options))
    trained(model[1])
    trained(model[4])
    return model


def mode_model(norm=modenorm.ModeNorm2d):
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm(8, 4), nn.ReLU(), nn.Conv2d(8, 6, 3), norm(6, 2))


def images(*shape):
    return torch.randn(shape or (6, 3, 8, 8))


def counting_backend():
    """A backend of `torch.compile` that runs graphs as they are, and a list of them."""
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    return count, graphs
