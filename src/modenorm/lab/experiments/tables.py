"""All tables that `modenorm reproduce` knows."""

from collections.abc import Iterable

from modenorm.lab.experiments.beyond import AUTOMATIC, LEVEL, OPTIONS
from modenorm.lab.experiments.paper import PAPER_TABLES, Cell
from modenorm.lab.training import TrainConfig

TABLES: dict[str, list[Cell]] = {
    **PAPER_TABLES,
    "level": LEVEL,
    "options": OPTIONS,
    "automatic": AUTOMATIC,
}


def configs(table: str, seeds: Iterable[int]) -> list[TrainConfig]:
    """The trainings of a table: every cell with the first seed, then with the second, and so on."""
    return [cell.config(seed) for seed in seeds for cell in TABLES[table]]
