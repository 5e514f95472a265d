"""Measure what the modes are used for.

Letters: N samples, C channels, K modes. Entropy and information are in bits.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modenorm.checks import masked
from modenorm.kernels import plain
from modenorm.layers import ModeGroupNorm, ModeNorm
from modenorm.mixing import batch_statistics
from modenorm.modes.findings import LayerReport, ModeReport
from modenorm.modes.recording import listening, mode_layers, uncompiled

__all__ = ["mode_report"]

SMALLEST_GATE = 1e-30
LN2 = math.log(2)


@torch.no_grad()
def mode_report(
    model: nn.Module,
    batches: Iterable[Any],
    labels: Tensor | Sequence[int] | None = None,
    domains: Tensor | Sequence[int] | None = None,
) -> ModeReport:
    """Measure what the modes of every layer are used for, in evaluation mode.

    Args:
        model: Any model with mode norms or mode group norms; it is left as it was.
        batches: Inputs of the model, or tuples (input, labels, domains) or (input, labels).
        labels: Class of every sample, in the order of the batches; otherwise those in the batches.
        domains: Domain of every sample, likewise.

    Example:
        >>> import modenorm
        >>> gate = nn.Linear(3, 2)
        >>> report = mode_report(modenorm.ModeNorm2d(3, gate=gate), [torch.randn(16, 3, 4, 4)])
        >>> round(sum(report.layers[0].shares), 6)
        1.0
    """
    layers = mode_layers(model)
    if not layers:
        raise ValueError("mode_report found no mode norm or mode group norm in the model")
    meters = {name: _Meter(name, layer) for name, layer in layers.items()}
    listeners = [(layer, meters[name].listen) for name, layer in layers.items()]
    count = 0
    watching = _watching_inputs(meters.values())
    with uncompiled, evaluating(model), watching, listening(listeners):
        for x, classes, sources in _labelled(batches, labels, domains):
            for meter in meters.values():
                meter.labels = {"class": classes, "domain": sources}
            model(x)
            count += len(x)
    _check_length("labels", labels, count)
    _check_length("domains", domains, count)
    if count == 0:
        raise ValueError("mode_report got no samples; give it at least one batch of model inputs")
    reached = tuple(meter.result() for meter in meters.values() if meter.batches)
    unreached = tuple(meter.name for meter in meters.values() if not meter.batches)
    return ModeReport(reached, unreached)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode everywhere, and then what was before."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was in training.items():
            module.training = was


def parts_of(batch: Any) -> tuple[Any, ...]:
    """What a batch holds: the model's input first, then whatever came with it."""
    if isinstance(batch, Tensor):
        return (batch,)
    if not isinstance(batch, tuple | list) or not batch:
        keys = f" with {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else ""
        raise ValueError(
            f"a batch is a {type(batch).__name__}{keys}; expected the model's input, a tensor, or "
            f"a tuple or list that begins with it: give (batch[key] for batch in batches) for dicts"
        )
    return tuple(batch)


@contextlib.contextmanager
def _watching_inputs(meters: Iterable[_Meter]) -> Iterator[None]:
    """Let meters that need a layer's input see it."""
    with contextlib.ExitStack() as stack:
        for meter in meters:
            if not meter.has_estimates:
                handle = meter.layer.register_forward_pre_hook(meter.take_input, with_kwargs=True)
                stack.callback(handle.remove)
        yield


def _labelled(
    batches: Iterable[Any], labels: Any, domains: Any
) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
    given = [_given("labels", labels), _given("domains", domains)]
    start = 0
    for batch in batches:
        parts = parts_of(batch)
        x, stop = parts[0], start + len(parts[0])
        found: list[Tensor | None] = []
        for place, values in enumerate(given, start=1):
            own = parts[place] if len(parts) > place else None
            found.append(_as_labels(own, len(x)) if values is None else values[start:stop])
        yield x, found[0], found[1]
        start = stop


def _given(name: str, values: Any) -> Tensor | None:
    """Labels of all samples, as they were given."""
    if values is None:
        return None
    try:
        found = torch.as_tensor(values, device=None if isinstance(values, Tensor) else "cpu")
    except (TypeError, ValueError, RuntimeError):
        found = None  # texts, say
    if found is None or found.ndim != 1 or found.is_floating_point() or found.is_complex():
        kind = type(values).__name__
        kind = kind if found is None else f"{found.dtype} of shape {tuple(found.shape)}"
        raise ValueError(
            f"{name} is a {kind}; expected one integer for each sample, in the order of the batches"
        )
    return found.long().cpu()


