"""Finished trainings with chosen errors, as a training would leave them."""

import json
from pathlib import Path
from typing import Any

from modenorm.lab.experiments import Cell


def fake_run(cell: Cell, runs: Path, seed: int, top: float, final: float, **changes: Any) -> Path:
    """Write a run directory of a cell; `changes` go into result.json."""
    config = cell.config(seed)
    folder = runs / config.run_id
    folder.mkdir(parents=True)
    result = {
        "run": config.run_id,
        "final_error": final,
        "top_error": top,
        "top_step": 3,
        "top5_error": final / 2,
        "domain_errors": {"mnist": 1.0, "svhn": 2.0},
        "steps": 4,
        "samples_seen": 4 * config.batch,
        "seconds": 1.5,
        "device": "some device",
        "torch": "2.13.0",
        "modenorm": "0.1.0",
        "commit": "abc",
        "date": "2026-01-02T03:04:05+00:00",
    }
    last = {"step": 4, "samples": 4 * config.batch, "test_error": final}
    (folder / "metrics.jsonl").write_text(json.dumps(last) + "\n")
    (folder / "config.json").write_text(config.to_json() + "\n")
    (folder / "result.json").write_text(json.dumps(result | changes))
    (folder / "done").touch()
    return folder
