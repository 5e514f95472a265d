"""The launches of a mode group norm of one size, and the memory between them.

Forward: moments, mixing, map. Backward: reduce, mixing, map, parameters.
mode_group_norm.py makes one autograd node of them, mode_group_norm_operator.py hands all but the
maps to `torch.compile`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial

from torch import Tensor

from modenorm.kernels import plain
from modenorm.kernels.cpp.node import MODE_GROUP_NORM
from modenorm.kernels.gpu.mode_group_mixing import ChannelMixing
from modenorm.kernels.gpu.passes import Geometry, Passes
from modenorm.kernels.gpu.plan import AffineKind, affine_kind, aligned, geometry_of, pointer
from modenorm.kernels.gpu.slab import channel_backward_slab, channel_forward_slab, channel_kept_slab
from modenorm.kernels.gpu.stage import Split, Stage, Stream, node_of
from modenorm.kernels.mode_group_norm_arrays import ChannelBackward, ChannelForward, Given

__all__ = ["ChannelPlan", "channel_plan_for"]


class ChannelPlan:
    """The launches and memory of a mode group norm of one size."""

    def __init__(
        self,
        geometry: Geometry,
        num_modes: int,
        eps: float,
        pixel: bool,
        affine: AffineKind,
        direct: bool,
    ) -> None:
        samples, channels, positions = geometry[:3]
        self.passes, self.pixel = Passes(geometry, direct), pixel
        self.mixing = ChannelMixing(
            samples, channels, positions, num_modes, eps, pixel, affine, direct
        )
        self.gates_shape = (samples, channels, num_modes)
        self.kept = channel_kept_slab(self.gates_shape, pixel)
        self.forward = channel_forward_slab(samples, channels)
        self.backward = channel_backward_slab(self.gates_shape, pixel)
        # without the gates as an output, and with them
        self.run_forward = [Stage(direct, self._coefficients, self._apply) for _ in (False, True)]
        self.run_mix = Stage(direct, self._coefficients)
        back = (self._samples_backward, self._parameters_backward, self._apply_backward)
        # with a gradient of the gates from elsewhere, and without
        self.run_backward = [Stage(direct, *back) for _ in (False, True)]
        self.run_mix_backward = [Stage(direct, *back[:2]) for _ in (False, True)]
        self._node: Callable[..., Tensor] | None = None

    def node_for(self, given: Given) -> Callable[..., Tensor] | None:
        """An autograd node of C++ for calls like this; None if there is none yet."""
        if self._node is None:
            self._node = node_of(
                MODE_GROUP_NORM,
                self.run_forward[False],
                self.run_backward[True],
                (self.kept, self.forward, self.backward),
                given[:4],
                (),
                partial(plain.mode_group_norm, eps=given.eps, pixel=given.pixel),
            )
        return self._node

    def _coefficients(self, stream: Stream, split: Split, arrays: ChannelForward) -> None:
        x, gate_weight, gate_bias, weight, bias, gates, kept, scratch, _ = arrays
        mean, var, *of_modes = split(self.kept, kept)
        scale, shift = split(self.forward, scratch)
        if self.pixel:
            self.passes.moments(stream, x, mean, var)
        else:
            self.passes.mean(stream, x, mean, scale)  # which is written over afterwards
        affine = (pointer(weight, mean), pointer(bias, mean))
        mix = self.mixing.forward if gates is None else self.mixing.forward_with_gates
        gates = pointer(gates, mean)
        mix(stream, mean, var, gate_weight, gate_bias, *affine, scale, shift, gates, *of_modes)

    def _apply(self, stream: Stream, split: Split, arrays: ChannelForward) -> None:
        mean, *_ = split(self.kept, arrays.kept)
        self.passes.apply(stream, arrays.x, mean, *split(self.forward, arrays.scratch), arrays.y)

    def _samples_backward(self, stream: Stream, split: Split, arrays: ChannelBackward) -> None:
        dy, x, gate_weight, gate_bias, weight, dgates, kept, scratch, *_ = arrays
        mean, var, *of_modes = split(self.kept, kept)
        a, d, scale, offset, slope, dgate_parts = split(self.backward, scratch)
        self.passes.reduce_backward(stream, dy, x, mean, d, a)
        mix = self.mixing.backward if dgates is None else self.mixing.backward_extra
        mix(
            stream, mean, var, *of_modes, gate_weight, gate_bias, pointer(weight, mean),
            pointer(dgates, mean), a, d, scale, slope, offset, dgate_parts,
        )  # fmt: skip

    def _apply_backward(self, stream: Stream, split: Split, arrays: ChannelBackward) -> None:
        mean, *_ = split(self.kept, arrays.kept)
        _, _, scale, offset, slope, _ = split(self.backward, arrays.scratch)
        launch = self.passes.apply_backward[self.pixel, True]
        launch(stream, arrays.dy, arrays.x, mean, scale, slope, offset, arrays.dx)

    def _parameters_backward(self, stream: Stream, split: Split, arrays: ChannelBackward) -> None:
        mean, _, mode_mean, mode_var, _ = split(self.kept, arrays.kept)
        a, d, *_, dgate_parts = split(self.backward, arrays.scratch)
        found = (pointer(gradient, mean) for gradient in (arrays.dweight, arrays.dbias))
        self.mixing.parameters(
            stream, mean, mode_mean, mode_var, a, d, dgate_parts, *found,
            arrays.dgate_weight, arrays.dgate_bias,
        )  # fmt: skip


def channel_plan_for(
    x: Tensor, given: Given, others: tuple[Tensor | None, ...] = ()
) -> ChannelPlan:
    """The plan of a call on a dense x; other tensors are looked at for alignment."""
    return _plan(
        geometry_of(x),
        len(given.gate_weight),
        given.eps,
        given.pixel,
        affine_kind(given.weight, given.bias),
        x.get_device(),
        aligned((x, *given[:4], *others)),
    )


@functools.lru_cache(maxsize=4096)
def _plan(
    geometry: Geometry,
    num_modes: int,
    eps: float,
    pixel: bool,
    affine: AffineKind,
    device: int,  # kernels are compiled for one
    direct: bool,
) -> ChannelPlan:
    return ChannelPlan(geometry, num_modes, eps, pixel, affine, direct)
