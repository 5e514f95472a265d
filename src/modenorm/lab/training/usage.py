"""Which modes the test samples use, noted while an evaluation runs anyway.

Letters: N samples, C channels, K modes, D domains. Nothing here waits for the device, and the gates
of mode group norms are averaged over their channels batch by batch, so what is kept is small.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from modenorm.layers import ModeNorm
from modenorm.modes.findings import distinct_modes, duplicate_modes
from modenorm.modes.recording import mode_layers
from modenorm.modes.report import SMALLEST_GATE, gate_distances, statistics_distances

DIGITS = 4
Forward = Callable[[nn.Module, list[Any], Tensor], tuple[Tensor, list[Tensor]]]


def with_gates(model: nn.Module, layers: list[Any], images: Tensor) -> tuple[Tensor, list[Tensor]]:
    """What a model says of some images, and the gates of its layers; can be compiled."""
    heard: list[list[Tensor]] = [[] for _ in layers]
    for layer, gates in zip(layers, heard, strict=True):
        layer.gate_listener = gates.append
    logits = model(images)
    for layer in layers:
        layer.gate_listener = None
    return logits, [gates[0].detach() for gates in heard]


class ModeUsage:
    """Gates of one evaluation, and what they sum up to.

    Layers that are alike, of one kind and with the same K, are summed up together: an evaluation
    then costs a handful of operators more, whatever the number of layers.

    Args:
        model: Any model; without modes there is nothing to note.
        distinct: Also find out how many modes of every mode norm are distinct.
        forward: `with_gates`, or a compiled form of it.
    """

    def __init__(
        self, model: nn.Module, distinct: bool = False, forward: Forward | None = None
    ) -> None:
        self._model, self._layers = model, mode_layers(model)
        self._forward = forward or with_gates
        self._alike: dict[tuple[bool, int], list[str]] = {}
        for name, layer in self._layers.items():
            key = (isinstance(layer, ModeNorm), layer.num_modes)
            self._alike.setdefault(key, []).append(name)
        self._distinct = distinct
        self.forget()

    def forget(self) -> None:
        """Forget the gates that were noted."""
        self._rows: dict[str, list[Tensor]] = {name: [] for name in self._layers}

    def __call__(self, images: Tensor) -> Tensor:
        """What the model says of some images; their gates are noted."""
        logits, gates = self._forward(self._model, list(self._layers.values()), images)
        for name, found in zip(self._layers, gates, strict=True):
            self._rows[name].append(_small(found))
        return logits

    def totals(self, domains: Tensor, num_domains: int, num_samples: int | None = None) -> Tensor:
        """Sums over the samples as one float64 row, to be summed over ranks.

        Args:
            domains: Domain of every sample that the model was given, in that order.
            num_domains: D.
            num_samples: Of all ranks; None for these alone.
        """
        parts = [torch.zeros(0, dtype=torch.float64, device=domains.device)]
        member = nn.functional.one_hot(domains, num_domains).t().double()  # (D, N)
        for (of_samples, num_modes), names in self._alike.items():
            width = num_modes if of_samples else num_modes + 1
            rows = [row for name in names for row in self._rows[name]]
            gates = torch.cat(rows or [member.new_zeros((0, width))])
            gates = gates.double().view(len(names), len(domains), width)
            table = _with_entropy(gates) if of_samples else gates
            parts.append((member @ table).flatten())
            if of_samples and self._distinct:
                share = len(domains) / (num_samples or len(domains))
                parts += [*self._log_sums(gates), self._estimates(names) * share]
        return torch.cat(parts)

    def _log_sums(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        logs = gates.clamp_min(SMALLEST_GATE).log()  # (layers, N, K)
        return logs.sum(1).flatten(), (logs.mT @ logs).flatten()

    def _estimates(self, names: list[str]) -> Tensor:
        """Running means and variances of some layers in one row."""
        layers: list[Any] = [self._layers[name] for name in names]
        estimates = [e for layer in layers for e in (layer.running_mean, layer.running_var)]
        return torch.cat([estimate.flatten() for estimate in estimates]).double()

    def describe(self, totals: Tensor, domain_names: tuple[str, ...]) -> dict[str, Any]:
        """Mean gates and mean entropy (bits) of every layer, gates in every domain.

        And the number of distinct modes, if it was asked for.
        """
        found, row = {}, _Row(totals)
        for (of_samples, num_modes), names in self._alike.items():
            tables = row.take(len(names), len(domain_names), num_modes + 1)
            for name, table in zip(names, tables, strict=True):
                found[name] = _describe(table, domain_names)
            if of_samples and self._distinct:
                logs = row.take(len(names), num_modes)
                products = row.take(len(names), num_modes, num_modes)
                for i, name in enumerate(names):
                    count = tables[i, :, :-1].sum()
                    between = gate_distances(logs[i] / count, products[i] / count)
                    found[name]["distinct"] = self._count(name, row, found[name]["shares"], between)
        return {name: found[name] for name in self._layers}

    def _count(self, name: str, row: "_Row", shares: list[float], between: Tensor) -> int:
        layer: Any = self._layers[name]
        mean, var = (row.take(*layer.running_mean.shape) for _ in range(2))
        apart = statistics_distances(mean, var, layer.eps)
        duplicates = duplicate_modes(shares, apart.tolist(), between.tolist())
        return distinct_modes(shares, duplicates)


class _Row:
    """Arrays taken off the front of a row of numbers."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._place = values, 0

    def take(self, *shape: int) -> Tensor:
        start, self._place = self._place, self._place + math.prod(shape)
        return self._values[start : self._place].view(shape)


def scalars(usage: dict[str, Any]) -> dict[str, float]:
    """The shares and entropies of `ModeUsage.describe` as single named numbers."""
    shares = {
        f"mode_share/{layer}/{k}": share
        for layer, found in usage.items()
        for k, share in enumerate(found["shares"])
    }
    shares |= {f"gate_entropy/{layer}": found["entropy"] for layer, found in usage.items()}
    return shares | {
        f"distinct_modes/{layer}": found["distinct"]
        for layer, found in usage.items()
        if "distinct" in found
    }


def _small(gates: Tensor) -> Tensor:
    """Gates of samples as they are, (N, K); gates of channels as means with entropy, (N, K + 1)."""
    return gates if gates.ndim == 2 else _with_entropy(gates).mean(1)


def _with_entropy(gates: Tensor) -> Tensor:
    return torch.cat((gates, torch.special.entr(gates).sum(-1, keepdim=True)), dim=-1)


def _describe(table: Tensor, domain_names: tuple[str, ...]) -> dict[str, Any]:
    samples = table[:, :-1].sum(1, keepdim=True)  # gates of a sample sum to 1
    total = table.sum(0) / samples.sum()
    found: dict[str, Any] = {
        "shares": _rounded(total[:-1]),
        "entropy": round(float(total[-1]) / math.log(2), DIGITS),
    }
    if len(domain_names) > 1:
        rows = (table[:, :-1] / samples.clamp_min(1e-300)).unbind(0)
        found["by_domain"] = {
            name: _rounded(row)
            for name, row, seen in zip(domain_names, rows, samples.tolist(), strict=True)
            if seen[0]
        }
    return found


def _rounded(values: Tensor) -> list[float]:
    return [round(value, DIGITS) for value in values.tolist()]
