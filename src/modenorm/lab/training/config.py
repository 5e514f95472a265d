"""What one training is: a frozen configuration, its checks, its name, and the paper's recipes."""

import dataclasses
import hashlib
import inspect
import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

import torch

from modenorm.lab.data.folder import folder_name, folder_path
from modenorm.lab.models import MODELS, NORMS
from modenorm.lab.models.norms import GATES

Unit = Literal["samples", "epochs", "updates"]
Precision = Literal["float32", "bfloat16"]
Crop = Literal["padded", "resized"]

CHOICES: dict[str, Collection[str]] = {
    "model": MODELS,
    "norm": NORMS,
    "where": ("all", "first"),
    "gate": GATES,
    "variance": ("pooled", "pixel"),
    "unit": get_args(Unit),
    "dtype": get_args(Precision),
    "crop": get_args(Crop),
}


LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides the result of one training.

    Attributes:
        model: A name in `modenorm.lab.models.MODELS`.
        dataset: A name that `modenorm.lab.data.load` knows.
        image_size: Side of the images of a folder whose images differ in size; None otherwise.
        norm: The normalization: bn, in, ln, gn, mn or mgn.
        modes: K of mn and mgn; or {name pattern: K}, where the first pattern that matches a norm's
            name decides.
        sparsity: By how much the outputs may change, relative to their standard deviation, when
            modes that make little difference are closed (mn), at 70 % of the training or at 90 %
            of the time before the learning rate first falls; a tenth as much when modes are pruned
            at the end. 0 to keep all modes.
        groups: Groups of gn.
        options: Further arguments of the model, such as {"activation": "sigmoid"} of lenet.
        where: Replace "all" norms of the model, or only the "first".
        gate: The gating network of mn; "linear" is the paper's.
        variance: Which variance mgn takes, "pooled" or "pixel".
        running_momentum: λ, the weight of a new batch in the running estimates.
        batch: N, samples in a batch.
        lr: The first learning rate.
        momentum: Of SGD.
        weight_decay: Of SGD.
        unit: What `total`, `milestones` and `eval_every` count.
        total: Length of the training.
        milestones: Where the learning rate is multiplied by `factor`.
        factor: See `milestones`.
        eval_every: Distance between evaluations on the test set; the end is always evaluated.
        augment: Random crops and random flips.
        crop: Crops of images "padded" by four, or "resized" parts of random area and shape.
        stream: Decode the files of an image folder when they are needed, in worker processes,
            instead of keeping all images on the device.
        seed: Decides the initial weights, the order of samples, augmentation and dropout.
        dtype: "bfloat16" computes under autocast; weights stay float32.
        channels_last: Keep images and weights in torch's channels_last format.
        compile: On a GPU, train and evaluate the model compiled by torch.compile.
        sync: Trained by several ranks, take the statistics of bn and mn over the whole batch, not
            over each rank's part of it; then the number of ranks makes no difference.
    """

    model: str
    dataset: str
    image_size: int | None = None
    norm: str = "bn"
    modes: int | dict[str, int] = 2
    sparsity: float = 0.0
    groups: int = 2
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    where: str = "all"
    gate: str = "linear"
    variance: str = "pooled"
    running_momentum: float = 0.1
    batch: int = 128
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    unit: Unit = "epochs"
    total: int = 100
    milestones: tuple[int, ...] = ()
    factor: float = 0.1
    eval_every: int = 1
    augment: bool = False
    crop: Crop = "padded"
    stream: bool = False
    seed: int = 0
    dtype: Precision = "float32"
    channels_last: bool = False
    compile: bool = False
    sync: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "milestones", tuple(self.milestones))
        for name in ("batch", "groups", "total", "eval_every"):
            _require(self, name, getattr(self, name) >= 1, "at least 1")
        named = bool(self.dataset.strip())
        _require(self, "dataset", named, "the name of a data set, or folder:PATH")
        large = self.image_size is None or self.image_size >= 1
        _require(self, "image_size", large, "at least 1")
        counts = self.modes.values() if isinstance(self.modes, dict) else (self.modes,)
        whole = all(isinstance(k, int) and k >= 1 for k in counts)
        _require(self, "modes", bool(counts) and whole, "at least 1, or at least 1 for each layer")
        _require(self, "sparsity", 0 <= self.sparsity < math.inf, "at least 0 and finite")
        sparse = self.norm == "mn" or not self.sparsity
        _require(self, "sparsity", sparse, "0 unless the norm is mn")
        for name in ("lr", "factor"):
            rule = f"above 0 and at most {LARGEST:g}, the largest number of float32"
            _require(self, name, 0 < getattr(self, name) <= LARGEST, rule)
        for name in ("momentum", "weight_decay"):
            _require(self, name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        _require(self, "running_momentum", 0 < self.running_momentum <= 1, "above 0 and at most 1")
        for name, known in CHOICES.items():
            rule = f"one of {', '.join(known)}"
            _require(self, name, getattr(self, name) in known, rule)
        self._check_options()
        rising = list(self.milestones) == sorted({m for m in self.milestones if m >= 1})
        _require(self, "milestones", rising, "above 0 and in rising order, such as 80,120")
        if self.stream:
            _require(
                self, "dataset", folder_path(self.dataset) is not None, "folder:PATH to stream"
            )
            _require(self, "image_size", self.image_size is not None, "given to stream")
            resized = self.crop == "resized" or not self.augment
            _require(self, "crop", resized, "resized to augment what is streamed")

    def _check_options(self) -> None:
        taken = _options_of(self.model)
        for name in sorted(self.options.keys() - taken):
            known = f"only {', '.join(sorted(taken))}" if taken else "none"
            raise ValueError(f"options has {name!r}, but {self.model} has {known}: leave it out")

    @property
    def run_id(self) -> str:
        """A readable name that ends in a hash of all settings that are not the default."""
        modes = f"auto{self.modes_label}" if self.sparsity else self.modes_label
        count = {"mn": modes, "mgn": modes, "gn": str(self.groups)}.get(self.norm, "")
        chosen = self.chosen()
        if isinstance(self.modes, dict):
            chosen["modes"] = list(self.modes.items())  # whose order matters
        digest = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:8]
        data = folder_name(self.dataset)
        return f"{self.model}-{data}-{self.norm}{count}-n{self.batch}-s{self.seed}-{digest}"

    @property
    def kind(self) -> str:
        """A name for all that differ by their seeds alone."""
        return dataclasses.replace(self, seed=0).run_id

    @property
    def modes_label(self) -> str:
        """The number of modes, or those of the patterns in their order."""
        numbers = self.modes.values() if isinstance(self.modes, dict) else (self.modes,)
        return ".".join(map(str, numbers))

    def chosen(self) -> dict[str, Any]:
        """The settings that are not the default; a setting that is added later changes no name."""
        fields = {field.name: field for field in dataclasses.fields(self)}
        return {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if value != default_of(fields[name])
        }

    def to_json(self) -> str:
        """Write the configuration with sorted names, and patterns of modes in their order."""
        return json.dumps(dict(sorted(dataclasses.asdict(self).items())))

    @classmethod
    def from_json(cls, text: str) -> "TrainConfig":
        """Read what `to_json` wrote; raises ValueError for anything else."""
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"a configuration is a JSON object, got {type(values).__name__}")
        types = get_type_hints(cls)
        unknown = sorted(values.keys() - types.keys())
        if unknown:
            raise ValueError(f"unknown setting {unknown[0]!r}: a configuration has {sorted(types)}")
        for name, value in values.items():
            if not _has_type(value, types[name]):
                expected = types[name].__name__
                raise ValueError(f"not a configuration: {name} is {value!r}, expected {expected}")
        try:
            return cls(**values)
        except (TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a configuration: {error}") from None

    def differences(self, other: "TrainConfig") -> list[str]:
        """Describe every setting in which `other` differs."""
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        return [
            f"{name} {theirs[name]!r} instead of {mine[name]!r}"
            for name in mine
            if mine[name] != theirs[name]
        ]


def _has_type(value: Any, kind: Any) -> bool:
    """Whether a value from JSON is of a plain type; types made of others are passed."""
    known = {str: str, bool: bool, int: int, float: int | float}
    return kind not in known or (
        isinstance(value, known[kind]) and isinstance(value, bool) == (kind is bool)
    )


def default_of(field: dataclasses.Field[Any]) -> Any:
    """A setting's default; MISSING if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _require(config: TrainConfig, name: str, holds: bool, rule: str) -> None:
    if not holds:
        option = "--" + name.replace("_", "-")
        raise ValueError(f"{name} is {getattr(config, name)!r}, but must be {rule}: set {option}")


