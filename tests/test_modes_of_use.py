"""The ways in which PyTorch users run a layer, each with numbers."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import functional_call, grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

import modenorm
from compare import assert_close, make_layer, one_hot, run
from modenorm import functional

TRAINING = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
# torch itself still calls its older compiler in places.
TORCH_JIT = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


def double(*shape):
    return torch.randn(shape).double()


# Numerical derivatives. The gradient of a plain sum is zero: every check has random weights.

SHAPE = (4, 2, 3)


def weighted(function):
    """A scalar with a random upstream gradient."""
    upstream = double(*SHAPE)
    return lambda *args: (function(*args) * upstream).sum()


def mode_norm_function(training, with_state=True, mask=None, per_mode=False):
    """`mode_norm` of tensors only: x, gates or gate parameters, weight, bias."""
    mean, var = (double(2, 2), double(2, 2).exp()) if with_state else (None, None)

    def function(x, first, second, weight, bias):
        gates = torch.softmax(first, 1) if second is None else _linear(first, second)
        state = (None, None) if mean is None else (mean.clone(), var.clone())
        return functional.mode_norm(
            x, gates, *state, weight, bias, training=training, mask=mask, eps=1e-2
        )

    return function


def _linear(weight, bias):
    return lambda features: nn.functional.linear(features, weight, bias)


def inputs(kind, per_mode):
    affine = (2, 2) if per_mode else (2,)
    first, second = (double(4, 2), None) if kind == "gates" else (double(2, 2), double(2))
    tensors = double(*SHAPE), first, second, double(*affine), double(*affine)
    return tuple(None if t is None else t.requires_grad_() for t in tensors)


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck], ids=["first", "second"])
@pytest.mark.parametrize("per_mode", [False, True], ids=["shared", "per_mode"])
@pytest.mark.parametrize("kind", ["gates", "network"])
@TRAINING
def test_numerical_derivatives(training, kind, per_mode, check, backend):
    function = weighted(mode_norm_function(training))
    assert check(function, inputs(kind, per_mode))


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck], ids=["first", "second"])
def test_numerical_derivatives_with_a_mask(check):
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 1, 1]]).bool()
    function = weighted(mode_norm_function(True, mask=mask))
    assert check(function, inputs("network", False))


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck], ids=["first", "second"])
@pytest.mark.parametrize("variance", ["pooled", "pixel"])
def test_numerical_derivatives_of_mode_group_norm(variance, check, backend):
    def function(*tensors):
        return functional.mode_group_norm(*tensors, eps=1e-2, variance=variance)

    tensors = double(*SHAPE), double(3), double(3), double(2), double(2)
    assert check(weighted(function), tuple(t.requires_grad_() for t in tensors))


@TRAINING
def test_a_gradient_penalty(training, backend):
    """Double backward through a model, as in WGAN-GP, agrees with plain operators."""
    layer, x, upstream = make_layer(3, 2).train(training), double(4, 3, 2, 2), double(4, 3, 2, 2)

    def penalty(name):
        other, leaf = copy.deepcopy(layer), x.clone().requires_grad_()
        with modenorm.use_backend(name):
            (gradient,) = torch.autograd.grad(other(leaf), leaf, upstream, create_graph=True)
            gradient.square().sum().backward()
        return [leaf.grad, *(p.grad for name, p in other.named_parameters() if name != "bias")]

    for actual, expected in zip(penalty(backend), penalty("eager"), strict=True):
        assert_close(actual, expected, 1e-10)


def test_backward_twice_through_one_graph(backend):
    layer, x = make_layer(3, 2), double(4, 3, 2, 2).requires_grad_()
    y, upstream = layer(x), double(4, 3, 2, 2)
    first = torch.autograd.grad(y, x, upstream, retain_graph=True)[0]
    exact = torch.autograd.grad(y, x, upstream, create_graph=True)[0]
    again = torch.autograd.grad(y, x, upstream)[0]
    assert_close(exact, first, 1e-12)
    assert_close(again, first, 1e-12)


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "gate.weight"])
def test_gradient_of_one_tensor_alone(wanted, backend):
    layer, x, upstream = make_layer(3, 2), double(4, 3, 2, 2), double(4, 3, 2, 2)
    expected = run(layer, x, upstream).gradients[wanted]
    layer.requires_grad_(False)
    leaf = x.requires_grad_() if wanted == "x" else layer.get_parameter(wanted).requires_grad_()
    assert_close(torch.autograd.grad(layer(x), leaf, upstream)[0], expected, 1e-12)


@TORCH_JIT
def test_forward_mode_differentiation(backend):
    layer, x, tangent = (
        make_layer(3, 2, track_running_stats=False),
        double(4, 3, 2),
        double(4, 3, 2),
    )
    layer = modenorm.ModeNorm1d(3, track_running_stats=False).double()
    with forward_ad.dual_level():
        actual = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent))).tangent
    expected = (layer(x + 1e-6 * tangent) - layer(x - 1e-6 * tangent)) / 2e-6
    assert_close(actual, expected, 1e-7)
    assert_close(jvp(layer, (x,), (tangent,))[1], actual, 1e-12)


# Mixed precision.


@TRAINING
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_leaves_the_statistics_in_float32(dtype, training, backend):
    layer = make_layer(64, 2, dtype=torch.float32).train(training)
    x, upstream = torch.randn(8, 64, 3, 3).to(dtype), torch.randn(8, 64, 3, 3).to(dtype)
    expected = run(layer, x, upstream)
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(leaf)
    y.backward(upstream)
    assert y.dtype == dtype
    assert torch.equal(y, expected.y)
    assert torch.equal(leaf.grad, expected.gradients["x"])
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, expected.gradients[name]), name
    for name, buffer in expected.buffers.items():
        assert torch.equal(layer.get_buffer(name), buffer), name


def test_backward_inside_autocast_stays_in_float32():
    layer, x, upstream = make_layer(64, 2, dtype=torch.float32), *torch.randn(2, 8, 64, 3, 3)
    gates = torch.rand(8, 2).softmax(1)
    found = []
    for inside in (False, True):
        leaves = [x.clone().requires_grad_(), gates.clone().requires_grad_()]
        with modenorm.use_backend("fused"), torch.autocast("cpu", torch.bfloat16, enabled=inside):
            y = layer(leaves[0], gates=leaves[1])
            found.append(torch.autograd.grad(y, [*leaves, layer.weight, layer.bias], upstream))
    for value, expected in zip(*found, strict=True):
        assert torch.equal(value, expected)


def test_autocast_in_a_model(backend):
    model = nn.Sequential(nn.Conv2d(2, 4, 3), modenorm.ModeNorm2d(4), nn.Conv2d(4, 4, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(torch.randn(4, 2, 8, 8))
    y.float().square().mean().backward()
    assert y.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_autocast_with_a_custom_gate():
    gate = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    layer, x = modenorm.ModeNorm2d(4, gate=gate), torch.randn(4, 4, 3, 3)
    expected = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x), expected)


# Compilation and export.

COMPILED = {
    "default": {},
    "momentum=None": {"momentum": None},
    "usage": {"momentum": None, "running_update": "usage"},
    "per_mode_affine": {"per_mode_affine": True},
    "no_running_stats": {"track_running_stats": False},
    "standardized": {"gate": modenorm.StandardizedGate},
    "custom_gate": {"gate": lambda c, k: nn.Sequential(nn.Linear(c, 4), nn.Linear(4, k))},
}


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    yield lambda function, backend="aot_eager": torch.compile(
        function, fullgraph=True, backend=backend
    )
    torch._dynamo.reset()


def assert_compiles(layer, compile_with, tolerance, x, **kwargs):
    other, upstream = copy.deepcopy(layer), torch.randn_like(x)
    compiled_layer = compile_with(layer)
    for training in (True, True, False):
        layer.train(training)
        other.train(training)
        results = []
        for function in (compiled_layer, other):
            leaf = x.detach().clone().requires_grad_()
            y = function(leaf, **kwargs)
            y.backward(upstream)
            results.append((y, leaf.grad))
        assert_close(*(y for y, _ in results), tolerance, "output")
        assert_close(*(g for _, g in results), tolerance, "gradient of x")
    for a, b in zip(layer.parameters(), other.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            assert_close(a.grad, b.grad, tolerance, "gradient of a parameter")
    for (name, a), b in zip(layer.named_buffers(), other.buffers(), strict=True):
        assert_close(a, b, tolerance, name)


@pytest.mark.parametrize("options", COMPILED.values(), ids=COMPILED)
def test_compile_without_graph_breaks(options, compiled):
    assert_compiles(make_layer(3, 2, **options), compiled, 1e-10, double(4, 3, 5, 5))


def test_compile_with_gates_and_mask(compiled):
    x = double(4, 3, 5, 5)
    assert_compiles(make_layer(3, 2), compiled, 1e-10, x, gates=one_hot([0, 1, 1, 0], 2))
    torch._dynamo.reset()
    assert_compiles(make_layer(3, 2), compiled, 1e-10, x, mask=torch.rand(4, 5, 5) < 0.7)


@pytest.mark.parametrize("variance", ["pooled", "pixel"])
def test_compile_mode_group_norm(variance, compiled):
    layer = modenorm.ModeGroupNorm(3, variance=variance).double()
    assert_compiles(layer, compiled, 1e-10, double(4, 3, 5, 5))


@TORCH_JIT
@pytest.mark.slow
def test_compile_with_inductor(compiled):
    layer, x = make_layer(3, 2, momentum=None), double(4, 3, 5, 5).requires_grad_()
    other, upstream = copy.deepcopy(layer), double(4, 3, 5, 5)
    function = compiled(layer, "inductor")
    gradients = [
        torch.autograd.grad(f(x), [x, *f.parameters()], upstream) for f in (function, other)
    ]
    for actual, expected in zip(*gradients, strict=True):
        assert_close(actual, expected, 1e-10)
    for name, buffer in other.named_buffers():
        assert_close(layer.get_buffer(name), buffer, 1e-12, name)


def test_compile_under_autocast(compiled):
    layer, x = make_layer(3, 2, dtype=torch.float32), torch.randn(4, 3, 5, 5).bfloat16()
    expected = copy.deepcopy(layer)(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = compiled(layer)(x)
    assert y.dtype == torch.bfloat16
    assert_close(y, expected, 2**-7)


def test_compile_takes_other_batch_sizes(compiled):
    layer = make_layer(3, 2).eval()
    function = compiled(layer)
    for size in (4, 5, 9):
        x = double(size, 3, 5, 5)
        assert_close(function(x), layer(x), 1e-12)


@pytest.mark.parametrize("gate", [modenorm.LinearGate, modenorm.StandardizedGate])
def test_export_in_eval_with_a_dynamic_batch(gate):
    model = (
        nn.Sequential(nn.Conv2d(2, 3, 3), make_layer(3, 2, gate=gate), nn.ReLU()).double().eval()
    )
    batch = torch.export.Dim("batch", min=1)
    shapes = ({0: batch},)
    program = torch.export.export(model, (double(4, 2, 6, 6),), dynamic_shapes=shapes)
    for size in (1, 4, 7):
        x = double(size, 2, 6, 6)
        assert_close(program.module()(x), model(x), 1e-12)
    assert not program.graph_signature.buffers_to_mutate


def test_export_of_mode_group_norm():
    model = modenorm.ModeGroupNorm(3).double().eval()
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    program = torch.export.export(model, (double(4, 3, 5, 5),), dynamic_shapes=shapes)
    x = double(7, 3, 5, 5)
    assert_close(program.module()(x), model(x), 1e-12)


# Activation checkpointing.


@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None}, {"running_update": "usage"}, {"gate": modenorm.StandardizedGate}],
    ids=["default", "momentum=None", "usage", "standardized"],
)
def test_checkpointing_updates_the_statistics_once(options, reentrant, backend):
    plain = nn.Sequential(nn.Conv2d(2, 3, 3), make_layer(3, 2, **options), nn.ReLU()).double()
    saving = copy.deepcopy(plain)
    x, upstream = double(4, 2, 6, 6), double(4, 3, 4, 4)
    gradients = []
    for model, recompute in ((plain, False), (saving, True)):
        leaf = x.clone().requires_grad_()
        y = checkpoint(model, leaf, use_reentrant=reentrant) if recompute else model(leaf)
        y.backward(upstream)
        gradients.append([leaf.grad, *(p.grad for p in model.parameters())])
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, saving.get_buffer(name)), name
    assert plain[1].num_batches_tracked == 1
    for actual, expected in zip(*gradients, strict=True):
        assert_close(actual, expected, 1e-12)


def test_checkpointing_inside_a_compiled_function(compiled):
    layer, x, upstream = make_layer(3, 2), double(4, 3, 2, 2), double(4, 3, 2, 2)
    expected = run(layer, x, upstream)
    leaf = x.clone().requires_grad_()
    compiled(lambda x: checkpoint(layer, x, use_reentrant=False))(leaf).backward(upstream)
    assert_close(leaf.grad, expected.gradients["x"], 1e-12)
    assert_close(layer.running_var, expected.buffers["running_var"], 1e-12)
    assert layer.num_batches_tracked == 1


def test_a_forward_after_backward_updates_again(backend):
    layer, x = make_layer(3, 2), double(4, 3, 2, 2).requires_grad_()
    for _ in range(3):
        layer(x).sum().backward()
    assert layer.num_batches_tracked == 3


# torch.func.


def parameters_and_buffers(layer):
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    return parameters, dict(layer.named_buffers())


@TRAINING
def test_functional_grad_is_autograd(training):
    layer = make_layer(3, 2, track_running_stats=not training).train(training)
    parameters, buffers = parameters_and_buffers(layer)
    x, upstream = double(4, 3, 2, 2), double(4, 3, 2, 2)

    def loss(parameters):
        return (functional_call(layer, (parameters, buffers), (x,)) * upstream).sum()

    expected = run(layer, x, upstream).gradients
    for name, gradient in grad(loss)(parameters).items():
        assert_close(gradient, expected[name], 1e-12, name)


def test_per_sample_gradients_in_eval():
    layer = make_layer(3, 2).eval()
    parameters, buffers = parameters_and_buffers(layer)
    x, upstream = double(4, 3, 2, 2), double(4, 3, 2, 2)

    def loss(parameters, sample, weights):
        y = functional_call(layer, (parameters, buffers), (sample[None],))
        return (y * weights).sum()

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, upstream)
    for n in range(4):
        expected = run(layer, x[n : n + 1], upstream[n : n + 1]).gradients
        for name, gradient in gradients.items():
            assert_close(gradient[n], expected[name], 1e-12, name)


@TRAINING
def test_vmap_over_an_ensemble(training):
    layers = [make_layer(3, 2, track_running_stats=not training).train(training) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(layers)
    base, x = copy.deepcopy(layers[0]).to("meta"), double(4, 3, 2, 2)

    def call(parameters, buffers, x):
        return functional_call(base, (parameters, buffers), (x,))

    actual = vmap(call, in_dims=(0, 0, None))(parameters, buffers, x)
    for y, layer in zip(actual, layers, strict=True):
        assert_close(y, layer(x), 1e-12)


def test_vmap_in_stateless_training_treats_batches_alone():
    layer, x = make_layer(3, 2, track_running_stats=False), double(5, 4, 3, 2, 2)
    expected = torch.stack([layer(batch) for batch in x])
    assert_close(vmap(layer)(x), expected, 1e-12)


def test_functional_call_moves_the_buffers_it_was_given():
    layer, x = make_layer(3, 2), double(4, 3, 2, 2)
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    before = layer.running_mean.clone()
    functional_call(layer, state, (x,))
    assert torch.equal(layer.running_mean, before)
    layer(x)
    assert torch.equal(layer.running_mean, state["running_mean"])


def test_vmap_of_mode_group_norm():
    layer, x = modenorm.ModeGroupNorm(3).double(), double(5, 4, 3, 2, 2)
    assert_close(vmap(layer)(x), torch.stack([layer(batch) for batch in x]), 1e-12)


# Training loops.


def test_gradient_accumulation(backend):
    layer, parts = make_layer(3, 2), [double(4, 3, 2, 2) for _ in range(3)]
    upstream = [double(4, 3, 2, 2) for _ in parts]
    expected = None
    for x, weights in zip(parts, upstream, strict=True):
        gradient = run(layer, x, weights).gradients["gate.weight"]
        expected = gradient if expected is None else expected + gradient
    for x, weights in zip(parts, upstream, strict=True):
        layer(x).backward(weights)
    assert_close(layer.gate.weight.grad, expected, 1e-12)
    assert layer.num_batches_tracked == 3


def test_two_forwards_one_backward(backend):
    """As a GAN's discriminator sees real and made samples before one backward."""
    layer, real, made = make_layer(3, 2), double(4, 3, 2, 2), double(4, 3, 2, 2)
    upstream = double(4, 3, 2, 2), double(4, 3, 2, 2)
    expected = (
        run(layer, real, upstream[0]).gradients["weight"]
        + run(layer, made, upstream[1]).gradients["weight"]
    )
    y = layer(real), layer(made)
    ((y[0] * upstream[0]).sum() + (y[1] * upstream[1]).sum()).backward()
    assert_close(layer.weight.grad, expected, 1e-12)


