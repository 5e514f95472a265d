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

from modenorm.modes import listening, mode_layers

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

    def totals(self, domains: Tensor, num_domains: int) -> Tensor:
        """Sums over the samples of every domain: float64 (layers · D · (K + 1),).

        Args:
            domains: Domain of every sample that the model was given, in that order.
            num_domains: D.
        """
        parts = [torch.zeros(0, dtype=torch.float64, device=domains.device)]
        if self._layers:
            member = nn.functional.one_hot(domains, num_domains).t().double()  # (D, N)
            for name, layer in self._layers.items():
                rows = torch.cat(self._rows[name] or [member.new_zeros((0, layer.num_modes + 1))])
                rows = _with_entropy(rows) if rows.shape[1] == layer.num_modes else rows
                parts.append((member @ rows.double()).flatten())
        return torch.cat(parts)

    def describe(self, totals: Tensor, domain_names: tuple[str, ...]) -> dict[str, Any]:
        """Mean gates and mean entropy (bits) of every layer, and the gates in every domain."""
        sizes = [len(domain_names) * (layer.num_modes + 1) for layer in self._layers.values()]
        tables = (part.view(len(domain_names), -1) for part in totals.split(sizes))
        return {
            name: _describe(t, domain_names) for name, t in zip(self._layers, tables, strict=True)
        }


def scalars(usage: dict[str, Any]) -> dict[str, float]:
    """The shares and entropies of `ModeUsage.describe` as single named numbers."""
    shares = {
        f"mode_share/{layer}/{k}": share
        for layer, found in usage.items()
        for k, share in enumerate(found["shares"])
    }
    return shares | {f"gate_entropy/{layer}": found["entropy"] for layer, found in usage.items()}


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
