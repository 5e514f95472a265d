"""Maps of rows that are no multiple of 16 bytes, against torch's operators."""

import pytest
import torch

from modenorm.kernels import gpu
from modenorm.kernels.gpu import Geometry, Passes

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
    assert_close(gpu.apply(x, centre, scale, shift), wanted, dtype)


@pytest.mark.parametrize("with_x", [True, False], ids=["slope", "none"])
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_apply_backward(arrays, shape, dtype, with_x):
    dy, x, centre, scale, slope, offset = arrays(shape, dtype)
    passes, dx = Passes(Geometry(*shape, False, dtype), direct=False), torch.empty_like(x)
    launch = passes.apply_backward if with_x else passes.apply_backward_without_x
    launch(gpu.current_stream(x), dy, x, centre, scale, slope, offset, dx)
    wanted = dy.double() * scale[..., None] + offset[..., None]
    if with_x:
        wanted += (x.double() - centre[..., None]) * slope[..., None]
    assert_close(dx, wanted, dtype)


def test_which_rows_are_ragged():
    half, single = torch.bfloat16, torch.float32
    wanted = {(49, half): True, (49, single): True, (196, half): True, (196, single): False}
    wanted |= {(64, half): False, (9, half): False, (511, half): True, (513, half): False}
    for (positions, dtype), ragged in wanted.items():
        assert Geometry(8, 6, positions, False, dtype).is_ragged == ragged
        assert not Geometry(8, 6, positions, True, dtype).is_ragged
