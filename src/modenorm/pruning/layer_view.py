"""A layer with fewer modes: how many go for which change of its output, and what became of it.

Letters: N samples, C channels, K modes. A layer's map of each sample and channel depends on small
arrays only, so dropping a mode or merging two is tried on them (search.py) without running the
model.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from modenorm.kernels import plain, streaming
from modenorm.kernels.choice import FUSED, choose_path
from modenorm.layers import ModeGroupNorm, ModeNorm
from modenorm.modes.findings import DEAD_SHARE
from modenorm.modes.recording import listening
from modenorm.modes.report import SMALLEST_GATE, statistics_distances
from modenorm.pruning.outcome import LayerPruning
from modenorm.pruning.resizing import combine_modes, mode_rows
from modenorm.pruning.search import ChannelSearch, ModeSearch, Stop
from modenorm.state import last_linear

__all__ = ["LayerView", "Stop", "furthest", "leave_shared", "watching"]

NO_BETTER = 1e-6  # differences between changes that don't count
MOST_SAMPLES = 2048  # of one layer's samples, for choosing what to merge


def furthest(path: Sequence[Stop], limit: float) -> Stop:
    """The last stop of a layer's path that changes its output by no more than the limit.

    The first one, where nothing has changed, is always allowed.
    """
    return [path[0], *(stop for stop in path[1:] if stop.change <= limit)][-1]


class LayerView:
    """What a layer saw and did on the batches, kept on the CPU, and what it would do."""

    def __init__(self, layer: ModeNorm | ModeGroupNorm) -> None:
        self.layer = layer
        self.note = ""
        self.takes_more = False  # arguments that a batch norm could not be called with
        self._means: list[Tensor] = []
        self._vars: list[Tensor] = []
        self._gates: list[Tensor] = []
        self._device = torch.device("cpu")  # where changes are worked out
        if not all(isinstance(rows, nn.Parameter) for rows in mode_rows(layer)):
            self.note = "left: its rows per mode are computed from other parameters"
        if isinstance(layer, ModeNorm):
            if last_linear(layer.gate, layer.num_modes) is None:
                self.note = f"left: its gate, {type(layer.gate).__name__}, has no rows per mode"
            if layer.running_mean is None:
                self.note = "left: it has no running estimates"

    def take_input(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hear what the layer is called with; a forward pre-hook."""
        self.takes_more |= len(args) != 1 or bool(kwargs)
        given = kwargs.get("gates", args[1] if len(args) > 1 else None)
        if given is not None:
            self.note = "left: its gates are given from outside"
        if kwargs.get("mask", args[2] if len(args) > 2 else None) is not None:
            self.note = "left: its input has a mask"
        x = args[0] if args else kwargs["x"]
        if x.numel() == 0:
            return
        if x.device.type == "cuda":  # others may have no float64
            self._device = x.device
        for kept, moment in zip((self._means, self._vars), _moments(x.detach()), strict=True):
            kept.append(moment.to("cpu", copy=True))

    def take_gates(self, gates: Tensor) -> None:
        """Hear the gates of a forward; those of a mode group norm as means over its channels."""
        usage = gates if gates.ndim == 2 else gates.mean(1)
        self._gates.append(usage.detach().cpu())

    def path(self) -> list[Stop]:
        """The layer with ever fewer modes, and how much its output changes."""
        modes = self.layer.num_modes
        stops = [Stop(tuple((k,) for k in range(modes)), (0.0,) * modes, 0.0)]
        if not sum(map(len, self._means)):
            self.note = self.note or "left: it was not used"
        if self.note:
            return stops
        usage = torch.cat(self._gates)
        self.shares = usage.double().mean(0)
        search = self._search(_chosen(usage))
        while len(stops[-1].groups) > 1:
            stops.append(min(search.steps(stops[-1]), key=self._cost))
        return stops

    def _search(self, chosen: Tensor) -> ModeSearch | ChannelSearch:
        mean, var, gates = (
            torch.cat(heard)[chosen].to(self._device, torch.float64)
            for heard in (self._means, self._vars, self._gates)
        )
        if isinstance(self.layer, ModeGroupNorm):
            return ChannelSearch(self.layer, mean, var)
        logs = gates.clamp_min(SMALLEST_GATE).log()
        search = ModeSearch(self.layer, mean, var, logs, self.shares)
        self._statistics = statistics_distances(*search.estimates, self.layer.eps).cpu()
        self._between = (logs[:, :, None] - logs[:, None]).std(0, correction=0).cpu()
        return search

    def _cost(self, stop: Stop) -> float:
        """The change; of equal ones, dead modes are rather dropped and living ones merged."""
        dead = {k for k, share in enumerate(self.shares.tolist()) if share < DEAD_SHARE}
        merged = {k for group in stop.groups if len(group) > 1 for k in group}
        kept = set(itertools.chain(*stop.groups))
        dropped = set(range(len(self.shares))) - kept
        return stop.change + NO_BETTER * (len(merged & dead) + len(dropped - dead))

    def shrink(
        self, layer: ModeNorm | ModeGroupNorm, stop: Stop, optimizer: Optimizer | None = None
    ) -> None:
        """Give the layer, or a copy of it, the modes of a stop, in place."""
        if len(stop.groups) < layer.num_modes:
            offsets = torch.tensor(stop.offsets, dtype=torch.float64, device="cpu")
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


def _chosen(usage: Tensor) -> Tensor:
    """The samples that decide: all, or of many some at random, since they may come in turns.

    With the one that uses it most for each mode: rare ones would seem to make no difference.
    """
    if len(usage) <= MOST_SAMPLES:
        return torch.arange(len(usage), device="cpu")
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = torch.randperm(len(usage), generator=generator, device="cpu")[:MOST_SAMPLES]
    return torch.cat([drawn, usage.argmax(0)]).unique()


def leave_shared(views: Iterable[LayerView]) -> None:
    """Mark layers that have rows of parameters in common: one can't have fewer modes alone."""
    rows = {view: mode_rows(view.layer) for view in views}
    owners = Counter(itertools.chain(*rows.values()))
    for view, parameters in rows.items():
        if any(owners[parameter] > 1 for parameter in parameters):
            view.note = view.note or "left: another layer has the same gate or parameters"


def _largest_of(distances: Tensor, group: tuple[int, ...]) -> float:
    return float(distances[list(group)][:, list(group)].max())


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance over the positions, (N, C) each."""
    if choose_path(x) in FUSED:
        mean, var, *_ = streaming.moments(x)
    else:
        mean, var = plain.moments(x)
    assert var is not None
    return mean, var


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
