"""Cells beside the paper: means over seeds, differences to batch norm, and the order of norms."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from modenorm.lab.experiments.collect import Line
from modenorm.lab.experiments.paper import CITED, Cell

BASELINE = "BN"
HEADER = (
    "experiment", "norm", "paper", "top error", "final error", "seeds", "top − BN", "final − BN",
    "as in the paper",
)  # fmt: skip

GAIN_HEADER = (
    "top error, %", "paper: BN", "MN K=2", "MN − BN", "here: BN", "MN K=2", "MN − BN", "seeds",
)  # fmt: skip


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (None for one value) of `n` values."""

    mean: float
    sd: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """Of some values; None if there are none."""
        if not values:
            return None
        sd = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), sd, len(values))

    def __str__(self) -> str:
        return number(self.mean, self.sd)


@dataclass(frozen=True)
class Difference:
    """A difference of means, its standard error (None if unknown), and whether it is by seed."""

    mean: float
    se: float | None
    paired: bool

    @classmethod
    def of(cls, ours: dict[int, float], baseline: dict[int, float]) -> "Difference | None":
        """Between two sets of numbers by seed: paired if the seeds are the same ones."""
        a, b = Spread.of(list(ours.values())), Spread.of(list(baseline.values()))
        if a is None or b is None:
            return None
        if ours.keys() == baseline.keys():
            pairs = Spread.of([ours[seed] - baseline[seed] for seed in ours])
            assert pairs is not None
            se = None if pairs.sd is None else pairs.sd / math.sqrt(pairs.n)
            return cls(pairs.mean, se, True)
        if a.sd is None or b.sd is None:
            return cls(a.mean - b.mean, None, False)
        return cls(a.mean - b.mean, math.sqrt(a.sd**2 / a.n + b.sd**2 / b.n), False)

    def __str__(self) -> str:
        sign = "+" if self.mean > 0 else "−"
        return sign + number(abs(self.mean), self.se) + ("" if self.paired else " (unpaired)")


@dataclass(frozen=True)
class Summary:
    """A cell and what was measured of it.

    Attributes:
        cell: The cell.
        seeds: Seeds that were trained.
        top: Lowest error of the evaluations, over seeds; None if nothing was measured.
        final: Error at the end, over seeds.
        top_difference: To batch norm in the same group; None for batch norm itself.
        final_difference: Likewise.
        top5: Final top-5 error, over seeds.
        as_published: Whether the cell is on the published side of batch norm, by top error.
    """

    cell: Cell
    seeds: tuple[int, ...]
    top: Spread | None
    final: Spread | None
    top_difference: Difference | None
    final_difference: Difference | None
    top5: Spread | None
    as_published: bool | None


def by_settings(lines: Iterable[Line]) -> dict[str, dict[int, Line]]:
    """Lines by the hash of their settings, and by seed."""
    found: dict[str, dict[int, Line]] = {}
    for line in lines:
        found.setdefault(line["settings"], {})[line["seed"]] = line
    return found


def summarize(cells: Sequence[Cell], lines: Iterable[Line]) -> list[Summary]:
    """Put the lines of results to their cells; lines of no cell are passed over."""
    by_key = by_settings(lines)
    baselines = {cell.group: cell for cell in cells if cell.label == BASELINE}

    def values(cell: Cell | None, measure: str) -> dict[int, float]:
        found = by_key.get(cell.key, {}) if cell else {}
        return {
            seed: line[measure]
            for seed, line in sorted(found.items())
            if cell is None or cell.stand_in or not line.get("stand_in")
        }

    def one(cell: Cell) -> Summary:
        bn = None if cell.label == BASELINE else baselines.get(cell.group)
        top, final = values(cell, "top_error"), values(cell, "final_error")
        difference = Difference.of(top, values(bn, "top_error"))
        return Summary(
            cell=cell,
            seeds=tuple(top),
            top=Spread.of(list(top.values())),
            final=Spread.of(list(final.values())),
            top_difference=difference,
            final_difference=Difference.of(final, values(bn, "final_error")),
            top5=Spread.of(list(values(cell, "top5_error").values())),
            as_published=_same_side(cell, bn, difference),
        )

    return [one(cell) for cell in cells]


