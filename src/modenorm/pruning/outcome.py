"""What `prune_modes` did: to each layer and to the model's outputs, in numbers and in words."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from modenorm.modes.findings import finite

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["LayerPruning", "Pruning"]


@dataclass(frozen=True)
class LayerPruning:
    """What happened to the modes of one layer.

    Of more than 2048 samples, `gate_distances` and `change` are those of a random part.

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

    Example:
        >>> import torch, modenorm
        >>> model = modenorm.ModeNorm1d(4, num_modes=3)
        >>> (layer,) = modenorm.prune_modes(model, [torch.randn(64, 4)]).layers
        >>> layer.before, layer.after <= layer.before
        (3, True)
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
        """What was done, in words.

        >>> LayerPruning("norm", 2, 1, removed=(1,), shares=(0.98, 0.02)).words()
        'dropped 1 (2.0 %)'
        """
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

    Example:
        >>> import torch, modenorm
        >>> model = torch.nn.Sequential(modenorm.ModeNorm1d(4, num_modes=3))
        >>> pruning = modenorm.prune_modes(model, [torch.randn(64, 4)], tolerance=0.05)
        >>> pruning.change <= pruning.tolerance, pruning.num_samples
        (True, 64)
    """

    layers: tuple[LayerPruning, ...]
    change: float
    tolerance: float
    num_samples: int

    @property
    def num_modes(self) -> dict[str, int]:
        """The number of modes of each layer now, by name.

        >>> Pruning((LayerPruning("norm", 3, 2),), 0.0, 0.05, 64).num_modes
        {'norm': 2}
        """
        return {layer.name: layer.after for layer in self.layers}

    def to_json(self) -> str:
        """Everything as a JSON object; numbers that are not finite become null.

        >>> json.loads(Pruning((), 0.0, 0.05, 64).to_json())["tolerance"]
        0.05
        """
        return json.dumps(finite(dataclasses.asdict(self)))

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
        """A table for the terminal; needs the package rich.

        >>> Pruning((LayerPruning("norm", 3, 2),), 0.0, 0.05, 64).table().row_count
        1
        """
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
