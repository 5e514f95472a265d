"""Moments and gates in one launch against reference.py and two launches, and when it is used."""

import pytest
import torch
from test_fused import TOLERANCES, assert_close, gradients, layer_for, tensor, truth_of

from modenorm.kernels import gpu_gated_moments, mode_plan
from modenorm.kernels.gpu import Geometry, Passes
from modenorm.kernels.gpu_gated_moments import gated_moments_launch
from modenorm.kernels.gpu_mixing import Mixing
from modenorm.kernels.launch import current_stream
from modenorm.kernels.plan import geometry_of
from modenorm.kernels.tiles import Tile, gated_tile, moments_tile

SHAPES = {
    "2d": (6, 37),
    "odd": (5, 3, 5, 7),
    "one position": (3, 20, 1, 1),
    "one channel": (3, 1, 6, 5),
    "one sample": (1, 6, 4, 4),
    "many channels": (5, 40, 7, 7),  # channels last, more than in a tile of `moments`
    "volume": (3, 6, 2, 3, 2),
    "steps": (3, 16, 23, 23),  # channels last: two full tiles and a rest
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=["one launch", "small tiles", "two launches"])
def launches(request, monkeypatch):
    """Small tiles: of two positions."""
    mode_plan._plans.clear()
    if request.param == "two launches":
        monkeypatch.setattr(gpu_gated_moments, "gated_tile", lambda *_: None)
    elif request.param == "small tiles":
        monkeypatch.setattr(gpu_gated_moments, "gated_tile", small_tile)
    yield request.param
    mode_plan._plans.clear()


def small_tile(geometry, num_modes):
    return gated_tile(geometry, num_modes)._replace(positions=2)


def compare(layer, x, dy, launches):
    twin, truth, true_gradients = truth_of(layer, x, dy)
    y, found = gradients(layer, x, dy)
    (plan,) = mode_plan._plans.values()
    assert (plan.gated is None) == (launches == "two launches")
    tolerance = TOLERANCES[x.dtype]
    assert_close(y, truth, tolerance, "y")
    assert_close(found[0], true_gradients[0], max(tolerance, 3e-5), "dx", floor=3e-5)
    for value, wanted in zip(found[1:], true_gradients[1:], strict=True):
        assert_close(value, wanted, 1e-4, "parameter", floor=1e-4)
    for (name, value), wanted in zip(layer.named_buffers(), twin.buffers(), strict=True):
        assert_close(value, wanted, 1e-6, name)


@pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("num_modes", [1, 2, 5], ids="K{}".format)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_training(device, launches, shape, num_modes, channels_last):
    x = tensor(shape, device, torch.float32, channels_last, mean=1.0)
    dy = tensor(shape, device, torch.float32, False)
    compare(layer_for(shape, num_modes, device), x, dy, launches)


@pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types(device, launches, dtype, channels_last):
    x, dy = (tensor((6, 12, 5, 5), device, dtype, channels_last) for _ in range(2))
    compare(layer_for(x.shape, 2, device), x, dy, launches)


def test_many_modes(device):
    mode_plan._plans.clear()
    x, dy = (tensor((6, 12, 5, 5), device, torch.float32, True) for _ in range(2))
    compare(layer_for(x.shape, 50, device), x, dy, "two launches")  # 800 weights for 64 threads
    mode_plan._plans.clear()
    x, dy = (tensor((6, 4, 5, 5), device, torch.float32, True) for _ in range(2))
    compare(layer_for(x.shape, 64, device), x, dy, "one launch")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_bad_samples_leave_the_estimates(device, launches, bad, channels_last):
    x = tensor((4, 20, 3, 3), device, torch.float32, channels_last)
    layer = layer_for(x.shape, 2, device)
    before = [buffer.clone() for buffer in layer.buffers()]
    x[1, 18, 0, 0] = bad
    assert layer(x).isnan().any()
    for value, wanted in zip(layer.buffers(), before, strict=True):
        assert torch.equal(value, wanted)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("bad_bias", [False, True])
