"""Batch normalization of compiled networks on a GPU, by the streaming passes of mode norms.

Inductor sums over samples and positions in two or three launches each way; the passes sum over the
positions of every sample, and one small launch does the rest. As with mode norms, all that leads to
the maps' coefficients is an operator, and the maps are plain operators, which Inductor fuses with
what stands around the norm.

Letters: N samples, C channels.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from modenorm.buffers import HALF_TYPES
from modenorm.kernels import plain
from modenorm.kernels.cpp.operator import Work, operator
from modenorm.kernels.gpu.slab import Slab
from modenorm.kernels.layout import as_dense, dense_like
from modenorm.lab.layers.geometry import power_of_two
from modenorm.lab.layers.own_kernels import can_run, switched_on

if TYPE_CHECKING:
    from modenorm.kernels.gpu.passes import Geometry
    from modenorm.kernels.gpu.stage import Split, Stream

__all__ = [
    "Plan",
    "StreamedBatchNorm2d",
    "batch_gradients",
    "batch_statistics",
    "stream_batch_norms",
]

ENABLED = switched_on("BATCH_NORM")
"""Whether `StreamedBatchNorm2d` uses its own kernels where it can; else it is torch's."""
_TILE = 2048  # numbers that a program sums at once
_CHANNELS = 16  # of a program


def stream_batch_norms(model: nn.Module) -> None:
    """Let the batch norms of a model that is going to be compiled use these operators."""
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = StreamedBatchNorm2d  # which adds no state


class StreamedBatchNorm2d(nn.BatchNorm2d):
    """Torch's BatchNorm2d, but for compiled training on a GPU, which has operators of its own."""

    def forward(self, input: Tensor, relu: bool = False) -> Tensor:
        """Normalise (N, C, H, W), and cut the result off at zero if a ReLU is asked for."""
        if not self._kernels_serve(input):
            y = super().forward(input)
            return y.relu() if relu else y
        weight, bias = self.weight.detach(), self.bias.detach()
        running = (self.running_mean, self.running_var, self.num_batches_tracked)
        numbers = (self.eps, self.momentum, relu)
        kept, _ = batch_statistics(input.detach(), weight, bias, *running, *numbers)
        found: Tensor = _Map.apply(input, self.weight, self.bias, kept, relu)
        return found

    def _kernels_serve(self, x: Tensor) -> bool:
        if not (ENABLED and can_run(x) and torch.compiler.is_compiling() and self.training):
            return False
        if not (self.affine and self.track_running_stats) or self.momentum is None:
            return False
        if x.ndim != 4 or x.shape[1] != self.num_features or x.numel() <= x.shape[1]:
            return False  # for torch to refuse
        return x.dtype in (torch.float32, *HALF_TYPES) and self.weight.dtype == torch.float32


class _Map(torch.autograd.Function):
    """The map, with the gradient of everything that its coefficients were made from."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, kept: Tensor, relu: bool
    ) -> Tensor:
        ctx.save_for_backward(x, bias, kept)
        ctx.relu = relu
        centre, scale, *_ = _kept_slab(x.shape[:2], relu).tensors(kept)
        y = (x - _along(centre)) * _along(scale) + _along(bias)
        return plain.as_type(y.relu() if relu else y, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, kept = ctx.saved_tensors
        lines, dweight, dbias = batch_gradients(dy, x, kept, ctx.relu)
        centre, scale, *_ = _kept_slab(x.shape[:2], ctx.relu).tensors(kept)
        slope, offset, *_ = _lines_slab(x.shape[:2]).tensors(lines)
        # not x - centre: that is in the forward too, and might be kept for here, in float32
        apart = _along(centre) - x
        if ctx.relu:
            dy = torch.where(_along(bias) - apart * _along(scale) <= 0, 0, dy)
        dx = dy * _along(scale) + (_along(offset) - apart * _along(slope))
        return plain.as_type(dx, x.dtype), dweight, dbias, None, None


def _along(values: Tensor) -> Tensor:
    """(C,) values, shaped to broadcast along samples and positions."""
    return values.view(-1, 1, 1)


def _statistics_like(x: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """Memory for the results of `batch_statistics`."""
    rows = x.shape[:2]
    return _kept_slab(rows, given[-1]).allocate(x.device), _moments_slab(rows).allocate(x.device)


@operator(
    "batch_statistics(Tensor x, Tensor weight, Tensor bias, Tensor(a!) running_mean, "
    "Tensor(b!) running_var, Tensor(c!) tracked, float eps, float momentum, bool relu) "
    "-> (Tensor, Tensor)",
    _statistics_like,
)
def batch_statistics(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    tracked: Tensor,
    eps: float,
    momentum: float,
    relu: bool,
) -> Work:
    """What is kept for backward, and memory that was needed: two slabs."""
    x = as_dense(x)
    given = (weight, bias, running_mean, running_var, tracked)
    plan = _plan_for((x, *given), eps, momentum, relu)
    kept, moments = plan.kept.allocate(x.device), plan.moments.allocate(x.device)
    return Work((kept, moments), plan.run_statistics, _Forward(x, *given, kept, moments))


def _gradients_like(
    dy: Tensor, x: Tensor, kept: Tensor, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the results of `batch_gradients`."""
    return _empty_gradients(x)


