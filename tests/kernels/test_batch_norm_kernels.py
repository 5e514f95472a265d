"""Batch norms of compiled networks against torch's own, in float64 of the same rounded numbers."""

import copy

import pytest
import torch
from test_fused import assert_close, tensor

from modenorm.lab.layers import batch_norm as module
from modenorm.lab.layers.batch_norm import (
    StreamedBatchNorm2d,
    batch_gradients,
    batch_statistics,
    stream_batch_norms,
)
from modenorm.lab.models import create_model
from modenorm.lab.models.blocks import ConvNormReLU

# Odd sizes; one position; more channels, then more samples, than a program takes at once.
SMALL = [(5, 3, 5, 7), (7, 20, 1, 1), (4, 40, 3, 3), (130, 5, 2, 2)]
REAL = [(128, 192, 32, 32), (256, 64, 32, 32), (128, 16, 32, 32), (128, 512, 2, 2)]
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=["fp32", "bf16", "fp16"])
RELU = pytest.mark.parametrize("relu", [False, True], ids=["plain", "relu"])


@pytest.fixture
def served(monkeypatch):
    """Layers compute by their operators, though nothing is compiled."""
    monkeypatch.setattr(StreamedBatchNorm2d, "_kernels_serve", lambda self, x: x.ndim == 4)


def layer_for(channels, device):
    layer = StreamedBatchNorm2d(channels).to(device)
    for each in (layer.weight, layer.bias, layer.running_mean):
        torch.nn.init.normal_(each, mean=0.3, std=0.5)
    return layer


def learn(function, layer, x, dy, relu):
    """Y, dx, the parameters' gradients, and the running estimates."""
    leaf = x.detach().requires_grad_()
    y = function(leaf)
    y = y.relu() if relu else y
    gradients = torch.autograd.grad(y, [leaf, layer.weight, layer.bias], dy.to(y.dtype))
    return y.detach(), *gradients, *layer.buffers()


def check(shape, device, dtype, channels_last, relu, mean=0.0, tolerance=None):
    torch.manual_seed(0)
    layer = layer_for(shape[1], device)
    torchs = torch.nn.BatchNorm2d(shape[1]).double()
    torchs.load_state_dict(layer.state_dict())
    x, dy = (tensor(shape, device, dtype, channels_last, at) for at in (mean, 0.0))
    wanted = learn(torchs, torchs, x.cpu().double(), dy.cpu(), relu)
    found = learn(lambda x: layer(x, relu=relu), layer, x, dy, False)
    assert found[0].dtype == found[1].dtype == dtype
    assert found[0].stride() == found[1].stride() == x.stride()
    for value, truth in zip(found, wanted, strict=True):
        assert_close(value.cpu(), truth, tolerance or TOLERANCES[dtype], str(shape))


@pytest.mark.parametrize("shape", SMALL, ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@RELU
def test_sizes(device, served, shape, channels_last, relu):
    check(shape, device, torch.float32, channels_last, relu)


@DTYPES
@RELU
def test_types(device, served, dtype, relu):
    check((6, 24, 5, 4), device, dtype, True, relu)


def test_large_mean(device, served):
    """Variances are sums around a mean, whose own rounding is all that costs digits."""
    check((6, 8, 5, 4), device, torch.float32, True, False, mean=100.0, tolerance=3e-5)


def test_not_a_number(device, served):
    """It stays in its channel, and reaches the running estimates, as with torch."""
    layer, x = layer_for(8, device), tensor((3, 8, 4, 4), device, torch.float32, True)
    x[1, 3, 2, 2] = torch.nan
    y = layer(x)
    hit = torch.arange(8, device=device) == 3
    for found in (y.isnan().all(dim=(0, 2, 3)), layer.running_mean.isnan()):
        assert torch.equal(found, hit)
    assert not y[:, ~hit].isnan().any()


def test_upstream_gradient_in_any_order(device, served):
    layer, x = layer_for(8, device), tensor((3, 8, 4, 5), device, torch.float32, True)
    dy, found = torch.randn(3, 8, 4, 5, device=device), []
    for given in (dy, dy.contiguous(memory_format=torch.channels_last)):
        found.append(learn(layer, layer, x, given, False)[:4])
    for value, wanted in zip(*found, strict=True):
        assert_close(value, wanted, 1e-6, "order")


def test_traced_network(device, counted):
    """As one graph, under autocast; after that it is evaluated, which torch's own code does."""
    conv = torch.nn.Conv2d(3, 8, 3, bias=False)
    model = ConvNormReLU(conv, layer_for(8, device)).to(device)
    twin = ConvNormReLU(copy.deepcopy(conv), torch.nn.BatchNorm2d(8)).to(device)
    twin.load_state_dict(model.state_dict())
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    x, dy = (torch.randn(4, c, s, s, device=device) for c, s in ((3, 8), (8, 6)))
    plans, found = counted(module, "_plan_for"), []
    for function, owner in ((compiled, model), (twin, twin)):
        with torch.autocast(device.type, torch.bfloat16):
            y = function(x)
        gradients = torch.autograd.grad(y, list(owner.parameters()), dy.to(y.dtype))
        owner.eval()
        with torch.no_grad():
            found.append([y, *gradients, *owner.buffers(), function(x)])
    assert len(plans) == 2  # one each way
    for value, wanted in zip(*found, strict=True):
        assert_close(value, wanted, 2e-2, "traced")


def test_networks_have_them(device, monkeypatch):
    """All but those before a shortcut's sum take a ReLU along; switched off, none serves."""
    torch.manual_seed(0)
    model = create_model("resnet20", num_classes=3, norm="bn").to(device)
    stream_batch_norms(model)
    model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8, device=device).contiguous(memory_format=torch.channels_last)
    traced, found = [], []

    def backend(graph, inputs):
        traced.append(
            [node.args[-1] for node in graph.graph.nodes if node.target is batch_statistics]
        )
        return graph.forward

    for enabled in (True, False):
        monkeypatch.setattr(module, "ENABLED", enabled)
        torch.compiler.reset()
        found.append(torch.compile(copy.deepcopy(model), fullgraph=True, backend=backend)(x))
    assert traced == [[True, *[True, False] * 9], []]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_registration(device):
    x, dy = (tensor((4, 6, 3, 3), device, torch.float32, True) for _ in range(2))
    layer = layer_for(6, device)
    given = (layer.weight.detach(), layer.bias.detach(), *layer.buffers())
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for relu in (False, True):
        forward = (x, *given, 1e-5, 0.1, relu)
        torch.library.opcheck(batch_statistics, forward, test_utils=checks)
        kept, _ = batch_statistics(*forward)
        torch.library.opcheck(batch_gradients, (dy, x, kept, relu), test_utils=checks)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="too large for the interpreter")
@pytest.mark.parametrize("shape", REAL, ids=str)
@RELU
def test_real_sizes(device, served, shape, relu):
    check(shape, device, torch.bfloat16, True, relu)
