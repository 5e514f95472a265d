"""Mode normalization against the paper's sums in float64: values and all gradients."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import modenorm
from compare import (
    TOLERANCES,
    assert_close,
    assert_same,
    data,
    double,
    make_layer,
    one_hot,
    run,
    run_reference,
)
from marks import TRAINING
from modenorm import functional
from modenorm.kernels import torch_passes

SHAPES = [(5, 3), (5, 3, 7), (5, 3, 4, 5), (4, 3, 2, 3, 5)]


@TRAINING
@pytest.mark.parametrize("num_modes", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{len(shape)}d")
def test_every_rank_and_number_of_modes(shape, num_modes, training, backend):
    layer = make_layer(shape[1], num_modes, len(shape)).train(training)
    x, upstream = data(*shape), torch.randn(shape).double()
    actual, expected = run(layer, x, upstream), run_reference(layer, x, upstream)
    assert_same(actual, expected, torch.float64)


ODD_SIZES = [(2, 1), (3, 1, 1), (1, 3, 5, 1), (2, 7, 1, 1), (7, 1, 3, 11), (3, 17, 13, 1)]


@pytest.mark.parametrize("shape", ODD_SIZES, ids=str)
def test_odd_sizes(shape, backend):
    layer = make_layer(shape[1], 3, len(shape))
    x, upstream = data(*shape), torch.randn(shape).double()
    assert_same(run(layer, x, upstream), run_reference(layer, x, upstream), torch.float64)


@TRAINING
@pytest.mark.parametrize("parameters", [None, torch.float32], ids=["same", "float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_type(dtype, parameters, training, backend):
    layer = make_layer(5, 2, dtype=parameters or dtype).train(training)
    x, upstream = data(6, 5, 7, 3, dtype=dtype), torch.randn(6, 5, 7, 3).to(dtype)
    actual, expected = run(layer, x, upstream), run_reference(layer, x, upstream)
    assert_same(actual, expected, dtype)
    assert all(buffer.dtype == torch.float32 for buffer in actual.buffers.values())


def channels_last(shape):
    return data(*shape).to(memory_format=torch.channels_last)


LAYOUTS = {
    "contiguous": lambda: data(4, 3, 5, 6),
    "channels_last": lambda: channels_last((4, 3, 5, 6)),
    "channels_last_3d": lambda: data(4, 3, 2, 5, 6).to(memory_format=torch.channels_last_3d),
    "permuted_NLC": lambda: data(4, 7, 3).transpose(1, 2),
    "permuted_CN": lambda: data(3, 4).t(),
    "permuted_CNHW": lambda: data(3, 4, 5, 6).transpose(0, 1),
    "permuted_NHCW": lambda: data(4, 5, 3, 6).permute(0, 2, 1, 3),
    "every_second_position": lambda: data(4, 3, 5, 12)[..., ::2],
    "every_second_channel": lambda: data(4, 6, 5, 6)[:, ::2],
    "every_second_sample": lambda: data(8, 3, 5, 6)[::2],
    "channels_last_every_second_position": lambda: channels_last((4, 3, 5, 12))[..., ::2],
    "channels_last_every_second_channel": lambda: channels_last((4, 6, 5, 6))[:, ::2],
    "expanded_positions": lambda: data(4, 3, 1, 1).expand(4, 3, 5, 6),
    "expanded_channels": lambda: data(4, 1, 5, 6).expand(4, 3, 5, 6),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("upstream_layout", ["contiguous", "channels_last", "slice", "expanded"])
def test_every_layout(layout, upstream_layout, backend):
    x = LAYOUTS[layout]()
    upstream = {
        "contiguous": lambda: torch.randn(x.shape),
        "channels_last": lambda: torch.randn(x.movedim(1, -1).shape).movedim(-1, 1),
        "slice": lambda: torch.randn(*x.shape[:-1], 2 * x.shape[-1])[..., ::2],
        "expanded": lambda: torch.randn(x.shape[0], 1, *x.shape[2:]).expand(x.shape),
    }[upstream_layout]().double()
    layer = make_layer(3, 2, x.ndim)
    actual, expected = run(layer, x, upstream), run_reference(layer, x, upstream)
    assert_same(actual, expected, torch.float64)


@pytest.mark.parametrize(
    ("layout", "memory_format"),
    [
        ("contiguous", torch.contiguous_format),
        ("channels_last", torch.channels_last),
        ("channels_last_3d", torch.channels_last_3d),
        ("channels_last_every_second_position", torch.channels_last),
    ],
)
@TRAINING
def test_output_and_gradient_keep_the_memory_format(layout, memory_format, training, backend):
    x = LAYOUTS[layout]()
    actual = run(make_layer(3, 2, x.ndim).train(training), x, torch.randn_like(x))
    assert actual.y.is_contiguous(memory_format=memory_format)
    if x.is_contiguous(memory_format=memory_format):
        assert actual.gradients["x"].is_contiguous(memory_format=memory_format)


@TRAINING
@pytest.mark.parametrize("num_positions", [4, 25])
def test_chunks_of_the_cpu_passes(num_positions, training, monkeypatch):
    monkeypatch.setattr(torch_passes, "CHUNK", 64)  # several samples, or less than one, at a time
    layer = make_layer(5, 2, 3).train(training)
    x, upstream = data(7, 5, num_positions), torch.randn(7, 5, num_positions).double()
    with modenorm.use_backend("fused"):
        assert_same(run(layer, x, upstream), run_reference(layer, x, upstream), torch.float64)


OPTIONS = {
    "affine=False": {"affine": False},
    "track_running_stats=False": {"track_running_stats": False},
    "per_mode_affine": {"per_mode_affine": True},
    "usage": {"running_update": "usage"},
    "momentum=None": {"momentum": None},
    "momentum=1": {"momentum": 1.0},
    "eps=0.1": {"eps": 0.1},
    "custom_gate": {
        "gate": lambda c, k: nn.Sequential(nn.Linear(c, 4), nn.Tanh(), nn.Linear(4, k))
    },
    "standardized_gate": {"gate": modenorm.StandardizedGate},
}


@TRAINING
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option(options, training, backend):
    layer = make_layer(3, 4, **options).train(training)
    x, upstream = data(6, 3, 4, 5), torch.randn(6, 3, 4, 5).double()
    actual, expected = run(layer, x, upstream), run_reference(layer, x, upstream)
    assert_same(actual, expected, torch.float64)


@TRAINING
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("per_mode_affine", [False, True], ids=["shared", "per_mode"])
def test_gates_from_outside(per_mode_affine, dtype, training, backend):
    layer = make_layer(3, 4, per_mode_affine=per_mode_affine, dtype=torch.float64)
    layer = layer.to(torch.float64 if dtype == torch.float64 else torch.float32).train(training)
    x, upstream = data(6, 3, 4, 5, dtype=dtype), torch.randn(6, 3, 4, 5).to(dtype)
    gates = torch.softmax(torch.randn(6, 4), 1).to(layer.weight.dtype)
    actual, expected = run(layer, x, upstream, gates), run_reference(layer, x, upstream, gates)
    assert_same(actual, expected, dtype)


def test_gates_from_outside_leave_the_gate_alone(backend):
    layer = make_layer(3, 2)
    layer(data(6, 3, 4, 5), gates=one_hot([0, 1, 0, 1, 0, 1], 2)).square().sum().backward()
    assert layer.gate.weight.grad is None


class _Doubled(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return 2 * value


def _parametrize(module, name):
    parametrize.register_parametrization(module, name, _Doubled())


def _replace(module, name):
    """As wrappers do that keep the parameters elsewhere: FSDP, DataParallel's replicas."""
    value = getattr(module, name)
    delattr(module, name)
    setattr(module, name, 2 * value)


