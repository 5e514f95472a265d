"""What a training step keeps for backward: x, and arrays without positions."""

import pytest
import torch
from torch import nn

import modenorm

SHAPE = (4, 6, 32, 32)
SIZE = 4 * 6 * 32 * 32 * 4  # bytes


def saved_tensors(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    return list(saved.values())


def num_bytes(tensors) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def make(num_modes: int, kind: str) -> nn.Module:
    if kind == "ModeGroupNorm":
        return modenorm.ModeGroupNorm(6, num_modes, variance="pixel")
    return modenorm.ModeNorm2d(6, num_modes, per_mode_affine=kind == "per_mode_affine")


@pytest.mark.parametrize("kind", ["ModeNorm2d", "per_mode_affine", "ModeGroupNorm"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("num_modes", [1, 2, 8])
def test_fused_training_keeps_x_and_small_arrays(num_modes, memory_format, kind):
    x = torch.randn(SHAPE, requires_grad=True).to(memory_format=memory_format)
    with modenorm.use_backend("fused"):
        saved = saved_tensors(make(num_modes, kind), x)
    big = [tensor for tensor in saved if tensor.untyped_storage().nbytes() >= SIZE]
    assert [tensor.data_ptr() for tensor in big] == [x.data_ptr()]
    small = num_bytes(saved) - SIZE
    assert small <= 12 * num_modes * 4 * 6 * 4 + 4096  # a dozen (N, K, C) arrays, at most


def test_half_precision_keeps_no_float32_copy():
    x = torch.randn(SHAPE, dtype=torch.bfloat16, requires_grad=True)
    with modenorm.use_backend("fused"):
        saved = saved_tensors(modenorm.ModeNorm2d(6), x)
    assert num_bytes(saved) < 1.2 * SIZE / 2


def test_the_count_can_fail():
    """The paper's form keeps activations once per mode: the measure sees them."""
    x = torch.randn(SHAPE, requires_grad=True)
    with modenorm.use_backend("reference"):
        saved = saved_tensors(modenorm.ModeNorm2d(6, 8), x)
    assert num_bytes(saved) > 8 * SIZE


def test_no_position_wide_temporary_per_mode():
    """Peak memory of a whole step on the CPU: y, dx and chunks, whatever the number of modes."""
    peaks = []
    for num_modes in (1, 8):
        layer = modenorm.ModeNorm2d(6, num_modes)
        x, upstream = torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE)
        with modenorm.use_backend("fused"), LargeAllocations() as allocations:
            layer(x).backward(upstream)
        peaks.append(allocations.count)
    assert peaks[0] == peaks[1]


class LargeAllocations(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts results as large as the input."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() >= SIZE // 4:
            self.count += 1
        return result


@pytest.mark.parametrize("kind", ["ModeNorm2d", "per_mode_affine", "ModeGroupNorm"])
def test_saved_tensors_may_come_back_in_another_order(kind):
    """As from `save_on_cpu` with pinned memory, which keeps no memory format."""
    layer = make(2, kind)
    x = torch.randn(SHAPE).to(memory_format=torch.channels_last)
    dy, found = torch.randn(SHAPE), []
    for unpack in (lambda tensor: tensor, torch.Tensor.contiguous):
        leaf = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            y = layer(leaf)
        found.append(torch.autograd.grad(y, [leaf, *layer.parameters()], dy))
    for kept, moved in zip(*found, strict=True):
        assert torch.equal(kept, moved)
