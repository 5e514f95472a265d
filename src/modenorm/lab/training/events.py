"""TensorBoard, for those who ask for it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from modenorm.lab.training.usage import scalars as mode_scalars


class Events:
    """TensorBoard events of the evaluations, over samples seen.

    Args:
        path: Of the run.
        records: Evaluations so far. They are written again: those of a killed process may not have
            reached its file, or be of steps that are repeated now.
    """

    def __init__(self, path: Path, records: Iterable[dict[str, Any]]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError(
                "--tensorboard needs the package tensorboard: pip install tensorboard"
            ) from None
        self._writer = SummaryWriter(str(path / "tensorboard"), purge_step=0)
        for record in records:
            self.write(record)

    def write(self, record: dict[str, Any]) -> None:
        """Write the numbers of one record of metrics."""
        scalars = {name: record[name] for name in ("lr", "train_loss", "test_error", "top5_error")}
        scalars |= {f"domain_error/{name}": e for name, e in record["domain_errors"].items()}
        scalars |= mode_scalars(record["modes"])
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, record["samples"])

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
