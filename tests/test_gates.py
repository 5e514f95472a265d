"""Gating networks: what they compute, how they start, what they remember."""

import copy

import pytest
import torch
from torch import nn

import modenorm
from compare import assert_close, double
from modenorm.gates import LinearGate, StandardizedGate, make_gate


def test_linear_gate_is_an_affine_map():
    gate, features = LinearGate(5, 3).double(), torch.randn(4, 5).double()
    assert_close(gate(features), features @ gate.weight.t() + gate.bias, 1e-14)


def test_linear_gate_starts_with_small_noise():
    gate = LinearGate(400, 50)
    assert gate.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert gate.weight.mean().abs() < 1e-3
    assert gate.bias.abs().max() <= 1 / 20
    assert gate.bias.abs().max() > 1 / 25


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_linear_gate_of_half_type_computes_in_the_features_type(dtype):
    gate, features = LinearGate(64, 2, dtype=dtype), torch.randn(4, 64)
    logits = gate(features)
    assert logits.dtype == torch.float32
    assert_close(logits, features @ gate.weight.float().t() + gate.bias.float(), 1e-6)


def test_standardized_gate_in_training():
    gate = StandardizedGate(5, 3).double()
    features = torch.randn(6, 5).double() * 7 + 3
    normed = nn.functional.batch_norm(features, None, None, training=True)
    assert_close(gate(features), normed @ gate.weight.t() + gate.bias, 1e-12)


def test_standardized_gate_in_evaluation_after_training():
    gate = StandardizedGate(5, 3, momentum=0.2).double()
    mean, var = torch.zeros(5).double(), torch.ones(5).double()
    for step in range(4):
        features = torch.randn(6, 5).double() * (step + 1) + step
        gate(features)
        mean = 0.8 * mean + 0.2 * features.mean(0)
        var = 0.8 * var + 0.2 * features.var(0, correction=0)
    features = torch.randn(3, 5).double()
    normed = (features - mean) / torch.sqrt(var + 1e-5)
    assert_close(gate.eval()(features), normed @ gate.weight.t() + gate.bias, 1e-12)


def test_standardized_gate_is_free_of_the_features_scale():
    gate, features = StandardizedGate(5, 3), torch.randn(6, 5)
    assert_close(gate(features), gate(1000 * features - 5), 1e-4)


def test_standardized_gate_gradients():
    gate = StandardizedGate(5, 3).double()
    features = torch.randn(6, 5).double().requires_grad_()
    assert torch.autograd.gradcheck(gate, features)
    assert torch.autograd.gradcheck(gate.eval(), features)


def test_standardized_gate_with_one_sample_uses_its_estimates():
    gate = StandardizedGate(5, 3)
    gate(torch.randn(6, 5))
    before, features = gate.running_mean.clone(), torch.randn(1, 5)
    assert_close(gate.train()(features), gate.eval()(features), 1e-6)
    assert torch.equal(gate.running_mean, before)


def test_standardized_gate_takes_the_samples_that_count():
    gate, features = StandardizedGate(5, 3).double(), double(6, 5) + 3
    counted = torch.tensor([True, False, True, True, False, True])
    other = copy.deepcopy(gate)
    assert_close(gate(features, counted)[counted], other(features[counted]), 1e-12)
    assert_close(gate.running_var, other.running_var, 1e-12)
    assert torch.autograd.gradcheck(lambda f: gate(f, counted), features.requires_grad_())
    before = gate.running_mean.clone()
    one = torch.arange(6) == 2
    assert_close(gate(features, one), gate.eval()(features), 1e-12)
    assert torch.equal(gate.running_mean, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_standardized_gate_forgets_bad_batches(bad):
    gate, features = StandardizedGate(5, 3), torch.randn(6, 5)
    gate(features)
    before = gate.running_mean.clone(), gate.running_var.clone()
    features[2, 1] = bad
    gate(features)
    assert torch.equal(gate.running_mean, before[0])
    assert torch.equal(gate.running_var, before[1])


def test_gate_given_as_a_module_is_kept():
    gate = nn.Linear(5, 3)
    assert make_gate(gate, 5, 3) is gate
    assert modenorm.ModeNorm2d(5, 3, gate=gate).gate is gate


def test_gate_factory_is_called_with_sizes_and_moved():
    layer = modenorm.ModeNorm2d(5, 3, gate=nn.Linear, dtype=torch.float64)
    assert isinstance(layer.gate, nn.Linear)
    assert layer.gate.weight.shape == (3, 5)
    assert layer.gate.weight.dtype == torch.float64


def test_gate_factory_on_the_meta_device():
    layer = modenorm.ModeNorm2d(5, 3, gate=StandardizedGate, device="meta")
    assert {tensor.device.type for tensor in layer.state_dict().values()} == {"meta"}


@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_custom_gate_gets_features_of_its_own_type(gate_dtype, backend):
    seen = []

    class Gate(nn.Linear):
        def forward(self, features):
            seen.append(features.dtype)
            return super().forward(features)

    layer = modenorm.ModeNorm2d(5, 3, gate=Gate(5, 3, dtype=gate_dtype))
    y = layer(torch.randn(4, 5, 2, 2, dtype=torch.float16))
    assert seen == [gate_dtype]
    assert y.dtype == torch.float16


def in_place(features):
    return features.relu_()[:, :2] * 2


@pytest.mark.parametrize("name", ["reference", "eager", "fused"])
@pytest.mark.parametrize("module", [True, False], ids=["module", "function"])
@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 4)], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_gate_that_works_in_place(training, shape, module, name):
    class Gate(nn.Module):
        def forward(self, features):
            return in_place(features)

    x, upstream = double(*shape), double(*shape)
    state = torch.randn(2, 3).double(), torch.rand(2, 3).double() + 0.5
    gate, results = Gate() if module else in_place, []
    for given in (gate, lambda features: in_place(features.clone())):
        leaf = x.clone().requires_grad_()
        buffers = [tensor.clone() for tensor in state]
        with modenorm.use_backend(name):
            y = modenorm.functional.mode_norm(leaf, given, *buffers, training=training)
        y.backward(upstream)
        assert torch.equal(leaf, x)
        results.append((y, leaf.grad, *buffers))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_gate_without_parameters(backend):
    class SignGate(nn.Module):
        def forward(self, features):
            return torch.stack([features[:, 0], -features[:, 0]], 1) * 1e4

    layer = modenorm.ModeNorm2d(3, 2, gate=SignGate(), affine=False)
    x = torch.randn(8, 3, 4, 4).double()
    x[::2, 0] += 10
    x[1::2, 0] -= 10
    y = layer.double()(x)
    for part in (y[::2], y[1::2]):
        assert_close(part.mean((0, 2, 3)), torch.zeros(3), 1e-9)


