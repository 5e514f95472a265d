"""The operators that a compiled mode group norm is made of, against plain ones."""

import copy

import pytest
import torch
from test_fused import assert_close, tensor

import modenorm
from modenorm import mixing
from modenorm.kernels import choice, plain
from modenorm.kernels.cpp import operator as cpp_operator
from modenorm.kernels.gpu import mode_group_norm_operator, mode_group_norm_plan
from modenorm.kernels.mode_group_norm_arrays import Given


def plainly(x, given, gates_matter):
    mean, var = plain.moments(x, with_var=given.pixel)
    scale, shift, gates = mixing.channel_modes(mean, var, *given[:5])
    return plain.apply(x, mean, scale, shift), gates


@pytest.mark.parametrize("pixel", [False, True], ids=["pooled", "pixel"])
@pytest.mark.parametrize(("weight", "bias"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("channels_last", "gates_matter"), [(False, True), (True, False)], ids=["nchw", "nhwc"]
)
def test_against_plain_operators(device, channels_last, gates_matter, weight, bias, pixel):
    torch.manual_seed(0)
    x, dy = (tensor((7, 20, 3, 5), device, torch.float32, channels_last) for _ in range(2))
    parameters = [torch.randn(size, device=device) for size in (3, 3, 20, 20)]
    used = (True, True, weight, bias)
    parameters = [p if use else None for p, use in zip(parameters, used, strict=True)]
    pull = torch.randn(7, 20, 3, device=device)
    found = []
    for function in (mode_group_norm_operator.mode_group_norm, plainly):
        inputs = [None if t is None else t.clone().requires_grad_() for t in (x, *parameters)]
        y, gates = function(inputs[0], Given(*inputs[1:], 1e-5, pixel), gates_matter)
        leaves = [t for t in inputs if t is not None]
        heads = ((y, gates), (dy, pull)) if gates_matter else (y, dy)
        found.append([y, gates, *torch.autograd.grad(heads[0], leaves, heads[1])])
    for value, wanted in zip(*found, strict=True):
        assert_close(value, wanted, 3e-5, "", floor=3e-5)


@pytest.mark.parametrize("pixel", [False, True], ids=["pooled", "pixel"])
def test_operator_registration(device, pixel):
    torch.manual_seed(0)
    x, dy = (tensor((4, 6, 3, 3), device, torch.float32, False) for _ in range(2))
    given = (torch.randn(2, device=device), torch.randn(2, device=device), None, None)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    forward = (x, *given, 1e-5, pixel)
    torch.library.opcheck(mode_group_norm_operator.statistics, forward, test_utils=checks)
    gates, kept, _ = mode_group_norm_operator.statistics(*forward)
    for dgates in (torch.zeros_like(gates), None):
        backward = (dy, dgates, x, *given, kept, 1e-5, pixel)
        torch.library.opcheck(mode_group_norm_operator.gradients, backward, test_utils=checks)


@pytest.mark.parametrize("heard", [False, True], ids=["alone", "heard"])
@pytest.mark.parametrize("variance", ["pooled", "pixel"])
def test_traced_layers(device, monkeypatch, variance, heard):
    """Traced as one graph, with the activation around it, as on a GPU but without Inductor."""
    monkeypatch.setattr(choice, "runs_operators", lambda x: True)
    monkeypatch.setattr(cpp_operator, "cpp_module", lambda: None)  # which needs no plans
    torch.manual_seed(0)
    x, dy = (tensor((6, 8, 3, 3), device, torch.float32, True) for _ in range(2))
    layers = [modenorm.ModeGroupNorm(8, 3, variance=variance).to(device) for _ in range(2)]
    model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU())
    twin, found = copy.deepcopy(model), []

    def step(module, leaf):
        gates = []
        module[0].gate_listener = gates.append if heard else None
        y = module(leaf)
        return y, *gates

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    mode_group_norm_plan._plan.cache_clear()
    for function, module in ((compiled, model), (step, twin)):
        leaf = x.detach().requires_grad_()
        y, *gates = function(module, leaf)
        assert mode_group_norm_plan._plan.cache_info().currsize == 1  # not by plain operators
        penalty = sum((g**2).sum() for g in gates)
        inputs = [leaf, *module.parameters()]
        found.append([y, *torch.autograd.grad((y * dy).sum() + penalty, inputs)])
    for value, wanted in zip(*found, strict=True):
        assert_close(value, wanted, 3e-5, "", floor=3e-5)


@pytest.mark.parametrize("variance", ["pooled", "pixel"])
def test_a_mode_that_no_channel_belongs_to(device, variance):
    """Its gates are zero in float32, its weights are not."""
    layer = modenorm.ModeGroupNorm(20, 3, variance=variance).to(device)
    with torch.no_grad():
        layer.gate_weight.copy_(torch.tensor([5.0, -5.0, 0.1]))
    x, dy = (tensor((3, 20, 4, 4), device, torch.float32, False, mean) for mean in (15.0, 0.0))
    assert not torch.softmax(x.mean((2, 3))[..., None] * layer.gate_weight, -1)[..., 1].any()
    found = []
    for dtype in (torch.float32, torch.float64):
        twin, leaf = copy.deepcopy(layer).to(dtype), x.to(dtype).requires_grad_()
        y = twin(leaf)
        found.append([y, *torch.autograd.grad(y, [leaf, *twin.parameters()], dy.to(dtype))])
    for ours, wanted in zip(*found, strict=True):
        # the gradient of the gate's bias is zero here, a sum whose parts cancel
        assert_close(ours, wanted, 2e-3, "", floor=1e-3)
