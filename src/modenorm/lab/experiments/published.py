"""The paper's numbers for the report's page."""

import json

from modenorm.lab.experiments.paper import PAPER_TABLES
from modenorm.lab.report.tables import PaperNumber, settings_of


def published_numbers() -> list[PaperNumber]:
    """Every published error with the settings it belongs to, to stand beside our top error."""
    return [
        PaperNumber(
            cell.table.replace("table", "Table ").replace("extra", "authors' repository"),
            cell.error,
            settings_of(json.loads(cell.config(0).to_json())),
        )
        for cells in PAPER_TABLES.values()
        for cell in cells
        if cell.error is not None
    ]
