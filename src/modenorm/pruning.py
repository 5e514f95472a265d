"""Take away modes that a trained model doesn't need, and say what that changed.

Letters: N samples, C channels, K modes. Which modes can go is decided by what the layer computes:
its map of each sample and channel depends on small arrays only, so dropping a mode or merging two
can be tried on them without running the model. How many go is decided by what the model computes.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from modenorm import mixing
from modenorm.convert import to_batchnorm
from modenorm.findings import DEAD_SHARE
from modenorm.kernels import plain
from modenorm.layers import ModeGroupNorm, ModeNorm
from modenorm.modes import SMALLEST_GATE, evaluating, statistics_distances
from modenorm.recording import listening, mode_layers
from modenorm.resizing import combine_modes, group_weights, last_linear, merged_statistics

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["DEFAULT_TOLERANCE", "LayerPruning", "Pruning", "prune_modes"]

DEFAULT_TOLERANCE = 0.05
NO_BETTER = 1e-6  # differences between changes that don't count
MOST_SAMPLES = 2048  # of one layer's samples, for choosing what to merge


@dataclass(frozen=True)
class LayerPruning:
    """What happened to the modes of one layer.

    Attributes:
        name: The layer's name in the model, "" for the model itself.
        before: Its number of modes.
        after: Its number of modes now.
        removed: Modes that were dropped; their samples go to the others.
        merged: Groups of modes that became one.
        shares: Mean gate of each mode before.
        statistics_distances: Of each merged group, the largest distance between its modes'
            statistics, in standard deviations (see `mode_report`).
        gate_distances: Of each merged group, the largest standard deviation of log g_j/g_k.
        change: Root mean square change of the layer's output, relative to its standard deviation.
        note: Why the layer was left alone, if it was.
        batchnorm: Whether it became a batch norm.
    """

    name: str
    before: int
    after: int
    removed: tuple[int, ...] = ()
    merged: tuple[tuple[int, ...], ...] = ()
    shares: tuple[float, ...] = ()
    statistics_distances: tuple[float, ...] = ()
    gate_distances: tuple[float, ...] = ()
    change: float = 0.0
    note: str = ""
    batchnorm: bool = False

    def words(self) -> str:
        """What was done, in words."""
        done = [f"dropped {k} ({100 * self.shares[k]:.1f} %)" for k in self.removed]
        distances = zip(self.merged, self.statistics_distances, self.gate_distances, strict=True)
        done += [
            f"merged {'+'.join(map(str, group))} (statistics {statistics:.2f}, gates {gates:.2f})"
            for group, statistics, gates in distances
        ]
        done += ["now batch norm"] if self.batchnorm else []
        return ", ".join(done) or self.note or "kept as it is"


@dataclass(frozen=True)
class Pruning:
    """What `prune_modes` did.

    Attributes:
        layers: In the order of definition.
        change: Root mean square change of the model's outputs on the batches, relative to their
            standard deviation.
        tolerance: What it was allowed to be.
        num_samples: On how many samples it was measured.
    """

    layers: tuple[LayerPruning, ...]
    change: float
    tolerance: float
    num_samples: int

    @property
    def num_modes(self) -> dict[str, int]:
        """The number of modes of each layer now, by name."""
        return {layer.name: layer.after for layer in self.layers}

    def to_json(self) -> str:
        """Everything as a JSON object."""
        return json.dumps(dataclasses.asdict(self))

    def __str__(self) -> str:
        rows = [(x.name or "model", f"{x.before} → {x.after}", x.words()) for x in self.layers]
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        lines = [f"{a:{widths[0]}}  {b:{widths[1]}}  {c}" for a, b, c in rows]
        return "\n".join([*lines, self._summary()])

    def _summary(self) -> str:
        return (
            f"outputs changed by {self.change:.2g} of their standard deviation on "
            f"{self.num_samples} samples (allowed: {self.tolerance:g})"
        )

    def table(self) -> Table:
        """A table for the terminal; needs the package rich."""
        try:
            from rich.table import Table
        except ImportError:
            raise ImportError("Pruning.table needs the package rich: pip install rich") from None
        table = Table(title="Modes of every layer", caption=self._summary())
        table.add_column("layer", overflow="fold")
        for heading in ("before", "after", "change"):
            table.add_column(heading, justify="right")
        table.add_column("done")
        for layer in self.layers:
            numbers = (str(layer.before), str(layer.after), f"{layer.change:.2g}")
            table.add_row(layer.name or "model", *numbers, layer.words())
        return table


@torch.no_grad()
def prune_modes(
    model: nn.Module,
    batches: Iterable[Any],
    tolerance: float = DEFAULT_TOLERANCE,
    *,
    optimizer: Optimizer | None = None,
    batchnorm: bool = False,
) -> Pruning:
    """Drop dead modes and merge duplicates, in place, as far as the model's outputs allow.

    Modes are the same to a layer if their statistics are, or if they receive all samples in the
    same proportion; usage alone does not tell, since gates that have collapsed use all modes alike.
    In each layer the change that dropping a mode or merging two makes to the layer's output is
    worked out, and the smallest is made first. All layers go as far as the same change of their
    outputs; that is chosen as large as the model's own outputs, in evaluation, allow. With a
    tolerance of 0 nothing is changed but what makes no difference at all.

    Gates must end in a linear layer; other layers are left, and so are those that got their gates
    from outside. Parameters stay the same objects.

    Args:
        model: Changed in place.
        batches: Inputs of the model, or tuples and lists whose first entry is the input; a few
            hundred samples at least. They are kept in memory.
        tolerance: Largest root mean square change of the model's outputs, relative to their
            standard deviation.
        optimizer: An optimizer of the model, whose state is changed along.
        batchnorm: Turn layers that end with one mode into batch norms, as `to_batchnorm` does. An
            optimizer keeps the gate's parameters, which then have no effect.

    Returns:
        What was done to each layer, and how much the outputs changed.

    Example:
        >>> import modenorm
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), modenorm.ModeNorm2d(8, num_modes=4))
        >>> x = torch.randn(64, 3, 8, 8)
        >>> for _ in range(100):
        ...     y = model(x)
        >>> print(prune_modes(model, [x]))
        1  4 → 1  merged 0+1+2+3 (statistics ..., gates ...)
        outputs changed by ... of their standard deviation on 64 samples (allowed: 0.05)
    """
    if not tolerance >= 0:
        raise ValueError(f"tolerance is {tolerance}; it must be at least 0")
    layers = mode_layers(model)
    if not layers:
        raise ValueError("prune_modes found no mode norm or mode group norm in the model")
    inputs = [batch if isinstance(batch, Tensor) else batch[0] for batch in batches]
    if sum(map(len, inputs)) == 0:
        raise ValueError("prune_modes got no samples; give it at least one batch of model inputs")
    views = {name: _View(layer) for name, layer in layers.items()}
    with _watching(views.values()):
        before = _outputs(model, inputs)
    paths = {name: view.path() for name, view in views.items()}
    scale = _deviation(before)

    def change_with(limit: float) -> float:
        trial = copy.deepcopy(model)
        for name, layer in mode_layers(trial).items():
            _apply(layer, views[name], _furthest(paths[name], limit))
        return _difference(before, _outputs(trial, inputs)) / scale

    changes = sorted({stop.change for path in paths.values() for stop in path})
    limit = _largest(changes, lambda limit: change_with(limit) <= tolerance)
    stops = {name: _furthest(path, limit) for name, path in paths.items()}
    for name, layer in layers.items():
        _apply(layer, views[name], stops[name], optimizer)
    turned = to_batchnorm(model) if batchnorm else {}
    change = _difference(before, _outputs(model, inputs)) / scale
    found = tuple(view.describe(name, stops[name], name in turned) for name, view in views.items())
    return Pruning(found, change, tolerance, sum(map(len, inputs)))


@dataclass(frozen=True)
class _Stop:
    """A layer with fewer modes: groups of the old ones, offsets of biases, change of its output."""

    groups: tuple[tuple[int, ...], ...]
    offsets: tuple[float, ...]
    change: float


def _furthest(path: Sequence[_Stop], limit: float) -> _Stop:
    return [stop for stop in path if stop.change <= limit][-1]


def _largest(limits: Sequence[float], tolerated: Callable[[float], bool]) -> float:
    """The largest tolerated limit, by bisection; the first one is taken to be so."""
    low, high = 0, len(limits)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tolerated(limits[middle]) else (low, middle)
    return limits[low]


class _View:
    """What a layer saw and did on the batches, in float64 on the CPU, and what it would do."""

    def __init__(self, layer: ModeNorm | ModeGroupNorm) -> None:
        self.layer = layer
        self.note = ""
        self._means: list[Tensor] = []
        self._vars: list[Tensor] = []
        self._logs: list[Tensor] = []
        if isinstance(layer, ModeNorm):
            if last_linear(layer.gate, layer.num_modes) is None:
                self.note = f"left: its gate, {type(layer.gate).__name__}, has no rows per mode"
            if layer.running_mean is None:
                self.note = "left: it has no running estimates"

    def take_input(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = kwargs.get("gates", args[1] if len(args) > 1 else None)
        if given is not None:
            self.note = "left: its gates are given from outside"
        if kwargs.get("mask", args[2] if len(args) > 2 else None) is not None:
            self.note = "left: its input has a mask"
        x = args[0] if args else kwargs["x"]
        mean, var = plain.moments(x.detach())
        assert var is not None
        self._means.append(mean.double().cpu())
        self._vars.append(var.double().cpu())

    def take_gates(self, gates: Tensor) -> None:
        if gates.ndim == 2:
            self._logs.append(gates.detach().double().cpu().clamp_min(SMALLEST_GATE).log())

    def path(self) -> list[_Stop]:
        """The layer with ever fewer modes, and how much its output changes."""
        modes = self.layer.num_modes
        first = _Stop(tuple((k,) for k in range(modes)), (0.0,) * modes, 0.0)
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
        self._first = self._map(tuple((k,) for k in range(len(self.shares))))
        layer = self.layer
        if isinstance(layer, ModeNorm):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            mean, var = layer.running_mean.double().cpu(), layer.running_var.double().cpu()
            self._statistics = statistics_distances(mean, var, layer.eps)
        scale, shift = self._first
        centred = shift - shift.mean(0)
        flat = self.logs.flatten(0, -2)
        self._between = torch.stack(
            [(flat - flat[:, k : k + 1]).std(0, correction=0) for k in range(flat.shape[1])]
        )
        self._deviation = float((scale**2 * self.var + centred**2).mean().sqrt()) or 1.0

    def _tries(self, stop: _Stop) -> Iterator[_Stop]:
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

    def _cost(self, stop: _Stop) -> float:
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

    def _stop(self, groups: tuple[tuple[int, ...], ...], offsets: tuple[float, ...]) -> _Stop:
        scale, shift = self._map(groups, torch.tensor(offsets, dtype=torch.float64))
        square = (scale - self._first[0]) ** 2 * self.var + (shift - self._first[1]) ** 2
        return _Stop(groups, offsets, float(square.mean().sqrt()) / self._deviation)

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
        assert layer.running_mean is not None
        assert layer.running_var is not None
        mean, var = merged_statistics(
            weights, layer.running_mean.double().cpu(), layer.running_var.double().cpu()
        )
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

    def describe(self, name: str, stop: _Stop, batchnorm: bool) -> LayerPruning:
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


def _largest_of(distances: Tensor, group: tuple[int, ...]) -> float:
    return float(distances[list(group)][:, list(group)].max())


def _wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().double().cpu()


def _mixed(weights: Tensor, rows: Tensor) -> Tensor:
    return weights @ rows.detach().double().cpu()


def _apply(
    layer: ModeNorm | ModeGroupNorm, view: _View, stop: _Stop, optimizer: Optimizer | None = None
) -> None:
    if len(stop.groups) < layer.num_modes:
        offsets = torch.tensor(stop.offsets, dtype=torch.float64)
        combine_modes(layer, stop.groups, view.shares, offsets, optimizer)


@contextlib.contextmanager
def _watching(views: Iterable[_View]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        heard = []
        for view in views:
            handle = view.layer.register_forward_pre_hook(view.take_input, with_kwargs=True)
            stack.callback(handle.remove)
            heard.append((view.layer, view.take_gates))
        stack.enter_context(listening(heard))
        yield


def _outputs(model: nn.Module, inputs: Iterable[Tensor]) -> list[Tensor]:
    """What the model says of each batch in evaluation, one row per batch's flattened tensors."""
    with evaluating(model):
        return [torch.cat([t.double().flatten() for t in _tensors(model(x))]) for x in inputs]


def _tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors in what a model returns."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return [tensor for entry in output for tensor in _tensors(entry)]
    return []


def _difference(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    total = sum(float((a - b).square().sum()) for a, b in zip(after, before, strict=True))
    return (total / sum(map(len, before))) ** 0.5


def _deviation(outputs: Sequence[Tensor]) -> float:
    if not sum(map(len, outputs)):
        raise ValueError("prune_modes compares the model's outputs, but it returned no tensor")
    return float(torch.cat(list(outputs)).std(correction=0)) or 1.0