@pytest.mark.parametrize("outside", [False, True], ids=["gate", "gates="])
def test_backward_after_the_buffers_have_moved(outside, backend):
    """Evaluation with gradients, then a training step, then backward: no buffer may be kept."""
    layer = make_layer(3, 2, gate=modenorm.StandardizedGate)
    x, upstream = double(4, 3, 2, 2), double(4, 3, 2, 2)
    gates = torch.softmax(double(4, 2), 1).requires_grad_() if outside else None
    expected = run(layer.eval(), x, upstream, gates).gradients["weight"]
    y = layer(x, gates=gates)
    layer.train()(double(4, 3, 2, 2))
    layer.zero_grad()
    y.backward(upstream)
    assert_close(layer.weight.grad, expected, 1e-12)


def test_in_place_operations_after_the_layer(backend):
    layer, x, upstream = make_layer(3, 2), double(4, 3, 2, 2), double(4, 3, 2, 2)
    results = []
    for inplace in (False, True):
        leaf = x.clone().requires_grad_()
        nn.ReLU(inplace)(layer(leaf)).backward(upstream)
        results.append(leaf.grad)
    assert torch.equal(*results)


def test_deterministic_mode(backend):
    layer, x, upstream = make_layer(3, 4), double(6, 3, 5, 5), double(6, 3, 5, 5)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = run(layer, x, upstream), run(layer, x, upstream)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first.y, second.y)
    assert all(torch.equal(second.gradients[name], g) for name, g in first.gradients.items())
    assert all(torch.equal(second.buffers[name], b) for name, b in first.buffers.items())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context, backend):
    layer, x = make_layer(3, 2), double(4, 3, 2, 2)
    expected = copy.deepcopy(layer)(x)
    with context():
        y = layer(x)
    assert torch.equal(y, expected)
    assert not y.requires_grad
    assert layer.num_batches_tracked == 1


def test_frozen_input(backend):
    """A first layer: its input needs no gradient, its parameters do."""
    layer, x, upstream = make_layer(3, 2), double(4, 3, 2, 2), double(4, 3, 2, 2)
    layer(x).backward(upstream)
    expected = run(layer, x, upstream).gradients
    for name, parameter in layer.named_parameters():
        assert_close(parameter.grad, expected[name], 1e-12, name)