def _options_of(model: str) -> set[str]:
    parameters = inspect.signature(MODELS[model]).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


_LENET = {
    "dataset": "multitask",
    "batch": 128,
    "lr": 0.1,
    "unit": "samples",
    "total": 3_500_000,
    "milestones": (2_500_000, 3_000_000),
    "eval_every": 100_000,
}
_CIFAR = {"dataset": "cifar10", "batch": 128, "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
_RESNET = {**_CIFAR, "total": 160, "milestones": (80, 120), "augment": True}

RECIPES: dict[str, dict[str, Any]] = {
    "lenet": _LENET,
    "lenet1989": _LENET,
    "nin": {**_CIFAR, "total": 100, "milestones": (65, 80), "augment": True},
    "vgg13": {**_CIFAR, "total": 100, "milestones": (65, 80, 90), "augment": True},
    "resnet20": _RESNET,
    "resnet56": _RESNET,
    "resnet110": _RESNET,
    "resnet18": {
        **_CIFAR,
        "dataset": "folder:imagenet",
        "image_size": 224,
        "stream": True,
        "crop": "resized",
        "batch": 256,
        "total": 90,
        "milestones": (30, 60),
        "augment": True,
    },
}
"""The paper's settings of every model; weight decay 1e-4 for NIN and VGG13 is our reading."""


def recipe(model: str, **changes: Any) -> TrainConfig:
    """Take the paper's settings for a model, with changes.

    The recipe's milestones and evaluations belong to its own length: with another `total` the
    learning rate stays, unless `milestones` are given too, and the test set is looked at 20 times.

    >>> recipe("resnet20", norm="mn", seed=3).run_id
    'resnet20-cifar10-mn2-n128-s3-...'
    """
    if model not in RECIPES:
        raise ValueError(f"no recipe for model {model!r}: known are {', '.join(RECIPES)}")
    settings = dict(RECIPES[model])
    if changes.get("unit") in CHOICES["unit"] and "total" not in changes:
        raise ValueError(f"unit is {changes['unit']!r}, but how many is not said: set --total")
    dataset = changes.get("dataset", settings["dataset"])
    if folder_path(dataset) is None:
        if changes.get("image_size") is not None:
            raise ValueError(
                f"image_size is {changes['image_size']}, but {dataset} has a size of its own: "
                "leave --image-size out, or set --dataset folder:PATH"
            )
        settings = {k: v for k, v in settings.items() if k not in ("stream", "image_size")}
    length = {"unit": "epochs", **settings}
    if any(changes.get(name, length[name]) != length[name] for name in ("unit", "total")):
        total = changes.get("total", length["total"])
        settings.update(milestones=(), eval_every=max(1, total // 20))
    return TrainConfig(**{"model": model, **settings, **changes})
