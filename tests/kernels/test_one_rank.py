"""Collectives of a group with one process: nccl on a GPU, which a second process couldn't share."""

import copy

import pytest
import torch
import torch.distributed as dist
from test_fused import assert_close, layer_for, tensor

import modenorm
from modenorm import layers


@pytest.fixture
def group(device, monkeypatch):
    """A process group whose only rank exchanges its statistics with itself."""
    backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(layers, "in_use", lambda ranks: ranks)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_exchange_with_oneself_changes_nothing(device, group, dtype, compiled):
    torch.manual_seed(0)
    x, dy = (tensor((8, 16, 5, 5), device, dtype, True) for _ in range(2))
    alone = layer_for(x.shape, 3, device)
    shared = modenorm.convert_sync_modenorm(copy.deepcopy(alone))
    call = torch.compile(shared, fullgraph=True, backend="aot_eager") if compiled else shared
    found = []
    for function, layer in ((call, shared), (alone, alone)):
        leaf = x.detach().requires_grad_()
        y = function(leaf)
        found.append([y, *torch.autograd.grad(y, [leaf, *layer.parameters()], dy)])
    assert shared.ranks is not None
    assert shared.ranks.agreed is not None, "nothing was exchanged"
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for value, wanted in zip(*found, strict=True):
        assert_close(value, wanted, tolerance, "", floor=tolerance)
    for value, wanted in zip(shared.buffers(), alone.buffers(), strict=True):
        assert_close(value, wanted, 1e-5, "buffer")