def test_the_same_as_two_launches(device, channels_last, bad_bias):
    """Also which samples are finite, of numbers whose squares come close to float32's end."""
    x = tensor((6, 20, 5, 3), device, torch.float32, channels_last)
    x[1, 18, 0, 0] = float("nan")
    x[2, 3, 4, 2] = float("inf")
    x[3, 0, 0, 0] = 1e20
    x[4, 19] = 5e18  # six such samples have no finite sum
    x[5, 19] = 1e18
    weight, bias = torch.randn(3, 20, device=device) * 1e-19, torch.randn(3, device=device)
    if bad_bias:
        bias[1] = float("nan")
    geometry, stream = geometry_of(x), current_stream(x)
    options = (1e-5, 0.1, True, (True, True, False), (True, True, True, True), False)
    mixing = Mixing(6, 20, 15, 3, *options)
    one, two = ([torch.empty(s, device=device) for s in ((6, 20),) * 2 + ((6, 3), 6)] for _ in "12")
    Passes(geometry, False).moments(stream, x, *two[:2])
    mixing.gates(stream, *two[:2], weight, bias, *two[2:])
    gated_moments_launch(geometry, 3, False)(stream, x, *one[:2], weight, bias, *one[2:])
    wanted = [0] * 6 if bad_bias else [1, 0, 0, 0, 0, 1]
    assert one[3].tolist() == wanted
    torch.testing.assert_close(one, two, equal_nan=True)


def test_large_means_cost_no_digits(device, launches):
    x = tensor((8, 4, 20, 20), device, torch.float64, True) * 0.1 + 1000
    layer, x = layer_for(x.shape, 2, device), x.float()
    layer.gate.weight.data.mul_(1e-3)  # both modes have something
    truth = truth_of(layer, x, x)[1]
    # float32 holds 1000 to 3e-5; averaged over many values that is 1e-4 of a standard deviation.
    assert_close(layer(x), truth, 1e-3, "y")


def test_unaligned_memory(device, launches):
    layer = layer_for((4, 5, 3, 3), 2, device)
    for start in (0, 1, 0, 3):
        memory = torch.randn(4 * 5 * 9 + 8, device=device)
        x = memory[start : start + 4 * 5 * 9].view(4, 5, 3, 3)
        truth = truth_of(layer, x, x)[1]
        assert_close(layer(x), truth, 2e-6, "y")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter always repeats")
@pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
def test_results_repeat(device, channels_last):
    x = tensor((128, 16, 32, 32), device, torch.bfloat16, channels_last)
    layer = layer_for(x.shape, 4, device)
    first, second = (gradients(layer, x, x.sin()) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


@pytest.mark.parametrize(
    ("shape", "dtype", "first", "last"),
    [
        ((128, 6, 784), torch.bfloat16, (8, 1024, 8), (8, 1024, 4)),
        ((128, 6, 784), torch.float32, (8, 1024, 8), (8, 512, 4)),
        ((128, 16, 1024), torch.bfloat16, (16, 1024, 16), (16, 512, 4)),
        ((128, 16, 1024), torch.float32, (16, 1024, 16), (16, 256, 4)),
        ((128, 64, 1024), torch.bfloat16, None, (64, 256, 8)),
        ((128, 64, 1024), torch.float32, None, (64, 128, 8)),
        ((256, 64, 3136), torch.bfloat16, None, (64, 128, 4)),
        ((256, 64, 3136), torch.float32, None, (64, 128, 8)),
        ((32, 64, 1024), torch.float32, None, None),  # processors idle
        ((1, 16, 1024), torch.float32, (16, 1024, 16), (16, 256, 4)),  # small
        ((1024, 16, 1024), torch.float32, None, (16, 256, 4)),  # more than run at once
        ((1024, 64, 1024), torch.float32, None, None),
        ((256, 2048, 49), torch.float32, None, None),
    ],
)
def test_when_it_is_used(shape, dtype, first, last):
    for channels_last, wanted in ((False, first), (True, last)):
        geometry = Geometry(*shape, channels_last, dtype)
        found = gated_tile(geometry, 2)
        assert found == (wanted and Tile(*wanted))
        usual = moments_tile(geometry)
        if channels_last and found:  # as many numbers for each thread
            assert found.positions == usual.positions
            assert found.rows * usual.num_warps == usual.rows * found.num_warps


def test_given_gates_have_no_use_for_it(device):
    mode_plan._plans.clear()
    x = tensor((4, 5, 3, 3), device, torch.float32, False)
    layer_for(x.shape, 2, device)(x, gates=torch.full((4, 2), 0.5, device=device))
    (plan,) = mode_plan._plans.values()
    assert plan.gated is None
