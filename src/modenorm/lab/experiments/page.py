"""The tables of README.md and docs/reproduction.md, built from results/*.jsonl, never typed."""

import datetime
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path

from modenorm.lab.bench.page import markdown_table
from modenorm.lab.experiments.automatic import MODES_HEADER, modes_rows
from modenorm.lab.experiments.claims import PARAMETER_HEADER, parameter_rows
from modenorm.lab.experiments.collect import Line, read_lines, results_file
from modenorm.lab.experiments.gates import GATE_HEADER, gate_rows
from modenorm.lab.experiments.mixtures import NEEDED, mixtures_tables, tuning_table
from modenorm.lab.experiments.paper import PAPER_TABLES
from modenorm.lab.experiments.summary import (
    GAIN_HEADER,
    HEADER,
    gain_rows,
    gains,
    orders,
    rows,
    summarize,
)
from modenorm.lab.experiments.tables import TABLES
from modenorm.lab.provenance import all_of
from modenorm.lab.training.files import read_objects

GAIN_TABLES = ("table1", "table5", "table3", "table4")
MIXTURE_FILES = ("automatic_mixtures", "automatic_tuning")


def with_results(text: str, results: Path) -> str:
    """The page with each table between its markers built anew.

    A table stands between a marker and `<!-- end -->`: errors after `<!-- results TABLE -->`, the
    gates' shares after `<!-- gates TABLE -->`, found numbers of modes after `<!-- modes TABLE -->`,
    what `modenorm mixtures` found after `<!-- mixtures FILE -->`, numbers of parameters after
    `<!-- parameters -->`, MN beside BN wherever both are measured after `<!-- gains -->`, and the
    minutes that each table took after `<!-- cost -->`.
    """
    makers: dict[str, Callable[..., str]] = {
        "results": table_text,
        "gates": gates_text,
        "modes": modes_text,
        "mixtures": mixtures_text,
        "parameters": parameters_text,
        "gains": gains_text,
        "cost": cost_text,
    }

    def rebuild(match: re.Match[str]) -> str:
        names = match["names"].split()
        return (
            f"<!-- {match['names']} -->\n\n{makers[names[0]](results, *names[1:])}\n\n<!-- end -->"
        )

    tables = "|".join((*TABLES, *MIXTURE_FILES))
    pattern = rf"<!-- (?P<names>(?:{'|'.join(makers)})(?: (?:{tables}))?) -->.*?<!-- end -->"
    return re.sub(pattern, rebuild, text, flags=re.DOTALL)


def parameters_text(_: Path) -> str:
    """What the norms add to the networks' parameters, in Markdown."""
    return markdown_table(list(PARAMETER_HEADER), parameter_rows())


def gains_text(results: Path) -> str:
    """MN beside BN in all tables, in Markdown."""
    lines = {table: read_lines(results_file(results, table)) for table in GAIN_TABLES}
    pairs = gains([s for table in GAIN_TABLES for s in summarize(TABLES[table], lines[table])])
    if not pairs:
        return "_not measured yet_"
    shown = {(s.cell.key, seed) for s in chain(*pairs) for seed in s.seeds}
    measured = _once(chain(*lines.values()))
    trained = [line for training, line in measured.items() if training in shown]
    return f"{markdown_table(list(GAIN_HEADER), gain_rows(pairs))}\n\n{conditions(trained)}"


def _once(lines: Iterable[Line]) -> dict[tuple[str, int], Line]:
    """Each training once, also if it is in several tables."""
    return {(line["settings"], line["seed"]): line for line in lines}


def cost_text(results: Path) -> str:
    """What the paper's tables took, in Markdown."""
    everything: list[Line] = []
    rows = []
    for table, cells in PAPER_TABLES.items():
        lines = read_lines(results_file(results, table))
        everything += lines
        for group in dict.fromkeys(cell.group for cell in cells):
            keys = {cell.key for cell in cells if cell.group == group}
            if found := [line for line in lines if line["settings"] in keys]:
                rows.append([table, group, *_cost(found)])
    once = list(_once(everything).values())
    by_commit: dict[str, list[Line]] = {}
    for line in sorted(once, key=itemgetter("date")):
        by_commit.setdefault(line["commit"], []).append(line)
    if len(by_commit) > 1:
        rows += [["all", f"at commit {name}", *_cost(found)] for name, found in by_commit.items()]
    rows.append(["all", "", *_cost(once)])
    return markdown_table(["table", "experiment", "trainings", "minutes"], rows)


def _cost(lines: Sequence[Line]) -> tuple[str, str]:
    return str(len(lines)), f"{busy_minutes(lines):.1f}"


def table_text(results: Path, table: str) -> str:
    """A table in Markdown, the order of its norms, and where the numbers come from."""
    lines = read_lines(results_file(results, table))
    if not lines:
        return "_not measured yet_"
    summaries = summarize(TABLES[table], lines)
    sentences = "\n".join(f"- {sentence}" for sentence in orders(summaries))
    parts = [markdown_table(list(HEADER), rows(summaries)), sentences, conditions(lines)]
    return "\n\n".join(filter(None, parts))


def gates_text(results: Path, table: str) -> str:
    """How a table's trainings share the samples out among the modes, in Markdown."""
    lines = read_lines(results_file(results, table))
    found = gate_rows(TABLES[table], lines)
    return markdown_table(list(GATE_HEADER), found) if found else "_not measured yet_"


def modes_text(results: Path, table: str) -> str:
    """Automatic numbers of modes beside fixed ones, in Markdown."""
    lines = read_lines(results_file(results, table))
    if not lines:
        return "_not measured yet_"
    found = markdown_table(list(MODES_HEADER), modes_rows(TABLES[table], lines))
    return f"{found}\n\n{conditions(lines)}"


def mixtures_text(results: Path, name: str) -> str:
    """What `modenorm mixtures` found, in Markdown."""
    file = results_file(results, name)
    lines = read_objects(file, NEEDED)
    if not lines:
        return "_not measured yet_"
    return tuning_table(lines) if name == "automatic_tuning" else mixtures_tables(lines)


def conditions(lines: Sequence[Line]) -> str:
    """The time, machines, versions, commits and days of some lines."""
    every = partial(all_of, lines, sort=True)
    days = sorted({str(line["date"])[:10] for line in lines})
    return (
        f"{duration(len(lines), busy_minutes(lines))}; {every('gpu')}, "
        f"torch {every('torch')}, commit {every('commit')}, "
        f"{' to '.join(dict.fromkeys((days[0], days[-1])))}. "
        "Errors in percent, mean ± standard deviation over seeds; differences ± standard error."
    )


def duration(trainings: int, minutes: float) -> str:
    """How many trainings took how long.

    >>> duration(1, 1.6)
    '1 training in 1.6 minutes'
    """
    return f"{trainings} training{'' if trainings == 1 else 's'} in {minutes:.1f} minutes"


def busy_minutes(lines: Iterable[Line]) -> float:
    """Minutes in which at least one of some trainings was going on."""
    busy, until = 0.0, float("-inf")
    ends = [(datetime.datetime.fromisoformat(line["date"]).timestamp(), line) for line in lines]
    for start, end in sorted((end - line["seconds"], end) for end, line in ends):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy / 60
