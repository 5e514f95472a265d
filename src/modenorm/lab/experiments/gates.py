"""How evenly the gates share the samples out, from results/TABLE.jsonl, layer by layer."""

from collections.abc import Iterable, Sequence

from modenorm.lab.experiments.collect import Line
from modenorm.lab.experiments.paper import Cell

COLLAPSED = 0.99
"""A layer has collapsed when one mode receives more than this share of the samples."""
GATE_HEADER = (
    "experiment", "norm", "layers", "trainings", "smallest share of a mode, mean", "lowest",
    "entropy of a gate, bits", "collapsed layers",
)  # fmt: skip


def gate_rows(cells: Sequence[Cell], lines: Iterable[Line]) -> list[list[str]]:
    """One row for each cell with several modes, over all its layers and trainings."""
    by_key: dict[str, list[Line]] = {}
    for line in lines:
        if line.get("gates"):
            by_key.setdefault(line["settings"], []).append(line)
    return [_row(cell, by_key[cell.key]) for cell in cells if cell.key in by_key]


def _row(cell: Cell, lines: Sequence[Line]) -> list[str]:
    layers = [layer for line in lines for layer in line["gates"].values()]
    smallest = [min(layer["shares"]) for layer in layers]
    entropies = [layer["entropy"] for layer in layers]
    collapsed = sum(max(layer["shares"]) > COLLAPSED for layer in layers)
    return [
        cell.group,
        cell.label,
        str(len(lines[0]["gates"])),
        str(len(lines)),
        f"{100 * sum(smallest) / len(smallest):.1f} %",
        f"{100 * min(smallest):.1f} %",
        f"{sum(entropies) / len(entropies):.2f}",
        f"{collapsed} of {len(layers)}",
    ]
