"""Image files that are decoded by worker processes when a batch needs them, as for ILSVRC12.

What is random about a sample comes from (seed, epoch, sample) alone, and batches arrive in order,
so the number of workers makes no difference. Workers deliver uint8 (N, S, S, 3); the device
normalises. Training takes resized crops and flips, evaluation the centre.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, distributed
from torch.utils.data import DataLoader, Dataset

from modenorm.lab.data.crops import Boxes, draw_boxes
from modenorm.lab.data.decoding_process import to_rgb
from modenorm.lab.data.folder import Listing
from modenorm.lab.data.loader import Batch, Normaliser, SampleStream, Scaling, derive_seed
from modenorm.lab.data.sets import DataError

CENTRE = 224 / 256
"""Side of the evaluated centre, as a share of the short side."""
IMAGENET = Scaling((123.675, 116.28, 103.53), (58.395, 57.12, 57.375))
"""The published mean and standard deviation of ILSVRC12: a set this large is not measured."""
AHEAD = 4
"""Batches that each worker prepares in advance."""
PR_SET_PDEATHSIG = 1
"""Linux: the signal that a process receives when its parent dies."""


class Place(NamedTuple):
    """A sample, and the epoch in which it is wanted; epoch None for evaluation."""

    sample: int
    epoch: int | None


class Wanted(NamedTuple):
    """What a worker has to know about a sample: so it needs no list of all files."""

    place: Place
    path: bytes
    label: int


Decoded = tuple[Tensor, Tensor] | DataError


class ImageFiles(Dataset[Decoded]):
    """Decodes whole batches; runs inside the workers.

    Args:
        size: S, the side of the result.
        seed: Of the crops and flips.
        augment: Whether training samples are cropped and flipped at random.
    """

    def __init__(self, size: int, seed: int = 0, augment: bool = True) -> None:
        self._size, self._seed, self._augment = size, seed, augment

    def __getitems__(self, batch: Sequence[Wanted]) -> Decoded:
        """Images uint8 (N, S, S, 3) and labels (N), or what is wrong with a file."""
        images = np.empty((len(batch), self._size, self._size, 3), np.uint8)
        try:
            for image, wanted in zip(images, batch, strict=True):
                image[:] = self._decode(wanted.place, Path(os.fsdecode(wanted.path)))
        except DataError as error:
            return error  # raised by the training, without the worker's traceback
        labels = torch.tensor([wanted.label for wanted in batch], dtype=torch.int64)
        return torch.from_numpy(images), labels

    def _decode(self, place: Place, path: Path) -> np.ndarray:
        try:
            with Image.open(path) as image:
                if place.epoch is None or not self._augment:
                    return cut(image, _centre(*image.size), self._size)
                purpose = f"epoch {place.epoch} sample {place.sample}"
                generator = torch.Generator().manual_seed(derive_seed(self._seed, purpose))
                box = draw_boxes(image.height, image.width, 1, generator)
                pixels = cut(image, _corners(box), self._size)
                flip = torch.randint(2, (), generator=generator)
                return pixels[:, ::-1] if flip else pixels
        # Decoders raise SyntaxError, struct.error and others beside OSError.
        except Exception as error:
            raise DataError(f"{path}: expected a complete image file ({error})") from error


Corners = tuple[float, float, float, float]


def cut(image: Image.Image, corners: Corners, size: int) -> np.ndarray:
    """Scale a part of an image, given by left, top, right and bottom, to (S, S, 3)."""
    width, height = image.size
    # lets the JPEG decoder skip detail, as long as the part is not smaller than the result
    scale = size / min(corners[2] - corners[0], corners[3] - corners[1])
    reduced = image.draft("RGB", (int(width * scale), int(height * scale)))
    # the reduced image is rounded up to whole pixels; its true size is told apart
    x, y = (reduced[1][2] / width, reduced[1][3] / height) if reduced else (1, 1)
    left, top, right, bottom = corners
    box = (left * x, top * y, min(right * x, image.width), min(bottom * y, image.height))
    return np.asarray(to_rgb(image).resize((size, size), Image.Resampling.BILINEAR, box))


def _corners(box: Boxes) -> Corners:
    top, left, height, width = (int(value) for value in box)
    return left, top, left + width, top + height


def _centre(width: int, height: int) -> Corners:
    side = min(width, height) * CENTRE
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


class StreamedImages:
    """A listing of image files as a set to train on and to evaluate.

    Args:
        listing: The files and labels.
        size: S, the side of the images.
        device: Where batches go.
        channels_last: Deliver images in torch's channels_last format.
        workers: Processes that decode; 0 decodes in this one.
    """

    scaling = IMAGENET

    def __init__(
        self,
        listing: Listing,
        size: int,
        device: torch.device,
        *,
        channels_last: bool = False,
        workers: int = 0,
    ) -> None:
        self.listing, self.size, self.device, self.workers = listing, (size, size), device, workers
        self.labels = torch.tensor(listing.labels, device=device)
        self.domains = torch.zeros_like(self.labels)
        self._normalise = Normaliser(IMAGENET, device, channels_last=True)
        self._format = torch.channels_last if channels_last else torch.contiguous_format

    def __len__(self) -> int:
        return len(self.listing.labels)

    def batches(self, size: int, part: slice = slice(None)) -> Iterator[Batch]:
        """Yield the samples of a part of the set once, in order; the last batch may be smaller."""
        samples = range(len(self))[part]
        chunks = (samples[i : i + size] for i in range(0, len(samples), size))
        places = ([Place(sample, None) for sample in chunk] for chunk in chunks)
        files = ImageFiles(self.size[0])
        for decoded in self.deliver(files, places):
            pixels, labels = (part.to(self.device, non_blocking=True) for part in decoded)
            yield Batch(self.normalise(pixels), labels, torch.zeros_like(labels))

    def normalise(self, pixels: Tensor) -> Tensor:
        """Images (N, C, S, S) of uint8 (N, S, S, C), in the format that is wanted."""
        return self._normalise(pixels).contiguous(memory_format=self._format)

    def deliver(
        self, files: ImageFiles, batches: Iterator[list[Place]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Pixels uint8 (N, S, S, C) and labels (N) of each batch, on the host, in order."""
        context = _context() if self.workers else None
        served = context is not None and context.get_start_method() == "forkserver"
        decoded: DataLoader[Decoded] = DataLoader(
            files,
            batch_sampler=_Once([self._wanted(place) for place in batch] for batch in batches),
            num_workers=self.workers,
            prefetch_factor=AHEAD if self.workers else None,
            collate_fn=_as_it_is,  # type: ignore[arg-type]
            worker_init_fn=partial(_follow_the_training, training=None if served else os.getpid()),
            multiprocessing_context=context,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # torch's own is neither used nor changed
        )
        for batch in decoded:
            if isinstance(batch, DataError):
                raise batch
            yield batch

    def _wanted(self, place: Place) -> Wanted:
        path, label = self.listing.paths[place.sample], self.listing.labels[place.sample]
        return Wanted(place, os.fsencode(path), label)


