"""Random resized crops: a part of the image of random area and shape, scaled to the wanted size.

The usual augmentation of ILSVRC12. Boxes are drawn on the host; on-device sets are resampled in one
batched operation that a CUDA graph can hold.

N samples, C channels, S the side of the result.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

AREA = (0.08, 1.0)
"""Share of the image's area."""
RATIO = (3 / 4, 4 / 3)
"""Width over height."""
TRIES = 10


class Boxes(NamedTuple):
    """Parts of images in whole pixels; all int64 (N,)."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor


def draw_boxes(height: int, width: int, count: int, generator: torch.Generator) -> Boxes:
    """Draw parts of images of one size: the first of ten tries that fits, else the centre."""
    shape = (2, TRIES, count)
    area, ratio = torch.rand(shape, generator=generator, dtype=torch.float64).unbind(0)
    area = height * width * (AREA[0] + area * (AREA[1] - AREA[0]))
    low, high = map(math.log, RATIO)
    ratio = (low + ratio * (high - low)).exp()
    widths, heights = (area * ratio).sqrt().round().long(), (area / ratio).sqrt().round().long()
    fits = (widths >= 1) & (widths <= width) & (heights >= 1) & (heights <= height)
    first = fits.long().argmax(0, keepdim=True)
    centre_height, centre_width = _centre(height, width)
    fitting = fits.any(0)
    h = torch.where(fitting, heights.gather(0, first)[0], centre_height)
    w = torch.where(fitting, widths.gather(0, first)[0], centre_width)
    place = torch.rand((2, count), generator=generator, dtype=torch.float64)
    top, left = (place * torch.stack((height - h + 1, width - w + 1))).long().unbind(0)
    top = torch.where(fitting, top, (height - h) // 2)
    left = torch.where(fitting, left, (width - w) // 2)
    return Boxes(top, left, h, w)


def _centre(height: int, width: int) -> tuple[int, int]:
    """The largest part in the middle whose shape is allowed."""
    if width / height < RATIO[0]:
        return round(width / RATIO[0]), width
    if width / height > RATIO[1]:
        return height, round(height * RATIO[1])
    return height, width


def resample(images: Tensor, boxes: Boxes, flip: Tensor, size: tuple[int, int]) -> Tensor:
    """Scale a part of each image to one size, bilinearly, and mirror some of them.

    Nothing outside a part has an influence on the result. For parts not larger than `size`, this
    is what cutting them out and resizing gives.

    Args:
        images: Float (N, C, H, W).
        boxes: The parts.
        flip: 1 for the samples to mirror, (N,).
        size: Height and width of the result.
    """
    rows = _places(boxes.top, boxes.height, size[0])
    columns = _places(boxes.left, boxes.width, size[1])
    columns = torch.where(flip.bool()[:, None], columns.flip(1), columns)
    y = 2 * rows / max(images.shape[2] - 1, 1) - 1
    x = 2 * columns / max(images.shape[3] - 1, 1) - 1
    grid = torch.stack((x[:, None, :].expand(-1, *size), y[:, :, None].expand(-1, *size)), dim=-1)
    return functional.grid_sample(images, grid.to(images.dtype), align_corners=True)


def _places(start: Tensor, length: Tensor, count: int) -> Tensor:
    """Where the centres of the result's pixels lie, kept inside the part: (N, count)."""
    centres = (torch.arange(count, device=start.device) + 0.5) / count
    inside = (length[:, None] * centres - 0.5).clamp_min(0)
    return start[:, None] + torch.minimum(inside, length[:, None] - 1)
