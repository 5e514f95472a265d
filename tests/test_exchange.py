"""What ranks tell each other: who takes part, how often, and what they say if it goes wrong."""

import copy
import datetime
import gc
import pickle
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import modenorm
from compare import assert_close, make_layer, run
from world import of_rank, whole_batch

C, K = 4, 3


# Who takes part.


def two_groups(rank):
    pair, alone = dist.new_group([0, 2]), dist.new_group([1])
    x, upstream = whole_batch((9, C, 2, 5))
    layer = make_layer(C, K)
    synced = modenorm.convert_sync_modenorm(copy.deepcopy(layer), alone if rank == 1 else pair)
    parts = (5, 1, 3)
    part = run(synced, of_rank(rank, parts, x), of_rank(rank, parts, upstream))
    together = [1] if rank == 1 else [0, 2]
    x, upstream = (torch.cat([of_rank(r, parts, t) for r in together]) for t in (x, upstream))
    whole = run(layer, x, upstream)
    own = slice(5, None) if rank == 2 else slice(0, parts[rank])
    assert_close(part.y, whole.y[own], 1e-12)
    assert_close(part.gradients["x"], whole.gradients["x"][own], 1e-12)
    for name, buffer in whole.buffers.items():
        assert_close(part.buffers[name], buffer, 1e-13, name)
    with pytest.raises(ValueError, match=r"process_group doesn't contain this process, rank \d"):
        modenorm.convert_sync_modenorm(layer, pair if rank == 1 else alone)
    with pytest.raises(ValueError, match=r"process_group is \[0, 2\]; it must be one group"):
        modenorm.convert_sync_modenorm(layer, [0, 2])
    with pytest.raises(ValueError, match=r"save model\.state_dict"):
        pickle.dumps(synced)
    assert copy.deepcopy(synced).ranks.group is synced.ranks.group


def test_process_groups(world):
    world.check(two_groups)


def backward_alone(rank):
    x, upstream = (of_rank(rank, (2, 0, 1), t) for t in whole_batch((3, C, 2, 5)))
    layer, given = make_layer(C, K), modenorm.ModeNorm2d(C, K).double()
    for norm in (layer, given):
        modenorm.convert_sync_modenorm(norm, dist.new_group([0, 1, 2]))
    expected = run(layer, x, upstream).gradients["x"]
    again, mask = x.clone().requires_grad_(), torch.ones(len(x), 2, 5, dtype=torch.bool)
    outputs = [layer(again), given(again, mask=mask)]  # by nodes, and by plain operators
    held = [weakref.ref(norm.ranks) for norm in (layer, given)]
    del layer, given, norm
    outputs[0].backward(upstream)
    assert_close(again.grad, expected, 1e-12)
    outputs[1].backward(upstream)
    outputs.clear()
    gc.collect()
    assert [ranks() for ranks in held] == [None, None]


def test_a_layer_that_is_gone_can_be_differentiated_and_holds_no_group(world):
    world.check(backward_alone)


def not_a_number(rank):
    layer = modenorm.convert_sync_modenorm(make_layer(C, K))
    before = copy.deepcopy(layer.state_dict())
    x = torch.randn(2, C, 3, 3, dtype=torch.float64)
    if rank == 1:
        x[0, 0, 0, 0] = float("nan")
    assert layer(x).isnan().any()
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())


def test_nan_on_one_rank_leaves_all_estimates(world):
    world.check(not_a_number)


def nobody_has_anything(rank):
    layer = modenorm.convert_sync_modenorm(make_layer(C, K, gate=modenorm.StandardizedGate))
    before = copy.deepcopy(layer.state_dict())
    x = torch.zeros(0, C, 3, 3, dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    assert all((p.grad == 0).all() for p in layer.parameters())
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())


def test_no_values_at_all_change_nothing(world):
    world.check(nobody_has_anything)


def counted(rank):
    """Count the collectives and the numbers in them."""
    calls = []
    name = next(n for n in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, n))
    gather, reduce = getattr(dist, name), dist.all_reduce

    def count(original, given):
        def collective(*arguments, **options):
            calls.append((given, arguments[-1].numel(), arguments[-1].dtype))
            return original(*arguments, **options)

        return collective

    setattr(dist, name, count(gather, "gather"))
    dist.all_reduce = count(reduce, "reduce")
    try:
        layer = modenorm.convert_sync_modenorm(make_layer(C, K, dtype=torch.float32))
        x = torch.randn(2, C, 3, 3)
        layer(x).sum().backward()  # the first time, the ranks also compare their layers
        assert calls.pop(0) == ("gather", 256, torch.uint8)
        first, calls[:] = list(calls), []
        layer(x).sum().backward()
        assert calls == first
        layer.eval()(x)
        modenorm.freeze_statistics(layer.train())
        layer(x)
    finally:
        setattr(dist, name, gather)
        dist.all_reduce = reduce
    return calls


