"""Where trainings get their data from: sets that they share, and the batches of each."""

import hashlib
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modenorm.lab.data import DataSet, FolderIndex, index_folder, load
from modenorm.lab.data.folder import folder_name, folder_path
from modenorm.lab.data.loader import (
    PADDING,
    Batches,
    DeviceImages,
    Images,
    Loader,
    SampleStream,
)
from modenorm.lab.data.streaming import IMAGENET, StreamedImages, StreamLoader
from modenorm.lab.training.checkpoint import About
from modenorm.lab.training.config import TrainConfig
from modenorm.lab.training.ranks import Ranks


@dataclass(frozen=True)
class TrainingData:
    """A data set, on the device or streamed, shared by the trainings that use it.

    `description` changes when images are added, removed, renamed (if streamed) or changed (if not).
    """

    train: Images
    test: Images
    about: About
    description: str


def batches_for(
    config: TrainConfig, data: TrainingData, total: int, capacity: int, part: slice
) -> Batches:
    """The batches of a training.

    Args:
        config: Says in what order, and how they are augmented.
        data: The data set.
        total: Steps of the training.
        capacity: Steps that are prepared at once.
        part: The samples of every batch to deliver, such as those of one rank.
    """
    images = data.train
    stream = SampleStream(
        len(images),
        config.batch,
        config.seed,
        augment=config.augment,
        resized=images.size if config.crop == "resized" else None,
    )
    if isinstance(images, StreamedImages):
        return StreamLoader(images, stream, total, part)
    assert isinstance(images, DeviceImages)
    return Loader(images, stream, capacity, part)


class SharedData:
    """Data sets on a device, each loaded once; streamed ones are only listed.

    Args:
        device: Where they go.
        root: Folder with the published files.
        given: Data sets by name that need not be loaded.
        workers: Processes that decode what is streamed; as many as there are cores when None.
        ranks: Those who must have the same data.
    """

    def __init__(
        self,
        device: torch.device,
        root: Path | None,
        given: Mapping[str, DataSet] | None = None,
        workers: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._device, self._root, self._given = device, root, given or {}
        self._ranks = ranks or Ranks()
        self._workers = _cores_per_rank() if workers is None else workers
        self._sets: dict[tuple[str, int | None], DataSet] = {}
        self._placed: dict[tuple[object, ...], TrainingData] = {}

    def get(self, config: TrainConfig) -> TrainingData:
        """The data of a training, in the form its loader needs.

        Raises:
            ValueError: They are missing or wrong on a rank, or not the same on all of them; raised
                on every rank.
        """
        names = ("dataset", "image_size", "augment", "crop", "stream", "channels_last")
        key = tuple(getattr(config, name) for name in names)
        if key not in self._placed:
            listed = self._stream if config.stream else self._load
            self._placed[key] = listed(config)
        return self._placed[key]

    def _stream(self, config: TrainConfig) -> TrainingData:
        folder, size = folder_path(config.dataset), config.image_size
        assert folder is not None
        assert size is not None  # TrainConfig sees to both
        index = self._ranks.each(lambda: index_folder(folder))
        description = _describe_folder(index, folder)
        self._ranks.compare("the data", description)
        train, test = (
            StreamedImages(
                listing,
                size,
                self._device,
                channels_last=config.channels_last,
                workers=self._workers,
            )
            for listing in (index.train, index.test)
        )
        about = About(index.classes, (folder_name(config.dataset),), *IMAGENET)
        return TrainingData(train, test, about, description)

    def _load(self, config: TrainConfig) -> TrainingData:
        key = (config.dataset, config.image_size)
        if config.dataset in self._given:
            data = self._given[config.dataset]
        elif key in self._sets:
            data = self._sets[key]
        else:
            data = self._ranks.each(
                lambda: load(config.dataset, self._root, size=config.image_size)
            )
            self._sets[key] = data
        description = _describe_images(data)
        self._ranks.compare("the data", description)
        return self._place(data, config, description)

    def _place(self, data: DataSet, config: TrainConfig, description: str) -> TrainingData:
        padding = PADDING if config.augment and config.crop == "padded" else 0
        layout = config.channels_last
        train = DeviceImages(data.train, self._device, padding=padding, channels_last=layout)
        test = DeviceImages(data.test, self._device, scaling=train.scaling, channels_last=layout)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # other streams are going to read it
        about = About(data.train.classes, data.train.domain_names, *train.scaling)
        return TrainingData(train, test, about, description)


def _cores_per_rank() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _describe_folder(index: FolderIndex, folder: Path) -> str:
    """Count and hash the names of files; the folder may lie elsewhere on every rank."""
    digest = hashlib.sha256(repr(index.classes).encode())
    for path in index.paths:
        digest.update(os.fsencode(path.relative_to(folder)) + b"\n")
    return _description(len(index.train.paths), len(index.test.paths), index.classes, digest)


def _describe_images(data: DataSet) -> str:
    digest = hashlib.sha256(repr(data.train.classes).encode())
    for part in (data.train, data.test):
        for tensor in (part.images, part.labels, part.domains):
            pixels = tensor.cpu().contiguous().view(-1).numpy().view("uint8")
            digest.update(str(zlib.crc32(pixels.data)).encode())
    return _description(len(data.train), len(data.test), data.train.classes, digest)


def _description(train: int, test: int, classes: Sequence[str], digest: Any) -> str:
    return (
        f"{train} training and {test} test images of {len(classes)} classes "
        f"(sum {digest.hexdigest()[:8]})"
    )
