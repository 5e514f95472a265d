"""The fused node with statistics over ranks: processes that run the kernels' interpreter."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

import modenorm
from compare import assert_close, make_layer, run
from modenorm.kernels.choice import runs_triton
from world import World

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="processes on one GPU share no nccl group"
    ),
]
SHAPE = (7, 5, 2, 3)
LAYERS = {
    "plain": {},
    "usage": {"running_update": "usage"},
    "per mode": {"per_mode_affine": True},
    "no affine": {"affine": False},
    "gate of one's own": {"gate": nn.Linear},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(2, str(tmp_path_factory.mktemp("world") / "store"))
    yield world
    world.close()


def same_as_one_process(rank, parts, options, given):
    layer = make_layer(5, 3, dtype=torch.float32, **options)
    x, upstream = torch.randn(SHAPE) + 2, torch.randn(SHAPE)
    gates = torch.rand(7, 3).softmax(1) if given else None
    assert runs_triton(x)
    with modenorm.use_backend("eager"):
        whole = run(copy.deepcopy(layer).double(), x.double(), upstream.double(), gates)
    own = [None if t is None else t.split(parts)[rank].clone() for t in (x, upstream, gates)]
    part = run(modenorm.convert_sync_modenorm(layer), *own)
    # float32 against float64: some tens of roundings, as in compare.py. The gate's gradients are
    # differences of larger terms: one process has 5e-5 there, on this batch.
    assert_close(part.y, whole.y.split(parts)[rank], 2e-5, "output")
    for name, gradient in part.gradients.items():
        expected = whole.gradients[name]
        if name in ("x", "gates"):
            expected = expected.split(parts)[rank]
        else:
            dist.all_reduce(gradient)
        limit = 1e-4 if name.startswith("gate") else 2e-5
        assert_close(gradient, expected, limit, f"gradient of {name}")
    for name, buffer in whole.buffers.items():
        assert_close(part.buffers[name], buffer, 2e-5, name)


@pytest.mark.parametrize("options", LAYERS)
def test_fused_ranks(world, options):
    world.check(same_as_one_process, (4, 3), LAYERS[options], False)


def test_fused_ranks_with_gates(world):
    world.check(same_as_one_process, (0, 7), LAYERS["usage"], True)


def second_derivatives(rank):
    layer = make_layer(5, 3, dtype=torch.float32)
    x, upstream = torch.randn(6, 5, 2, 2), torch.randn(6, 5, 2, 2)
    own = slice(3 * rank, 3 * rank + 3)
    found = []
    for norm, part in (
        (copy.deepcopy(layer).double(), slice(None)),
        (modenorm.convert_sync_modenorm(layer), own),
    ):
        values = x[part].to(norm.weight.dtype).requires_grad_()
        loss = (norm(values) ** 3 * upstream[part]).sum()
        (gradient,) = torch.autograd.grad(loss, values, create_graph=True)
        found.append(torch.autograd.grad((gradient**2).sum(), values)[0])
    assert_close(found[1], found[0][own], 1e-3)  # cubes and squares of gradients in float32


def test_fused_double_backward(world):
    world.check(second_derivatives)
