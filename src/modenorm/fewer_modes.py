"""A layer with fewer modes: what it would compute, and how much that differs from what it does.

Letters: N samples, C channels, K modes. A layer's map of each sample and channel depends on small
arrays only, so dropping a mode or merging two is tried on them without running the model.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from modenorm import mixing
from modenorm.findings import DEAD_SHARE
from modenorm.kernels import plain
from modenorm.layers import ModeGroupNorm, ModeNorm
from modenorm.modes import SMALLEST_GATE, statistics_distances
from modenorm.pruning_report import LayerPruning
from modenorm.recording import listening
from modenorm.resizing import (
    combine_modes,
    group_weights,
    last_linear,
    merged_statistics,
    mode_rows,
)

__all__ = ["LayerView", "Stop", "furthest", "leave_shared", "watching"]

NO_BETTER = 1e-6  # differences between changes that don't count
MOST_SAMPLES = 2048  # of one layer's samples, for choosing what to merge


@dataclass(frozen=True)
class Stop:
    """A layer with fewer modes: groups of the old ones, offsets of biases, change of its output."""

    groups: tuple[tuple[int, ...], ...]
    offsets: tuple[float, ...]
    change: float


def furthest(path: Sequence[Stop], limit: float) -> Stop:
    """The last stop of a layer's path that changes its output by no more than the limit."""
    return [stop for stop in path if stop.change <= limit][-1]


