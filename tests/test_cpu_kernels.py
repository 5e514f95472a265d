"""The C code of kernels/ against torch operators and the reference: same numbers, any thread."""

import copy

import pytest
import torch
from torch import nn

import modenorm
from compare import assert_close, assert_same, make_layer, one_hot, run, run_reference
from modenorm import functional, kernels
from modenorm.kernels import torch_mixing, torch_passes
from modenorm.kernels.c import library as c_library
from modenorm.kernels.c import mixing as c_mixing
from modenorm.kernels.c import mode_norm as c_mode_norm
from modenorm.kernels.c import passes as c_passes
from modenorm.kernels.mixing_arrays import Affine, Samples

pytestmark = pytest.mark.skipif(
    not kernels.cpu_kernels().startswith("compiled"), reason=kernels.cpu_kernels()
)
LAYOUTS = {"first": torch.contiguous_format, "last": torch.channels_last}
SHAPES = [
    (3, 5, 7, 7),  # rows of no vector's length
    (2, 16, 4, 8),  # whole vectors
    (1, 1, 41, 53),  # one row, more than a block
    (2, 300, 2, 3),  # more channels than a widened row has columns
    (17, 40, 5, 13),  # wide rows and a rest
    (1, 33, 9, 11),  # one sample: narrow tiles
    (4, 6, 1, 1),  # one position
    (4, 37),
]


