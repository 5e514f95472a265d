"""Automatic numbers of modes beside fixed ones, from results/automatic.jsonl."""

import statistics
from collections.abc import Iterable, Sequence

from modenorm.lab.experiments.collect import Line
from modenorm.lab.experiments.paper import Cell
from modenorm.lab.experiments.summary import Difference, Spread, by_settings

MODES_HEADER = (
    "experiment", "norm", "final error", "before pruning", "modes of the layers, mean", "seeds",
    "− best fixed K", "within one standard error",
)  # fmt: skip
MOST_LISTED = 6


def is_automatic(cell: Cell) -> bool:
    """Whether the cell's training looks for its number of modes."""
    return bool(cell.settings.get("sparsity"))


def modes_rows(cells: Sequence[Cell], lines: Iterable[Line]) -> list[list[str]]:
    """One row for each cell; automatic ones with the error after pruning, and beside the best."""
    found = by_settings(lines)
    rows = []
    for cell in cells:
        measured = found.get(cell.key, {})
        fixed = [c for c in cells if c.group == cell.group and not is_automatic(c)]
        errors = [_errors(found.get(other.key, {})) for other in fixed]
        best = min(filter(None, errors), key=lambda e: statistics.fmean(e.values()), default={})
        ours = _errors(measured)
        before = Spread.of([line["final_error"] for line in measured.values()])
        difference = Difference.of(ours, best) if is_automatic(cell) else None
        near = None if difference is None else difference.mean <= (difference.se or 0.0)
        rows.append(
            [
                cell.group,
                cell.label,
                str(Spread.of(list(ours.values())) or "missing"),
                str(before) if is_automatic(cell) and before else "",
                _modes(cell, list(measured.values())),
                str(len(measured)),
                str(difference or ""),
                {None: "", True: "yes", False: "no"}[near],
            ]
        )
    return rows


def _errors(lines: dict[int, Line]) -> dict[int, float]:
    """Errors by seed: after pruning, if the modes were pruned."""
    return {
        seed: line["pruned_error" if "pruned_error" in line else "final_error"]
        for seed, line in sorted(lines.items())
    }


def _modes(cell: Cell, lines: Sequence[Line]) -> str:
    if not is_automatic(cell):
        return str(cell.settings["modes"]) if cell.settings["norm"] == "mn" else "1"
    if not lines:
        return ""
    names = lines[0]["num_modes"]
    means = [statistics.fmean(line["num_modes"][name] for line in lines) for name in names]
    if len(means) <= MOST_LISTED:
        return ", ".join(f"{name} {mean:.1f}" for name, mean in zip(names, means, strict=True))
    return f"{statistics.fmean(means):.1f}, from {min(means):.1f} to {max(means):.1f}"