@pytest.mark.parametrize("change", [_parametrize, _replace])
@pytest.mark.parametrize("name", ["weight", "bias", "gate.weight", "gate.bias"])
def test_parameters_that_something_else_keeps(name, change, backend):
    x, layer = data(6, 3, 4, 5, dtype=torch.float32), make_layer(3, 2, dtype=torch.float32)
    twin = copy.deepcopy(layer)
    twin.get_parameter(name).data.mul_(2)
    path, _, last = name.rpartition(".")
    change(layer.get_submodule(path), last)
    assert_close(layer(x), twin(x), 1e-6)


def test_an_estimate_that_something_else_keeps(backend):
    x, layer = data(6, 3, 4, 5), make_layer(3, 2).eval()
    expected = layer(x)
    estimate = layer.running_mean
    del layer.running_mean
    layer.running_mean = estimate
    assert "running_mean" not in layer._buffers
    assert_close(layer(x), expected, 1e-12)


@TRAINING
def test_functional_takes_gates_or_a_gating_network(training, backend):
    layer = make_layer(3, 2)
    x = data(6, 3, 4, 5)
    state = (layer.running_mean.clone(), layer.running_var.clone(), layer.weight, layer.bias)
    gates = torch.softmax(layer.gate(x.mean((2, 3))), 1)
    y = [functional.mode_norm(x, g, *state, training=training) for g in (gates, layer.gate)]
    if not training:  # in training the first call moved the estimates, not the output
        assert_close(y[0], layer.eval()(x), 1e-12)
    assert_close(y[0], y[1], 1e-12)


