"""The tables of docs/reproduction.md, built from results/*.jsonl and never typed."""

import re
from collections.abc import Sequence
from pathlib import Path

from modenorm.lab.bench.page import _markdown
from modenorm.lab.experiments.collect import Line, read_lines, results_file
from modenorm.lab.experiments.paper import TABLES
from modenorm.lab.experiments.summary import HEADER, orders, rows, summarize


def with_results(text: str, results: Path) -> str:
    """The page with each table between its markers built anew.

    A table stands between `<!-- results TABLE -->` and `<!-- end -->`.
    """

    def rebuild(match: re.Match[str]) -> str:
        table = match["table"]
        return f"<!-- results {table} -->\n\n{table_text(table, results)}\n\n<!-- end -->"

    names = "|".join(TABLES)
    pattern = rf"<!-- results (?P<table>{names}) -->.*?<!-- end -->"
    return re.sub(pattern, rebuild, text, flags=re.DOTALL)


def table_text(table: str, results: Path) -> str:
    """A table in Markdown, the order of its norms, and where the numbers come from."""
    lines = read_lines(results_file(results, table))
    if not lines:
        return "_not measured yet_"
    summaries = summarize(TABLES[table], lines)
    sentences = "\n".join(f"- {sentence}" for sentence in orders(summaries))
    parts = [_markdown(list(HEADER), rows(summaries)), sentences, conditions(lines)]
    return "\n\n".join(filter(None, parts))


def conditions(lines: Sequence[Line]) -> str:
    """The machines, versions, commits and days of some lines."""

    def all_of(name: str) -> str:
        return ", ".join(sorted({str(line[name]) for line in lines}))

    days = sorted({str(line["date"])[:10] for line in lines})
    return (
        f"{len(lines)} trainings; {all_of('gpu')}, torch {all_of('torch')}, "
        f"commit {all_of('commit')}, {' to '.join(dict.fromkeys((days[0], days[-1])))}. "
        "Errors in percent, mean ± standard deviation over seeds; differences ± standard error."
    )
