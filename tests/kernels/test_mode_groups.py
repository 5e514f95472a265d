"""Programs that take several modes: what they say of all sizes and options is right."""

import pytest
import torch
from test_fused import assert_close, compare_training
from test_mixing_parts import AFFINE, arrays, compare_parts

from modenorm.kernels.gpu import mixing as gpu_mixing
from modenorm.kernels.gpu import mixing_launches, mode_norm_plan
from modenorm.kernels.gpu.mixing_launches import Mixing
from modenorm.kernels.gpu.plan import AffineKind, MixingKind, RunningKind

NEVER = 1 << 30
RUNNING = [
    (False, False, False, False),
    (True, False, True, False),
    (True, True, False, True),
    (True, True, True, True),
]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=[2, 4])
def groups(request, monkeypatch):
    """Programs take so many modes at any size."""
    for what in ("STATISTICS", "BACKWARD"):
        monkeypatch.setattr(mixing_launches, f"{what}_GROUPED", 1)
        monkeypatch.setattr(mixing_launches, f"{what}_GROUP", request.param)
    plans, launches = mode_norm_plan._plans, gpu_mixing._launches
    plans.clear(), launches.cache_clear()
    yield
    plans.clear(), launches.cache_clear()


@pytest.mark.parametrize("affine", AFFINE)
@pytest.mark.parametrize("num_modes", [2, 3, 8, 9], ids="K{}".format)
@pytest.mark.parametrize("size", [(5, 3), (6, 40), (1, 4)], ids=str)
def test_each_part(device, size, num_modes, affine, groups):
    compare_parts(arrays(device, *size, num_modes, affine))


@pytest.mark.parametrize("size", [(70, 3), (256, 20)], ids=str)
def test_many_samples(device, size, groups):
    compare_parts(arrays(device, *size, 5))


def test_a_mode_without_samples(device, groups):
    mean, var, gates, *rest = arrays(device, 6, 5, 3)
    gates = torch.nn.functional.one_hot(torch.tensor([0, 2, 2, 0, 2, 0], device=device), 3)
    compare_parts((mean, var, gates.float(), *rest))


@pytest.mark.parametrize("options", AFFINE.values(), ids=AFFINE)
def test_training(device, options, groups):
    compare_training(device, (5, 20, 3, 2), 5, True, **options)


def statistics(given, finite, running, has_usage):
    """Running estimates, counter, shares, statistics, mass and usage."""
    mean, var, gates = given
    sizes, modes = (*mean.shape, 9), (gates.shape[1], mean.shape[1])
    affine = AffineKind(weight=True, bias=True)
    kind = MixingKind(1e-5, affine, True, 0.1, RunningKind(*running), has_usage)
    launch = Mixing(*sizes, modes[0], kind, direct=False, chained=False).statistics
    estimates = torch.linspace(-1, 1, 2 * modes[0] * modes[1]).view(2, *modes).to(mean)
    tracked, share = torch.full((), 3, device=mean.device), torch.ones(modes[0]).to(mean)
    outputs = [torch.zeros(shape).to(mean) for shape in (modes, modes, modes[:1], modes[:1])]
    stream = torch.cuda.current_stream().cuda_stream if mean.is_cuda else 0
    launch(stream, mean, var, gates, finite, *estimates, tracked, share, *outputs)
    return *estimates, tracked, share, *outputs


@pytest.mark.parametrize("running", RUNNING, ids=str)
@pytest.mark.parametrize("what", ["good", "not finite", "a mode without samples"])
def test_running_estimates(device, what, running, groups, monkeypatch):
    """As of programs that take one mode each."""
    mean, var, gates, *_ = arrays(device, 40, 6, 5)
    finite = torch.ones(40, device=device)
    if what == "not finite":
        finite[33] = 0
    elif what != "good":
        gates[:, 1] = 0
    given = ((mean, var, gates), finite, running, running[1])
    found = statistics(*given)
    monkeypatch.setattr(mixing_launches, "STATISTICS_GROUPED", NEVER)
    for i, (value, wanted) in enumerate(zip(found, statistics(*given), strict=True)):
        assert_close(value, wanted, 1e-6, f"result {i}")


@pytest.mark.parametrize(
    ("size", "grouped"),
    [
        ((256, 2048, 4), [True, True]),
        ((256, 2048, 2), [True, False]),
        ((256, 8192, 1), [False, False]),
        ((257, 2048, 8), [False, False]),
        ((256, 64, 8), [False, False]),
    ],
)
def test_when(size, grouped):
    kind = MixingKind(1e-5, AffineKind(weight=True, bias=True, per_mode=True), has_gate=True)
    mixing = Mixing(*size[:2], 49, size[2], kind, direct=False)
    kernels = [launch.kernel.__name__ for launch in (mixing.statistics, mixing.modes_backward)]
    assert [name.startswith("group_") for name in kernels] == grouped