@TRAINING
@pytest.mark.parametrize("name", ["reference", "eager", "fused"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1,), (1, 3), (2, 1), (1, 1)], ids=str)
def test_affine_parameters_that_serve_several_modes_or_channels(shape, dtype, name, training):
    x, upstream = data(6, 3, 4, dtype=dtype), torch.randn(6, 3, 4, dtype=dtype)
    gates, results = torch.rand(6, 2).to(dtype), []  # rows that don't sum to one
    state = torch.randn(2, 3).to(dtype), torch.rand(2, 3).to(dtype) + 0.5
    parameters = torch.randn(2, *shape).to(dtype).unbind()
    for written_out in (False, True):
        affine = [p.clone().requires_grad_() for p in parameters]
        used = [p.expand((2, 3)[2 - p.ndim :]) for p in affine] if written_out else affine
        leaves = [t.clone().requires_grad_() for t in (x, gates)]
        with modenorm.use_backend("eager" if written_out else name):
            y = functional.mode_norm(*leaves, *(t.clone() for t in state), *used, training)
        y.backward(upstream)
        results.append((y, *(t.grad for t in (*leaves, *affine))))
    for found, expected in zip(*results, strict=True):
        assert_close(found, expected, TOLERANCES[dtype])


def test_backends_agree_with_the_reference_backend():
    layer = make_layer(3, 2, dtype=torch.float32)
    x, upstream = data(6, 3, 4, 5, dtype=torch.float32), torch.randn(6, 3, 4, 5)
    with modenorm.use_backend("reference"):
        expected = run(layer, x, upstream)
    assert_same(run(layer, x, upstream), expected, torch.float32)


@pytest.mark.parametrize("update", ["paper", "usage"])
def test_a_mode_without_samples_is_the_same_in_the_reference_backend(update, backend):
    layer = make_layer(3, 2, running_update=update)
    x, upstream, gates = data(6, 3, 4, 5), double(6, 3, 4, 5), one_hot([0] * 6, 2)
    actual = run(layer, x, upstream, gates)
    with modenorm.use_backend("reference"):
        expected = run(layer, x, upstream, gates)
    assert_same(actual, expected, torch.float64)
    for name, buffer in expected.buffers.items():
        assert torch.equal(buffer[1], layer.get_buffer(name)[1]), name


# Degenerate cases: what batch normalization gives.


def batchnorm(x, upstream, weight, bias, eps=1e-5):
    x = x.detach().clone().requires_grad_()
    weight, bias = (p.detach().clone().requires_grad_() for p in (weight, bias))
    y = nn.functional.batch_norm(x, None, None, weight, bias, training=True, eps=eps)
    y.backward(upstream)
    return y.detach(), {"x": x.grad, "weight": weight.grad, "bias": bias.grad}


def assert_is_batchnorm(actual, expected, tolerance=1e-11):
    assert_close(actual.y, expected[0], tolerance, "output")
    for name, gradient in expected[1].items():
        assert_close(actual.gradients[name], gradient, tolerance, f"gradient of {name}")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{len(shape)}d")
def test_one_mode_is_batchnorm(shape, backend):
    layer = make_layer(3, 1, len(shape))
    x, upstream = data(*shape), torch.randn(shape).double()
    actual = run(layer, x, upstream)
    assert_is_batchnorm(actual, batchnorm(x, upstream, layer.weight, layer.bias))
    assert_close(actual.gradients["gate.weight"], torch.zeros(1, 3), 1e-9)


@pytest.mark.parametrize("shares", [[0.25] * 4, [0.1, 0.2, 0.3, 0.4]], ids=["equal", "unequal"])
def test_constant_gates_are_batchnorm(shares, backend):
    layer = make_layer(3, 4)
    x, upstream = data(6, 3, 4, 5), torch.randn(6, 3, 4, 5).double()
    gates = torch.tensor(shares, dtype=torch.float64).expand(6, 4)
    assert_is_batchnorm(
        run(layer, x, upstream, gates), batchnorm(x, upstream, layer.weight, layer.bias)
    )


def test_constant_gates_are_a_stationary_point(backend):
    """A gate with zero weights gets no gradient: it would never learn (docs/math.md)."""
    layer = make_layer(3, 4)
    x, upstream = data(6, 3, 4, 5), torch.randn(6, 3, 4, 5).double()
    nn.init.zeros_(layer.gate.weight)
    collapsed = run(layer, x, upstream).gradients
    assert collapsed["gate.weight"].abs().max() < 1e-12
    assert collapsed["gate.bias"].abs().max() < 1e-12
    nn.init.normal_(layer.gate.weight, std=0.01)
    assert run(layer, x, upstream).gradients["gate.weight"].abs().max() > 1e-4


