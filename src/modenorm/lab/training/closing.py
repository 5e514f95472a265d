"""Modes that a training can do without: closed while it goes on, and taken away at its end."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from modenorm import prune_modes
from modenorm.lab.data.loader import Batches
from modenorm.pruning.prune import DEFAULT_TOLERANCE, Pruning
from modenorm.pruning.resizing import close_modes

DEFAULT_SPARSITY = DEFAULT_TOLERANCE
"""Tolerance of closing."""
AT_THE_END = 0.1
"""Part of that tolerance for the last pruning: no step follows that could make up for a change."""
PRUNING_SAMPLES = 2048
"""Of the training set: on these the smaller model is compared with the larger one."""


def pruned(
    model: nn.Module, loader: Batches, batches: int, tolerance: float
) -> tuple[nn.Module, Pruning]:
    """A smaller copy of the model, and what was pruned.

    Args:
        model: Stays as it is.
        loader: Gives its first batches, and has to be loaded again afterwards.
        batches: How many.
        tolerance: As for `prune_modes`.
    """
    smaller = copy.deepcopy(model)
    return smaller, prune_modes(smaller, _first_images(loader, batches), tolerance)


def _first_images(loader: Batches, batches: int) -> list[Tensor]:
    loader.load(0, batches)
    images = []
    for _ in range(batches):
        loader.feed()
        images.append(loader.next_batch()[0])
    return images


@torch.no_grad()
def close(
    model: nn.Module,
    loader: Batches,
    batches: int,
    tolerance: float,
    momentum: Mapping[str, Tensor],
) -> None:
    """Close the modes that make little difference; all tensors stay in place, for captured steps.

    Args:
        model: Changed in place.
        loader: Gives its first batches, and has to be loaded again afterwards.
        batches: How many.
        tolerance: As for `prune_modes`.
        momentum: Of the parameters, by name; forgotten where modes changed places.
    """
    smaller, _ = pruned(model, loader, batches, tolerance)
    changed = {id(parameter) for parameter in close_modes(model, smaller)}
    for name, parameter in model.named_parameters():
        if name in momentum and id(parameter) in changed:
            momentum[name].zero_()