def _as_labels(values: Any, count: int) -> Tensor | None:
    """The values, if they are one integer per sample."""
    if not isinstance(values, Tensor):
        try:
            values = torch.as_tensor(values, device="cpu")
        except (TypeError, ValueError, RuntimeError):  # texts, say, or nothing
            return None
    if values.is_floating_point() or values.is_complex():
        return None
    return values.long().cpu() if tuple(values.shape) == (count,) else None


def _check_length(name: str, values: Any, count: int) -> None:
    if values is not None and len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries, but the batches hold {count} samples")


class _Meter:
    """Sums over the gates of one layer, in float64 on the CPU."""

    def __init__(self, name: str, layer: ModeNorm | ModeGroupNorm) -> None:
        self.name, self.layer, self.modes = name, layer, layer.num_modes
        self.labels: dict[str, Tensor | None] = {}
        self.batches = self.samples = self.rows = 0
        zeros = partial(torch.zeros, dtype=torch.float64, device="cpu")
        self._gates, self._claims = zeros(2, self.modes)
        self._squares, self._logs = zeros(2, self.modes)
        self._products = zeros(self.modes, self.modes)
        self._entropy = zeros(())
        self._effective: list[Tensor] = []
        self._joint: dict[str, Tensor] = {}
        self._distances: list[Tensor] = []
        self._input: Tensor | None = None
        self._mask: Tensor | None = None

    @property
    def has_estimates(self) -> bool:
        """Whether the layer has running estimates that have seen data."""
        count = getattr(self.layer, "num_batches_tracked", None)
        return count is not None and int(count) > 0

    def take_input(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._input = args[0] if args else kwargs["x"]
        self._mask = kwargs.get("mask", args[2] if len(args) > 2 else None)

    def listen(self, gates: Tensor) -> None:
        if gates.numel() == 0:
            return
        gates = gates.detach().double().cpu()
        by_sample = gates if gates.ndim == 2 else gates.mean(1)  # (N, K)
        flat = gates.flatten(0, -2)
        self.batches += 1
        self.samples += len(gates)
        self.rows += len(flat)
        self._gates += flat.sum(0)
        self._squares += flat.square().sum(0)
        self._claims += torch.bincount(flat.argmax(1), minlength=self.modes)
        logs = flat.clamp_min(SMALLEST_GATE).log()
        self._entropy -= (flat * logs).sum()
        self._logs += logs.sum(0)
        self._products += logs.t() @ logs
        self._effective.append(effective_size(gates))
        for kind, labels in self.labels.items():
            if labels is not None and len(labels) == len(by_sample):
                self._joint[kind] = _add_joint(self._joint.get(kind), labels, by_sample)
        if self._input is not None:
            self._distances.append(self._batch_distances(gates))
            self._input = None

    def _batch_distances(self, gates: Tensor) -> Tensor:
        """Distances between the statistics of this batch's modes: (K, K)."""
        assert self._input is not None
        x = self._input.detach().double().cpu()
        if self._mask is None:
            (mean, var), counts = plain.moments(x), None  # (N, C)
        else:
            mean, var, counts = plain.masked_moments(*masked(x, self._mask.cpu()))
        assert var is not None
        if gates.ndim == 2:
            batch = batch_statistics(mean, var, gates, counts)
            return statistics_distances(batch.mean, batch.var, self.layer.eps)
        weights = self._channel_weights(mean)
        mode_mean = (weights * mean[..., None]).sum(1)  # (N, K)
        square = (mean[..., None] - mode_mean[:, None]) ** 2
        if getattr(self.layer, "variance", "") == "pixel":
            square = square + var[..., None]
        mode_var = (weights * square).sum(1)
        of_samples = statistics_distances(mode_mean[..., None], mode_var[..., None], self.layer.eps)
        return of_samples.mean(0)

    def _channel_weights(self, mean: Tensor) -> Tensor:
        """A mode group norm's gates over their sums, (N, C, K), where these may be 0 in float32."""
        layer = self.layer
        assert isinstance(layer, ModeGroupNorm)
        weight, bias = (p.double().cpu() for p in (layer.gate_weight, layer.gate_bias))
        return torch.log_softmax(mean[..., None] * weight + bias, -1).softmax(1)

    def result(self) -> LayerReport:
        shares = self._gates / self.rows
        spread = (self._squares / self.rows - shares**2).clamp_min(0).sqrt()
        logs = self._logs / self.rows
        effective = torch.stack(self._effective)  # (batches, K)
        return LayerReport(
            name=self.name,
            kind="mode norm" if isinstance(self.layer, ModeNorm) else "mode group norm",
            num_modes=self.modes,
            num_samples=self.samples,
            num_batches=self.batches,
            shares=_floats(shares),
            claims=_floats(self._claims / self.rows),
            spread=_floats(spread),
            entropy=float(self._entropy / self.rows) / LN2,
            effective_modes=2.0 ** entropy(shares),
            effective_size=_floats(effective.mean(0)),
            smallest_effective_size=_floats(effective.amin(0)),
            statistics_distances=_rows(self._statistics_distances()),
            gate_distances=_rows(gate_distances(logs, self._products / self.rows)),
            class_information=self._information("class"),
            domain_information=self._information("domain"),
            class_shares=self._shares_by("class"),
            domain_shares=self._shares_by("domain"),
        )

    def _statistics_distances(self) -> Tensor:
        mean, var = getattr(self.layer, "running_mean", None), None
        if self.has_estimates and mean is not None:
            var = self.layer.running_var
            assert isinstance(var, Tensor)
            return statistics_distances(mean.double().cpu(), var.double().cpu(), self.layer.eps)
        return torch.stack(self._distances).mean(0)

    def _information(self, kind: str) -> float | None:
        return None if kind not in self._joint else mutual_information(self._joint[kind])

    def _shares_by(self, kind: str) -> tuple[tuple[float, ...], ...] | None:
        if kind not in self._joint:
            return None
        joint = self._joint[kind]
        return _rows(joint / joint.sum(1, keepdim=True).clamp_min(1e-300))


def _floats(values: Tensor) -> tuple[float, ...]:
    return tuple(values.tolist())


def _rows(values: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(map(_floats, values))


def _add_joint(joint: Tensor | None, labels: Tensor, gates: Tensor) -> Tensor:
    """Σ_n g_nk for every label and mode: (labels, K), with rows for labels seen for the first time.

    Negative labels (ignored samples) count for nothing.
    """
    known = labels >= 0
    labels, gates = labels[known].long(), gates[known]
    rows = max(int(labels.max()) + 1 if len(labels) else 0, 0 if joint is None else len(joint))
    total = gates.new_zeros(rows, gates.shape[1])
    if joint is not None:
        total[: len(joint)] = joint
    return total.index_add_(0, labels, gates)


def entropy(probabilities: Tensor) -> float:
    """Entropy in bits."""
    return float(-torch.xlogy(probabilities, probabilities).sum()) / LN2


def mutual_information(joint: Tensor) -> float:
    """Mutual information, in bits, of the row and the column of a table of weights."""
    p = joint / joint.sum().clamp_min(1e-300)
    return max(0.0, entropy(p.sum(0)) + entropy(p.sum(1)) - entropy(p.flatten()))


def effective_size(gates: Tensor) -> Tensor:
    """Kish's effective sample size of every mode, (Σ g)² / Σ g²: (K,).

    Of (N, C, K) gates, the effective number of channels, averaged over the samples.
    """
    rows = gates.sum(-2) ** 2 / gates.square().sum(-2).clamp_min(1e-300)
    return rows if gates.ndim == 2 else rows.mean(0)


def gate_distances(logs: Tensor, products: Tensor) -> Tensor:
    """Standard deviation over samples of log g_j/g_k, from means of log g and its products."""
    covariance = products - logs[:, None] * logs
    variance = covariance.diagonal()
    between = (variance[:, None] + variance - 2 * covariance).clamp_min(0)
    between.fill_diagonal_(0)
    return between.sqrt()


def statistics_distances(mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """How far modes' statistics lie apart, in standard deviations: (..., K, C) → (..., K, K).

    The root mean square over channels of (μ_j − μ_k)/σ, with σ² the mean of both variances, and of
    log σ_j/σ_k.
    """
    var = var + eps
    shift = (mean[..., :, None, :] - mean[..., None, :, :]) ** 2
    pooled = (var[..., :, None, :] + var[..., None, :, :]) / 2
    scale = (var.log()[..., :, None, :] - var.log()[..., None, :, :]) / 2
    return (shift / pooled + scale**2).mean(-1).sqrt()