def test_gates_of_the_layer_are_a_softmax_of_pooled_features(backend):
    layer, x = modenorm.ModeNorm2d(3, 4).double(), torch.randn(5, 3, 4, 4).double()
    seen = []
    layer.gate_listener = seen.append
    layer(x)
    assert_close(seen[0], torch.softmax(layer.gate(x.mean((2, 3))), 1), 1e-13)


def test_hooks_of_the_gate_are_called():
    layer, seen = modenorm.ModeNorm2d(3), []
    layer.gate.register_forward_pre_hook(lambda gate, inputs: seen.append(inputs[0].shape))
    layer(torch.randn(5, 3, 4, 4))
    assert seen == [(5, 3)]


def test_backward_hooks_of_the_gate_are_called():
    layer, seen = modenorm.ModeNorm2d(3), []
    layer.gate.register_full_backward_pre_hook(lambda gate, gradients: seen.append(len(gradients)))
    layer(torch.randn(5, 3, 4, 4).requires_grad_()).sin().sum().backward()
    assert seen == [1]


def test_a_gate_with_a_forward_of_its_own_is_called():
    layer, x = modenorm.ModeNorm2d(3), torch.randn(5, 3, 4, 4)
    logits = torch.randn(5, 2)
    layer.gate.forward = lambda features: logits
    assert_close(layer(x), layer(x, gates=logits.softmax(1)), 1e-6)


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_a_lazy_gate_loads_a_state():
    def make():
        return modenorm.ModeNorm2d(3, gate=lambda channels, modes: nn.LazyLinear(modes)).eval()

    layer, again, x = make(), make(), torch.randn(4, 3, 5, 5)
    expected = layer(x)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), expected)
    assert make().load_state_dict(nn.BatchNorm2d(3).state_dict()).missing_keys == []


GLOBAL_HOOKS = {
    "forward": nn.modules.module.register_module_forward_hook,
    "before forward": nn.modules.module.register_module_forward_pre_hook,
    "backward": nn.modules.module.register_module_full_backward_hook,
    "before backward": nn.modules.module.register_module_full_backward_pre_hook,
}


@pytest.mark.parametrize("register", GLOBAL_HOOKS.values(), ids=GLOBAL_HOOKS)
def test_hooks_of_all_modules_see_the_gate(register):
    """Also in float32, which kernels take, gate and all."""
    layer, seen = modenorm.ModeNorm2d(3), []
    handle = register(lambda module, *_: seen.append(type(module)))
    try:
        layer(torch.randn(4, 3, 5, 5, requires_grad=True)).sum().backward()
    finally:
        handle.remove()
    assert LinearGate in seen


class Quantized(nn.Module):
    """A gate whose only parameter is no floating-point number."""

    def __init__(self):
        super().__init__()
        rows = torch.tensor([[1, 2, -1], [0, 3, 1]], dtype=torch.int8)
        self.weight = nn.Parameter(rows, requires_grad=False)

    def forward(self, features):
        assert features.dtype == torch.float32
        return features @ self.weight.t().to(features)


def test_a_quantized_gate_gets_whole_features(backend):
    layer, x = modenorm.ModeNorm2d(3, gate=Quantized()), torch.randn(6, 3, 4, 4) + 2
    with modenorm.record_gates(layer) as gates:
        layer(x)
    wanted = torch.softmax(x.mean((2, 3)) @ layer.gate.weight.t().float(), 1)
    torch.testing.assert_close(gates[""][0], wanted)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: modenorm.LinearGate(0, 2), "num_features is 0"),
        (lambda: modenorm.LinearGate(3, 0), "num_modes is 0"),
        (lambda: modenorm.StandardizedGate(3, 2, eps=-1.0), "eps is -1.0"),
        (lambda: modenorm.StandardizedGate(3, 2, momentum=5.0), "momentum is 5.0"),
        (lambda: modenorm.StandardizedGate(3, 2, momentum=None), "momentum is None"),
        (lambda: modenorm.ModeNorm2d(3, gate=modenorm.LinearGate(4, 2)), "num_features=4"),
        (lambda: modenorm.ModeNorm2d(3, gate=lambda c, k: modenorm.LinearGate(5, k)), "=5, but"),
    ],
)
def test_impossible_gates_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize("made", [None, (1, 2)], ids=str)
def test_a_gate_that_returns_no_tensor(made):
    layer = modenorm.ModeNorm2d(3, gate=lambda c, k: Returning(made))
    with pytest.raises(ValueError, match=r"the gate's logits are a (NoneType|tuple); expected"):
        layer(torch.randn(4, 3, 2, 2))


class Returning(nn.Module):
    def __init__(self, made):
        super().__init__()
        self.made = made

    def forward(self, _):
        return self.made
