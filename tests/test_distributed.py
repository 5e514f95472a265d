"""Statistics over ranks: three processes compute what one does with the whole batch."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import modenorm
from compare import assert_close, make_layer, one_hot, run
from world import of_rank, whole_batch

# One layer: output, all gradients and running estimates. float64 leaves room for sums in another
# order only, a few units of the last place of the largest terms.

N, C, K = 9, 4, 3
SHAPE = (N, C, 2, 5)
PARTS = {"even": (3, 3, 3), "uneven": (5, 1, 3), "empty": (4, 0, 5), "one rank": (9, 0, 0)}
LAYERS = {
    "plain": {},
    "mean of all batches": {"momentum": None},
    "usage": {"running_update": "usage"},
    "usage of all batches": {"running_update": "usage", "momentum": None},
    "per mode": {"per_mode_affine": True},
    "no affine": {"affine": False},
    "no estimates": {"track_running_stats": False},
    "standardized gate": {"gate": modenorm.StandardizedGate},
}
CALLS = {
    "the gate": dict,
    "gates": lambda: {"gates": torch.rand(N, K, dtype=torch.float64).softmax(1)},
    "modes absent from ranks": lambda: {"gates": one_hot([0, 0, 0, 0, 0, 1, 2, 2, 2], K)},
    "mode absent everywhere": lambda: {"gates": one_hot([0, 0, 0, 0, 0, 2, 2, 2, 2], K)},
    "mask": lambda: {"mask": torch.rand(N, 2, 5) > 0.4},
    "padding": lambda: {"mask": torch.arange(N)[:, None, None].expand(N, 2, 5) % 3 != 1},
}


def same_as_one_process(
    rank, parts, options=None, shape=SHAPE, call="the gate", channels_last=False, backend="auto"
):
    """A converted layer on each rank's part against the layer on the whole batch, two steps."""
    layer = make_layer(C, K, len(shape), **(options or {}))
    synced = modenorm.convert_sync_modenorm(copy.deepcopy(layer))
    for _ in range(2):
        x, upstream = whole_batch(shape)
        if channels_last:
            x = x.to(memory_format=torch.channels_last)
        given = CALLS[call]()
        own = {name: of_rank(rank, parts, value) for name, value in given.items()}
        whole = run(layer, x, upstream, **given)
        with modenorm.use_backend(backend):
            part = run(synced, of_rank(rank, parts, x), of_rank(rank, parts, upstream), **own)
        assert_close(part.y, of_rank(rank, parts, whole.y), 1e-12, "output")
        for name, gradient in part.gradients.items():
            if name in ("x", "gates"):
                expected = of_rank(rank, parts, whole.gradients[name])
            else:
                dist.all_reduce(gradient)
                expected = whole.gradients[name]
            assert_close(gradient, expected, 1e-12, f"gradient of {name}")
        for name, buffer in whole.buffers.items():
            assert_close(part.buffers[name], buffer, 1e-13, name)
        keep_estimates(layer, whole.buffers)
        keep_estimates(synced, part.buffers)


def keep_estimates(layer, buffers):
    """`run` works on a copy."""
    for name, buffer in buffers.items():
        layer.get_buffer(name).copy_(buffer)
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked += 1


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("backend", ["fused", "eager"])
def test_batches_of_any_size(world, parts, backend):
    world.check(same_as_one_process, PARTS[parts], None, SHAPE, "the gate", False, backend)


@pytest.mark.parametrize("options", LAYERS)
def test_every_kind_of_layer(world, options):
    for parts in ("uneven", "empty"):
        world.check(same_as_one_process, PARTS[parts], LAYERS[options])


@pytest.mark.parametrize("call", CALLS)
def test_gates_and_masks(world, call):
    for parts in ("uneven", "empty"):
        for options in ({}, {"running_update": "usage", "per_mode_affine": True}):
            for backend in ("fused", "eager"):
                world.check(same_as_one_process, PARTS[parts], options, SHAPE, call, False, backend)


def test_padding_and_a_standardized_gate(world):
    options = {"gate": modenorm.StandardizedGate}
    for parts in PARTS.values():
        world.check(same_as_one_process, parts, options, SHAPE, "padding")


def recalibrated(rank):
    layer = make_layer(C, K, gate=modenorm.StandardizedGate)
    synced = modenorm.convert_sync_modenorm(copy.deepcopy(layer))
    x, _ = whole_batch(SHAPE)
    modenorm.recalibrate(layer, [x, x + 1])
    own = of_rank(rank, PARTS["uneven"], x)
    modenorm.recalibrate(synced, [own, own + 1])
    for name, buffer in layer.named_buffers():
        assert_close(synced.get_buffer(name), buffer, 1e-12, name)


def test_recalibration(world):
    world.check(recalibrated)


def test_every_kind_of_input(world):
    for shape in ((N, C), (N, C, 7), (N, C, 2, 2, 2)):
        world.check(same_as_one_process, PARTS["uneven"], None, shape)
    world.check(same_as_one_process, (1, 1, 1), None, (3, C))  # a sample each: no variance alone
    world.check(same_as_one_process, PARTS["empty"], None, SHAPE, "the gate", True)


