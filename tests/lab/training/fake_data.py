"""A data set of a few hundred small images, and a training of a second or two on it."""

from typing import Any

import torch

from modenorm.lab.data import DataSet, ImageSet
from modenorm.lab.training import TrainConfig


def fake_images(count: int, size: int = 8, seed: int = 0) -> ImageSet:
    """Four classes in two domains; classes differ in brightness, so they can be learnt."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=generator)
    noise = torch.randint(0, 60, (count, 3, size, size), generator=generator)
    images = (noise + 40 * labels.view(-1, 1, 1, 1)).to(torch.uint8)
    domains = torch.randint(2, (count,), generator=generator)
    return ImageSet(images, labels, domains, ("a", "b", "c", "d"), ("plain", "odd"))


def fake_data(size: int = 8) -> dict[str, DataSet]:
    return {"fake": DataSet("fake", fake_images(70, size), fake_images(33, size, seed=1))}


def fake_config(**changes: Any) -> TrainConfig:
    """NIN, which takes images of any size, with all that a step can hold: dropout, momentum."""
    settings = {
        "model": "nin",
        "dataset": "fake",
        "norm": "mn",
        "batch": 4,
        "lr": 0.01,
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "unit": "updates",
        "total": 40,
        "milestones": (25,),
        "eval_every": 18,
        "augment": True,
    }
    return TrainConfig(**{**settings, **changes})
