"""Statistics over ranks: three processes compute what one does with the whole batch."""

import copy

import pytest
import torch
import torch.distributed as dist

import modenorm
from compare import assert_close, make_layer, one_hot, run
from world import World

SIZE = 3
PARTS = {"even": (3, 3, 3), "uneven": (5, 1, 3), "empty": (4, 0, 5), "almost": (9, 0, 0)}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(SIZE, str(tmp_path_factory.mktemp("world") / "store"))
    yield world
    world.close()


# One layer: output, all gradients and running estimates.

N, C, K = 9, 4, 3
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
    "gates": lambda: {"gates": torch.rand(N, K, dtype=torch.float64).softmax(1)},
    "one mode per rank": lambda: {"gates": one_hot([0, 0, 0, 0, 0, 1, 2, 2, 2], K)},
    "mask": lambda: {"mask": torch.rand(N, 2, 5) > 0.4},
}
INPUTS = {
    "2d": (4, (N, C, 2, 5)),
    "1d": (2, (N, C)),
    "channels last": (4, (N, C, 2, 5)),
}


def whole_batch(shape, dtype=torch.float64):
    return 2 * torch.randn(shape, dtype=dtype) + 3, torch.randn(shape, dtype=dtype)


def of_rank(rank, parts, tensor):
    return tensor.split(parts)[rank].clone()


def same_as_one_process(rank, parts, options, rank_of_x=4, shape=(N, C, 2, 5), call=None, steps=2):
    """Compare a converted layer with the same layer on the whole batch, several steps in a row."""
    layer = make_layer(C, K, rank_of_x, **options)
    synced = modenorm.convert_sync_modenorm(copy.deepcopy(layer))
    for _ in range(steps):
        x, upstream = whole_batch(shape)
        if shape == INPUTS["channels last"][1] and options is CHANNELS_LAST:
            x = x.to(memory_format=torch.channels_last)
        given = {} if call is None else CALLS[call]()
        own = {name: of_rank(rank, parts, value) for name, value in given.items()}
        whole = run(layer, x, upstream, **given)
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
        move(layer, whole.buffers)
        move(synced, part.buffers)


CHANNELS_LAST = {}


def move(layer, buffers):
    """`run` works on a copy; keep what it did to the estimates."""
    for name, buffer in buffers.items():
        layer.get_buffer(name).copy_(buffer)
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked += 1


@pytest.mark.parametrize("parts", PARTS)
def test_batches_of_any_size(world, parts):
    world.check(same_as_one_process, PARTS[parts], {})


@pytest.mark.parametrize("options", LAYERS)
def test_every_kind_of_layer(world, options):
    for parts in ("uneven", "empty"):
        world.check(same_as_one_process, PARTS[parts], LAYERS[options])