def positions_differ(rank):
    """Maps of another size on every rank weigh as padding and a mask would make them."""
    x, upstream = whole_batch((6, C, 1, 5))
    sizes = (5, 3, 2)
    mask = torch.zeros(6, 1, 5, dtype=torch.bool)
    for n in range(6):
        mask[n, :, : sizes[n // 2]] = True
    layer = make_layer(C, K)
    whole = run(layer, x, upstream * mask[:, None], mask=mask)
    own = (slice(2 * rank, 2 * rank + 2), slice(None), slice(None), slice(sizes[rank]))
    part = run(modenorm.convert_sync_modenorm(layer), x[own], upstream[own])
    assert_close(part.y, whole.y[own], 1e-12, "output")
    assert_close(part.gradients["x"], whole.gradients["x"][own], 1e-12, "gradient")
    assert_close(part.buffers["running_var"], whole.buffers["running_var"], 1e-13)


def test_maps_of_other_sizes(world):
    world.check(positions_differ)


def no_positions(rank):
    """A rank whose samples have no positions has nothing to tell."""
    layer = modenorm.convert_sync_modenorm(make_layer(C, K))
    x = torch.randn(2, C, 1, 0 if rank == 1 else 3, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.shape == x.grad.shape
    return layer.running_mean


def test_samples_without_positions(world):
    first, *others = world.check(no_positions)
    assert first.isfinite().all()
    assert all(torch.equal(first, other) for other in others)


class Autocast(nn.Module):
    def __init__(self, norm, enabled):
        super().__init__()
        self.norm, self.enabled = norm, enabled

    def forward(self, x, gates=None):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            return self.norm(x, gates)


def half_precision(rank, dtype, autocast):
    x, upstream = whole_batch((6, C, 3, 3), dtype)
    layer = make_layer(C, K, dtype=torch.float32)
    synced = modenorm.convert_sync_modenorm(copy.deepcopy(layer))
    layer, synced = Autocast(layer, autocast), Autocast(synced, autocast)
    whole = run(layer, x, upstream)
    part = run(synced, x[2 * rank : 2 * rank + 2], upstream[2 * rank : 2 * rank + 2])
    # statistics are float32 on both sides, so half types round to neighbours at the most
    tolerance = 2e-5 if dtype == torch.float32 else 2 * 2**-8
    assert part.y.dtype == dtype
    assert_close(part.y, whole.y[2 * rank : 2 * rank + 2], tolerance, "output")
    assert_close(part.gradients["x"], whole.gradients["x"][2 * rank : 2 * rank + 2], tolerance)
    for name, buffer in whole.buffers.items():
        assert_close(part.buffers[name], buffer, 2e-6, name)


@pytest.mark.parametrize("autocast", [False, True])
def test_mixed_precision(world, autocast):
    for dtype in (torch.float32, torch.bfloat16):
        world.check(half_precision, dtype, autocast)


def far_from_zero(rank):
    """Sums of squares around a mean: at mean 1000 and deviation 0.1 float32 keeps its digits."""
    x = 1000 + 0.1 * torch.randn(6, C, 8, 8)
    layer = modenorm.ModeNorm2d(C, 1, affine=False)
    expected = nn.functional.batch_norm(x.double(), None, None, training=True)
    y = modenorm.convert_sync_modenorm(layer)(x[2 * rank : 2 * rank + 2])
    # one rounding of x, 3e-5, is 3e-4 deviations
    assert (y - expected[2 * rank : 2 * rank + 2]).abs().max() < 1e-3


def test_large_means(world):
    world.check(far_from_zero)


def second_derivatives(rank):
    layer = make_layer(C, K)
    synced = modenorm.convert_sync_modenorm(copy.deepcopy(layer))
    x, upstream = whole_batch((6, C, 2))
    layer._dimensions = synced._dimensions = (3,)
    own = slice(2 * rank, 2 * rank + 2)
    found = []
    for norm, part in ((layer, slice(None)), (synced, own)):
        values = x[part].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(
            (norm(values) ** 3 * upstream[part]).sum(), values, create_graph=True
        )
        found.append(torch.autograd.grad((gradient**2).sum(), values)[0])
    assert_close(found[1], found[0][own], 1e-11)


def test_double_backward(world):
    world.check(second_derivatives)


def one_value(rank, options, backend):
    """One rank has one value per channel: no variance to learn from, but no rank knows before."""
    layer = modenorm.convert_sync_modenorm(make_layer(C, K, 2, **options))
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    x = torch.randn(int(rank == 1), C, dtype=torch.float64)
    with modenorm.use_backend(backend):
        layer(x)
        for name, buffer in layer.named_buffers():
            assert torch.equal(buffer, before[name]), name
        layer(torch.randn(int(rank != 2), C, dtype=torch.float64))
    assert int(layer.num_batches_tracked) == 1


@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"running_update": "usage"}], ids=str)
@pytest.mark.parametrize("backend", ["fused", "eager"])
def test_one_value_over_all_ranks_moves_no_estimates(world, options, backend):
    world.check(one_value, options, backend)


def small_gates(rank):
    """Gates of a sample that sum to little are no sign of a lonely value."""
    layer = modenorm.convert_sync_modenorm(modenorm.ModeNorm1d(C, K))
    layer(torch.randn(8, C), gates=torch.full((8, K), 0.005))
    assert int(layer.num_batches_tracked) == 1
    assert float(layer.running_mean.abs().max()) > 0


def test_gates_that_sum_to_little_move_the_estimates(world):
    world.check(small_gates)
