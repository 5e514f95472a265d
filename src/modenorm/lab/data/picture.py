"""A contact sheet of a data set: a block of pictures for each domain, a row for each class."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from modenorm.lab.data.sets import ImageSet

GAP, MARGIN, PAPER = 2, 10, 255


def contact_sheet(images: ImageSet, columns: int = 8, scale: int = 2) -> Image.Image:
    """Up to `columns` pictures of each class, classes below each other, domains side by side."""
    side = images.images.shape[-1]
    step = side + GAP
    blocks = [_rows(images, domain, columns) for domain in range(len(images.domain_names))]
    width = len(blocks) * (columns * step - GAP + MARGIN) + MARGIN
    height = max(len(rows) for rows in blocks) * step - GAP + 2 * MARGIN
    sheet = np.full((height, width, 3), PAPER, np.uint8)
    for b, rows in enumerate(blocks):
        left = MARGIN + b * (columns * step - GAP + MARGIN)
        for r, row in enumerate(rows):
            for c, picture in enumerate(row):
                x, y = left + c * step, MARGIN + r * step
                sheet[y : y + side, x : x + side] = picture
    size = (width * scale, height * scale)
    return Image.fromarray(sheet).resize(size, Image.Resampling.NEAREST)


def _rows(images: ImageSet, domain: int, columns: int) -> list[np.ndarray]:
    labels = images.labels[images.domains == domain].unique().tolist()
    chosen = [torch.nonzero(images.labels == label)[:columns, 0] for label in labels]
    return [images.images[i].permute(0, 2, 3, 1).numpy() for i in chosen]
