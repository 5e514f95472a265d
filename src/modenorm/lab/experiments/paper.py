"""The paper's tables and Figure 2 as data: every cell, its settings and the published number.

Errors are in percent. Open points of the paper and what is taken here: docs/reproduction.md.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modenorm.lab.data.folder import STAND_INS, folder_name, folder_path, recognise
from modenorm.lab.training import RECIPES, TrainConfig
from modenorm.lab.training.closing import DEFAULT_SPARSITY

Published = tuple[float, float | None] | None
"""Mean and standard deviation; None where nothing was published."""


@dataclass(frozen=True)
class Cell:
    """One number of a table: what to train, and what the paper reports.

    Attributes:
        table: A key of `modenorm.lab.experiments.TABLES`.
        group: The network, data or batch size that cells to be compared have in common.
        label: The norm, such as "MN K=2".
        settings: Arguments of `TrainConfig` without the seed.
        error: Published error; None if there is none.
        sd: Published standard deviation over initialisations.
        top5: Published top-5 error.
    """

    table: str
    group: str
    label: str
    settings: Mapping[str, Any]
    error: float | None = None
    sd: float | None = None
    top5: float | None = None

    def config(self, seed: int) -> TrainConfig:
        """The training with a seed."""
        return TrainConfig(**self.settings, seed=seed)

    @property
    def key(self) -> str:
        """See `settings_key`."""
        return settings_key(self.config(0))

    @property
    def stand_in(self) -> bool:
        """Whether other data take the place of the paper's."""
        return folder_name(self.settings["dataset"]) in STAND_INS


@dataclass(frozen=True)
class Figure:
    """A picture of what modes claim: the training, with seed 0, and the layers it shows."""

    cell: Cell
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Cited:
    """A number that the paper quotes from others beside its own."""

    table: str
    group: str
    label: str
    error: float


NORMS: dict[str, dict[str, Any]] = {
    "BN": {"norm": "bn"},
    "IN": {"norm": "in"},
    "LN": {"norm": "ln"},
    "GN G=2": {"norm": "gn", "groups": 2},
    "MN K=2": {"norm": "mn", "modes": 2},
    "MN K=4": {"norm": "mn", "modes": 4},
    "MN K=6": {"norm": "mn", "modes": 6},
    "MN K=8": {"norm": "mn", "modes": 8},
    "MN auto": {"norm": "mn", "modes": 8, "sparsity": DEFAULT_SPARSITY},
    "MGN K=2": {"norm": "mgn", "modes": 2},
    "MGN K=2, pixel variance": {"norm": "mgn", "modes": 2, "variance": "pixel"},
    "MN K=2, standardised gate": {"norm": "mn", "modes": 2, "gate": "standardized"},
    "MN K=4, standardised gate": {"norm": "mn", "modes": 4, "gate": "standardized"},
    "MN K=6, standardised gate": {"norm": "mn", "modes": 6, "gate": "standardized"},
    "first norm MN K=2": {"norm": "mn", "modes": 2, "where": "first"},
}

LENET: dict[str, Any] = {"model": "lenet", **RECIPES["lenet"]}
LENET_SMALL_BATCHES: dict[str, Any] = {
    **LENET,
    "lr": 0.02,
    "unit": "updates",
    "total": 50_000,
    "milestones": (35_000, 42_500),
    "eval_every": 2_500,
}
FAST = {"dtype": "bfloat16", "channels_last": True, "compile": True}
NIN, VGG13, RESNET20, RESNET56, RESNET18 = (
    {"model": model, **RECIPES[model], **FAST}
    for model in ("nin", "vgg13", "resnet20", "resnet56", "resnet18")
)
CIFAR10, CIFAR100 = {"dataset": "cifar10"}, {"dataset": "cifar100"}
TINY = {"dataset": "folder:tiny-imagenet-200", "image_size": 64, "stream": False}
IMAGENETTE, ANY_FOLDER = {"dataset": "folder:imagenette"}, {"dataset": "folder:stand-in"}

TRAIN_IMAGES = {
    "multitask": 243_257,
    "cifar10": 50_000,
    "cifar100": 50_000,
    "imagenet": 1_281_167,
    "tiny-imagenet-200": 100_000,
    "imagenette": 9_469,
}
ILSVRC12_CLASSES = 1000


def cells_of(
    table: str, group: str, settings: Mapping[str, Any], published: Mapping[str, Published]
) -> list[Cell]:
    """One cell for each norm, with what was published of it."""
    return [
        Cell(table, group, label, {**settings, **NORMS[label]}, *(number or (None, None)))
        for label, number in published.items()
    ]


PUBLISHED1: dict[str, Published] = {
    "BN": (26.91, 1.08),
    "IN": (28.87, 2.28),
    "LN": (27.31, 0.71),
    "MN K=2": (23.16, 1.23),
    "MN K=4": (24.25, 0.71),
    "MN K=6": (25.12, 1.48),
}
TABLE1 = cells_of("table1", "LeNet, N=128", LENET, PUBLISHED1)

