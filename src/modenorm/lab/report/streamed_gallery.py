"""Galleries of images that are decoded when they are needed: only those shown are kept."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from modenorm.lab.data import ImageSet
from modenorm.lab.data.streaming import ImageFiles, Place, StreamedImages
from modenorm.lab.report.gallery import LARGEST_TILE, Gallery, choose_layers, gallery_of
from modenorm.modes.findings import ModeReport
from modenorm.modes.recording import mode_layers

BATCH = 64


def make_streamed_gallery(
    model: nn.Module,
    images: StreamedImages,
    dataset: str,
    classes: tuple[str, ...],
    domain_names: tuple[str, ...],
    *,
    layers: Sequence[str] = (),
    count: int = 24,
    most_layers: int = 12,
) -> tuple[Gallery, ModeReport]:
    """Look which images the modes of a trained model claim, as its evaluations see the images.

    Args:
        model: In evaluation mode, with mode norms or mode group norms.
        images: Usually the test set.
        dataset: Its name.
        classes: Names of its labels.
        domain_names: Names of its domains.
        layers: Names of layers; without, all of them or `most_layers` spread evenly.
        count: Images for each mode.
        most_layers: See `layers`.
    """
    chosen = choose_layers(list(mode_layers(model)), layers, most_layers)
    labels, domains = images.labels.cpu(), images.domains.cpu()
    known = ImageSet(torch.empty(0), labels, domains, classes, domain_names)
    tile = min(LARGEST_TILE, images.size[0])
    batches, pixels = images.batches(BATCH), partial(_pixels, images)
    return gallery_of(model, batches, known, pixels, dataset, tile, chosen, count)


def _pixels(images: StreamedImages, samples: Sequence[int]) -> Tensor:
    """Some of the images, uint8 (N, 3, S, S)."""
    chunks = (samples[i : i + BATCH] for i in range(0, len(samples), BATCH))
    places = ([Place(sample, None) for sample in chunk] for chunk in chunks)
    decoded = images.deliver(ImageFiles(images.size[0]), places)
    return torch.cat([pixels for pixels, _ in decoded]).permute(0, 3, 1, 2)