def _same_side(cell: Cell, bn: Cell | None, difference: Difference | None) -> bool | None:
    if bn is None or cell.error is None or bn.error is None or difference is None:
        return None
    return (cell.error < bn.error) == (difference.mean < 0)


def rows(summaries: Sequence[Summary]) -> list[list[str]]:
    """The cells as rows of text under `HEADER`.

    What is not measured is called missing, but for stand-ins, of which nobody needs all.
    """
    found = []
    for group, members in _groups(summaries).items():
        if all(member.cell.stand_in and not member.seeds for member in members):
            continue
        found += [
            [group, cited.label, number(cited.error), *[""] * (len(HEADER) - 3)]
            for cited in CITED
            if (cited.table, cited.group) == (members[0].cell.table, group)
        ]
        found += [_row(member) for member in members]
    return found


def gains(summaries: Sequence[Summary]) -> list[tuple[Summary, Summary]]:
    """BN, and MN with two modes beside it, where both were measured."""
    found = []
    for members in _groups(summaries).values():
        by_label = {member.cell.label: member for member in members}
        bn, mn = by_label.get(BASELINE), by_label.get("MN K=2")
        if bn is not None and mn is not None and bn.seeds and mn.seeds:
            found.append((bn, mn))
    return found


def gain_rows(pairs: Sequence[tuple[Summary, Summary]]) -> list[list[str]]:
    """MN beside BN in the paper and here, as rows of text under `GAIN_HEADER`."""
    found = []
    for bn, mn in pairs:
        published = ["", "", ""]
        if bn.cell.error is not None and mn.cell.error is not None and not mn.cell.stand_in:
            gain = Difference(mn.cell.error - bn.cell.error, None, True)
            published = [number(bn.cell.error), number(mn.cell.error), str(gain)]
        measured = [str(bn.top), str(mn.top), str(mn.top_difference)]
        found.append([mn.cell.group, *published, *measured, str(len(mn.seeds))])
    return found


def _row(summary: Summary) -> list[str]:
    cell = summary.cell
    paper = "" if cell.error is None else number(cell.error, cell.sd)
    top, final = str(summary.top or "missing"), str(summary.final or "missing")
    if cell.top5 is not None:
        paper += f", top-5 {cell.top5:.2f}"
    if (cell.top5 is not None or cell.stand_in) and summary.top5 is not None:
        final += f", top-5 {summary.top5}"
    differences = [str(d or "") for d in (summary.top_difference, summary.final_difference)]
    verdict = {None: "", True: "yes", False: "no"}[summary.as_published]
    seeds = str(len(summary.seeds))
    return [cell.group, cell.label, paper, top, final, seeds, *differences, verdict]


def orders(summaries: Sequence[Summary]) -> list[str]:
    """For each group a sentence on whether the norms come in the published order, by top error."""
    return [
        f"{group}: {_order(members)}"
        for group, members in _groups(summaries).items()
        if all(member.cell.error is not None for member in members)
    ]


def _order(members: Sequence[Summary]) -> str:
    published = sorted(members, key=lambda m: m.cell.error or 0.0)
    missing = [member.cell.label for member in members if member.top is None]
    paper = " < ".join(member.cell.label for member in published)
    if missing:
        return f"the paper's order is {paper}; {', '.join(missing)} not measured yet."
    measured = sorted(members, key=lambda m: m.top.mean if m.top else 0.0)
    if measured == published:
        return f"the paper's order holds, {paper}."
    ours = " < ".join(member.cell.label for member in measured)
    return f"the paper's order does not hold: {paper} there, {ours} here."


def _groups(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    groups: dict[str, list[Summary]] = {}
    for summary in summaries:
        groups.setdefault(summary.cell.group, []).append(summary)
    return groups


def number(mean: float, spread: float | None = None) -> str:
    """An error in percent, with its spread where there is one."""
    return f"{mean:.2f}" + ("" if spread is None else f" ± {spread:.2f}")
