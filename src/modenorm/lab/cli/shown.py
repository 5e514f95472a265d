"""How commands show things: names as they are, and nothing cut off on a narrow terminal."""

import os
from typing import Any

from rich.console import Console
from rich.progress import TextColumn
from rich.table import Column, Table

WITHOUT_TERMINAL = 1000
"""Columns for files and pipes: a name stays in one line, for grep to find."""


def make_console(**options: Any) -> Console:
    """A console that takes brackets and colons in names for what they are."""
    console = Console(markup=False, emoji=False, highlight=False, **options)
    if not console.is_terminal and "COLUMNS" not in os.environ and "width" not in options:
        console.width = WITHOUT_TERMINAL
    return console


def make_table(*headings: str, right: tuple[str, ...] = (), title: str | None = None) -> Table:
    """A table whose long words go on in the next line.

    Args:
        headings: Of the columns.
        right: Headings of columns of numbers.
        title: Above it.
    """
    table = Table(title=title)
    for heading in headings:
        justify: Any = "right" if heading in right else "left"
        table.add_column(heading, overflow="fold", justify=justify)
    return table


def name_column() -> TextColumn:
    """The names of tasks, before their progress."""
    column = Column(overflow="fold")
    return TextColumn("{task.description}", markup=False, table_column=column)
