"""The paper's experiments: what to train, what was published, and what was measured."""

from modenorm.lab.experiments.collect import collect, update
from modenorm.lab.experiments.page import with_results
from modenorm.lab.experiments.paper import Cell
from modenorm.lab.experiments.summary import summarize
from modenorm.lab.experiments.tables import TABLES, configs

__all__ = ["TABLES", "Cell", "collect", "configs", "summarize", "update", "with_results"]
