"""Evaluation of a mode norm in one launch, in Triton: one program for each sample.

A program reads its sample for the gate's logits, mixes the running estimates, and reads the sample
again for the map, from the end to the start: by then caches hold the sample, or its end. The first
time it reads a tile ahead; without that, compilers let loads wait for each other.

Tiles of channels and positions, if channels lie last or rows of positions are long, are summed to
the channels' sums first. Pieces of 16 bytes, from short rows of any length, are summed to logits at
once: a logit is a sum over all of x, each number times the weight of its channel, and a piece has
numbers of one channel, or of one and the next. No means are needed: the map
(x − centre) · scale + shift is the same for any centre, and one amid the estimates costs no digits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from modenorm.kernels.gpu.common import begin, load_rows
from modenorm.kernels.gpu.launch import Launch
from modenorm.kernels.gpu.plan import AffineKind
from modenorm.kernels.gpu.tiles import Geometry, in_pieces, inference_tile, power_of_two_in

__all__ = ["inference_launch", "lines_shape"]


@triton.jit
def _inference_kernel(
    x_ptr,  # (N, C, L), or (N, L, C) if CHANNELS_LAST
    gate_weight_ptr,  # (K, C)
    gate_bias_ptr,  # (K,)
    mode_mean_ptr,  # (K, C)
    mode_var_ptr,  # (K, C)
    weight_ptr,  # (C,) or (K, C)
    bias_ptr,  # (C,) or (K, C)
    gates_ptr,  # (N, K)
    lines_ptr,  # (N, C, 4) and 4 more: centre, scale and shift of the map, sum over positions
    y_ptr,  # as x
    num_channels,
    num_positions,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_MODE: tl.constexpr,
    NUM_MODES: tl.constexpr,
    CENTRED: tl.constexpr,  # half types are too coarse for a centre to save any digits
    PIECES: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    SPLIT: tl.constexpr,  # a piece may have numbers of two channels
    DIVIDES: tl.constexpr,  # pieces: the size of a sample, else what is contiguous
    SINGLE: tl.constexpr,  # a block holds all channels
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,  # where a thread has one channel
    ROWS: tl.constexpr,  # of a tile: positions, or pieces
    WIDTH: tl.constexpr,  # of a tile: channels, or numbers of a piece
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    sample = tl.program_id(0).to(tl.int64)
    # see _hinted in pass_kernels.py
    if CHANNELS_LAST:
        num_channels = num_channels // DIVIDES * DIVIDES
    elif not PIECES:
        num_positions = num_positions // DIVIDES * DIVIDES
    size = num_channels * num_positions
    if PIECES:
        size = size // DIVIDES * DIVIDES
    x_ptr += sample * size
    y_ptr += sample * size
    lines_ptr += sample * num_channels * 4
    modes = tl.arange(0, BLOCK_K)
    mask_k = modes < NUM_MODES
    if PIECES:
        sums = _sums_of_pieces(
            x_ptr, gate_weight_ptr, num_channels, num_positions, size,
            NUM_MODES, BLOCK_K, SPLIT, ROWS, WIDTH,
        )  # fmt: skip
    else:
        if CHANNELS_LAST:
            _store_sums(x_ptr, lines_ptr + 3, num_channels, num_positions, ROWS, WIDTH)
        else:
            _store_row_sums(x_ptr, lines_ptr + 3, num_channels, num_positions, ROWS, WIDTH)
        tl.debug_barrier()  # other threads read what was stored
        if SINGLE:
            channels = tl.arange(0, BLOCK_C)
            mask_c = channels < num_channels
            weight = load_rows(gate_weight_ptr, modes, channels, mask_k, mask_c, num_channels)
            found = tl.load(lines_ptr + 3 + channels * 4, mask=mask_c, other=0.0)
            sums = tl.sum(weight * found[None, :], 1)
        else:
            sums = _sums_of_channels(
                lines_ptr + 3, gate_weight_ptr, num_channels, NUM_MODES, BLOCK_K, BLOCK_C
            )
    logits = sums / num_positions + tl.load(gate_bias_ptr + modes, mask=mask_k, other=0.0)
    logits = tl.where(mask_k, logits, float("-inf"))
    powers = tl.exp(logits - tl.max(logits, 0))
    gates = powers / tl.sum(powers, 0)
    gates_ptr += sample * NUM_MODES
    tl.store(gates_ptr + modes, gates, mask=mask_k)
    tl.debug_barrier()
    for first in range(0, num_channels, BLOCK_C):
        _store_lines(
            first + tl.arange(0, BLOCK_C), gates_ptr, mode_mean_ptr, mode_var_ptr, weight_ptr,
            bias_ptr, lines_ptr, num_channels, eps,
            HAS_WEIGHT, HAS_BIAS, PER_MODE, NUM_MODES, CENTRED,
        )  # fmt: skip
    tl.debug_barrier()
    if PIECES:
        _map_pieces(
            x_ptr, y_ptr, lines_ptr, num_channels, num_positions, size, CENTRED, SPLIT, ROWS, WIDTH
        )
    else:
        _map_tiles(
            x_ptr,
            y_ptr,
            lines_ptr,
            num_channels,
            num_positions,
            CENTRED,
            CHANNELS_LAST,
            ROWS,
            WIDTH,
        )


@triton.jit
def _zeros(NUM_MODES: tl.constexpr, ROWS: tl.constexpr):
    sums = tl.tuple(())
    for _ in tl.static_range(NUM_MODES):
        sums += (tl.zeros([ROWS], tl.float32),)
    return sums


@triton.jit
def _add(sums, values, gate_weight_ptr, channels, num_channels, NUM_MODES: tl.constexpr):
    """Each mode's sum with values of some channels, times the gate's weights.

    Beyond the last channel values are zero, and weights any.
    """
    channels = tl.minimum(channels, num_channels - 1)
    new = tl.tuple(())
    for mode in tl.static_range(NUM_MODES):
        weight = tl.load(gate_weight_ptr + mode * num_channels + channels)
        new += (sums[mode] + weight * values,)
    return new


@triton.jit
def _store_sums(
    x_ptr, sums_ptr, num_channels, num_positions, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Sums over the positions."""
    positions = tl.arange(0, BLOCK_P)
    for first in range(0, num_channels, BLOCK_C):
        channels = first + tl.arange(0, BLOCK_C)
        mask_c = channels < num_channels
        total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
        mask = positions < num_positions
        ahead = load_rows(x_ptr, positions, channels, mask, mask_c, num_channels)
        for position in range(BLOCK_P, num_positions + BLOCK_P, BLOCK_P):
            total += ahead.to(tl.float32)
            mask = position + positions < num_positions
            ahead = load_rows(x_ptr, position + positions, channels, mask, mask_c, num_channels)
        tl.store(sums_ptr + channels * 4, tl.sum(total, 0), mask=mask_c)


