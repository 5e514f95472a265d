"""The paper's experiments: what to train, what was published, and what was measured."""

from modenorm.lab.experiments.collect import collect, update
from modenorm.lab.experiments.page import with_results
from modenorm.lab.experiments.paper import TABLES, Cell, configs
from modenorm.lab.experiments.summary import summarize

__all__ = ["TABLES", "Cell", "collect", "configs", "summarize", "update", "with_results"]
