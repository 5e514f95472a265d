"""The mixing as an operator, and a compiled layer, against the eager ones."""

import copy

import pytest
import torch
from test_fused import assert_close, layer_for, tensor

import modenorm
from modenorm import mixing
from modenorm.kernels import operators


@pytest.mark.parametrize("given", [False, True], ids=["gate", "gates"])
@pytest.mark.parametrize("per_mode", [False, True], ids=["shared", "per-mode"])
def test_mix_against_plain_operators(device, given, per_mode):
    torch.manual_seed(0)
    mean = torch.randn(7, 20, device=device)
    var = torch.rand(7, 20, device=device)
    gates = torch.softmax(torch.randn(7, 3, device=device), 1) if given else None
    gate = (
        [None, None]
        if given
        else [torch.randn(3, 20, device=device), torch.randn(3, device=device)]
    )
    shape = (3, 20) if per_mode else (20,)
    weight, bias = torch.randn(shape, device=device), torch.randn(shape, device=device)
    pulls = [torch.randn(7, 20, device=device) for _ in range(2)]

    def plain(mean, var, gates, gate_weight, gate_bias, weight, bias, eps):
        if gates is None:
            gates = torch.softmax(mean @ gate_weight.t() + gate_bias, 1)
        batch = mixing.batch_statistics(mean, var, gates)
        centre = mean.detach()
        return mixing.coefficients(batch.mean, batch.var, gates, centre, weight, bias, eps)

    found = []
    for function in (operators.mix, plain):
        inputs = [
            None if t is None else t.clone().requires_grad_()
            for t in (mean, var, gates, *gate, weight, bias)
        ]
        scale, shift = function(*inputs, 1e-5)[:2]
        leaves = [t for t in inputs if t is not None]
        found.append([scale, shift, *torch.autograd.grad((scale, shift), leaves, pulls)])
    for value, wanted in zip(*found, strict=True):
        assert_close(value, wanted, 3e-5, "", floor=3e-5)


def test_operator_registration(device):
    torch.manual_seed(0)
    inputs = (
        torch.randn(4, 6, device=device, requires_grad=True),
        torch.rand(4, 6, device=device),
        None,
        torch.randn(2, 6, device=device),
        torch.randn(2, device=device),
        None,
        None,
        1e-5,
    )
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operators.mix, inputs, test_utils=checks)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Inductor's kernels need a GPU")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", ["mn", "mgn", "standardized"])
def test_compiled_layer(device, training, kind):
    torch.manual_seed(0)
    x = tensor((8, 16, 9, 9), device, torch.bfloat16, True)
    dy = tensor((8, 16, 9, 9), device, torch.bfloat16, True)
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
        with torch.autocast("cuda", torch.bfloat16):
            y = function(leaf)
        found.append([y, *torch.autograd.grad(y, [leaf, *parameters.parameters()], dy)])
    for value, wanted in zip(*found, strict=True):
        assert_close(value, wanted, 2e-2, "", floor=2e-3)
    for value, wanted in zip(layer.buffers(), twin.buffers(), strict=True):
        assert_close(value, wanted, 1e-3, "buffer")
