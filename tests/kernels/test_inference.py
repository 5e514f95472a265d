"""Evaluation in one launch against reference.py, and the rule for when it is used."""

import copy

import pytest
import torch

import modenorm
from modenorm.kernels.gpu import mode_norm_plan, tiles
from modenorm.kernels.gpu.passes import Geometry
from modenorm.kernels.gpu.plan import geometry_of
from modenorm.kernels.gpu.tiles import in_pieces, one_launch

SHAPES = {
    "2d": (6, 37),
    "3d": (4, 17, 3),
    "odd": (3, 5, 7, 7),
    "one position": (3, 20, 1, 1),
    "one channel": (3, 1, 6, 5),
    "many channels": (2, 40, 3, 3),
    "even": (2, 16, 4, 8),
    "volume": (3, 6, 2, 3, 2),
    "long": (2, 3, 23, 25),
    "rows": (2, 7, 12, 24),
}
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def planned_anew():
    mode_norm_plan._plans.clear()
    yield
    mode_norm_plan._plans.clear()


@pytest.fixture
def small_tiles(monkeypatch, planned_anew):
    """Samples of these tests take several steps."""
    monkeypatch.setattr(tiles, "INFERENCE_WARPS", 1)
    monkeypatch.setattr(tiles, "INFERENCE_BYTES", 16)


@pytest.fixture
def several_launches(monkeypatch, planned_anew):
    monkeypatch.setattr(tiles, "LARGEST_SAMPLE", 0)


def layer_for(shape, num_modes, device, **options):
    rank = {2: "1d", 3: "1d", 4: "2d", 5: "3d"}[len(shape)]
    layer = getattr(modenorm, f"ModeNorm{rank}")(shape[1], num_modes, **options).to(device).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, mean=0.2, std=0.5)
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    return layer


def tensor(shape, device, dtype=torch.float32, channels_last=False, mean=0.5):
    x = (torch.randn(shape, dtype=torch.float64) + mean).to(device, dtype)
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last else x


@torch.no_grad()
def outputs(layer, x):
    """Y and the gates."""
    heard = []
    layer.gate_listener = heard.append
    return layer(x), heard[0]


