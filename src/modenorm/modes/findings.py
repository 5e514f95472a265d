"""What `mode_report` found: the numbers of every layer, as a table, as JSON, and in plain words."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["LayerReport", "ModeReport", "finite"]

DEAD_SHARE = 0.001
SAME_DISTANCE = 0.05
CONSTANT_SPREAD = 0.01
FEW_SAMPLES = 8.0

Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class LayerReport:
    """What the modes of one layer are used for.

    A mode norm assigns samples to modes; a mode group norm assigns the channels of each sample, and
    "sample" below then means a channel of a sample.

    Attributes:
        name: The layer's name in the model, "" for the model itself.
        kind: "mode norm" or "mode group norm".
        num_modes: K.
        num_samples: Samples seen.
        num_batches: Batches seen.
        shares: Mean gate of each mode.
        claims: Share of the samples whose largest gate is that of the mode.
        spread: Standard deviation of each mode's gate over the samples.
        entropy: Mean entropy of a sample's gates in bits: 0 when every sample belongs to one mode,
            log2 K when it is shared out evenly.
        effective_modes: 2 to the entropy of `shares`: K when all are used alike, 1 when one is.
        effective_size: Effective number of samples (Σg)²/Σg² of each mode in a batch, averaged over
            batches; of a mode group norm, of channels in a sample.
        smallest_effective_size: The same in the batch where it was smallest.
        statistics_distances: Distance between each two modes' means and variances, in standard
            deviations; from the running estimates if there are any, else from the batches.
        gate_distances: Standard deviation over the samples of log g_j/g_k: 0 when two modes always
            get their samples in the same proportion.
        class_information: Mutual information between mode and class in bits.
        domain_information: Mutual information between mode and domain in bits.
        class_shares: For each class, the mean gates of its samples.
        domain_shares: For each domain, the mean gates of its samples.

    Example:
        >>> import torch, modenorm
        >>> model = modenorm.ModeNorm1d(4, num_modes=2)
        >>> (layer,) = modenorm.mode_report(model, [torch.randn(64, 4)]).layers
        >>> layer.kind, layer.num_modes, layer.num_samples
        ('mode norm', 2, 64)
    """

    name: str
    kind: str
    num_modes: int
    num_samples: int
    num_batches: int
    shares: tuple[float, ...]
    claims: tuple[float, ...]
    spread: tuple[float, ...]
    entropy: float
    effective_modes: float
    effective_size: tuple[float, ...]
    smallest_effective_size: tuple[float, ...]
    statistics_distances: Rows
    gate_distances: Rows
    class_information: float | None = None
    domain_information: float | None = None
    class_shares: Rows | None = None
    domain_shares: Rows | None = None

    @property
    def dead(self) -> tuple[int, ...]:
        """Modes that receive less than a thousandth of the samples.

        >>> import torch, modenorm
        >>> model = modenorm.ModeNorm1d(4, num_modes=2, gate=modenorm.LinearGate)
        >>> with torch.no_grad():
        ...     _ = model.gate.bias.copy_(torch.tensor([20.0, 0.0]))
        >>> modenorm.mode_report(model, [torch.randn(64, 4)]).layers[0].dead
        (1,)
        """
        return tuple(k for k, share in enumerate(self.shares) if share < DEAD_SHARE)

    @property
    def constant(self) -> bool:
        """Whether all samples have the same gates, so that the modes make no difference."""
        return max(self.spread) < CONSTANT_SPREAD

    @property
    def duplicates(self) -> tuple[tuple[int, int], ...]:
        """Pairs of living modes with the same statistics, or with the same samples.

        >>> import torch, modenorm
        >>> model = modenorm.ModeNorm1d(4, num_modes=2)
        >>> modenorm.mode_report(model, [torch.randn(64, 4)]).layers[0].duplicates
        ((0, 1),)
        """
        return duplicate_modes(self.shares, self.statistics_distances, self.gate_distances)

    @property
    def distinct(self) -> int:
        """The number of living modes, duplicates counted once."""
        return distinct_modes(self.shares, self.duplicates)

    def findings(self) -> list[str]:
        """What is wrong with the layer, in plain words; nothing when all is well."""
        return [f"layer {self.name or 'model'}: {finding}" for finding in self._findings()]

    def _findings(self) -> list[str]:
        things, plain = "samples", "this layer is batch norm"
        if self.kind != "mode norm":
            things, plain = "channels", "all channels share one mean and one variance"
        if not all(map(math.isfinite, self.shares)):
            return ["gates are not finite: the training diverged, or the input holds NaN"]
        if self.num_modes == 1:
            return [f"there is one mode: {plain}"]
        if self.constant:
            return [f"gates are constant: {plain}"]
        words = [
            f"mode {k} receives {100 * self.shares[k]:.1f} % of the {things}" for k in self.dead
        ]
        words += [f"modes {j} and {k} are duplicates" for j, k in self.duplicates]
        words += [
            f"mode {k} has an effective sample size of {size:.1f} per batch: too few for statistics"
            for k, size in enumerate(self.effective_size)
            if self.kind == "mode norm" and size < FEW_SAMPLES and k not in self.dead
        ]
        return words


def duplicate_modes(
    shares: Sequence[float],
    statistics_distances: Sequence[Sequence[float]],
    gate_distances: Sequence[Sequence[float]],
) -> tuple[tuple[int, int], ...]:
    """Pairs of living modes with the same statistics, or with the same samples."""
    alive = [k for k, share in enumerate(shares) if share >= DEAD_SHARE]
    return tuple(
        (j, k)
        for j, k in itertools.combinations(alive, 2)
        if min(statistics_distances[j][k], gate_distances[j][k]) < SAME_DISTANCE
    )


def distinct_modes(shares: Sequence[float], duplicates: Iterable[tuple[int, int]]) -> int:
    """The number of living modes, duplicates counted once.

    >>> distinct_modes([0.5, 0.2, 0.0, 0.3], [(0, 3)])
    2
    """
    first = {k: k for k, share in enumerate(shares) if share >= DEAD_SHARE}
    for j, k in duplicates:
        first = {mode: first[j] if name == first[k] else name for mode, name in first.items()}
    return len(set(first.values()))


@dataclass(frozen=True)
class ModeReport:
    """The layers of a model, in the order of definition, and what their modes are used for.

    Attributes:
        layers: Those that a batch reached.
        unreached: The names of the others.

    Example:
        >>> import torch, modenorm
        >>> model = torch.nn.Sequential(modenorm.ModeNorm1d(4), modenorm.ModeNorm1d(4))
        >>> report = modenorm.mode_report(model, [torch.randn(64, 4)])
        >>> [layer.name for layer in report.layers], report.unreached
        (['0', '1'], ())
    """

    layers: tuple[LayerReport, ...]
    unreached: tuple[str, ...] = ()

    def findings(self) -> list[str]:
        """What is wrong, in plain words, layer by layer; nothing when all is well.

        >>> import torch, modenorm
        >>> modenorm.mode_report(modenorm.ModeNorm1d(4, 1), [torch.randn(64, 4)]).findings()
        ['layer model: there is one mode: this layer is batch norm']
        """
        found = [finding for layer in self.layers for finding in layer.findings()]
        return found + [f"layer {name or 'model'}: no batch reached it" for name in self.unreached]

    def to_json(self) -> str:
        """Everything as a JSON object; numbers that are not finite become null.

        >>> import torch, modenorm
        >>> report = modenorm.mode_report(modenorm.ModeNorm1d(4), [torch.randn(64, 4)])
        >>> json.loads(report.to_json())["layers"][0]["num_samples"]
        64
        """
        layers = []
        for layer in self.layers:
            found = {"dead": layer.dead, "duplicates": layer.duplicates, "constant": layer.constant}
            found |= {"distinct": layer.distinct}
            layers.append({**dataclasses.asdict(layer), **found})
        return json.dumps({"layers": finite(layers), "findings": self.findings()})

    def table(self) -> Table:
        """A table for the terminal; needs the package rich.

        >>> import torch, modenorm
        >>> report = modenorm.mode_report(modenorm.ModeNorm1d(4), [torch.randn(64, 4)])
        >>> report.table().row_count
        1
        """
        try:
            from rich.table import Table
        except ImportError:
            raise ImportError("ModeReport.table needs the package rich: pip install rich") from None
        caption = "\n".join(self.findings()) or None
        table = Table(title="Modes of every layer", caption=caption, padding=0)
        table.add_column("layer", overflow="fold")
        for heading in HEADINGS:
            words = heading.split()  # which stay whole on 80 columns
            table.add_column("\n".join(words), justify="right", min_width=max(map(len, words)))
        for layer in self.layers:
            table.add_row(layer.name or "model", *_cells(layer))
        return table


HEADINGS = (
    "share %",
    "entropy bits",
    "effective modes",
    "effective size",
    "distance σ",
    "class bits",
    "domain bits",
)


def _cells(layer: LayerReport) -> list[str]:
    pairs = itertools.combinations(range(layer.num_modes), 2)
    distances = [layer.statistics_distances[j][k] for j, k in pairs]
    information = (layer.class_information, layer.domain_information)
    return [
        " ".join(f"{100 * share:.1f}" for share in layer.shares),
        f"{layer.entropy:.3f}",
        f"{layer.effective_modes:.2f}",
        " ".join(f"{size:.0f}" for size in layer.effective_size),
        f"{min(distances):.2f}" if distances else "",
        *("" if bits is None else f"{bits:.3f}" for bits in information),
    ]


def finite(value: Any) -> Any:
    """What JSON can hold of a value: null for numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    return value
