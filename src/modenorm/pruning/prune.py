"""Take away modes that a trained model doesn't need, and say what that changed.

Which modes can go is decided by what each layer computes (layer_view.py), how many go by what the
model computes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from modenorm.convert.back import acts_as_batchnorm, turn_to_batchnorm
from modenorm.convert.optimizers import check_optimizer
from modenorm.convert.selection import check_model, check_unwrapped
from modenorm.kernels.choice import without_compiling
from modenorm.modes.recording import mode_layers, uncompiled
from modenorm.modes.report import evaluating, parts_of
from modenorm.pruning.layer_view import LayerView, furthest, leave_shared, watching
from modenorm.pruning.outcome import LayerPruning, Pruning
from modenorm.pruning.resizing import Layer
from modenorm.switches import check_switched
from modenorm.threads import one_thread

__all__ = ["DEFAULT_TOLERANCE", "LayerPruning", "Pruning", "prune_modes"]

DEFAULT_TOLERANCE = 0.05
UNCHANGED = -math.inf  # a limit that leaves every layer as it is
ROUNDING = 1e-6  # what may become of modes that make no difference: sums of fewer terms
NO_DIFFERENCE = 1e-12  # of a layer's output in float64: what merging equal modes may come to


@torch.inference_mode(False)  # parameters made in it could not be trained
@torch.no_grad()
def prune_modes(
    model: nn.Module,
    batches: Iterable[Any],
    tolerance: float = DEFAULT_TOLERANCE,
    *,
    optimizer: Optimizer | None = None,
    batchnorm: bool = False,
) -> Pruning:
    """Drop dead modes and merge duplicates, in place, as far as the model's outputs allow.

    Modes are the same to a layer if their statistics are, or if they receive all samples in the
    same proportion; usage alone does not tell, since gates that have collapsed use all modes alike.
    In each layer the change that dropping a mode or merging two makes to the layer's output is
    worked out, and the smallest is made first. All layers go as far as the same change of their
    outputs; that is chosen as large as the model's own outputs, in evaluation, allow. With a
    tolerance of 0 nothing is changed but what makes no difference at all, apart from rounding:
    where no layer's output changes, the model's may by 1e-6.

    Gates must end in a linear layer of their own; other layers are left, and so are those that got
    their gates from outside. Parameters stay the same objects.

    Args:
        model: Changed in place.
        batches: Inputs of the model, or tuples and lists whose first entry is the input; a few
            hundred samples at least. They are kept in memory.
        tolerance: Largest root mean square change of the model's outputs, relative to their
            standard deviation.
        optimizer: An optimizer of the model, whose state is changed along.
        batchnorm: Turn layers that end with one mode into batch norms, as `to_batchnorm` does. What
            that changes, by rounding alone, is measured too, but not held to the tolerance. An
            optimizer keeps the gate's parameters, which then have no effect.

    Returns:
        What was done to each layer, and how much the outputs changed.

    Example:
        >>> import modenorm
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), modenorm.ModeNorm2d(8, num_modes=4))
        >>> x = torch.randn(64, 3, 8, 8)
        >>> for _ in range(100):
        ...     y = model(x)
        >>> print(prune_modes(model, [x]))
        1  4 → 1  merged 0+1+2+3 (statistics ..., gates ...)
        outputs changed by ... of their standard deviation on 64 samples (allowed: 0.05)
    """
    if not tolerance >= 0:
        raise ValueError(f"tolerance is {tolerance}; it must be at least 0")
    check_unwrapped(model, "other shapes; prune the module inside, then wrap it again")
    if batchnorm:
        check_model(model)
    layers = mode_layers(model)
    _check_prunable(model, layers, optimizer)
    inputs = [parts_of(batch)[0] for batch in batches]
    if sum(map(len, inputs)) == 0:
        raise ValueError("prune_modes got no samples; give it at least one batch of model inputs")
    with uncompiled, _comparing(layers.values()):
        return _prune(model, layers, inputs, tolerance, optimizer, batchnorm)


def _comparing(layers: Iterable[Layer]) -> AbstractContextManager[None]:
    """On a GPU, kernels for each number of modes that is tried would take seconds to compile."""
    on_gpu = any(parameter.is_cuda for layer in layers for parameter in layer.parameters())
    return without_compiling() if on_gpu else nullcontext()


def _prune(
    model: nn.Module,
    layers: Mapping[str, Layer],
    inputs: Sequence[Tensor],
    tolerance: float,
    optimizer: Optimizer | None,
    batchnorm: bool,
) -> Pruning:
    views = {name: LayerView(layer) for name, layer in layers.items()}
    leave_shared(views.values())
    with watching(views.values()):
        before = _outputs(model, inputs)
    scale = _deviation(before)
    with one_thread():
        paths = {name: view.path() for name, view in views.items()}
    found: dict[float, float] = {}

    def tolerated(limit: float) -> bool:
        trial = _copy(model)
        for name, layer in mode_layers(trial).items():
            views[name].shrink(layer, furthest(paths[name], limit))
        most = tolerance if limit > NO_DIFFERENCE else max(tolerance, ROUNDING)
        found[limit] = _change(trial, inputs, before, scale, most)
        return found[limit] <= most

    changes = {s.change for path in paths.values() for s in path[1:] if s.change < math.inf}
    limit = _largest([UNCHANGED, *sorted(changes)], tolerated)
    stops = {name: furthest(path, limit) for name, path in paths.items()}
    for name, layer in layers.items():
        views[name].shrink(layer, stops[name], optimizer)
    turned = _turn_to_batchnorm(model, views, optimizer) if batchnorm else {}
    if turned or limit not in found:
        found[limit] = _change(model, inputs, before, scale)
    about = tuple(view.describe(name, stops[name], name in turned) for name, view in views.items())
    return Pruning(about, found[limit], tolerance, sum(map(len, inputs)))


def _check_prunable(
    model: nn.Module, layers: Mapping[str, Layer], optimizer: Optimizer | None
) -> None:
    if not layers:
        raise ValueError("prune_modes found no mode norm or mode group norm in the model")
    if optimizer is not None:
        check_optimizer(optimizer, model)
    check_switched(layers, "prune_modes")


def _turn_to_batchnorm(
    model: nn.Module, views: Mapping[str, LayerView], optimizer: Optimizer | None
) -> dict[str, nn.Module]:
    """The batch norms in place of layers that do no more than one does; the model itself stays."""
    found: dict[nn.Module, str] = {
        view.layer: name
        for name, view in views.items()
        if name and not view.takes_more and acts_as_batchnorm(view.layer, 0.0)
    }
    return turn_to_batchnorm(model, found, optimizer)


def _largest(limits: Sequence[float], tolerated: Callable[[float], bool]) -> float:
    """The largest tolerated limit, by bisection; the first one, that changes nothing, is so."""
    low, high = 0, len(limits)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tolerated(limits[middle]) else (low, middle)
    return limits[low]


def _outputs(model: nn.Module, inputs: Iterable[Tensor]) -> list[Tensor]:
    """What the model says of each batch in evaluation, in one row."""
    with evaluating(model), _same_noise(model):
        return [_row(model(x)) for x in inputs]


@contextmanager
def _same_noise(model: nn.Module) -> Iterator[None]:
    """A model that is random in evaluation, too, draws the same numbers each time."""
    devices = {p.get_device() for p in model.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(0)
        for device in devices:  # not all, as torch.manual_seed does: these alone are put back
            torch.cuda.default_generators[device].manual_seed(0)
        yield


def _copy(model: nn.Module) -> nn.Module:
    """A copy of a model that may keep tensors of its last step, which torch doesn't copy."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            for tensor in _tensors(value):
                if not tensor.is_leaf:
                    memo[id(tensor)] = tensor.detach().clone()
    return copy.deepcopy(model, memo)


