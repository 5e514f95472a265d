"""Statistics over ranks: three processes compute what one does with the whole batch."""

import copy
import datetime
import functools
import pickle
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import modenorm
from compare import assert_close, make_layer, one_hot, run
from world import World

SIZE = 3


def ignore_warnings(function):
    @functools.wraps(function)
    def ignoring(*arguments):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*arguments)

    return ignoring


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(SIZE, str(tmp_path_factory.mktemp("world") / "store"))
    yield world
    world.close()


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
}


def whole_batch(shape, dtype=torch.float64):
    return 2 * torch.randn(shape).to(dtype) + 3, torch.randn(shape).to(dtype)


def of_rank(rank, parts, tensor):
    part = tensor.split(parts)[rank]
    return part.clone(memory_format=torch.preserve_format)


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
    layer._ranks = synced._ranks = (3,)
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


# Who takes part.


def two_groups(rank):
    pair, alone = dist.new_group([0, 2]), dist.new_group([1])
    x, upstream = whole_batch(SHAPE)
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
    with pytest.raises(ValueError, match=r"save model\.state_dict"):
        pickle.dumps(synced)
    assert copy.deepcopy(synced).ranks.group is synced.ranks.group


def test_process_groups(world):
    world.check(two_groups)


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


# Models.


def network():
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        modenorm.ModeNorm2d(4, 2),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3),
        modenorm.ModeNorm2d(6, 3, gate=modenorm.StandardizedGate),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    ).double()
    for module in model.modules():
        if isinstance(module, modenorm.LinearGate):
            nn.init.normal_(module.weight)
    return model


def forward_of(model, kind, x):
    if kind.startswith("checkpoint"):
        return checkpoint(model, x, use_reentrant=kind.endswith("reentrant"))
    return model(x)


def train(model, kind, batches, targets, scale):
    """Two steps; "two forwards" takes both halves of the batch before one backward."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, target in zip(batches, targets, strict=True):
        halves = [h.clone().requires_grad_() for h in x.chunk(2)] if kind == "twice" else [x]
        if kind.startswith("checkpoint"):
            halves = [x.clone().requires_grad_()]
        outputs = torch.cat([forward_of(model, kind, half) for half in halves])
        loss = scale * nn.functional.cross_entropy(outputs, target, reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def sharded(model):
    for module in model:
        if isinstance(module, (nn.Conv2d, modenorm.ModeNorm2d)):
            fully_shard(module)
    return fully_shard(model)


@ignore_warnings
def with_own_buffers(model):  # torch 2.13 warns of a new name
    return DistributedDataParallel(model, broadcast_buffers=False)


WRAPPERS = {
    "ddp": DistributedDataParallel,
    "ddp, buffers of its own": with_own_buffers,
    "fsdp2": sharded,
}
USES = ["once", "twice", "checkpoint", "checkpoint, reentrant"]


def same_training(rank, wrapper, kind):
    # halves of a part must be those of the whole batch, in the same order for every rank
    samples = 12 if kind == "twice" else 9
    batches = torch.randn(2, samples, 2, 8, 8, dtype=torch.float64)
    targets = torch.randint(0, 3, (2, samples))
    alone = network()
    train(alone, kind, batches, targets, 1 / samples)

    own = torch.arange(samples).chunk(2) if kind == "twice" else [torch.arange(samples)]
    sizes = (3, 1, 2) if kind == "twice" else (6, 0, 3)
    own = torch.cat([half.split(sizes)[rank] for half in own])
    model = WRAPPERS[wrapper](modenorm.convert_sync_modenorm(network()))
    # wrappers average gradients over ranks, so the loss is a sum divided by the mean batch size
    train(model, kind, batches[:, own], targets[:, own], SIZE / samples)
    state = model.state_dict()
    for name, expected in alone.state_dict().items():
        value = state.get(name, state.get(f"module.{name}"))
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert_close(value, expected, 1e-11, name)


@pytest.mark.parametrize("kind", USES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_models(world, wrapper, kind):
    world.check(same_training, wrapper, kind)


@ignore_warnings  # of torch's own about its own
def compiled(rank):
    pair = dist.new_group([0, 1])
    if rank == 2:  # two cores, two compilers
        return
    x, upstream = whole_batch((6, C, 3, 3))
    layer = make_layer(C, K, gate=modenorm.StandardizedGate)
    whole = run(layer, x, upstream)
    synced = modenorm.convert_sync_modenorm(layer, pair)
    parts = (4, 2)
    x = of_rank(rank, parts, x).requires_grad_()
    function = torch.compile(synced, fullgraph=True, backend="aot_eager")
    y = function(x)
    y.backward(of_rank(rank, parts, upstream))
    assert_close(y, of_rank(rank, parts, whole.y), 1e-12, "output")
    assert_close(x.grad, of_rank(rank, parts, whole.gradients["x"]), 1e-12, "gradient of x")
    for name, parameter in synced.named_parameters():
        dist.all_reduce(parameter.grad, group=pair)
        assert_close(parameter.grad, whole.gradients[name], 1e-12, name)
    for name, buffer in whole.buffers.items():
        assert_close(synced.get_buffer(name), buffer, 1e-13, name)
    function(x[: 3 * rank]).sum().backward()  # empty on rank 0
    return synced.running_mean


def test_compiled(world):
    first, second, _ = world.check(compiled)
    assert torch.equal(first, second)


# Other functions of the library.


def converted_batchnorm(rank):
    group = dist.new_group([0, 1, 2])
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.SyncBatchNorm(3, process_group=group))
    (layer,) = modenorm.replace_batchnorm(model, num_modes=1).values()
    assert layer.ranks.group is group
    assert layer.ranks.name == "1"
    x = torch.randn(6, 3, 4, 4)
    expected = nn.functional.batch_norm(x, None, None, training=True)
    assert_close(layer(x[2 * rank : 2 * rank + 2]), expected[2 * rank : 2 * rank + 2], 2e-5)
    (norm,) = modenorm.to_batchnorm(model).values()
    assert type(norm) is nn.SyncBatchNorm
    assert norm.process_group is group


def test_sync_batch_norm_and_back(world):
    world.check(converted_batchnorm)


def lazy(rank):
    model = nn.Sequential(nn.Conv2d(2, C, 1), nn.LazyBatchNorm2d()).double()
    modenorm.replace_batchnorm(model, K, gate=modenorm.StandardizedGate)
    modenorm.convert_sync_modenorm(model)
    x = torch.randn(6, C, 4, 4, dtype=torch.float64)
    layer = model[1]
    layer(x[2 * rank : 2 * rank + 2])
    assert_close(layer.gate.running_mean, 0.1 * x.mean((0, 2, 3)), 1e-12)


def test_lazy_layers(world):
    world.check(lazy)


def recalibrated(rank):
    layer = make_layer(C, K)
    synced = modenorm.convert_sync_modenorm(copy.deepcopy(layer))
    batches = torch.randn(3, 6, C, 4, 4, dtype=torch.float64)
    modenorm.recalibrate(layer, batches)
    modenorm.recalibrate(synced, batches[:, 2 * rank : 2 * rank + 2])
    for name, buffer in layer.named_buffers():
        assert_close(synced.get_buffer(name), buffer, 1e-12, name)


def test_recalibrate(world):
    world.check(recalibrated)
