"""The switches of all gates: drawn, added to the gates' biases, and their cost, in one launch.

Letters: K modes, S switches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from modenorm.kernels.gpu.common import begin
from modenorm.kernels.gpu.device import on_device
from modenorm.kernels.gpu.plan import aligned
from modenorm.kernels.gpu.several import array_of, launch_for, padded, tile_of
from modenorm.kernels.several import MOST_ARRAYS

__all__ = ["draw", "draw_backward"]


@triton.jit
def _own_noise(random_ptr, places):
    """Uniform numbers by a counter, which is advanced: the launch has one program."""
    seed, draws = tl.load(random_ptr), tl.load(random_ptr + 1)
    zeros = (places * 0).to(tl.uint32)
    low_word, high_word = zeros + draws.to(tl.uint32), zeros + (draws >> 32).to(tl.uint32)
    drawn, _, _, _ = tl.philox(seed, places.to(tl.uint32), low_word, high_word, zeros)
    tl.debug_barrier()  # all warps have read it
    tl.store(random_ptr + 1, draws + 1)
    return tl.uint_to_uniform_float(drawn)


@triton.jit
def _draw_kernel(
    bias0_ptr,  # (K,), as all biases
    bias1_ptr,
    bias2_ptr,
    bias3_ptr,
    bias4_ptr,
    bias5_ptr,
    bias6_ptr,
    bias7_ptr,
    log_odds_ptr,  # (S,)
    strength_ptr,  # ()
    random_ptr,  # (2,), the seed of own noise and how often it was drawn
    noise_ptr,  # (S,), read, or written if it is own
    cost_ptr,  # ()
    used_ptr,  # (layers, pitch)
    found_ptr,  # (3, row): changes, their slopes, the cost's slopes
    num_layers,
    num_modes,
    pitch,
    row,
    temperature,
    low,
    high,
    closed,
    shift,
    OWN_NOISE: tl.constexpr,
    BLOCK_LAYERS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Hard-concrete switches, their logarithms added to biases, and the cost of open ones."""
    begin(OVERLAPS)
    layers, modes, known = tile_of(num_layers, num_modes, BLOCK_LAYERS, BLOCK_K)
    places = layers * num_modes + modes
    odds = tl.load(log_odds_ptr + places, mask=known, other=0.0)
    bias_ptr = array_of(
        layers, bias0_ptr, bias1_ptr, bias2_ptr, bias3_ptr,
        bias4_ptr, bias5_ptr, bias6_ptr, bias7_ptr,
    )  # fmt: skip
    bias = tl.load(bias_ptr + modes, mask=known, other=0.0)
    strength = tl.load(strength_ptr)

    if OWN_NOISE:
        noise = _own_noise(random_ptr, places)
        tl.store(noise_ptr + places, noise, mask=known)
    else:
        noise = tl.load(noise_ptr + places, mask=known, other=0.5)
    inner = tl.minimum(tl.maximum(noise, 1e-6), 1.0 - 1e-6)
    soft = tl.sigmoid((odds + tl.log(inner / (1.0 - inner))) / temperature)
    stretched = soft * (high - low) + low
    switch = tl.minimum(tl.maximum(stretched, 0.0), 1.0) * (1.0 - closed) + closed
    change = tl.log(switch)
    free = (stretched >= 0.0) & (stretched <= 1.0)
    slope = soft * (1.0 - soft) * ((high - low) * (1.0 - closed) / temperature) / switch
    share = tl.sigmoid(odds - shift)

    tl.store(used_ptr + layers * pitch + modes, bias + change, mask=known)
    tl.store(found_ptr + places, change, mask=known)
    tl.store(found_ptr + row + places, tl.where(free, slope, 0.0), mask=known)
    tl.store(found_ptr + 2 * row + places, strength * share * (1.0 - share), mask=known)
    tl.store(cost_ptr, strength * tl.sum(tl.where(known, share, 0.0), 0))