def _row(output: Any) -> Tensor:
    tensors = [tensor.double().flatten() for tensor in _tensors(output)]
    return torch.cat(tensors) if tensors else torch.empty(0, dtype=torch.float64, device="cpu")


def _tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors in what a model returns, or keeps."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return [tensor for entry in output for tensor in _tensors(entry)]
    return []


def _change(
    model: nn.Module,
    inputs: Iterable[Tensor],
    before: Sequence[Tensor],
    scale: float,
    most: float = math.inf,
) -> float:
    """The root mean square change of the model's outputs, in scales.

    Beyond `most` the other batches don't matter: it only grows with them.
    """
    count, square, change = sum(map(len, before)), 0.0, 0.0
    with evaluating(model), _same_noise(model):
        for x, row in zip(inputs, before, strict=True):
            square += float((_row(model(x)) - row).square().sum())
            change = (square / count) ** 0.5 / scale
            if change > most:
                break
    return change


def _deviation(outputs: Sequence[Tensor]) -> float:
    if not sum(map(len, outputs)):
        raise ValueError(
            "prune_modes compares the model's outputs, but it returned no floating-point tensor, "
            "alone or in tuples, lists and dicts; let it return one, such as its logits"
        )
    rows = [row for row in outputs if len(row)]  # others may be on another device
    deviation = float(torch.cat(rows).std(correction=0))
    if not math.isfinite(deviation):
        raise ValueError(
            "prune_modes compares the model's outputs, but on these batches they hold NaN or "
            "infinity; leave out the samples that lead to it"
        )
    return deviation or 1.0