@pytest.mark.parametrize("num_modes", [1, 3])
def test_eval_is_batchnorm_with_the_same_statistics(num_modes, backend):
    layer = make_layer(3, num_modes).eval()
    with torch.no_grad():
        layer.running_mean.copy_(layer.running_mean[0].clone())
        layer.running_var.copy_(layer.running_var[0].clone())
    x = data(6, 3, 4, 5)
    expected = nn.functional.batch_norm(
        x, layer.running_mean[0], layer.running_var[0], layer.weight, layer.bias
    )
    assert_close(layer(x), expected, 1e-13)


def test_one_hot_gates_are_batchnorm_per_domain(backend):
    layer = make_layer(3, 3)
    domains = [0, 2, 1, 0, 2, 2, 1]
    x, upstream = data(7, 3, 4, 5), torch.randn(7, 3, 4, 5).double()
    actual = run(layer, x, upstream, one_hot(domains, 3))
    weight_gradient = torch.zeros(3).double()
    for k in range(3):
        rows = torch.tensor(domains) == k
        y, gradients = batchnorm(x[rows], upstream[rows], layer.weight, layer.bias)
        assert_close(actual.y[rows], y, 1e-12)
        assert_close(actual.gradients["x"][rows], gradients["x"], 1e-12)
        weight_gradient += gradients["weight"]
        mean, var = x[rows].mean((0, 2, 3)), x[rows].var((0, 2, 3), correction=0)
        assert_close(
            actual.buffers["running_mean"][k], 0.9 * layer.running_mean[k] + 0.1 * mean, 1e-12
        )
        d = mean - layer.running_mean[k]
        assert_close(
            actual.buffers["running_var"][k],
            0.9 * layer.running_var[k] + 0.1 * var + 0.09 * d**2,
            1e-12,
        )
    assert_close(actual.gradients["weight"], weight_gradient, 1e-12)


# Large means: a float32 of size 1000 is known to 3e-5, and no mean can be held better than that.
# Divided by sd, that is the error which any method in float32 must make; four such roundings (of
# the samples' means, the mode's mean and their difference) are allowed. ⟨x²⟩ − ⟨x⟩² would be off by
# 0.06 in a variance of 0.01, or give NaN.
@TRAINING
@pytest.mark.parametrize(("mean", "sd"), [(1000.0, 0.1), (100.0, 0.01), (-1000.0, 0.1)])
def test_large_means_in_float32(mean, sd, training, backend):
    layer = make_layer(4, 2, dtype=torch.float32)
    nn.init.normal_(layer.gate.weight, std=1e-3)
    x = (torch.randn(16, 4, 6, 6).double() * sd + mean).float()
    upstream = torch.randn(x.shape)
    with torch.no_grad():
        layer.running_mean.copy_(torch.randn(2, 4) * sd + mean)
        layer.running_var.fill_(sd**2)
    layer.train(training)
    actual, expected = run(layer, x, upstream), run_reference(layer, x, upstream)
    rounding = torch.finfo(torch.float32).eps / 2 * abs(mean) / sd
    assert rounding < 1e-3
    assert_close(actual.y, expected.y, 4 * rounding, "output")
    assert_close(actual.gradients["x"], expected.gradients["x"], 8 * rounding, "gradient of x")
    assert_close(actual.gradients["weight"], expected.gradients["weight"], 4 * rounding, "weight")
    if training:
        assert_close(actual.buffers["running_var"], expected.buffers["running_var"], 8 * rounding)


def test_modes_far_apart_keep_their_small_variances(backend):
    """Two clusters at ±1000 with sd 0.1 each: centring on the batch mean would lose everything."""
    layer = make_layer(4, 2, dtype=torch.float32, affine=False)
    domains = [0, 1] * 8
    centres = torch.tensor(domains).view(-1, 1, 1, 1) * 2000.0 - 1000
    x = (torch.randn(16, 4, 6, 6) * 0.1 + centres).requires_grad_()
    y = layer(x, gates=one_hot(domains, 2, torch.float32))
    for k in range(2):
        part = y[k::2].double()
        assert_close(part.var((0, 2, 3), correction=0), torch.ones(4), 2e-3)


def test_half_precision_statistics_are_float32(backend):
    """A running mean of bfloat16 could not even hold 1000.5, nor a batch mean of it."""
    layer = modenorm.ModeNorm2d(2, 1, momentum=1.0).bfloat16()
    x = torch.full((8, 2, 16, 16), 1000.0)
    x[:, :, ::2] = 1004.0  # neighbours in bfloat16: their mean is between them
    layer(x.bfloat16())
    assert torch.equal(layer.running_mean, torch.full((1, 2), 1002.0))
    assert_close(layer.running_var, torch.full((1, 2), 4.0 + 0.0), TOLERANCES[torch.float32])
