"""Training: one configuration, one directory, one result; alone or many side by side."""

from modenorm.lab.training.checkpoint import Checkpoint, CheckpointError, load_model
from modenorm.lab.training.config import RECIPES, TrainConfig, recipe
from modenorm.lab.training.runner import Outcome, sweep, train, train_many
from modenorm.lab.training.runs import Run, find_runs, sort_by_state
from modenorm.lab.training.trainer import Diverged, Training

__all__ = [
    "RECIPES",
    "Checkpoint",
    "CheckpointError",
    "Diverged",
    "Outcome",
    "Run",
    "TrainConfig",
    "Training",
    "find_runs",
    "load_model",
    "recipe",
    "sort_by_state",
    "sweep",
    "train",
    "train_many",
]