@triton.jit
def _draw_backward_kernel(
    upstream0_ptr,  # (K,), as all gradients of used biases
    upstream1_ptr,
    upstream2_ptr,
    upstream3_ptr,
    upstream4_ptr,
    upstream5_ptr,
    upstream6_ptr,
    upstream7_ptr,
    cost_upstream_ptr,  # ()
    found_ptr,  # (3, row)
    gradient_ptr,  # (S,)
    num_layers,
    num_modes,
    row,
    HAS_COST: tl.constexpr,
    BLOCK_LAYERS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The gradient of the log odds."""
    begin(OVERLAPS)
    layers, modes, known = tile_of(num_layers, num_modes, BLOCK_LAYERS, BLOCK_K)
    places = layers * num_modes + modes
    upstream_ptr = array_of(
        layers, upstream0_ptr, upstream1_ptr, upstream2_ptr, upstream3_ptr,
        upstream4_ptr, upstream5_ptr, upstream6_ptr, upstream7_ptr,
    )  # fmt: skip
    gradient = tl.load(upstream_ptr + modes, mask=known, other=0.0)
    gradient *= tl.load(found_ptr + row + places, mask=known, other=0.0)
    if HAS_COST:
        slopes = tl.load(found_ptr + 2 * row + places, mask=known, other=0.0)
        gradient += tl.load(cost_upstream_ptr) * slopes
    tl.store(gradient_ptr + places, gradient, mask=known)


def draw(
    log_odds: Tensor,
    strength: Tensor,
    random: Tensor,
    noise: Tensor | None,
    biases: tuple[Tensor, ...],
    constants: tuple[float, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The cost, the used biases, (layers, K), what else is found, (3, S), and the noise.

    Args:
        log_odds: (S,).
        strength: Of the cost.
        random: Seed and number of own noise, which is advanced.
        noise: (S,), or None for own.
        biases: (K,) each.
        constants: Temperature, low, high, closed and shift of the hard-concrete distribution.
    """
    dense = [bias.contiguous() for bias in biases]
    first, count = dense[0], len(dense)
    pitch, row = padded(len(first)), padded(len(log_odds))
    cost = torch.empty_like(strength)
    kind: dict[str, Any] = {"device": log_odds.device, "dtype": torch.float32}
    used, found = torch.empty((count, pitch), **kind), torch.empty((3, row), **kind)
    own = noise is None
    noise = torch.empty_like(log_odds) if noise is None else noise.contiguous()
    direct = aligned((*dense, log_odds, strength, random, noise))
    sizes = (count, len(first), pitch, row, *constants)
    launch = launch_for(_draw_kernel, sizes, (own,), first.get_device(), direct)
    with on_device(first) as stream:
        launch(
            stream, *dense, *[first] * (MOST_ARRAYS - count),
            log_odds, strength, random, noise, cost, used, found,
        )  # fmt: skip
    return cost, used[:, : len(first)], found[:, : len(log_odds)], noise


def draw_backward(
    upstream: Sequence[Tensor | None], cost_upstream: Tensor | None, found: Tensor
) -> Tensor:
    """The gradient of the log odds, (S,), by those of the used biases and of the cost."""
    size = found.shape[1] // len(upstream)
    dense = [found.new_zeros(size) if u is None else u.contiguous() for u in upstream]
    first, count = dense[0], len(dense)
    gradient = torch.empty_like(found[0])
    direct = aligned((*dense, cost_upstream))
    sizes = (count, len(first), found.stride(0))
    has_cost = cost_upstream is not None
    launch = launch_for(_draw_backward_kernel, sizes, (has_cost,), first.get_device(), direct)
    with on_device(first) as stream:
        cost_upstream = first if cost_upstream is None else cost_upstream
        padding = [first] * (MOST_ARRAYS - count)
        launch(stream, *dense, *padding, cost_upstream, found, gradient)
    return gradient
