"""Sums and maps of rows that are no multiple of 16 bytes, against torch's operators."""

import pytest
import torch

from modenorm.kernels.gpu import passes as gpu_passes
from modenorm.kernels.gpu.device import current_stream
from modenorm.kernels.gpu.passes import Geometry, Passes
from modenorm.kernels.gpu.tiles import lines_for

# samples, channels, positions: odd sizes, less than a program, several, pieces that end with a row
SHAPES = [(3, 5, 49), (1, 1, 17), (2, 3, 18), (2, 40, 49), (5, 7, 196), (9, 16, 25), (3, 8, 511)]
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def ragged(dtype):
    return [shape for shape in SHAPES if Geometry(*shape, False, dtype).is_ragged]


CASES = [(shape, dtype) for dtype in TOLERANCES for shape in ragged(dtype)]


@pytest.fixture
def arrays(device):
    def make(shape, dtype):
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2)]
        rows = [torch.randn(shape[:2], generator=generator).to(device) for _ in range(4)]
        return *tensors, *rows

    return make


def assert_close(found, wanted, dtype):
    assert found.dtype == dtype
    assert (found.double() - wanted).norm() / wanted.norm() < TOLERANCES[dtype]


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_apply(arrays, shape, dtype):
    x, _, centre, scale, shift, _ = arrays(shape, dtype)
    wanted = (x.double() - centre[..., None]) * scale[..., None] + shift[..., None]
    assert_close(gpu_passes.apply(x, centre, scale, shift), wanted, dtype)


@pytest.mark.parametrize("with_x", [True, False], ids=["slope", "none"])
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_apply_backward(arrays, shape, dtype, with_x):
    dy, x, centre, scale, slope, offset = arrays(shape, dtype)
    passes, dx = Passes(Geometry(*shape, False, dtype), direct=False), torch.empty_like(x)
    passes.apply_backward[with_x, False](current_stream(x), dy, x, centre, scale, slope, offset, dx)
    wanted = dy.double() * scale[..., None] + offset[..., None]
    if with_x:
        wanted += (x.double() - centre[..., None]) * slope[..., None]
    assert_close(dx, wanted, dtype)


# lines that fill no program, and some; two, four and eight rows in a line; rows that fill none
LINES = [(2, 4, 49), (3, 8, 49), (40, 2, 18), (8, 1, 17), (5, 6, 196), (4, 8, 25), (3, 5, 49)]


@pytest.mark.parametrize("mean", [0.0, 1000.0])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", LINES, ids=str)
def test_moments(arrays, shape, dtype, mean):
    x = (arrays(shape, torch.float32)[0] + mean).to(dtype)
    found_mean, found_var = gpu_passes.moments(x)
    var, wanted = torch.var_mean(x.double(), 2, correction=0)
    assert (found_mean - wanted).abs().max() <= 1e-6 * (1 + mean)
    assert (found_var - var).abs().max() <= 1e-5 * (1 + var.max())
    assert torch.equal(gpu_passes.moments(x, with_var=False)[0], found_mean)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", LINES, ids=str)
def test_reduce_backward(arrays, shape, dtype):
    dy, x, centre, *_ = arrays(shape, dtype)
    total, product = gpu_passes.reduce_backward(dy, x, centre)
    wanted = (dy.double() * (x.double() - centre[..., None])).sum(2)
    assert (total - dy.double().sum(2)).abs().max() < 1e-4
    assert (product - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_what_is_not_finite_stays_in_its_row(arrays, dtype):
    dy, x, centre, *_ = arrays((4, 8, 49), dtype)
    for channel, position in ((3, 0), (5, 48)):
        x[2, channel, position] = float("nan")
    expected = torch.zeros(4, 8, dtype=torch.bool, device=x.device)
    expected[2, 3] = expected[2, 5] = True
    mean, var = gpu_passes.moments(x)
    _, product = gpu_passes.reduce_backward(dy, x, centre)
    for found in (mean, var, product):
        assert torch.equal(found.isnan(), expected)


def test_which_rows_are_read_as_lines():
    half, single = torch.bfloat16, torch.float32
    rows = {(49, half): 8, (49, single): 4, (196, half): 2, (25, half): 8, (18, single): 2}
    for (positions, dtype), number in rows.items():
        found = lines_for(Geometry(8, 6, positions, False, dtype))
        assert found.rows == number
        assert found.pieces * 16 >= number * positions * dtype.itemsize
        assert lines_for(Geometry(8, 6, positions, True, dtype)) is None
    assert lines_for(Geometry(3, 5, 49, False, half)) is None  # lines would not come out even
    assert lines_for(Geometry(8, 6, 196, False, single)) is None
    assert lines_for(Geometry(8, 6, 511, False, half)) is None


def test_which_rows_are_ragged():
    half, single = torch.bfloat16, torch.float32
    wanted = {(49, half): True, (49, single): True, (196, half): True, (196, single): False}
    wanted |= {(64, half): False, (9, half): False, (511, half): True, (513, half): False}
    for (positions, dtype), ragged in wanted.items():
        assert Geometry(8, 6, positions, False, dtype).is_ragged == ragged
        assert not Geometry(8, 6, positions, True, dtype).is_ragged
