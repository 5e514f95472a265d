"""Image sets that live on the device as uint8, and the seeded stream of samples drawn from them.

A training is a stream of samples: sample s belongs to epoch s // M at place s % M of that epoch's
permutation, so batches may straddle epochs, every batch is full and no sample is lost or repeated.
What is random about an epoch comes from (seed, epoch) alone and is drawn on the host: a resumed
training needs no saved random state, and the device makes no difference.

M samples in the set, N samples in a batch, T steps in a chunk, C channels.
"""

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from modenorm.lab.data.crops import Boxes, draw_boxes, resample

if TYPE_CHECKING:
    from modenorm.lab.data import ImageSet

PADDING = 4
"""Pixels of black added on every side before a random crop (the paper's augmentation)."""


class Batch(NamedTuple):
    """Normalised images (N, C, H, W) and what is known about them."""

    images: Tensor
    labels: Tensor
    domains: Tensor


class Scaling(NamedTuple):
    """Mean and standard deviation of every channel, in units of the uint8 values."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def measure(cls, images: Tensor) -> "Scaling":
        """Measure uint8 images (M, C, H, W) by their histograms, so exactly on every device."""
        values = torch.arange(256, dtype=torch.float64)
        mean, std = [], []
        for channel in images.unbind(1):
            share = torch.bincount(channel.flatten(), minlength=256).cpu().double()
            share /= share.sum()
            mean.append(float(share @ values))
            std.append(float(share @ (values - mean[-1]).square()) ** 0.5 or 1.0)
        return cls(tuple(mean), tuple(std))


class Images(Protocol):
    """A set of images that trainings and evaluations draw from, wherever its pixels are kept."""

    device: torch.device
    scaling: Scaling
    size: tuple[int, int]
    labels: Tensor
    domains: Tensor

    def __len__(self) -> int:
        """The number of samples."""

    def batches(self, size: int, part: slice = slice(None)) -> Iterator[Batch]:
        """Yield the samples of a part of the set once, in order."""


class Normaliser:
    """Scales uint8 pixels to mean 0 and standard deviation 1.

    Args:
        scaling: Mean and standard deviation of every channel.
        device: Where the pixels are.
        channels_last: Whether the pixels are (N, H, W, C) rather than (N, C, H, W).
    """

    def __init__(self, scaling: Scaling, device: torch.device, channels_last: bool) -> None:
        shape = (-1,) if channels_last else (-1, 1, 1)
        mean, std = (torch.tensor(values, dtype=torch.float64) for values in scaling)
        self._scale = (1 / std).float().view(shape).to(device)
        self._shift = (-mean / std).float().view(shape).to(device)
        self._channels_last = channels_last

    def __call__(self, pixels: Tensor) -> Tensor:
        """Scale pixels; returns float (N, C, H, W), in torch's channels_last format if they were.

        Nothing here waits for the device.
        """
        images = torch.addcmul(self._shift, pixels, self._scale)
        return images.permute(0, 3, 1, 2) if self._channels_last else images


class DeviceImages:
    """An image set on a device, stored in the layout in which batches are wanted.

    Args:
        source: The images, labels and domains.
        device: Where they go.
        scaling: Channel statistics of the training set; measured from `source` when None.
        padding: Pixels of black on every side, room for `SampleStream`'s crops.
        channels_last: Store and deliver images in torch's channels_last format.
    """

    def __init__(
        self,
        source: "ImageSet",
        device: torch.device,
        *,
        scaling: Scaling | None = None,
        padding: int = 0,
        channels_last: bool = False,
    ) -> None:
        images = source.images.to(device)
        self.scaling = scaling or Scaling.measure(images)
        self.size = (images.shape[2], images.shape[3])
        self.padding, self.channels_last, self.device = padding, channels_last, device
        if padding:
            images = torch.nn.functional.pad(images, (padding,) * 4)
        # (M, C, H, W), or (M, H, W, C) if channels_last: contiguous, so that flat indices reach it
        self.pixels = (images.permute(0, 2, 3, 1) if channels_last else images).contiguous()
        self.labels = source.labels.to(device)
        self.domains = source.domains.to(device)
        self.normalise = Normaliser(self.scaling, device, channels_last)

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, size: int, part: slice = slice(None)) -> Iterator[Batch]:
        """Yield the samples of a part of the set once, in order; the last batch may be smaller."""
        p, (height, width) = self.padding, self.size
        rows, columns = slice(p, p + height), slice(p, p + width)
        window = (rows, columns) if self.channels_last else (slice(None), rows, columns)
        first, last, _ = part.indices(len(self))
        for start in range(first, last, size):
            some = slice(start, min(start + size, last))
            images = self.normalise(self.pixels[(some, *window)])
            yield Batch(images, self.labels[some], self.domains[some])


class Draws(NamedTuple):
    """What is random about some samples: which, and how they are cropped and flipped; all int64.

    A crop begins at (dy, dx); height and width are those of resized crops, and otherwise 0.
    """

    sample: Tensor
    dy: Tensor
    dx: Tensor
    flip: Tensor
    height: Tensor
    width: Tensor


class SampleStream:
    """The order of samples, crops and flips of a training, as a function of the seed alone.

    Args:
        num_samples: M, the size of the set.
        batch: N; may exceed M.
        seed: Any integer.
        augment: Draw crops (of images padded by `PADDING`) and flips; otherwise they are 0.
        resized: Size of the images, to draw resized crops of them instead.
    """

    def __init__(
        self,
        num_samples: int,
        batch: int,
        seed: int,
        *,
        augment: bool,
        resized: tuple[int, int] | None = None,
    ) -> None:
        if num_samples < 1:
            raise ValueError("a training set needs at least one sample, got none: check the files")
        self.num_samples, self.batch, self.seed, self.augment = num_samples, batch, seed, augment
        self.resized = resized
        self._epochs: dict[int, Draws] = {}

    def draw(self, start: int, stop: int) -> Draws:
        """Draw the batches of the steps start to stop − 1; every tensor is (T, N)."""
        first, last = start * self.batch, stop * self.batch
        parts = []
        for epoch in range(first // self.num_samples, (last - 1) // self.num_samples + 1):
            origin = epoch * self.num_samples
            part = slice(max(first - origin, 0), last - origin)
            parts.append([values[part] for values in self._epoch(epoch)])
        shape = (stop - start, self.batch)
        return Draws(*(torch.cat(values).view(shape) for values in zip(*parts, strict=True)))

    def _epoch(self, epoch: int) -> Draws:
        if epoch not in self._epochs:
            self._epochs = {e: draws for e, draws in self._epochs.items() if e == epoch - 1}
            self._epochs[epoch] = self._draw_epoch(epoch)
        return self._epochs[epoch]

    def _draw_epoch(self, epoch: int) -> Draws:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, f"epoch {epoch}"))
        index = torch.randperm(self.num_samples, generator=generator)
        zero = torch.zeros(1, dtype=torch.int64).expand(self.num_samples)
        if not self.augment:
            return Draws(index, zero, zero, zero, zero, zero)
        if self.resized is not None:
            top, left, height, width = draw_boxes(*self.resized, self.num_samples, generator)
            flip = torch.randint(2, (self.num_samples,), generator=generator)
            return Draws(index, top, left, flip, height, width)
        highs = (2 * PADDING + 1, 2 * PADDING + 1, 2)
        dy, dx, flip = (torch.randint(h, (self.num_samples,), generator=generator) for h in highs)
        return Draws(index, dy, dx, flip, zero, zero)


def derive_seed(seed: int, purpose: str) -> int:
    """Derive an independent 63-bit seed for one purpose of a training."""
    digest = hashlib.sha256(f"{seed} {purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class Batches(Protocol):
    """Where a training step takes its batches from.

    A step is `feed`, which has the host's part of the work, and then `next_batch`, which may be
    part of a CUDA graph.
    """

    def load(self, start: int, stop: int) -> None:
        """Prepare the steps start to stop − 1."""

    def feed(self) -> None:
        """Bring the next batch to where `next_batch` finds it."""

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """The next images (N, C, H, W) and labels (N)."""

    def state(self) -> list[Tensor]:
        """The tensors that `next_batch` changes."""

    def close(self) -> None:
        """Give back what is held outside of this process."""


class Loader:
    """Training batches made on the device, from static buffers that a CUDA graph can hold.

    The host fills the buffers for the next steps with `load`; every `next_batch` then takes the
    row that a counter on the device points to, so replaying one captured step walks through them.

    Args:
        data: The training set; padded by `PADDING` if the stream draws padded crops.
        stream: The order of samples.
        capacity: T, the largest number of steps one `load` can hold.
        part: The samples of every batch to deliver, such as those of one rank.
    """

    def __init__(
        self,
        data: DeviceImages,
        stream: SampleStream,
        capacity: int,
        part: slice = slice(None),
    ) -> None:
        self.data, self.stream, self.capacity, self._part = data, stream, capacity, part
        count = len(range(stream.batch)[part])
        # per step and sample: its index, then what `_images` needs to know
        fields = 6 if stream.augment and stream.resized else 3
        shape = (capacity, fields, count)
        self._rows = torch.zeros(shape, dtype=torch.int64, device=data.device)
        self._counter = torch.zeros(1, dtype=torch.int64, device=data.device)
        padded = stream.augment and not stream.resized
        self._window = self._crop_windows() if padded else None

    def state(self) -> list[Tensor]:
        """The tensors that `next_batch` changes."""
        return [self._counter]

    def feed(self) -> None:
        """Nothing to do here: the device counts for itself."""

    def close(self) -> None:
        """Nothing to do here."""

    def load(self, start: int, stop: int) -> None:
        """Prepare the steps start to stop − 1: at most `capacity` of them."""
        draws = Draws(*(values[:, self._part] for values in self.stream.draw(start, stop)))
        rows = torch.stack(self._fields(draws), dim=1)
        if self._rows.is_cuda:
            rows = rows.pin_memory()  # its memory is not reused before the copy has run
        self._rows[: len(rows)].copy_(rows, non_blocking=True)
        self._counter.zero_()

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Gather, crop, flip and normalise the next images (N, C, H, W); returns labels (N) too.

        Nothing here waits for the device.
        """
        row = self._rows.index_select(0, self._counter)[0]
        self._counter.add_(1)
        return self._images(row), self.data.labels.index_select(0, row[0])

    def _fields(self, draws: Draws) -> tuple[Tensor, ...]:
        if self._rows.shape[1] == len(draws):
            return draws
        per_image, per_row, per_column = self._strides()
        begin = draws.sample * per_image + draws.dy * per_row + draws.dx * per_column
        return draws.sample, begin, draws.flip

    def _images(self, row: Tensor) -> Tensor:
        data, index = self.data, row[0]
        if self._window is not None:
            _, begin, flip = row.unbind(0)
            place = begin[:, None] + self._window.index_select(0, flip)  # (N, C·H·W)
            return data.normalise(data.pixels.take(place).view(-1, *self._shape()))
        pixels = data.pixels.flatten(1).index_select(0, index)
        images = data.normalise(pixels.view(-1, *self._shape()))
        if len(row) < len(Draws._fields):
            return images
        _, top, left, flip, height, width = row.unbind(0)
        images = resample(images, Boxes(top, left, height, width), flip, data.size)
        format = torch.channels_last if data.channels_last else torch.contiguous_format
        return images.contiguous(memory_format=format)

    def _shape(self) -> tuple[int, ...]:
        height, width = self.data.size
        if self.data.channels_last:
            return height, width, self.data.pixels.shape[3]
        return self.data.pixels.shape[1], height, width

    def _strides(self) -> tuple[int, int, int]:
        strides = self.data.pixels.stride()
        rows = 1 if self.data.channels_last else 2
        return strides[0], strides[rows], strides[rows + 1]

    def _crop_windows(self) -> Tensor:
        """Offsets of a crop's pixels from its first one, as they are and mirrored: (2, C·H·W)."""
        strides = self.data.pixels.stride()[1:]
        axes = [
            torch.arange(size) * stride for size, stride in zip(self._shape(), strides, strict=True)
        ]
        column = 1 if self.data.channels_last else 2
        windows = []
        for _ in range(2):
            a, b, c = axes
            windows.append((a[:, None, None] + b[:, None] + c).flatten())
            axes[column] = axes[column].flip(0)
        return torch.stack(windows).to(self.data.device)