@triton.jit
def _store_row_sums(
    x_ptr, sums_ptr, num_channels, num_positions, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr
):
    """The same of rows that fit a tile."""
    positions, channels = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_C)
    mask_p, mask = positions < num_positions, channels < num_channels
    ahead = load_rows(x_ptr, channels, positions, mask, mask_p, num_positions)
    for first in range(0, num_channels, BLOCK_C):
        x = ahead.to(tl.float32)
        after = first + BLOCK_C + channels
        ahead = load_rows(x_ptr, after, positions, after < num_channels, mask_p, num_positions)
        here = first + channels
        tl.store(sums_ptr + here * 4, tl.sum(x, 1), mask=here < num_channels)


@triton.jit
def _sums_of_channels(
    sums_ptr,
    gate_weight_ptr,
    num_channels,
    NUM_MODES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Sums over a sample, one for each mode."""
    sums = _zeros(NUM_MODES, BLOCK_C)
    for first in range(0, num_channels, BLOCK_C):
        channels = first + tl.arange(0, BLOCK_C)
        found = tl.load(sums_ptr + channels * 4, mask=channels < num_channels, other=0.0)
        sums = _add(sums, found, gate_weight_ptr, channels, num_channels, NUM_MODES)
    return _joined(sums, NUM_MODES, BLOCK_K)


@triton.jit
def _joined(sums, NUM_MODES: tl.constexpr, BLOCK_K: tl.constexpr):
    """The modes' sums, which are spread over threads, as one vector."""
    found = tl.zeros([BLOCK_K], tl.float32)
    for mode in tl.static_range(NUM_MODES):
        found = tl.where(tl.arange(0, BLOCK_K) == mode, tl.sum(sums[mode], 0), found)
    return found


@triton.jit
def _map_tiles(
    x_ptr,
    y_ptr,
    lines_ptr,
    num_channels,
    num_positions,
    CENTRED: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    num_blocks, num_steps = tl.cdiv(num_channels, BLOCK_C), tl.cdiv(num_positions, BLOCK_P)
    for block in range(num_blocks):
        channels = (num_blocks - 1 - block) * BLOCK_C + tl.arange(0, BLOCK_C)
        mask_c = channels < num_channels
        line_ptrs = lines_ptr + channels * 4
        scale = tl.load(line_ptrs + 1, mask=mask_c, other=0.0)[None, :]
        shift = tl.load(line_ptrs + 2, mask=mask_c, other=0.0)[None, :]
        if CENTRED:
            centre = tl.load(line_ptrs, mask=mask_c, other=0.0)[None, :]
        for step in range(num_steps):
            positions = (num_steps - 1 - step) * BLOCK_P + tl.arange(0, BLOCK_P)
            if CHANNELS_LAST:
                offs = positions[:, None] * num_channels + channels[None, :]
            else:
                offs = channels[None, :] * num_positions + positions[:, None]
            mask = (positions < num_positions)[:, None] & mask_c[None, :]
            x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
            if CENTRED:
                x -= centre
            y = x * scale + shift
            tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _pieces(first, num_channels, num_positions, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Offsets of pieces, the channel of each one's first number, and which are of that channel.

    The division is exact for samples of less than 2^20 numbers.
    """
    starts = first + tl.arange(0, ROWS) * WIDTH
    channels = ((starts.to(tl.float32) + 0.5) * (1.0 / num_positions)).to(tl.int32)
    channels = tl.minimum(channels, num_channels - 1)
    slots = tl.arange(0, WIDTH)[None, :]
    own = slots < ((channels + 1) * num_positions - starts)[:, None]
    return starts[:, None] + slots, channels, own


@triton.jit
def _sums_of_pieces(
    x_ptr,
    gate_weight_ptr,
    num_channels,
    num_positions,
    size,
    NUM_MODES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Sums over a sample, one for each mode."""
    sums = _zeros(NUM_MODES, ROWS)
    offs, _, _ = _pieces(0, num_channels, num_positions, ROWS, WIDTH)
    ahead = tl.load(x_ptr + offs, mask=offs < size, other=0.0)
    for first in range(0, size, ROWS * WIDTH):
        offs, channels, own = _pieces(first, num_channels, num_positions, ROWS, WIDTH)
        x = ahead.to(tl.float32)
        offs += ROWS * WIDTH
        ahead = tl.load(x_ptr + offs, mask=offs < size, other=0.0)
        if SPLIT:
            after = tl.sum(tl.where(own, 0.0, x), 1)
            sums = _add(sums, after, gate_weight_ptr, channels + 1, num_channels, NUM_MODES)
            x = tl.where(own, x, 0.0)
        sums = _add(sums, tl.sum(x, 1), gate_weight_ptr, channels, num_channels, NUM_MODES)
    return _joined(sums, NUM_MODES, BLOCK_K)


@triton.jit
def _map_pieces(
    x_ptr,
    y_ptr,
    lines_ptr,
    num_channels,
    num_positions,
    size,
    CENTRED: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    num_blocks = tl.cdiv(size, ROWS * WIDTH)
    for block in range(num_blocks):
        first = (num_blocks - 1 - block) * (ROWS * WIDTH)
        offs, channels, own = _pieces(first, num_channels, num_positions, ROWS, WIDTH)
        x = tl.load(x_ptr + offs, mask=offs < size, other=0.0).to(tl.float32)
        y = _mapped(x, lines_ptr + channels * 4, CENTRED)
        if SPLIT:
            y = tl.where(own, y, _mapped(x, lines_ptr + channels * 4 + 4, CENTRED))
        tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=offs < size)


@triton.jit
def _mapped(x, line_ptrs, CENTRED: tl.constexpr):
    """The map of pieces, by a line for each."""
    if CENTRED:
        x -= tl.load(line_ptrs)[:, None]
    return x * tl.load(line_ptrs + 1)[:, None] + tl.load(line_ptrs + 2)[:, None]


@triton.jit
def _store_lines(
    channels,
    gates_ptr,
    mode_mean_ptr,
    mode_var_ptr,
    weight_ptr,
    bias_ptr,
    lines_ptr,
    num_channels,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_MODE: tl.constexpr,
    NUM_MODES: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """Centre, scale and shift of some channels, one mode after the other."""
    mask = channels < num_channels
    centre = tl.zeros(channels.shape, tl.float32)
    if CENTRED:
        for mode in tl.static_range(NUM_MODES):
            mode_mean = tl.load(
                mode_mean_ptr + mode * num_channels + channels, mask=mask, other=0.0
            )
            centre += tl.load(gates_ptr + mode) * mode_mean
    scale = tl.zeros(channels.shape, tl.float32)
    shift = tl.zeros(channels.shape, tl.float32)
    if HAS_BIAS and not PER_MODE:
        shift += tl.load(bias_ptr + channels, mask=mask, other=0.0)
    for mode in tl.static_range(NUM_MODES):
        offs = mode * num_channels + channels
        affine = offs if PER_MODE else channels
        gate = tl.load(gates_ptr + mode)
        mode_mean = tl.load(mode_mean_ptr + offs, mask=mask, other=0.0)
        term = gate * tl.rsqrt(tl.load(mode_var_ptr + offs, mask=mask, other=1.0) + eps)
        if HAS_WEIGHT:
            term *= tl.load(weight_ptr + affine, mask=mask, other=0.0)
        scale += term
        shift += term * (centre - mode_mean)
        if HAS_BIAS and PER_MODE:
            shift += gate * tl.load(bias_ptr + affine, mask=mask, other=0.0)
    tl.store(lines_ptr + channels * 4, centre, mask=mask)
    tl.store(lines_ptr + channels * 4 + 1, scale, mask=mask)
    tl.store(lines_ptr + channels * 4 + 2, shift, mask=mask)


def inference_launch(
    geometry: Geometry,
    num_modes: int,
    eps: float,
    affine: AffineKind,
    direct: bool,
) -> Launch:
    """The launch for tensors of one geometry; direct: see `Launch`."""
    samples, channels, positions, last, dtype = geometry
    tile, pieces = inference_tile(geometry, num_modes), in_pieces(geometry, num_modes)
    rows, width = (tile.rows, tile.positions) if pieces else (tile.positions, tile.rows)
    contiguous = channels * positions if pieces else channels if last else positions
    layout = (dtype.itemsize == 4, pieces, last, pieces and positions % width != 0)
    modes = triton.next_power_of_2(num_modes)
    block = min(triton.next_power_of_2(channels), 32 * tile.num_warps)
    blocks = (power_of_two_in(contiguous), channels <= block, modes, block, rows, width)
    sizes, constants = (channels, positions, eps), (*affine, num_modes, *layout, *blocks)
    return Launch(_inference_kernel, (samples,), sizes, constants, tile.num_warps, direct)


def lines_shape(geometry: Geometry) -> tuple[int, int]:
    """Of the memory where programs keep what other threads of theirs read."""
    return geometry.num_samples * geometry.num_channels + 1, 4
