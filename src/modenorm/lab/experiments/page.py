"""The tables of docs/reproduction.md, built from results/*.jsonl and never typed."""

import datetime
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from modenorm.lab.bench.page import _markdown
from modenorm.lab.experiments.automatic import MODES_HEADER, modes_rows
from modenorm.lab.experiments.claims import PARAMETER_HEADER, parameter_rows
from modenorm.lab.experiments.collect import Line, read_lines, results_file
from modenorm.lab.experiments.gates import GATE_HEADER, gate_rows
from modenorm.lab.experiments.mixtures import mixtures_tables, tuning_table
from modenorm.lab.experiments.summary import HEADER, orders, rows, summarize
from modenorm.lab.experiments.tables import TABLES

MIXTURE_FILES = ("automatic_mixtures", "automatic_tuning")


def with_results(text: str, results: Path) -> str:
    """The page with each table between its markers built anew.

    A table stands between a marker and `<!-- end -->`: errors after `<!-- results TABLE -->`, the
    gates' shares after `<!-- gates TABLE -->`, found numbers of modes after `<!-- modes TABLE -->`,
    what `modenorm mixtures` found after `<!-- mixtures FILE -->`, and numbers of parameters after
    `<!-- parameters -->`.
    """
    text = re.sub(
        r"(?<=<!-- parameters -->).*?(?=<!-- end -->)", _parameters, text, flags=re.DOTALL
    )
    makers = {
        "results": table_text,
        "gates": gates_text,
        "modes": modes_text,
        "mixtures": mixtures_text,
    }

    def rebuild(match: re.Match[str]) -> str:
        kind, table = match["kind"], match["table"]
        return f"<!-- {kind} {table} -->\n\n{makers[kind](table, results)}\n\n<!-- end -->"

    kinds, names = "|".join(makers), "|".join((*TABLES, *MIXTURE_FILES))
    pattern = rf"<!-- (?P<kind>{kinds}) (?P<table>{names}) -->.*?<!-- end -->"
    return re.sub(pattern, rebuild, text, flags=re.DOTALL)


def _parameters(_: re.Match[str]) -> str:
    return f"\n\n{_markdown(list(PARAMETER_HEADER), parameter_rows())}\n\n"


def table_text(table: str, results: Path) -> str:
    """A table in Markdown, the order of its norms, and where the numbers come from."""
    lines = read_lines(results_file(results, table))
    if not lines:
        return "_not measured yet_"
    summaries = summarize(TABLES[table], lines)
    sentences = "\n".join(f"- {sentence}" for sentence in orders(summaries))
    parts = [_markdown(list(HEADER), rows(summaries)), sentences, conditions(lines)]
    return "\n\n".join(filter(None, parts))


def gates_text(table: str, results: Path) -> str:
    """How a table's trainings share the samples out among the modes, in Markdown."""
    lines = read_lines(results_file(results, table))
    found = gate_rows(TABLES[table], lines)
    return _markdown(list(GATE_HEADER), found) if found else "_not measured yet_"


def modes_text(table: str, results: Path) -> str:
    """Automatic numbers of modes beside fixed ones, in Markdown."""
    lines = read_lines(results_file(results, table))
    if not lines:
        return "_not measured yet_"
    found = _markdown(list(MODES_HEADER), modes_rows(TABLES[table], lines))
    return f"{found}\n\n{conditions(lines)}"


def mixtures_text(name: str, results: Path) -> str:
    """What `modenorm mixtures` found, in Markdown."""
    file = results_file(results, name)
    if not file.exists():
        return "_not measured yet_"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return tuning_table(lines) if name == "automatic_tuning" else mixtures_tables(lines)


def conditions(lines: Sequence[Line]) -> str:
    """The time, machines, versions, commits and days of some lines."""

    def all_of(name: str) -> str:
        return ", ".join(sorted({str(line[name]) for line in lines}))

    days = sorted({str(line["date"])[:10] for line in lines})
    return (
        f"{len(lines)} trainings in {busy_minutes(lines):.1f} minutes; {all_of('gpu')}, "
        f"torch {all_of('torch')}, commit {all_of('commit')}, "
        f"{' to '.join(dict.fromkeys((days[0], days[-1])))}. "
        "Errors in percent, mean ± standard deviation over seeds; differences ± standard error."
    )


def busy_minutes(lines: Iterable[Line]) -> float:
    """Minutes in which at least one of some trainings was going on."""
    busy, until = 0.0, float("-inf")
    ends = [(datetime.datetime.fromisoformat(line["date"]).timestamp(), line) for line in lines]
    for start, end in sorted((end - line["seconds"], end) for end, line in ends):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy / 60
