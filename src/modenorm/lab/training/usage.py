"""Which modes the test samples use, noted while an evaluation runs anyway.

Letters: N samples, C channels, K modes, D domains. Nothing here waits for the device, and the gates
of mode group norms are averaged over their channels batch by batch, so what is kept is small.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from modenorm.findings import distinct_modes, duplicate_modes
from modenorm.layers import ModeNorm
from modenorm.modes import (
    SMALLEST_GATE,
    gate_distances,
    listening,
    mode_layers,
    statistics_distances,
)

DIGITS = 4


class ModeUsage:
    """Gates of one evaluation, and what they sum up to.

    Args:
        model: Any model; without modes there is nothing to note.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = mode_layers(model)
        self._rows: dict[str, list[Tensor]] = {name: [] for name in self._layers}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Note the gates of everything that the model is given."""

        def listener(name: str) -> Any:
            return lambda gates: self._rows[name].append(_small(gates.detach()))

        with listening([(layer, listener(name)) for name, layer in self._layers.items()]):
            yield

    def totals(self, domains: Tensor, num_domains: int, num_samples: int | None = None) -> Tensor:
        """Sums over the samples of every domain, and what tells duplicates, as one float64 row.

        Args:
            domains: Domain of every sample that the model was given, in that order.
            num_domains: D.
            num_samples: Of all ranks, whose rows are going to be summed; None for these alone.
        """
        num_samples = num_samples or len(domains)
        parts = [torch.zeros(0, dtype=torch.float64, device=domains.device)]
        if self._layers:
            member = nn.functional.one_hot(domains, num_domains).t().double()  # (D, N)
            for name, layer in self._layers.items():
                of_samples = isinstance(layer, ModeNorm)
                width = layer.num_modes + (0 if of_samples else 1)
                rows = torch.cat(self._rows[name] or [member.new_zeros((0, width))])
                table = _with_entropy(rows) if of_samples else rows
                parts.append((member @ table.double()).flatten())
                if of_samples:
                    share = len(rows) / num_samples
                    parts.append(_distances(layer, rows).flatten() * share)
        return torch.cat(parts)

    def describe(self, totals: Tensor, domain_names: tuple[str, ...]) -> dict[str, Any]:
        """Mean gates, mean entropy (bits), distinct modes of every layer; gates in every domain."""
        found = {}
        for name, layer in self._layers.items():
            k, size = layer.num_modes, len(domain_names) * (layer.num_modes + 1)
            found[name] = _describe(totals[:size].view(len(domain_names), -1), domain_names)
            totals = totals[size:]
            if isinstance(layer, ModeNorm):
                distances = totals[: 2 * k * k].view(2, k, k).tolist()
                totals = totals[2 * k * k :]
                shares = found[name]["shares"]
                duplicates = duplicate_modes(shares, *distances)
                found[name]["distinct"] = distinct_modes(shares, duplicates)
        return found


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


def _distances(layer: Any, gates: Tensor) -> Tensor:
    """Distances between the statistics and between the gates of every two modes: (2, K, K)."""
    if len(gates) == 0:
        return gates.new_zeros((2, layer.num_modes, layer.num_modes), dtype=torch.float64)
    logs = gates.double().clamp_min(SMALLEST_GATE).log()
    between = gate_distances(logs.mean(0), logs.t() @ logs / len(logs))
    mean, var = layer.running_mean.double(), layer.running_var.double()
    return torch.stack((statistics_distances(mean, var, layer.eps), between))


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