class _Once:
    """What DataLoader wants of a batch sampler."""

    def __init__(self, batches: Iterator[list[Wanted]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[Wanted]]:
        return self._batches


def _context() -> BaseContext:
    """How workers are started: never by a fork of a process that trains with others.

    Threads of its process group take locks of Python's without waiting for their turn to run
    Python. A child that is forked in that moment waits for the lock forever, and the ranks for
    the child (CPython 3.11, in `PyOS_AfterFork_Child`). A fork server has no such threads.
    """
    joined = distributed.is_available() and distributed.is_initialized()
    possible = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if joined and possible else None)
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(["__main__", __name__])  # imported once for all workers
        _start_server()
    return context


def _start_server() -> None:
    """Start the fork server, unless there is one, deaf to the SIGTERM that torchrun sends to all.

    Its workers would end with it, before the training could keep what it has done.
    """
    resource_tracker.ensure_running()  # first, as its start lets signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # what children inherit
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _follow_the_training(_: int, training: int | None) -> None:
    """Let a worker outlive neither an interrupt nor the death of its training.

    A worker whose training was killed would wait forever, with the training's connections open.

    Args:
        training: The process that forked this one; None if a fork server did.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):  # the training decides when to stop
        signal.signal(signum, signal.SIG_IGN)
    if training is None:  # the server lives as long as its children: it is no parent to follow
        threading.Thread(target=_end_with_the_training, daemon=True).start()
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != training:  # it died before the signal was asked for
        os._exit(1)


def _end_with_the_training() -> None:
    training = multiprocessing.parent_process()  # the one that asked the server
    if training is not None:
        training.join()
    os._exit(1)


def _as_it_is(batch: Decoded) -> Decoded:
    return batch


class StreamLoader:
    """Training batches of streamed images, decoded ahead of the training.

    The host brings each batch into buffers that stay in place, so that a CUDA graph can hold what
    is done with it: a training whose workers need all cores has no time for launches.

    Args:
        data: The training set.
        stream: The order of samples.
        steps: Number of steps of the training; nothing is decoded beyond.
        part: The samples of every batch to deliver, such as those of one rank.
    """

    def __init__(
        self, data: StreamedImages, stream: SampleStream, steps: int, part: slice = slice(None)
    ) -> None:
        self.data, self.stream, self._steps, self._part = data, stream, steps, part
        self._files = ImageFiles(data.size[0], stream.seed, stream.augment)
        count = len(range(stream.batch)[part])
        self._pixels = torch.zeros((count, *data.size, 3), dtype=torch.uint8, device=data.device)
        self._labels = torch.zeros(count, dtype=torch.int64, device=data.device)
        self._next = -1  # the step that the running workers deliver next
        self._batches: Iterator[tuple[Tensor, Tensor]] = iter(())

    def state(self) -> list[Tensor]:
        """No tensors: `next_batch` changes none."""
        return []

    def load(self, start: int, stop: int) -> None:
        """Go on, or begin at `start`."""
        if start != self._next:
            self._next = start
            self._batches = self.data.deliver(self._files, self._places(start))

    def feed(self) -> None:
        """Bring the next decoded batch into the buffers."""
        self._next += 1
        for buffer, decoded in zip((self._pixels, self._labels), next(self._batches), strict=True):
            buffer.copy_(decoded, non_blocking=True)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """The normalised images (N, C, H, W) in the buffers and their labels (N)."""
        return self.data.normalise(self._pixels), self._labels.clone()

    def close(self) -> None:
        """Stop the workers."""
        self._next, self._batches = -1, iter(())

    def _places(self, start: int) -> Iterator[list[Place]]:
        batch, count = self.stream.batch, self.stream.num_samples
        for step in range(start, self._steps):
            samples = self.stream.draw(step, step + 1).sample[0].tolist()
            epochs = [place // count for place in range(step * batch, (step + 1) * batch)]
            places = [Place(s, e) for s, e in zip(samples, epochs, strict=True)]
            yield places[self._part]
