"""Run the GPU tests and record their outcome: python tests/record_gpu.py results/test_gpu.json."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from modenorm.lab.provenance import provenance


class Recorder:
    """Counts outcomes and keeps the names of failures."""

    def __init__(self):
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}
        self.failures = []

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.failed:
            self.failures.append(report.nodeid)

    def pytest_collectreport(self, report):
        if report.failed:  # a file that can't be imported
            self.counts["failed"] += 1
            self.failures.append(report.nodeid)


def main(path):
    if not torch.cuda.is_available():
        sys.exit(
            "no GPU here: the kernels' logic is tested by TRITON_INTERPRET=1 pytest tests/kernels"
        )
    recorder = Recorder()
    options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "tests"]
    if importlib.util.find_spec("xdist"):
        workers = max(1, 3 * (os.cpu_count() or 1) // 4)  # most of the time goes into compiling
        options += ["-n", str(min(12, workers))]
    status = pytest.main(options, plugins=[recorder])
    record = recorder.counts | {"failures": recorder.failures}
    record |= provenance(torch.device("cuda"))
    Path(path).write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))
    sys.exit(int(status))


if __name__ == "__main__":
    main(sys.argv[1])