@pytest.fixture(autouse=True)
def _empty_memory_is_nan():
    """What a pass doesn't write shows."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before


def tensor(shape, layout="first", mean=3.0):
    values = torch.randn(shape) * 2 + mean
    return values.to(memory_format=LAYOUTS[layout]) if len(shape) == 4 else values


PASSES = {
    "moments": lambda x, dy, c: (x,),
    "apply": lambda x, dy, c: (x, *c[:3]),
    "reduce_backward": lambda x, dy, c: (dy, x, c[0]),
    "apply_backward": lambda x, dy, c: (dy, x, *c),
}


def results(found):
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_pass(shape, layout, name):
    x = tensor(shape, layout)
    arguments = PASSES[name](x, torch.randn_like(x), torch.randn(4, *shape[:2]))
    found = results(getattr(c_passes, name)(*arguments))
    wanted = results(getattr(torch_passes, name)(*(array.double() for array in arguments)))
    for actual, expected in zip(found, wanted, strict=True):
        assert actual.dtype == torch.float32
        assert actual.stride() == expected.stride()
        assert_close(actual, expected, 1e-6, name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_mean_alone(layout):
    x = tensor((3, 5, 6, 7), layout)
    mean, var = c_passes.moments(x, with_var=False)
    assert var is None
    assert_close(mean, x.double().mean((2, 3)), 1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("side", [112, 384])
def test_long_rows_stay_accurate(side, layout):
    x, dy = tensor((1, 3, side, side), layout, 100.0), tensor((1, 3, side, side), layout, 1.0)
    exact = x.double()
    mean, var = c_passes.moments(x)
    assert_close(mean, exact.mean((2, 3)), 1e-7)
    assert_close(var, exact.var((2, 3), correction=0), 2e-7)
    for actual, expected in zip(
        c_passes.reduce_backward(dy, x, mean),
        torch_passes.reduce_backward(dy.double(), exact, mean.double()),
        strict=True,
    ):
        assert_close(actual, expected, 1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_large_mean_costs_no_digits(layout):
    x = (torch.randn(4, 3, 40, 40) + 1e6).to(memory_format=LAYOUTS[layout])
    x[:, 1, :2] = 0  # and rows that begin far from their mean
    mean, var = c_passes.moments(x)
    assert_close(mean, x.double().mean((2, 3)), 1e-7)
    for channel in range(3):
        expected = x[:, channel].double().flatten(1).var(1, correction=0)
        assert_close(var[:, channel], expected, 1e-6)


MIXINGS = [(5, 3, 1), (6, 40, 2), (33, 7, 5), (1, 4, 3)]


@pytest.mark.parametrize("per_mode", [False, True, None])
@pytest.mark.parametrize(("n", "c", "k"), MIXINGS)
def test_each_part_of_the_mixing(n, c, k, per_mode):
    shape = (k, c) if per_mode else (c,)
    weight, bias = (None, None) if per_mode is None else (torch.randn(shape), torch.randn(shape))
    mean, var = torch.randn(n, c) * 3 + 5, torch.rand(n, c)
    gates = torch.softmax(3 * torch.randn(n, k), 1)
    dscale, dshift = torch.randn(n, c), torch.randn(n, c)

    def parts(of, *tensors):
        samples, affine = Samples(*tensors[:3]), Affine(*tensors[3:5], 1e-5)
        modes = of.statistics(samples)
        pair = of.coefficients(samples, modes, affine)
        gradients = of.mode_gradients(*tensors[5:], samples, modes, affine)
        last = of.sample_gradients(*tensors[5:], samples, modes, affine, *gradients[:3])
        return (*modes, *pair, *gradients, *last)

    tensors = (mean, var, gates, weight, bias, dscale, dshift)
    doubles = (None if t is None else t.double() for t in tensors)
    wanted = parts(torch_mixing, *doubles)
    for i, (actual, expected) in enumerate(zip(parts(c_mixing, *tensors), wanted, strict=True)):
        assert (actual is None) == (expected is None)
        if actual is not None:
            assert_close(actual, expected, 2e-5, f"result {i}")


def calls(monkeypatch):
    """The names of the functions called in C."""
    names = []

    original = c_library.call_at

    def listening(name, *args):
        names.append(name)
        return original(name, *args)

    for module in (c_library, c_mode_norm):
        monkeypatch.setattr(module, "call_at", listening)
    return names


OPTIONS = {
    "default": {},
    "affine=False": {"affine": False},
    "per_mode_affine": {"per_mode_affine": True},
    "usage": {"running_update": "usage"},
    "momentum=None": {"momentum": None},
    "usage, momentum=None": {"running_update": "usage", "momentum": None},
    "no estimates": {"track_running_stats": False},
    "custom gate": {"gate": nn.Linear},
}
CASES = [((6, 3, 4, 5), 2, name) for name in OPTIONS]
CASES += [((3, 7, 5, 5), 5, "default"), ((4, 6, 9, 9), 1, "default"), ((9, 21), 2, "default")]
CASES += [((2, 5, 1, 1), 2, "default"), ((1, 4, 6, 7), 2, "default"), ((6, 4, 8), 2, "default")]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "num_modes", "option"), CASES, ids=str)
def test_a_layer(shape, num_modes, option, layout, nodes, monkeypatch):
    layer = make_layer(shape[1], num_modes, len(shape), torch.float32, **OPTIONS[option])
    x = tensor(shape, layout, 0.5)
    upstream = torch.randn_like(x)
    if layer.running_update == "usage" and layer.momentum is None:  # not in the reference
        double = (copy.deepcopy(layer).double(), x.double(), upstream.double())
        expected = run(*double)
    else:
        expected = run_reference(copy.deepcopy(layer), x, upstream)
    names = calls(monkeypatch)
    assert_same(run(layer, x, upstream), expected, torch.float32)
    one = set() if nodes == "C++" else {"forward", "backward"}
    passes = {"moments", "apply", "reduce_backward", "apply_backward"}
    parts = {"statistics", "coefficients", "mode_gradients", "sample_gradients"}
    assert set(names) == (passes | parts if option == "custom gate" else one)


@pytest.mark.parametrize("training", [True, False])
def test_given_gates(training, monkeypatch):
    layer = make_layer(4, 3, 4, torch.float32, per_mode_affine=True).train(training)
    x, gates = tensor((6, 4, 5, 5)), torch.rand(6, 3)  # which need not sum to one
    upstream = torch.randn_like(x)
    expected = run_reference(copy.deepcopy(layer), x, upstream, gates)
    names = calls(monkeypatch)
    assert_same(run(layer, x, upstream, gates), expected, torch.float32)
    assert ("forward" in names) == training


def test_a_mode_without_samples_keeps_its_estimates():
    layer = make_layer(3, 3, 4, torch.float32, running_update="usage", momentum=None)
    before = copy.deepcopy(layer)
    x = tensor((4, 3, 5, 5))
    y = layer(x, gates=one_hot([0, 2, 2, 0], 3, torch.float32))
    assert y.isfinite().all()
    assert torch.equal(layer.running_mean[1], before.running_mean[1])
    assert torch.equal(layer.running_var[1], before.running_var[1])
    assert not torch.equal(layer.running_mean[0], before.running_mean[0])
    assert layer.running_share.tolist() == [0.5, 0.0, 0.5]
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_and_infinity(bad, layout):
    layer, x = make_layer(3, 2, 4, torch.float32), tensor((4, 3, 5, 7), layout)
    x[1, 2, 3, 4] = bad
    before = copy.deepcopy(dict(layer.named_buffers()))
    x.requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert y[:, 2].isnan().all()  # as batch norm has it
    assert x.grad[:, 2].isnan().all()
    assert all(torch.equal(buffer, before[name]) for name, buffer in layer.named_buffers())
    mean, var = c_passes.moments(x.detach())
    assert not mean[1, 2].isfinite()
    assert var[1, 2].isnan()
    assert mean[0].isfinite().all()


def test_an_empty_batch():
    layer = make_layer(3, 2, 4, torch.float32)
    before = layer.running_mean.clone()
    x = torch.empty(0, 3, 5, 5, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape
    assert torch.equal(layer.running_mean, before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_upstream_gradients_that_lie_otherwise(layout):
    layer, x = make_layer(3, 2, 4, torch.float32), tensor((4, 3, 5, 6), layout)
    other = torch.randn(6, 5, 3, 4).permute(3, 2, 1, 0)
    for upstream in (
        other,
        torch.randn(6).expand(x.shape),
        other.as_strided(x.shape, (0, 1, 1, 2)),
    ):
        expected = run_reference(copy.deepcopy(layer), x, upstream)
        assert_same(run(layer, x, upstream), expected, torch.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_that_are_negated_when_read(layout):
    layer, x = make_layer(3, 2, 4, torch.float32), tensor((4, 3, 5, 6), layout)
    upstream = torch.randn_like(x)
    expected = run_reference(copy.deepcopy(layer), -x, -upstream)
    found = run(layer, torch._neg_view(x), torch._neg_view(upstream))
    assert_same(found, expected, torch.float32)


def step(layer, x, upstream):
    """Everything that a step gives, and the state it leaves."""
    layer, x = copy.deepcopy(layer), x.detach().requires_grad_()
    y = layer(x)
    gradients = torch.autograd.grad(y, [x, *layer.parameters()], upstream)
    return [y.detach(), *gradients, *layer.buffers()]


class FirstFeatures(nn.Module):
    """A gate without sums, which torch might take in another order."""

    def forward(self, features):
        return features[:, :5]


@pytest.mark.parametrize("gate", [None, FirstFeatures()], ids=["one node", "two nodes"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(24, 33, 12, 12), (2, 70, 40, 40)], ids=str)
def test_the_number_of_threads_changes_no_bit(shape, layout, gate):
    layer, x = make_layer(shape[1], 5, 4, torch.float32, gate=gate), tensor(shape, layout)
    upstream = torch.randn_like(x)
    expected = step(layer, x, upstream)
    for count in (2, 3):
        torch.set_num_threads(count)
        try:
            found = step(layer, x, upstream)
        finally:
            torch.set_num_threads(1)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_gradients_that_come_to_the_gates_from_elsewhere():
    layer, x = make_layer(4, 3, 4, torch.float32), tensor((6, 4, 5, 5))
    upstream, to_gates = torch.randn_like(x), torch.randn(6, 3)
    found = []
    for dtype in (torch.float32, torch.float64):
        gates, again = [], copy.deepcopy(layer).to(dtype)
        again.gate_listener = gates.append
        inputs = x.to(dtype, copy=True).requires_grad_()
        loss = (again(inputs) * upstream).sum() + (gates[0] * to_gates).sum()
        found.append(torch.autograd.grad(loss, [inputs, *again.parameters()]))
    for actual, expected in zip(*found, strict=True):
        assert_close(actual, expected, 2e-5)


def test_gradients_of_the_gates_alone():
    layer, x, gates = make_layer(4, 3, 4, torch.float32), tensor((6, 4, 5, 5)), []
    layer.gate_listener = gates.append
    layer(x)
    (found,) = torch.autograd.grad(gates[0][:, 0].sum(), layer.gate.weight)
    assert found.abs().max() > 1e-4


def test_a_double_backward():
    layer, x = make_layer(2, 2, 4, torch.float32), tensor((4, 2, 3, 3))
    found = []
    for name in ("fused", "eager"):
        with modenorm.use_backend(name):
            inputs = x.detach().requires_grad_()
            (dx,) = torch.autograd.grad(layer(inputs).pow(3).sum(), inputs, create_graph=True)
            found.append(torch.autograd.grad(dx.square().sum(), [inputs, *layer.parameters()]))
    for actual, expected in zip(*found, strict=True):
        assert_close(actual, expected, 1e-4)


def test_inference(monkeypatch):
    layer, x = make_layer(4, 3, 4, torch.float32).eval(), tensor((6, 4, 5, 5))
    with torch.no_grad(), modenorm.use_backend("reference"):
        expected = layer(x)
    before, names = layer.running_mean.clone(), calls(monkeypatch)
    with torch.no_grad():
        assert_close(layer(x), expected, 1e-5)
    assert names == ["forward"]
    assert torch.equal(layer.running_mean, before)


def test_input_that_needs_no_gradient():
    layer, x = make_layer(4, 3, 4, torch.float32), tensor((6, 4, 5, 5))
    upstream = torch.randn_like(x)
    expected = run(layer, x, upstream).gradients
    layer(x).backward(upstream)
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, expected[name])


@pytest.mark.parametrize("gate", [None, nn.Linear], ids=["one node", "two nodes"])
def test_another_default_type(gate):
    layer, x = make_layer(4, 3, 4, torch.float32, gate=gate), tensor((6, 4, 5, 5))
    upstream = torch.randn_like(x)
    expected = step(layer, x, upstream)
    torch.set_default_dtype(torch.float64)
    try:
        assert kernels.cpu_kernels().startswith("compiled")
        found = step(layer, x, upstream)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


UNUSUAL = {
    "weight that is broadcast": {"weight": torch.randn(1)},
    "float64 estimates": {
        "running_mean": torch.zeros(2, 3).double(),
        "running_var": torch.ones(2, 3).double(),
    },
    "estimates in columns": {
        "running_mean": torch.zeros(3, 2).t(),
        "running_var": torch.ones(3, 2).t(),
    },
}


@pytest.mark.parametrize("extra", UNUSUAL.values(), ids=UNUSUAL)
def test_what_c_does_not_take_is_left_to_torch(extra):
    x, gates = tensor((5, 3, 4, 4)), torch.softmax(torch.randn(5, 2), 1)
    found = []
    for name in ("fused", "eager"):
        again = {key: value.clone() for key, value in extra.items()}
        with modenorm.use_backend(name):
            y = functional.mode_norm(x, gates, training=True, **again)
        found.append((y, *again.values()))
    for actual, expected in zip(*found, strict=True):
        assert_close(actual, expected, 1e-5)


def test_wrong_sizes_are_refused_as_ever():
    x = tensor((5, 3, 4, 4))
    with pytest.raises(ValueError, match="weight"):
        functional.mode_norm(x, torch.rand(5, 2), weight=torch.randn(4), training=True)
    with pytest.raises(ValueError, match="gates"):
        functional.mode_norm(x, torch.rand(4, 2), training=True)