def test_one_collective_forward_and_one_backward(world):
    for calls in world.check(counted):
        assert calls == [
            ("gather", K * (2 * C + 1), torch.float32),
            ("reduce", 2 * K * C, torch.float32),
        ]


# Without a process group.


def test_evaluation_needs_no_process_group():
    layer = make_layer(C, K, gate=modenorm.StandardizedGate).eval()
    x = torch.randn(2, C, 3, 3, dtype=torch.float64)
    expected = layer(x)
    modenorm.convert_sync_modenorm(layer)
    assert torch.equal(layer(x), expected)
    frozen = modenorm.freeze_statistics(layer.train())
    assert frozen == [""]
    assert torch.equal(layer(x), expected)


def test_training_without_a_process_group():
    model = modenorm.convert_sync_modenorm(nn.Sequential(nn.Conv2d(3, 4, 1), make_layer(C, K)))
    with pytest.raises(ValueError, match=r"^1 takes its statistics over all .* torchrun"):
        model.double()(torch.randn(2, 3, 3, 3, dtype=torch.float64))


def test_the_model_itself_is_returned():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), modenorm.ModeGroupNorm(4), nn.BatchNorm2d(4))
    assert modenorm.convert_sync_modenorm(model) is model
    layer = modenorm.ModeNorm2d(4)
    assert modenorm.convert_sync_modenorm(layer) is layer
    assert "synchronized=True" in repr(layer)
    again = pickle.loads(pickle.dumps(layer))
    assert again.ranks is not None
    assert copy.deepcopy(layer).ranks is layer.ranks


# What goes wrong must say so, on every rank and soon.


def wrong_layer(rank, kind):
    made = {
        "modes": (4, 2 + (rank == 1), "1"),
        "channels": (4 + (rank == 2), 2, "1"),
        "dtype": (4, 2, "1"),
        "order": (4, 2, "12"[rank == 1]),
    }
    num_features, num_modes, name = made[kind]
    dtype = torch.float64 if kind == "dtype" and rank == 0 else torch.float32
    model = nn.ModuleDict({name: modenorm.ModeNorm2d(num_features, num_modes, dtype=dtype)})
    modenorm.convert_sync_modenorm(model)
    model[name](torch.randn(2, num_features, 3, 3, dtype=dtype))


MISMATCHES = {
    "modes": "rank 0 has K=2, C=4, float32 at 1; rank 1 has K=3, C=4, float32 at 1",
    "channels": "rank 2 has K=2, C=5, float32 at 1",
    "dtype": "rank 0 has K=2, C=4, float64 at 1; rank 1 has K=2, C=4, float32 at 1",
    "order": "rank 0 has K=2, C=4, float32 at 1; rank 1 has K=2, C=4, float32 at 2",
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_layers_that_differ(world, kind):
    start = time.monotonic()
    errors = world.run(wrong_layer, kind)
    assert time.monotonic() - start < 5
    for error in errors:
        assert isinstance(error, ValueError)
        assert MISMATCHES[kind] in str(error)
        assert "build the same model on every rank" in str(error)


def skipped(rank, first, part):
    """Rank 1 leaves the layer out, in its first step or later, forward or backward."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    layer = modenorm.convert_sync_modenorm(modenorm.ModeNorm2d(4), group)
    x = torch.randn(2, 4, 3, 3)
    if not first:
        layer(x)
    if rank != 1 or part == "backward":
        y = layer(x)
        if rank != 1:
            y.sum().backward()


@pytest.mark.parametrize(
    ("first", "part"), [(True, "forward"), (False, "forward"), (False, "backward")]
)
def test_a_rank_that_skips_a_layer(world, first, part):
    errors = world.run(skipped, first, part)
    assert errors[1] is None
    for rank in (0, 2):
        assert isinstance(errors[rank], RuntimeError)
        assert f"rank {rank} of 3 waited at the mode norm" in str(errors[rank])
        assert "also with an empty batch" in str(errors[rank])
