"""The operators that a compiled layer is made of, and such layers, against the eager ones."""

import copy

import pytest
import torch
from test_fused import assert_close, layer_for, tensor

import modenorm
from modenorm import mixing
from modenorm.kernels import operators, plain


@pytest.mark.parametrize("given", [False, True], ids=["gate", "gates"])
@pytest.mark.parametrize("affine", ["none", "shared", "per-mode"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
def test_against_plain_operators(device, given, affine, channels_last):
    torch.manual_seed(0)
    x, dy = (tensor((7, 20, 3, 5), device, torch.float32, channels_last) for _ in range(2))
    gates = torch.softmax(torch.randn(7, 3, device=device), 1) if given else None
    gate = [None, None]
    if not given:
        gate = [torch.randn(3, 20, device=device), torch.randn(3, device=device)]
    shape = (3, 20) if affine == "per-mode" else (20,)
    parameters = [None, None]
    if affine != "none":
        parameters = [torch.randn(shape, device=device) for _ in range(2)]
    pull = torch.randn(7, 3, device=device)  # for the gates as an output

    def plainly(x, gates, gate_weight, gate_bias, weight, bias, eps):
        mean, var = plain.moments(x)
        if gates is None:
            gates = torch.softmax(mean @ gate_weight.t() + gate_bias, 1)
        batch = mixing.batch_statistics(mean, var, gates)
        scale, shift = mixing.coefficients(batch.mean, batch.var, gates, mean, weight, bias, eps)
        return plain.apply(x, mean, scale, shift), gates, batch.mean, batch.var, batch.mass

    found = []
    for function in (operators.mode_norm, plainly):
        inputs = [
            None if t is None else t.clone().requires_grad_()
            for t in (x, gates, *gate, *parameters)
        ]
        y, used, *of_modes = function(*inputs, 1e-5)
        leaves = [t for t in inputs if t is not None]
        found.append([y, used, *of_modes, *torch.autograd.grad((y, used), leaves, (dy, pull))])
    for value, wanted in zip(*found, strict=True):
        assert_close(value, wanted, 3e-5, "", floor=3e-5)


def test_operator_registration(device):
    torch.manual_seed(0)
    x, dy = (tensor((4, 6, 3, 3), device, torch.float32, False) for _ in range(2))
    inputs = (None, torch.randn(2, 6, device=device), torch.randn(2, device=device), None, None)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operators.statistics, (x, *inputs, 1e-5), test_utils=checks)
    _, _, used, *kept = operators.statistics(x, *inputs, 1e-5)
    backward = (dy, torch.zeros_like(used), x, *inputs, used, *kept, 1e-5)
    torch.library.opcheck(operators.gradients, backward, test_utils=checks)


def test_traced_layers(device, monkeypatch):
    """Traced as one graph, with the activation around it, as on a GPU but without Inductor."""
    monkeypatch.setattr(operators, "available", lambda x: True)
    torch.manual_seed(0)
    x = tensor((6, 8, 3, 3), device, torch.float32, True)
    parts = [layer_for(x.shape, 3, device) for _ in range(2)]
    model = torch.nn.Sequential(*(torch.nn.Sequential(p, torch.nn.ReLU()) for p in parts))
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    dy = tensor(x.shape, device, torch.float32, True)
    found = []
    for function, module in ((compiled, model), (twin, twin)):
        leaf = x.detach().requires_grad_()
        y = function(leaf)
        found.append([y, *torch.autograd.grad(y, [leaf, *module.parameters()], dy)])
    for value, wanted in zip(*found, strict=True):
        assert_close(value, wanted, 3e-5, "", floor=3e-5)
    for value, wanted in zip(model.buffers(), twin.buffers(), strict=True):
        assert_close(value, wanted, 1e-5, "buffer")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Inductor's kernels need a GPU")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", ["mn", "mgn", "standardized"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_compiled_layer(device, training, kind, dtype):
    torch.manual_seed(0)
    x = tensor((8, 16, 9, 9), device, dtype, True)
    dy = tensor((8, 16, 9, 9), device, dtype, True)
    layer = layer_for(x.shape, 3, device)
    if kind == "mgn":
        layer = modenorm.ModeGroupNorm(16, 3).to(device)
    if kind == "standardized":
        layer = layer_for(x.shape, 3, device, gate=modenorm.StandardizedGate)
    twin = copy.deepcopy(layer)
    layer.train(training)
    twin.train(training)
    compiled = torch.compile(layer, fullgraph=True)
    found = []
    for function, parameters in ((compiled, layer), (twin, twin)):
        leaf = x.detach().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
            y = function(leaf)
        found.append([y, *torch.autograd.grad(y, [leaf, *parameters.parameters()], dy)])
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for value, wanted in zip(*found, strict=True):
        # the gradient of a gate's bias is what is left of sums that are a thousand times as large
        assert_close(value, wanted, tolerance, "", floor=tolerance)
    for value, wanted in zip(layer.buffers(), twin.buffers(), strict=True):
        assert_close(value, wanted, 1e-3, "buffer")