TABLE2 = [
    *cells_of(
        "table2",
        "LeNet, N=4",
        {**LENET_SMALL_BATCHES, "batch": 4},
        {
            "BN": (33.40, 0.75),
            "MN K=2": (32.80, 1.59),
            "GN G=2": (32.15, 1.10),
            "MGN K=2": (31.30, 1.65),
        },
    ),
    *cells_of(
        "table2",
        "LeNet, N=8",
        {**LENET_SMALL_BATCHES, "batch": 8},
        {
            "BN": (31.98, 1.53),
            "MN K=2": (29.05, 1.51),
            "GN G=2": (28.60, 1.45),
            "MGN K=2": (26.83, 1.34),
        },
    ),
    *cells_of(
        "table2",
        "LeNet, N=16",
        {**LENET_SMALL_BATCHES, "batch": 16},
        {
            "BN": (30.38, 0.60),
            "MN K=2": (28.70, 0.68),
            "GN G=2": (27.63, 0.45),
            "MGN K=2": (26.00, 1.68),
        },
    ),
]

TABLE3 = [
    cell
    for group, settings, bn, mn in (
        ("NIN on CIFAR-10", {**NIN, **CIFAR10}, 8.82, 8.42),
        ("NIN on CIFAR-100", {**NIN, **CIFAR100}, 32.30, 31.66),
        ("VGG13 on CIFAR-10", {**VGG13, **CIFAR10}, 8.28, 7.79),
        ("VGG13 on CIFAR-100", {**VGG13, **CIFAR100}, 31.15, 30.06),
        ("ResNet20 on CIFAR-10", {**RESNET20, **CIFAR10}, 8.44, 7.99),
        ("ResNet20 on CIFAR-100", {**RESNET20, **CIFAR100}, 31.56, 30.53),
    )
    for cell in cells_of("table3", group, settings, {"BN": (bn, None), "MN K=2": (mn, None)})
]

FIGURE2 = Figure(
    next(c for c in TABLE3 if (c.group, c.label) == ("VGG13 on CIFAR-10", "MN K=2")),
    ("features.conv3_64_1.norm", "features.conv3_256_1.norm"),
)

TABLE4 = [
    Cell(
        "table4",
        "ResNet18 on ILSVRC12",
        "BN",
        {**RESNET18, **NORMS["BN"]},
        30.25,
        top5=10.90,
    ),
    Cell(
        "table4",
        "ResNet18 on ILSVRC12",
        "MN K=2",
        {**RESNET18, **NORMS["MN K=2"]},
        30.07,
        top5=10.65,
    ),
    *(
        cell
        for name, settings in (
            ("Tiny-ImageNet-200", TINY),
            ("Imagenette", IMAGENETTE),
            ("another image folder", ANY_FOLDER),
        )
        for cell in cells_of(
            "table4",
            f"ResNet18 on {name} (a stand-in)",
            {**RESNET18, **settings},
            {"BN": None, "MN K=2": None},
        )
    ),
]

TABLE5 = [
    *cells_of(
        "table5",
        "LeNet, N=256",
        {**LENET, "batch": 256},
        {
            "BN": (26.34, 1.82),
            "IN": (31.15, 3.45),
            "LN": (26.95, 2.51),
            "MN K=2": (25.29, 1.31),
            "MN K=4": (25.04, 1.88),
            "MN K=6": (24.88, 1.24),
        },
    ),
    *cells_of(
        "table5",
        "LeNet, N=512",
        {**LENET, "batch": 512},
        {
            "BN": (26.51, 1.15),
            "IN": (29.00, 1.85),
            "LN": (28.98, 1.32),
            "MN K=2": (26.18, 1.86),
            "MN K=4": (24.29, 1.82),
            "MN K=6": (25.33, 1.33),
        },
    ),
]

# From the authors' repository, each from a single seed; BN for comparison (that of ResNet20 is
# the same training as in Table 3).
EXTRA = [
    *cells_of(
        "extra",
        "ResNet56 on CIFAR-100",
        {**RESNET56, **CIFAR100},
        {"BN": None, "MN K=2": (28.75, None)},
    ),
    *cells_of(
        "extra",
        "ResNet20 on CIFAR-10",
        {**RESNET20, **CIFAR10},
        {"BN": None, "first norm MN K=2": (7.73, None)},
    ),
]

PAPER_TABLES: dict[str, list[Cell]] = {
    "table1": TABLE1,
    "table2": TABLE2,
    "table3": TABLE3,
    "table4": TABLE4,
    "table5": TABLE5,
    "extra": EXTRA,
}

CITED = (
    Cited("table3", "NIN on CIFAR-10", "Lin et al.", 8.81),
    Cited("table3", "ResNet20 on CIFAR-10", "He et al.", 8.75),
)


def located(config: TrainConfig, data: Path) -> TrainConfig:
    """The configuration with its image folder, if it has one, inside the folder of data.

    Or the folder of data itself, if that is an image folder of the wanted kind.
    """
    if folder_path(config.dataset) is None:
        return config
    name = dataset_name(config)
    if is_image_folder(data) and recognise(data) == name:
        dataset = f"folder:{name}={data}"
    else:
        dataset = f"folder:{data / name}"
    return dataclasses.replace(config, dataset=dataset)


def is_image_folder(data: Path) -> bool:
    """Whether a folder holds images itself, rather than data sets."""
    return (data / "train").is_dir()


def dataset_name(config: TrainConfig) -> str:
    """The data set's name; see `folder_name`."""
    return folder_name(config.dataset)


def settings_key(config: TrainConfig) -> str:
    """A hash of all chosen settings but the seed and the place of an image folder."""
    settings = config.chosen() | {"dataset": dataset_name(config)}
    settings.pop("seed", None)
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
