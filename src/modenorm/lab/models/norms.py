"""The norm as an argument: models ask a factory for each norm layer and never name one."""

import itertools
from collections.abc import Callable, Iterator

from torch import nn

import modenorm
from modenorm.gates import GateFactory, LinearGate, StandardizedGate

NormFactory = Callable[[int], nn.Module]

NORMS = ("bn", "in", "ln", "gn", "mn", "mgn")
GATES: dict[str, GateFactory] = {"linear": LinearGate, "standardized": StandardizedGate}


def make_norm(
    name: str,
    num_features: int,
    *,
    modes: int = 2,
    groups: int = 2,
    momentum: float = 0.1,
    eps: float = 1e-5,
    gate: str | GateFactory | None = None,
    variance: str = "pooled",
) -> nn.Module:
    """Make one affine norm layer for (N, C, H, W) input.

    Args:
        name: One of `NORMS`: batch, instance, layer, group, mode, mode group normalization.
        num_features: C.
        modes: K of mn and mgn.
        groups: G of gn; must divide C.
        momentum: Weight of the newest batch in the running estimates of bn and mn.
        eps: Added to every variance.
        gate: The gating network of mn: a key of `GATES`, or a function that makes one from (C, K);
            None for the layer's own.
        variance: What mgn takes its variance over.

    Raises:
        ValueError: The name is unknown, or a number does not suit the layer.
    """
    match name:
        case "bn":
            return nn.BatchNorm2d(num_features, eps=eps, momentum=momentum)
        case "in":
            # the same as nn.InstanceNorm2d, whose kernels are slow with small images
            return nn.GroupNorm(num_features, num_features, eps=eps)
        case "ln":
            return nn.GroupNorm(1, num_features, eps=eps)
        case "gn":
            if num_features % groups:
                raise ValueError(
                    f"groups is {groups}, which doesn't divide the {num_features} channels of a "
                    f"layer: set --groups to a number that does"
                )
            return nn.GroupNorm(groups, num_features, eps=eps)
        case "mn":
            gate = _gate_factory(gate)
            return modenorm.ModeNorm2d(num_features, modes, eps=eps, momentum=momentum, gate=gate)
        case "mgn":
            return modenorm.ModeGroupNorm(num_features, modes, eps=eps, variance=variance)
    raise ValueError(f"unknown norm {name!r}; known: {', '.join(NORMS)}")


def norm_factory(
    name: str,
    *,
    modes: int = 2,
    groups: int = 2,
    where: str = "all",
    momentum: float = 0.1,
    eps: float = 1e-5,
    gate: str | GateFactory | None = None,
    variance: str = "pooled",
) -> NormFactory:
    """Make the `norm` argument of one model; a second model needs a factory of its own.

    Args:
        name: One of `NORMS`.
        modes: See `make_norm`, as for every argument not described here.
        groups: See `make_norm`.
        where: "all", or "first" for the chosen norm in the first place only and batch
            normalization after it. Models ask for their norms in the order of the forward pass.
        momentum: See `make_norm`.
        eps: See `make_norm`.
        gate: See `make_norm`.
        variance: See `make_norm`.
    """
    if name not in NORMS:
        raise ValueError(f"unknown norm {name!r}; known: {', '.join(NORMS)}")
    gate = _gate_factory(gate)
    names = _names(name, where)

    def norm(num_features: int) -> nn.Module:
        return make_norm(
            next(names),
            num_features,
            modes=modes,
            groups=groups,
            momentum=momentum,
            eps=eps,
            gate=gate,
            variance=variance,
        )

    return norm


def _gate_factory(gate: str | GateFactory | None) -> GateFactory | None:
    if not isinstance(gate, str):
        return gate
    if gate not in GATES:
        raise ValueError(f"unknown gate {gate!r}; known: {', '.join(GATES)}")
    return GATES[gate]


def _names(name: str, where: str) -> Iterator[str]:
    match where:
        case "all":
            return itertools.repeat(name)
        case "first":
            return itertools.chain([name], itertools.repeat("bn"))
    raise ValueError(f"unknown where {where!r}; known: all, first")
