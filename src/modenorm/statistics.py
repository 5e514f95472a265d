"""Running estimates of a whole model: take them anew, or hold them still."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from modenorm.checks import check_module
from modenorm.exchange import has_group
from modenorm.gates import StandardizedGate
from modenorm.layers import ESTIMATES, ModeNorm
from modenorm.mixing import RunningEstimates, Statistics, update_running
from modenorm.modes.report import evaluating, parts_of

__all__ = ["freeze_statistics", "recalibrate"]

UNTOUCHED = torch.finfo(torch.float32).tiny
"""A variance that no batch has: what still has it at the end of one received nothing."""


@torch.no_grad()
def recalibrate(model: nn.Module, batches: Iterable[Any]) -> int:
    """Take the running estimates anew, as equal averages over the batches.

    What `torch.optim.swa_utils.update_bn` does for batch norm, after averaging weights (SWA, EMA)
    or to remove the lag of exponential averages. The features' estimates in a `StandardizedGate`
    are taken along. A mode is averaged over the batches that have samples of it; without any it
    keeps its estimates, as does a layer that no batch reaches. The other parts of the model run as
    in evaluation; modes of training, momenta and parameters are left as they were, and so are the
    estimates if a batch fails. A model whose statistics are those of all ranks needs this call on
    every rank, as often; without a process group this process is taken for all.

    Args:
        model: any model with mode norms.
        batches: inputs of the model, or tuples and lists whose first entry is the input.

    Returns:
        The number of batches used.

    Example:
        >>> import modenorm
        >>> layer = modenorm.ModeNorm2d(3)
        >>> recalibrate(layer, [torch.randn(8, 3, 4, 4) for _ in range(5)])
        5
    """
    check_module(model)
    layers = [module for module in model.modules() if isinstance(module, ModeNorm)]
    layers = [layer for layer in layers if layer.track_running_stats]
    if not layers:
        raise ValueError("recalibrate found no mode norm with running estimates in the model")
    gates = [module for module in model.modules() if isinstance(module, StandardizedGate)]
    averages = [_Average(layer) for layer in layers]
    count = 0
    with _collecting(model, layers, gates), _all_or_nothing([*layers, *gates]) as before:
        for batch in batches:
            count += 1
            for average in averages:
                average.start()
            model(parts_of(batch)[0])
            for average in averages:
                average.add()
        for average in averages:
            average.store(before)
    if count == 0:
        raise ValueError("recalibrate got no batches; give it at least one batch of model inputs")
    return count


class _Average:
    """A layer's estimates over batches, those of each mode over the batches that have it."""

    def __init__(self, layer: ModeNorm) -> None:
        self.layer = layer
        buffers = [getattr(layer, name) for name in ESTIMATES]
        self.estimates = RunningEstimates(*buffers)
        mean, var, tracked = (torch.zeros_like(buffer) for buffer in buffers[:3])
        self.found = RunningEstimates(mean, var, tracked, mean[:, 0].clone())

    def start(self) -> None:
        """Let the layer take the statistics of the next batch alone."""
        self.layer.reset_running_stats()
        self.estimates.var.fill_(UNTOUCHED)

    def add(self) -> None:
        """Take what the layer found: nothing, if it saw no batch or refused it."""
        mean, var, _, share = self.estimates
        if share is None:  # batches count the same
            share = (var != UNTOUCHED).any(1).to(mean)
        update_running(self.found, Statistics(mean, var, share, share), None, "usage")

    def store(self, before: dict[Tensor, Tensor]) -> None:
        """Hand the averages to the layer, with the estimates of before where there are none."""
        assert self.found.share is not None
        modes = self.found.share > 0
        used = (modes[:, None], modes[:, None], modes.any(), modes)
        for buffer, found, use in zip(self.estimates, self.found, used, strict=True):
            if buffer is not None and found is not None:
                buffer.copy_(torch.where(use, found, before[buffer]))


@contextlib.contextmanager
def _collecting(
    model: nn.Module, layers: list[ModeNorm], gates: list[StandardizedGate]
) -> Iterator[None]:
    """Evaluation mode everywhere but in the layers and gates, which average over all batches."""
    momenta = {layer: layer.momentum for layer in layers}
    modules: list[ModeNorm | StandardizedGate] = [*layers, *gates]
    frozen = {module: module.statistics_frozen for module in modules}
    ranks = {module: module.ranks for module in modules}
    with evaluating(model):
        try:
            for module in modules:
                module.training, module.statistics_frozen = True, False
                module.ranks = module.ranks if has_group() else None
            for layer in layers:
                layer.momentum = None
            for gate in gates:
                gate.averaged = torch.zeros_like(gate.running_var[0])
            yield
        finally:
            for module in modules:
                module.statistics_frozen, module.ranks = frozen[module], ranks[module]
            for layer in layers:
                layer.momentum = momenta[layer]
            for gate in gates:
                gate.averaged = None


@contextlib.contextmanager
def _all_or_nothing(modules: Iterable[nn.Module]) -> Iterator[dict[Tensor, Tensor]]:
    """Put buffers back as they were, which are yielded, if what happens inside fails."""
    before = {buffer: buffer.clone() for module in modules for buffer in module.buffers()}
    try:
        yield before
    except BaseException:
        for buffer, value in before.items():
            buffer.copy_(value)
        raise


def freeze_statistics(model: nn.Module, frozen: bool = True) -> list[str]:
    """Let mode norms use their running estimates, unchanged, also in training mode.

    The same holds for the features' estimates in a `StandardizedGate`. Parameters still learn.
    Unlike `layer.eval()` this survives `model.train()`.

    Args:
        model: any model with mode norms.
        frozen: False lets the statistics move again.

    Returns:
        The names of the layers that were set.

    Example:
        >>> import modenorm
        >>> freeze_statistics(nn.Sequential(nn.Conv2d(3, 8, 3), modenorm.ModeNorm2d(8)))
        ['1']
    """
    check_module(model)
    names = []
    for name, module in model.named_modules():
        if isinstance(module, StandardizedGate):
            module.statistics_frozen = frozen
        elif isinstance(module, ModeNorm) and module.track_running_stats:
            module.statistics_frozen = frozen
            names.append(name)
    return names
