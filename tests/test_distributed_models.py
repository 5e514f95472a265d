"""Models with statistics over ranks: wrapped, compiled, converted, trained as by one process."""

import contextlib
import copy
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import modenorm
from compare import assert_close, make_layer, run
from world import SIZE, of_rank, whole_batch

C, K = 4, 3


def ignore_warnings(function):
    @functools.wraps(function)
    def ignoring(*arguments):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*arguments)

    return ignoring


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


@ignore_warnings
def switched(rank, given):
    """Steps with switches, each rank with its own samples and draws; then they are removed."""
    model = network()
    if given == "module":
        penalty = modenorm.ModeSparsity(model, 0.1, "switch")
    wrapped = DistributedDataParallel(model)
    if given == "wrapper":
        penalty = modenorm.ModeSparsity(wrapped, 0.1, "switch")
    optimizer = torch.optim.Adam([*model.parameters(), *penalty.parameters()], 0.1)
    torch.manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        for apart in (True, False):  # DDP goes by what is around the forward
            with wrapped.no_sync() if apart else contextlib.nullcontext():
                loss = wrapped(torch.randn(4, 2, 8, 8).double()).pow(3).sum() + penalty()
            with contextlib.nullcontext() if apart else wrapped.no_sync():
                with torch.no_grad():
                    model(torch.randn(4, 2, 8, 8).double())
                loss.backward()
        optimizer.step()
    learnt = penalty.log_odds.detach().clone()
    penalty.remove()
    return learnt, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("given", ["wrapper", "module"])
def test_switches_of_all_ranks_learn_the_same(world, given):
    (first, parameters), *others = world.check(switched, given)
    assert not torch.allclose(first, first[:1].expand_as(first))
    for learnt, theirs in others:
        assert torch.equal(learnt, first)
        assert all(map(torch.equal, theirs, parameters))


@ignore_warnings
def penalized(rank, method):
    """A step with a penalty, while one rank has no samples."""
    model = DistributedDataParallel(modenorm.convert_sync_modenorm(network()))
    penalty = modenorm.ModeSparsity(model, 0.1, method)
    x = torch.randn(0 if rank == 1 else 4, 2, 8, 8).double()
    (model(x).pow(3).sum() + penalty()).backward()
    return [parameter.grad for parameter in (*model.parameters(), *penalty.parameters())]


@pytest.mark.parametrize("method", ["entropy", "switch"])
def test_a_penalty_and_an_empty_batch(world, method):
    first, *others = world.check(penalized, method)
    assert all(gradient.isfinite().all() for gradient in first)
    assert all(all(map(torch.equal, theirs, first)) for theirs in others)
