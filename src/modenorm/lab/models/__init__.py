"""The paper's networks, with the norm as an argument."""

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from modenorm.gates import GateFactory
from modenorm.lab.layers.dropout import (
    SeededDropout,
    draw_seed,
    generator_states,
    generators,
    load_generator_states,
)
from modenorm.lab.models.lenet import lenet, lenet1989
from modenorm.lab.models.nin import nin
from modenorm.lab.models.norms import (
    GATES,
    NORMS,
    NormFactory,
    make_norm,
    norm_factory,
)
from modenorm.lab.models.resnet import resnet18, resnet20, resnet56, resnet110
from modenorm.lab.models.vgg import vgg13
from modenorm.modes.recording import mode_layers
from modenorm.pruning.resizing import set_num_modes

__all__ = [
    "GATES",
    "MODELS",
    "NORMS",
    "NormFactory",
    "SeededDropout",
    "check_size",
    "count_parameters",
    "create_model",
    "generator_states",
    "generators",
    "load_generator_states",
    "make_norm",
    "norm_factory",
]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "lenet": lenet,
    "lenet1989": lenet1989,
    "nin": nin,
    "vgg13": vgg13,
    "resnet20": resnet20,
    "resnet56": resnet56,
    "resnet110": resnet110,
    "resnet18": resnet18,
}
SIDES = {"lenet": range(32, 36), "lenet1989": range(29, 33), "vgg13": range(32, 64)}
"""Sides of images that fit linear layers made for 32×32; the other networks take any."""


def create_model(
    name: str,
    *,
    num_classes: int,
    norm: str = "bn",
    modes: int | Mapping[str, int] = 2,
    groups: int = 2,
    where: str = "all",
    momentum: float = 0.1,
    gate: str | GateFactory | None = None,
    variance: str = "pooled",
    generator: torch.Generator | None = None,
    **options: Any,
) -> nn.Module:
    """Create a network of `MODELS` with its initial weights, on the CPU.

    Args:
        name: A key of `MODELS`.
        num_classes: Number of classes.
        norm: One of `NORMS`; see `make_norm` for the numbers that belong to each.
        modes: K of mn and mgn; or {name pattern: K} for all their layers, where the first pattern
            that matches a layer's name decides.
        groups: G of gn.
        where: "all" norms of the network, or only the "first", the others being batch norms.
        momentum: Weight of the newest batch in the running estimates of bn and mn.
        gate: The gating networks of mn: a key of `GATES`, or a function that makes one from (C, K);
            None for the layer's own.
        variance: What mgn takes its variance over.
        generator: Decides the initial weights and the dropout; torch's global state is then neither
            used nor changed. None for the global state.
        options: What the model's own function takes, such as `activation` and `pool` of lenet.

    Raises:
        ValueError: A name is unknown.

    Example:
        >>> model = create_model("resnet20", num_classes=10, norm="bn")
        >>> model(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; known: {', '.join(MODELS)}")
    factory = norm_factory(
        norm,
        modes=modes if isinstance(modes, int) else 1,
        groups=groups,
        where=where,
        momentum=momentum,
        gate=gate,
        variance=variance,
    )

    def create() -> nn.Module:
        model = MODELS[name](num_classes, factory, **options)
        if not isinstance(modes, int) and norm in ("mn", "mgn"):
            _set_modes(model, modes)
        return model

    if generator is None:
        return create()
    seed = draw_seed(generator)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return create()


def _set_modes(model: nn.Module, modes: Mapping[str, int]) -> None:
    layers = mode_layers(model)
    for pattern in modes:
        if not fnmatch.filter(layers, pattern):
            raise ValueError(
                f"modes has the pattern {pattern!r}, which matches no layer: their names are "
                f"{', '.join(layers)}"
            )
    for name, layer in layers.items():
        chosen = [k for pattern, k in modes.items() if fnmatch.fnmatchcase(name, pattern)]
        if not chosen:
            raise ValueError(
                f"modes says nothing of the layer {name}: add it, or '*' for all that are left"
            )
        if chosen[0] != layer.num_modes:
            set_num_modes(layer, chosen[0])


def check_size(
    name: str,
    size: tuple[int, int],
    source: str,
    advice: str = "set --image-size 32 or choose resnet20",
) -> None:
    """Refuse images that a network of `MODELS` cannot take.

    Args:
        name: The network's.
        size: Height and width of the images.
        source: Where they come from.
        advice: What to do.

    Raises:
        ValueError: They have another size than the network needs.
    """
    if name in SIDES and not all(side in SIDES[name] for side in size):
        height, width = size
        raise ValueError(f"{name} needs 32×32 images, {source} has {height}×{width}: {advice}")


def count_parameters(model: nn.Module) -> int:
    """Count the numbers in all parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())