class LayerView:
    """What a layer saw and did on the batches, in float64 on the CPU, and what it would do."""

    def __init__(self, layer: ModeNorm | ModeGroupNorm) -> None:
        self.layer = layer
        self.note = ""
        self.takes_more = False  # gates or a mask, which a batch norm could not be called with
        self._means: list[Tensor] = []
        self._vars: list[Tensor] = []
        self._logs: list[Tensor] = []
        if not all(isinstance(rows, nn.Parameter) for rows in mode_rows(layer)):
            self.note = "left: its rows per mode are computed from other parameters"
        if isinstance(layer, ModeNorm):
            if last_linear(layer.gate, layer.num_modes) is None:
                self.note = f"left: its gate, {type(layer.gate).__name__}, has no rows per mode"
            if layer.running_mean is None:
                self.note = "left: it has no running estimates"

    def take_input(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hear what the layer is called with; a forward pre-hook."""
        self.takes_more |= len(args) > 1 or bool({"gates", "mask"} & kwargs.keys())
        given = kwargs.get("gates", args[1] if len(args) > 1 else None)
        if given is not None:
            self.note = "left: its gates are given from outside"
        if kwargs.get("mask", args[2] if len(args) > 2 else None) is not None:
            self.note = "left: its input has a mask"
        x = args[0] if args else kwargs["x"]
        if x.numel() == 0:
            return
        mean, var = plain.moments(x.detach())
        assert var is not None
        self._means.append(mean.double().cpu())
        self._vars.append(var.double().cpu())

    def take_gates(self, gates: Tensor) -> None:
        """Hear the gates of a forward; those of a mode group norm follow from its input."""
        if gates.ndim == 2:
            self._logs.append(gates.detach().double().cpu().clamp_min(SMALLEST_GATE).log())

    def path(self) -> list[Stop]:
        """The layer with ever fewer modes, and how much its output changes."""
        modes = self.layer.num_modes
        first = Stop(tuple((k,) for k in range(modes)), (0.0,) * modes, 0.0)
        stops = [first]
        if not sum(map(len, self._means)):
            self.note = self.note or "left: it was not used"
        if self.note:
            return stops
        self._prepare()
        while len(stops[-1].groups) > 1:
            stops.append(min(self._tries(stops[-1]), key=self._cost))
        return stops

    def _prepare(self) -> None:
        rows = sum(map(len, self._means))
        every = -(-rows // MOST_SAMPLES)
        self.mean, self.var = (torch.cat(parts)[::every] for parts in (self._means, self._vars))
        if self._logs:
            self.logs = torch.cat(self._logs)[::every]
        else:
            assert isinstance(self.layer, ModeGroupNorm)
            w, b = (p.double().cpu() for p in (self.layer.gate_weight, self.layer.gate_bias))
            self.logs = (self.mean[..., None] * w + b).log_softmax(-1)
        self.gates = self.logs.exp()
        self.shares = self.gates.flatten(0, -2).mean(0)
        if isinstance(self.layer, ModeNorm):
            mean, var = _wide(self.layer.running_mean), _wide(self.layer.running_var)
            assert mean is not None
            assert var is not None
            self._estimates = mean, var
            self._statistics = statistics_distances(mean, var, self.layer.eps)
        self._first = self._map(tuple((k,) for k in range(len(self.shares))))
        scale, shift = self._first
        centred = shift - shift.mean(0)
        flat = self.logs.flatten(0, -2)
        self._between = torch.stack(
            [(flat - flat[:, k : k + 1]).std(0, correction=0) for k in range(flat.shape[1])]
        )
        self._deviation = float((scale**2 * self.var + centred**2).mean().sqrt()) or 1.0

    def _tries(self, stop: Stop) -> Iterator[Stop]:
        """Every way to have one mode less: drop one, or merge two."""
        count = len(stop.groups)
        for k in range(count):
            rest = [i for i in range(count) if i != k]
            groups = tuple(stop.groups[i] for i in rest)
            yield self._stop(groups, tuple(stop.offsets[i] for i in rest))
        if isinstance(self.layer, ModeGroupNorm):
            return
        for j, k in itertools.combinations(range(count), 2):
            rest = [i for i in range(count) if i not in (j, k)]
            group = tuple(sorted(stop.groups[j] + stop.groups[k]))
            groups = (*(stop.groups[i] for i in rest), group)
            offsets = (*(stop.offsets[i] for i in rest), self._offset(group))
            order = sorted(range(len(groups)), key=groups.__getitem__)
            yield self._stop(tuple(groups[i] for i in order), tuple(offsets[i] for i in order))

    def _cost(self, stop: Stop) -> float:
        """The change; of equal ones, dead modes are rather dropped and living ones merged."""
        dead = {k for k, share in enumerate(self.shares.tolist()) if share < DEAD_SHARE}
        merged = {k for group in stop.groups if len(group) > 1 for k in group}
        kept = set(itertools.chain(*stop.groups))
        dropped = set(range(len(self.shares))) - kept
        return stop.change + NO_BETTER * (len(merged & dead) + len(dropped - dead))

    def _offset(self, group: tuple[int, ...]) -> float:
        """What the mean logit of a group is below the logarithm of its gates' sum, on average."""
        part = list(group)
        weights = self.shares[part] / self.shares[part].sum()
        together = self.gates[:, part].sum(1)
        gap = self.logs[:, part].logsumexp(1) - self.logs[:, part] @ weights
        return float((together * gap).sum() / together.sum())

    def _stop(self, groups: tuple[tuple[int, ...], ...], offsets: tuple[float, ...]) -> Stop:
        scale, shift = self._map(groups, torch.tensor(offsets, dtype=torch.float64))
        square = (scale - self._first[0]) ** 2 * self.var + (shift - self._first[1]) ** 2
        return Stop(groups, offsets, float(square.mean().sqrt()) / self._deviation)

    def _map(
        self, groups: tuple[tuple[int, ...], ...], offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scale and shift, (N, C), of the layer with these groups as modes."""
        layer = self.layer
        weights = group_weights(groups, self.shares)
        if isinstance(layer, ModeGroupNorm):
            return mixing.channel_modes(
                self.mean,
                self.var if layer.variance == "pixel" else None,
                _mixed(weights, layer.gate_weight),
                _mixed(weights, layer.gate_bias),
                _wide(layer.weight),
                _wide(layer.bias),
                layer.eps,
            )[:2]
        logits = self.logs @ weights.t()
        gates = torch.softmax(logits if offsets is None else logits + offsets, 1)
        mean, var = merged_statistics(weights, *self._estimates)
        weight, bias = (
            _mixed(weights, p) if layer.per_mode_affine and p is not None else _wide(p)
            for p in (layer.weight, layer.bias)
        )
        inverse = (var + layer.eps).rsqrt()  # (K, C)
        inverse = inverse if weight is None else inverse * weight
        scale = gates @ inverse
        shift = scale * self.mean - gates @ (inverse * mean)
        if bias is not None:
            shift = shift + (gates @ bias if bias.ndim == 2 else bias)
        return scale, shift

    def shrink(
        self, layer: ModeNorm | ModeGroupNorm, stop: Stop, optimizer: Optimizer | None = None
    ) -> None:
        """Give the layer, or a copy of it, the modes of a stop, in place."""
        if len(stop.groups) < layer.num_modes:
            offsets = torch.tensor(stop.offsets, dtype=torch.float64)
            combine_modes(layer, stop.groups, self.shares, offsets, optimizer)

    def describe(self, name: str, stop: Stop, batchnorm: bool) -> LayerPruning:
        """What became of the layer, in numbers."""
        if self.note:
            return LayerPruning(name, len(stop.groups), len(stop.groups), note=self.note)
        before = len(self.shares)
        merged = tuple(group for group in stop.groups if len(group) > 1)
        kept = set(itertools.chain(*stop.groups))
        return LayerPruning(
            name,
            before=before,
            after=len(stop.groups),
            removed=tuple(k for k in range(before) if k not in kept),
            merged=merged,
            shares=tuple(self.shares.tolist()),
            statistics_distances=tuple(_largest_of(self._statistics, group) for group in merged),
            gate_distances=tuple(_largest_of(self._between, group) for group in merged),
            change=stop.change,
            batchnorm=batchnorm,
        )


def leave_shared(views: Iterable[LayerView]) -> None:
    """Mark layers that have rows of parameters in common: one can't have fewer modes alone."""
    rows = {view: mode_rows(view.layer) for view in views}
    owners = Counter(itertools.chain(*rows.values()))
    for view, parameters in rows.items():
        if any(owners[parameter] > 1 for parameter in parameters):
            view.note = view.note or "left: another layer has the same gate or parameters"


def _largest_of(distances: Tensor, group: tuple[int, ...]) -> float:
    return float(distances[list(group)][:, list(group)].max())


def _wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().double().cpu()


def _mixed(weights: Tensor, rows: Tensor) -> Tensor:
    return weights @ rows.detach().double().cpu()


@contextlib.contextmanager
def watching(views: Iterable[LayerView]) -> Iterator[None]:
    """Let views see what their layers do."""
    with contextlib.ExitStack() as stack:
        heard = []
        for view in views:
            handle = view.layer.register_forward_pre_hook(view.take_input, with_kwargs=True)
            stack.callback(handle.remove)
            heard.append((view.layer, view.take_gates))
        stack.enter_context(listening(heard))
        yield