def assert_right(layer, x):
    assert one_launch(geometry_of(x), layer.num_modes)
    y, gates = outputs(layer, x)
    with modenorm.use_backend("reference"):
        truth, true_gates = outputs(copy.deepcopy(layer).double(), x.double())
    assert y.dtype == x.dtype
    assert y.stride() == x.stride()
    error = (y.double() - truth).norm() / truth.norm()
    assert error < TOLERANCES[x.dtype]
    torch.testing.assert_close(gates.double(), true_gates, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("num_modes", [1, 2, 5], ids="K{}".format)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values(device, shape, num_modes, channels_last):
    layer, x = (
        layer_for(shape, num_modes, device),
        tensor(shape, device, torch.float32, channels_last),
    )
    assert_right(layer, x)


@pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values_in_several_steps(device, small_tiles, shape, dtype, channels_last):
    assert_right(layer_for(shape, 2, device), tensor(shape, device, dtype, channels_last))


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("shape", [(2, 7, 12, 24), (3, 5, 16, 16), (2, 9, 16)], ids=str)
def test_rows_in_several_steps(device, small_tiles, monkeypatch, shape, dtype):
    monkeypatch.setattr(tiles, "SHORT_ROW", 16)
    x = tensor(shape, device, dtype)
    assert not in_pieces(geometry_of(x), 5)
    assert_right(layer_for(shape, 5, device), x)


@pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("options", [{"per_mode_affine": True}, {"affine": False}], ids=str)
def test_values_with_options(device, options, channels_last):
    shape = (3, 20, 3, 5)
    layer = layer_for(shape, 3, device, **options)
    assert_right(layer, tensor(shape, device, torch.float32, channels_last))


@pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
def test_tiles_of_real_size(device, monkeypatch, planned_anew, channels_last):
    """Rows of 49 numbers, more than one tile of them."""
    monkeypatch.setattr(tiles, "SMALL_SAMPLE", 1 << 20)
    shape = (2, 700, 7, 7)
    assert_right(layer_for(shape, 2, device), tensor(shape, device, torch.bfloat16, channels_last))


@pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
def test_several_launches_give_the_same(device, several_launches, channels_last):
    shape = (3, 20, 3, 5)
    layer, x = layer_for(shape, 2, device), tensor(shape, device, torch.float32, channels_last)
    assert not one_launch(geometry_of(x), 2)
    wanted = outputs(layer, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "LARGEST_SAMPLE", 1 << 20)
        mode_norm_plan._plans.clear()
        assert_right(layer, x)
        torch.testing.assert_close(outputs(layer, x), wanted, atol=3e-6, rtol=3e-6)


def test_large_means_cost_no_digits(device):
    x = tensor((4, 6, 10, 10), device, torch.float64) * 0.1 + 1000
    layer = layer_for(x.shape, 2, device)
    layer.gate.weight.data.mul_(1e-3)
    layer.running_mean.mul_(0.05).add_(1000)
    layer.running_var.fill_(0.01)
    x = x.float()
    with modenorm.use_backend("reference"):
        truth, _ = outputs(copy.deepcopy(layer).double(), x.double())
    # float32 holds 1000 to 3e-5, and so the gate's logits
    assert (outputs(layer, x)[0] - truth).norm() / truth.norm() < 1e-4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_bad_numbers_stay_in_their_sample(device, bad, channels_last):
    x = tensor((4, 20, 3, 3), device, torch.float32, channels_last)
    x[1, 18, 0, 0] = bad
    y, gates = outputs(layer_for(x.shape, 2, device), x)
    assert y.isnan().flatten(1).all(1).tolist() == [False, True, False, False]
    assert gates.isnan().any(1).tolist() == y.isnan().flatten(1).any(1).tolist()


def test_unaligned_memory(device):
    layer = layer_for((4, 5, 3, 3), 2, device)
    for start in (0, 1, 0, 3):
        memory = torch.randn(4 * 5 * 9 + 8, device=device)
        assert_right(layer, memory[start : start + 4 * 5 * 9].view(4, 5, 3, 3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter always repeats")
@pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
def test_results_repeat(device, channels_last):
    x = tensor((128, 200, 7, 7), device, torch.bfloat16, channels_last)
    layer = layer_for(x.shape, 4, device)
    first, second = (outputs(layer, x) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


BOTH, LAST, NEITHER = (True, True), (False, True), (False, False)
"""Channels first, last."""


@pytest.mark.parametrize(
    ("samples", "channels", "positions", "dtype", "num_modes", "wanted"),
    [
        (1, 16, 1024, torch.float32, 2, BOTH),  # small
        (128, 64, 1024, torch.float32, 2, BOTH),
        (256, 2048, 49, torch.float32, 2, LAST),
        (256, 2048, 49, torch.bfloat16, 2, BOTH),
        (256, 2048, 49, torch.float32, 9, NEITHER),  # a sum for each mode in registers
        (32, 64, 1024, torch.float32, 2, NEITHER),  # processors idle
        (140, 64, 1024, torch.float32, 2, BOTH),
        (256, 256, 3136, torch.bfloat16, 2, NEITHER),  # leaves the caches
        (256, 1024, 196, torch.float32, 2, LAST),
        (128, 64, 1024, torch.bfloat16, 8, BOTH),
    ],
)
def test_when_it_is_used(samples, channels, positions, dtype, num_modes, wanted):
    for channels_last in (False, True):
        geometry = Geometry(samples, channels, positions, channels_last, dtype)
        assert one_launch(geometry, num_modes) == wanted[channels_last]


def test_many_modes():
    """Channels first, threads have a sum for each mode: large samples are left to two passes."""
    for channels_last in (False, True):
        geometry = Geometry(256, 1024, 196, channels_last, torch.bfloat16)
        assert one_launch(geometry, 8) == channels_last


def test_short_rows_of_channels():
    """Many samples with few channels, channels last, are left to two passes."""
    wanted = {(128, True): True, (1024, True): False, (1024, False): True}
    for (samples, channels_last), used in wanted.items():
        assert one_launch(Geometry(samples, 6, 784, channels_last, torch.bfloat16), 2) == used


@pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pieces_have_two_channels_at_most(channels_last, dtype):
    for positions in (2, 3, 4, 7, 8, 9, 49, 1000):
        geometry = Geometry(1, 5, positions, channels_last, dtype)
        tile = tiles.inference_tile(geometry, 2)
        assert channels_last or tile.positions <= positions
        assert tile.rows * tile.positions >= 32 or tile.rows * tile.positions >= 5 * positions
