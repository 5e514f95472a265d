"""The operators that a compiled layer is made of, and such layers, against the eager ones."""

import copy

import pytest
import torch
from test_fused import assert_close, layer_for, tensor

import modenorm
from modenorm import mixing
from modenorm.checks import Options
from modenorm.kernels import choice, plain
from modenorm.kernels.gpu import mode_norm_operator
from modenorm.kernels.mode_norm_arrays import Inputs


@pytest.mark.parametrize("given", [False, True], ids=["gate", "gates"])
@pytest.mark.parametrize("affine", ["none", "shared", "per-mode"])
@pytest.mark.parametrize(
    ("channels_last", "gates_matter", "momentum", "update", "relu"),
    [
        (False, True, 0.1, "paper", False),
        (True, False, 0.3, "usage", False),
        (True, True, None, "paper", False),
        (False, False, 0.1, "paper", True),
        (True, True, 0.1, "paper", True),
    ],
    ids=["nchw", "nhwc", "averaging", "nchw-relu", "nhwc-relu"],
)
def test_against_plain_operators(
    device, given, affine, channels_last, gates_matter, momentum, update, relu
):
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
    pull = torch.randn(7, 3, device=device) if gates_matter else None

    def estimates():
        tensors = (torch.zeros(3, 20), torch.ones(3, 20), torch.zeros((), dtype=torch.int64))
        return mixing.RunningEstimates(*(t.to(device) for t in tensors), None)

    def plainly(x, inputs, estimates, options):
        gates, gate_weight, gate_bias, weight, bias = inputs
        mean, var = plain.moments(x)
        if gates is None:
            gates = torch.softmax(mean @ gate_weight.t() + gate_bias, 1)
        batch = mixing.batch_statistics(mean.detach(), var.detach(), gates.detach())
        mixing.update_running(estimates, batch, options.momentum, options.running_update)
        batch = mixing.batch_statistics(mean, var, gates)
        coefficients = (batch.mean, batch.var, gates, mean, weight, bias, options.eps)
        scale, shift = mixing.coefficients(*coefficients)
        y = plain.apply(x, mean, scale, shift)
        return torch.relu(y) if options.relu else y, gates, None

    found = []
    options = Options(True, momentum, running_update=update, gates_matter=gates_matter, relu=relu)
    for function in (mode_norm_operator.mode_norm, plainly):
        inputs = [
            None if t is None else t.clone().requires_grad_()
            for t in (x, gates, *gate, *parameters)
        ]
        running = estimates()
        y, used, usage = function(inputs[0], Inputs(*inputs[1:]), running, options)
        assert usage is None
        leaves = [t for t in inputs if t is not None]
        heads = ((y, used), (dy, pull)) if gates_matter else (y, dy)
        gradients = torch.autograd.grad(heads[0], leaves, heads[1])
        found.append([y, used, *running[:3], *gradients])
    for value, wanted in zip(*found, strict=True):
        assert_close(value, wanted, 3e-5, "", floor=3e-5)


def test_operator_registration(device):
    torch.manual_seed(0)
    x, dy = (tensor((4, 6, 3, 3), device, torch.float32, False) for _ in range(2))
    inputs = (None, torch.randn(2, 6, device=device), torch.randn(2, device=device), None, None)
    running = (torch.zeros(2, 6, device=device), torch.ones(2, 6, device=device), None, None)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    of_gates, of_usage = torch.zeros(4, 2, device=device), torch.zeros(2, device=device)
    for dused, dusage in ((None, of_usage), (of_gates, None)):
        forward = (x, *inputs, *running, 1e-5, 0.1, False, dusage is not None)
        torch.library.opcheck(mode_norm_operator.statistics, forward, test_utils=checks)
        kept, lines, *_ = mode_norm_operator.statistics(*forward)
        for mapped in (None, lines):
            backward = (dy, dused, dusage, x, *inputs, kept, mapped, 1e-5)
            torch.library.opcheck(mode_norm_operator.gradients, backward, test_utils=checks)


@pytest.mark.parametrize("relu", [False, True], ids=["apart", "own"])
def test_traced_layers(device, monkeypatch, relu):
    """Traced as one graph, with the activation around it, as on a GPU but without Inductor."""
    monkeypatch.setattr(choice, "runs_operators", lambda x: True)
    torch.manual_seed(0)
    x = tensor((6, 8, 3, 3), device, torch.float32, True)
    parts = [layer_for(x.shape, 3, device) for _ in range(2)]
    model = torch.nn.Sequential(*(torch.nn.Sequential(p, torch.nn.ReLU()) for p in parts))
    twin = copy.deepcopy(model)
    if relu:
        model = torch.nn.Sequential(*map(WithReLU, parts))
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


class WithReLU(torch.nn.Module):
    """A layer that is asked for a ReLU."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, relu=True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
def test_a_relu_lets_gradients_of_nan_pass(device):
    """As torch's; a sample of NaN makes its own gates NaN and so all modes' statistics."""
    x = tensor((4, 3, 2, 2), device, torch.float32, True)
    x[1, 2, 0, 0] = float("nan")
    gate = (torch.randn(2, 3, device=device), torch.randn(2, device=device))
    leaf = x.clone().requires_grad_()
    options = Options(True, 0.1, relu=True)
    y, *_ = mode_norm_operator.mode_norm(leaf, Inputs(None, *gate, None, None), None, options)
    assert y.isnan().all()
    y.sum().backward()
    assert leaf.grad.isnan().all()


def test_traced_gate_with_a_hook(device, monkeypatch):
    monkeypatch.setattr(choice, "runs_operators", lambda x: True)
    torch.manual_seed(0)
    x = tensor((6, 8, 3, 3), device, torch.float32, True)
    layer = layer_for(x.shape, 3, device)
    layer.gate.register_forward_hook(lambda gate, inputs, logits: 3 * logits)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x), layer(x), 3e-5, "y")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Inductor's kernels need a GPU")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", ["mn", "mn relu", "mgn", "standardized"])
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
    if kind == "mn relu":
        layer, twin = WithReLU(layer), torch.nn.Sequential(twin, torch.nn.ReLU())
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