@operator(
    "batch_gradients(Tensor dy, Tensor x, Tensor kept, bool relu) -> (Tensor, Tensor, Tensor)",
    _gradients_like,
)
def batch_gradients(dy: Tensor, x: Tensor, kept: Tensor, relu: bool) -> Work:
    """A slab with slope and offset of dx; the gradients of weight and bias."""
    x = as_dense(x)
    dy, found = dense_like(dy, x), _empty_gradients(x)
    plan = _plan_for((x, dy, kept), 0.0, 0.0, relu)
    return Work(found, plan.run_gradients, _Backward(dy, x, kept, *found))


def _kept_slab(rows: tuple[int, ...], relu: bool) -> Slab:
    """Mean, scale and 1/σ; then the mean for each sample, if a ReLU follows scale and shift too."""
    channels, more = rows[1:], rows if relu else (1,)
    return Slab(channels, channels, channels, rows, more, more)


def _moments_slab(rows: tuple[int, ...]) -> Slab:
    """Mean and variance of each sample."""
    return Slab(rows, rows)


def _lines_slab(rows: tuple[int, ...]) -> Slab:
    """Slope and offset of dx; the sums of each sample."""
    return Slab(rows[1:], rows[1:], rows, rows)


def _empty_gradients(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A slab of lines, and memory for the gradients of weight and bias."""
    rows, device = x.shape[:2], x.device
    dweight, dbias = (torch.empty(rows[1], device=device, dtype=torch.float32) for _ in range(2))
    return _lines_slab(rows).allocate(device), dweight, dbias


class _Forward(NamedTuple):
    """The arrays of the forward's launches."""

    x: Any
    weight: Any
    bias: Any
    running_mean: Any
    running_var: Any
    tracked: Any
    kept: Any  # a slab
    moments: Any  # a slab


class _Backward(NamedTuple):
    """The arrays of the backward's launches."""

    dy: Any
    x: Any
    kept: Any  # a slab
    lines: Any  # a slab
    dweight: Any
    dbias: Any


class Plan:
    """The launches of a batch norm of one size: two forward, two backward."""

    def __init__(
        self, geometry: Geometry, eps: float, momentum: float, relu: bool, direct: bool
    ) -> None:
        from modenorm.kernels.gpu.launch import Launch
        from modenorm.kernels.gpu.passes import Passes
        from modenorm.kernels.gpu.stage import Stage
        from modenorm.lab.layers import batch_norm_kernels as kernels

        rows, count = geometry[:2], geometry.num_samples * geometry.num_positions
        self.kept, self.moments = _kept_slab(rows, relu), _moments_slab(rows)
        self.lines = _lines_slab(rows)
        self.passes, self._relu = Passes(geometry, direct), relu
        grid = (-(-geometry.num_channels // _CHANNELS),)
        samples = power_of_two(geometry.num_samples)
        tile = (min(samples, _TILE // _CHANNELS), _CHANNELS)
        numbers = (*rows, eps, momentum, count / (count - 1))
        self.statistics = Launch(
            kernels.batch_statistics_kernel, grid, numbers, (relu, *tile), direct=direct
        )
        self.gradients = Launch(
            kernels.batch_gradients_kernel, grid, (*rows, 1 / count), tile, direct=direct
        )
        self.run_statistics = Stage(direct, self._statistics)
        self.run_gradients = Stage(direct, self._gradients)

    def _statistics(self, stream: Stream, split: Split, arrays: _Forward) -> None:
        x, *given, kept, moments = arrays
        mean, var = split(self.moments, moments)
        self.passes.moments(stream, x, mean, var)
        self.statistics(stream, mean, var, *given, *split(self.kept, kept))

    def _gradients(self, stream: Stream, split: Split, arrays: _Backward) -> None:
        dy, x, kept, lines, dweight, dbias = arrays
        _, scale, inverse, *of_samples = split(self.kept, kept)
        slope, offset, *sums = split(self.lines, lines)
        if self._relu:
            self.passes.reduce_cut_backward(stream, dy, x, *of_samples, *sums)
        else:
            self.passes.reduce_backward(stream, dy, x, of_samples[0], *sums)
        self.gradients(stream, *sums, scale, inverse, slope, offset, dweight, dbias)


def _plan_for(tensors: tuple[Tensor, ...], eps: float, momentum: float, relu: bool) -> Plan:
    """The plan of a call on a dense x, which is the first of what its launches read."""
    from modenorm.kernels.gpu.plan import aligned, geometry_of

    x = tensors[0]
    return _plan(geometry_of(x), eps, momentum, relu, x.get_device(), aligned(tensors))


@functools.lru_cache(maxsize=4096)
def _plan(
    geometry: Geometry, eps: float, momentum: float, relu: bool, device: int, direct: bool
) -> Plan:
    return Plan(geometry, eps, momentum, relu, direct)
