"""What layers would compute with fewer modes: every way to have one less, and the change it makes.

Letters: N samples, C channels, K modes, T ways. All in float64, on the device of what is given; the
ways are worked out together, since a layer's arrays are small and there are many ways.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modenorm import mixing
from modenorm.layers import ModeGroupNorm, ModeNorm
from modenorm.pruning.resizing import group_members, group_weights, merged_statistics

__all__ = ["ChannelSearch", "ModeSearch", "Stop"]

Group = tuple[int, ...]
Groups = tuple[Group, ...]

AT_ONCE = {"cuda": 1 << 24}
"""Values of one array of ways that are worked out together, by device."""
IN_CACHE = 1 << 18
"""On other devices: 2 MiB, small enough for a core's second-level cache."""


@dataclass(frozen=True)
class Stop:
    """A layer with fewer modes: groups of the old ones, offsets of biases, change of its output."""

    groups: Groups
    offsets: tuple[float, ...]
    change: float


class ModeSearch:
    """Fewer modes of a mode norm: one is dropped, or two are merged.

    With gates g, and a and b of modes (K, C), a mode norm's scale is g·a and its shift is
    m·scale − g·b, but for a bias that all modes share.

    Args:
        layer: Has running estimates.
        mean: m, (N, C), of the layer's inputs.
        var: (N, C), of its inputs.
        logs: (N, K), of its gates.
        shares: (K,), mean gate of each mode, by which merged ones are weighted.
    """

    def __init__(
        self, layer: ModeNorm, mean: Tensor, var: Tensor, logs: Tensor, shares: Tensor
    ) -> None:
        self.logs, self.gates = logs, logs.exp()
        self.shares = shares
        self._mean, self._deviations = mean, var.sqrt()
        self._eps = layer.eps
        assert layer.running_mean is not None
        assert layer.running_var is not None
        self.estimates = layer.running_mean.to(mean), layer.running_var.to(mean)
        self._weight = _like(mean, layer.weight)
        self._bias = _like(mean, layer.bias) if layer.per_mode_affine else None
        self._places: dict[Group, int] = {}  # of a group's row in the tables
        self._offsets: list[float] = []
        self._logits, self._lines = logs.new_empty(0, len(logs)), mean.new_empty(0, 2 * len(mean.T))
        self._add([(k,) for k in range(logs.shape[1])])
        self._before = torch.softmax(self._logits, 0).t() @ self._lines  # (N, 2C)
        scale, pulled = self._before.chunk(2, 1)
        shift = mean * scale - pulled
        square = scale**2 * var + (shift - shift.mean(0)) ** 2
        self._size = float(square.mean().sqrt()) or 1.0

    def steps(self, stop: Stop) -> list[Stop]:
        """Every way to have one mode less."""
        ways = [*_drops(stop.groups), *_merges(stop.groups)]
        self._add(sorted(set(itertools.chain(*ways)) - self._places.keys()))
        changes = self._changes(ways)
        return [
            Stop(groups, tuple(self._offsets[self._places[group]] for group in groups), change)
            for groups, change in zip(ways, changes, strict=True)
        ]

    def _add(self, groups: Sequence[Group]) -> None:
        """Work out what modes the groups would be."""
        if not groups:
            return
        weights = group_weights(groups, self.shares).to(self.logs)
        offsets = self._offsets_of(groups, weights)
        self._places.update({group: len(self._places) + i for i, group in enumerate(groups)})
        self._offsets += [0.0 if len(g) == 1 else o for g, o in zip(groups, offsets, strict=True)]
        offset = self.logs.new_tensor(self._offsets[-len(groups) :])
        self._logits = torch.cat([self._logits, weights @ self.logs.t() + offset[:, None]])
        self._lines = torch.cat([self._lines, self._lines_of(weights)])

    def _offsets_of(self, groups: Sequence[Group], weights: Tensor) -> list[float]:
        """What mean logits of groups are below the logarithms of their gates' sums, on average."""
        together = group_members(groups, len(self.shares)).to(self.gates) @ self.gates.t()
        gaps = together.log() - weights @ self.logs.t()  # (groups, N)
        found: list[float] = ((together * gaps).sum(1) / together.sum(1)).tolist()
        return found

    def _lines_of(self, weights: Tensor) -> Tensor:
        """The lines a and b, side by side, of modes put together by weights: (groups, 2C)."""
        mean, var = merged_statistics(weights, *self.estimates)
        scale = (var + self._eps).rsqrt()
        if self._weight is not None:
            scale = scale * (weights @ self._weight if self._weight.ndim == 2 else self._weight)
        pulled = scale * mean
        if self._bias is not None:
            pulled = pulled - weights @ self._bias
        return torch.cat([scale, pulled], 1)

    def _changes(self, ways: Sequence[Groups]) -> list[float]:
        """How much the layer's output changes, relative to its standard deviation."""
        places = torch.tensor(
            [[self._places[group] for group in groups] for groups in ways], device="cpu"
        )
        device = self.logs.device
        size = len(self.logs) * max(self._before.shape[1], places.shape[1])
        parts = places.to(device).split(max(1, AT_ONCE.get(device.type, IN_CACHE) // size))
        norms = torch.cat([self._norms(part) for part in parts])
        return (norms / self._mean.numel() ** 0.5 / self._size).tolist()

    def _norms(self, places: Tensor) -> Tensor:
        """The norm over samples and channels of what changes in the output, (T,)."""
        gates = torch.softmax(self._logits[places], 1).mT  # (T, N, modes)
        # summed up as before, so that a mode without samples makes no difference at all
        change = torch.bmm(gates, self._lines[places]).sub_(self._before)
        scale, pulled = change.chunk(2, 2)
        pulled.addcmul_(scale, self._mean, value=-1)  # of the shift, with the other sign
        scale.mul_(self._deviations)
        return torch.linalg.vector_norm(change.flatten(1), dim=1)


class ChannelSearch:
    """Fewer modes of a mode group norm, which only drops them.

    Args:
        layer: Whose gates follow from its input.
        mean: (N, C), of the layer's inputs.
        var: (N, C), of its inputs.
    """

    def __init__(self, layer: ModeGroupNorm, mean: Tensor, var: Tensor) -> None:
        self._layer, self._mean, self._var = layer, mean, var
        self._gate = layer.gate_weight.detach().to(mean), layer.gate_bias.detach().to(mean)
        self._before = scale, shift = self._map(tuple((k,) for k in range(layer.num_modes)))
        square = scale**2 * var + (shift - shift.mean(0)) ** 2
        self._size = float(square.mean().sqrt()) or 1.0

    def steps(self, stop: Stop) -> list[Stop]:
        """Every way to have one mode less."""
        ways = list(_drops(stop.groups))
        changes = torch.stack([self._change(groups) for groups in ways]).tolist()
        return [Stop(g, (0.0,) * len(g), c) for g, c in zip(ways, changes, strict=True)]

    def _change(self, groups: Groups) -> Tensor:
        scale, shift = self._map(groups)
        square = (scale - self._before[0]) ** 2 * self._var + (shift - self._before[1]) ** 2
        return square.mean().sqrt() / self._size

    def _map(self, groups: Groups) -> tuple[Tensor, Tensor]:
        """Scale and shift, (N, C), of the layer with these modes alone."""
        layer, kept = self._layer, list(itertools.chain(*groups))
        return mixing.channel_modes(
            self._mean,
            self._var if layer.variance == "pixel" else None,
            self._gate[0][kept],
            self._gate[1][kept],
            _like(self._mean, layer.weight),
            _like(self._mean, layer.bias),
            layer.eps,
        )[:2]


def _drops(groups: Groups) -> list[Groups]:
    return [groups[:i] + groups[i + 1 :] for i in range(len(groups))]


def _merges(groups: Groups) -> list[Groups]:
    ways = []
    for one, other in itertools.combinations(groups, 2):
        rest = (group for group in groups if group not in (one, other))
        ways.append(tuple(sorted((*rest, tuple(sorted(one + other))))))
    return ways


def _like(values: Tensor, tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to(values)
