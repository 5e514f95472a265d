"""Mode group normalization in C against operators in float64: values, all gradients, any thread."""

import copy
import itertools

import pytest
import torch

import modenorm
from compare import assert_close
from modenorm import kernels
from modenorm.kernels.c import mode_group_norm as c_mode_group_norm

pytestmark = pytest.mark.skipif(
    not kernels.cpu_kernels().startswith("compiled"), reason=kernels.cpu_kernels()
)
LAYOUTS = {"first": torch.contiguous_format, "last": torch.channels_last}
SHAPES = [(3, 5, 7, 7), (2, 16, 4, 8), (17, 40, 5, 13), (1, 33, 9, 11), (4, 6, 1, 1), (4, 37)]
NAMES = ("y", "gates", "x", "gate_weight", "gate_bias", "weight", "bias")


@pytest.fixture(autouse=True)
def _empty_memory_is_nan():
    """What C doesn't write shows."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before


@pytest.fixture
def counted(monkeypatch):
    """How often the node was taken."""
    calls = itertools.count()
    node = c_mode_group_norm._node
    monkeypatch.setattr(c_mode_group_norm, "_node", lambda *given: (next(calls), node(*given))[1])
    return lambda: next(calls)


def layer_for(channels, num_modes, variance="pooled", affine=True):
    layer = modenorm.ModeGroupNorm(channels, num_modes, variance=variance, affine=affine)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return layer


def tensor(shape, layout="first"):
    values = torch.randn(shape) * 2 + 3 * torch.randn(shape[1]).view(-1, *[1] * (len(shape) - 2))
    return values.to(memory_format=LAYOUTS[layout]) if len(shape) == 4 else values


def results(layer, x, dy, dgates=None):
    layer = copy.deepcopy(layer).to(x.dtype)
    heard, leaf = [], x.detach().requires_grad_()
    layer.gate_listener = heard.append
    y = layer(leaf)
    outputs, upstream = [y], [dy]
    if dgates is not None:
        outputs, upstream = [y, heard[0]], [dy, dgates]
    found = torch.autograd.grad(outputs, [leaf, *layer.parameters()], upstream)
    return dict(zip(NAMES, (y, heard[0], *found), strict=False))


def compare(layer, x, dy, dgates=None):
    found = results(layer, x, dy, dgates)
    doubles = (None if t is None else t.double() for t in (x, dy, dgates))
    for name, wanted in results(layer, *doubles).items():
        assert found[name].dtype == torch.float32
        assert_close(found[name], wanted, 2e-5, name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variance", ["pooled", "pixel"])
@pytest.mark.parametrize("num_modes", [1, 2, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, num_modes, variance, layout, counted):
    x, dy = tensor(shape, layout), torch.randn(shape)
    compare(layer_for(shape[1], num_modes, variance), x, dy)
    assert counted() == 1  # the operators in float64 do without


@pytest.mark.parametrize("variance", ["pooled", "pixel"])
def test_gradients_that_come_to_the_gates_from_elsewhere(variance):
    x, dy = tensor((5, 40, 3, 3)), torch.randn(5, 40, 3, 3)
    compare(layer_for(40, 3, variance), x, dy, torch.randn(5, 40, 3))


def test_without_weight_and_bias(counted):
    x, dy = tensor((5, 6, 3, 3)), torch.randn(5, 6, 3, 3)
    compare(layer_for(6, 3, affine=False), x, dy)
    assert counted() == 1


def test_gradients_of_the_gates_alone():
    layer, x = layer_for(6, 3), tensor((4, 6, 3, 3))
    pull = torch.randn(4, 6, 3)
    found = []
    for dtype in (torch.float32, torch.float64):
        heard, leaf = [], x.to(dtype).requires_grad_()
        twin = copy.deepcopy(layer).to(dtype)
        twin.gate_listener = heard.append
        twin(leaf)
        found.append(torch.autograd.grad(heard[0], [leaf, twin.gate_weight], pull.to(dtype)))
    for ours, wanted in zip(*found, strict=True):
        assert_close(ours, wanted, 1e-5)


def test_upstream_gradients_that_lie_otherwise():
    layer, x = layer_for(6, 2), tensor((4, 6, 3, 5), "last")
    compare(layer, x, torch.randn(4, 6, 5, 3).transpose(2, 3))
    compare(layer, x, torch.randn(4, 6, 1, 1).expand(4, 6, 3, 5))


def test_input_that_needs_no_gradient():
    layer, x = layer_for(6, 2), tensor((4, 6, 3, 5))
    dy = torch.randn_like(x)
    wanted = results(layer, x, dy)
    y = layer(x)
    for name, found in zip(
        NAMES[3:], torch.autograd.grad(y, [*layer.parameters()], dy), strict=True
    ):
        assert torch.equal(found, wanted[name])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_number_of_threads_changes_no_bit(layout):
    layer, x = layer_for(40, 3, "pixel"), tensor((64, 40, 9, 9), layout)
    dy, before, found = torch.randn_like(x), torch.get_num_threads(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(results(layer, x, dy))
    torch.set_num_threads(before)
    for other in found[1:]:
        for name, value in other.items():
            assert torch.equal(value, found[0][name]), name


def test_samples_do_not_meet():
    """Not a number, or infinity, stays in its sample."""
    layer, x = layer_for(6, 2), tensor((4, 6, 3, 5))
    clean = layer(x)
    x[1, 2, 0, 0], x[3, 0, 1, 1] = float("nan"), float("inf")
    y = layer(x)
    assert torch.equal(y[::2], clean[::2])
    assert y[1].isnan().all()
    assert y[3].isnan().all()


def test_a_double_backward():
    found = []
    layer, x = layer_for(5, 2, "pixel"), tensor((3, 5, 4, 4))
    for dtype in (torch.float32, torch.float64):
        twin, leaf = copy.deepcopy(layer).to(dtype), x.to(dtype).requires_grad_()
        (slope,) = torch.autograd.grad(twin(leaf).pow(3).sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), [leaf, *twin.parameters()]))
    for ours, wanted in zip(*found, strict=True):
        assert_close(ours, wanted, 2e-4)


def test_what_c_does_not_take_is_left_to_operators(counted):
    x = tensor((3, 6, 4, 4))
    many = modenorm.ModeGroupNorm(6, c_mode_group_norm.MOST_MODES + 1)
    assert many(x).isfinite().all()
    with modenorm.use_backend("eager"):
        layer_for(6, 2)(x)
    layer_for(6, 2).double()(x.double())
    assert counted() == 0


def test_a_negated_view():
    layer, z = layer_for(6, 2), torch.complex(tensor((4, 6, 3, 3)), tensor((4, 6, 3, 3)))
    x = z.conj().imag
    assert x.is_neg()
    assert torch.equal(layer(x), layer(x.resolve_neg()))
