"""Batch norms of compiled trainings are torch's on a CPU. Kernels: tests/kernels."""

import copy

import pytest
import torch
from torch import nn

from modenorm.lab.layers.batch_norm import StreamedBatchNorm2d, stream_batch_norms
from modenorm.lab.models import create_model


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_computes_as_torch_does(training):
    model = create_model("resnet20", num_classes=3).train(training)
    streamed, x = copy.deepcopy(model), torch.randn(4, 3, 8, 8)
    stream_batch_norms(streamed)
    assert sum(isinstance(part, StreamedBatchNorm2d) for part in streamed.modules()) == 19
    assert torch.equal(streamed(x), model(x))
    for (name, tensor), (same, wanted) in zip(
        streamed.state_dict().items(), model.state_dict().items(), strict=True
    ):
        assert name == same
        assert torch.equal(tensor, wanted)


def test_takes_a_relu_along():
    layer, x = StreamedBatchNorm2d(5), torch.randn(4, 5, 3, 3)
    assert torch.equal(layer(x, relu=True), copy.deepcopy(layer)(x).relu())


def test_others_stay():
    """What is not torch's own layer may do more than it."""

    class Own(nn.BatchNorm2d):
        pass

    model = nn.Sequential(Own(3), nn.SyncBatchNorm(3), nn.BatchNorm1d(3), nn.GroupNorm(1, 3))
    kinds = [type(part) for part in model]
    stream_batch_norms(model)
    assert [type(part) for part in model] == kinds
