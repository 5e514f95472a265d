"""TensorBoard, for those who ask for it."""

from pathlib import Path
from typing import Any

from modenorm.lab.training.usage import scalars as mode_scalars


class Events:
    """TensorBoard events of the evaluations, over samples seen."""

    def __init__(self, path: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError(
                "--tensorboard needs the package tensorboard: pip install tensorboard"
            ) from None
        self._writer = SummaryWriter(str(path / "tensorboard"), purge_step=step)

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
