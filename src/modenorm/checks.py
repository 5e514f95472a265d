"""What a norm refuses, with messages that name the value, the rule and the fix."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import NamedTuple

import torch
from torch import Tensor, nn

from modenorm.exchange import Ranks
from modenorm.mixing import RunningEstimates

__all__ = [
    "Options",
    "check_affine",
    "check_channels",
    "check_choice",
    "check_count",
    "check_eps",
    "check_estimates",
    "check_input",
    "check_module",
    "check_momentum",
    "check_options",
    "check_tensor",
    "known_modes",
    "masked",
]


SMALLEST_EPS = torch.finfo(torch.float32).tiny


class Options(NamedTuple):
    """How a mode norm behaves, apart from its tensors."""

    training: bool = False
    momentum: float | None = 0.1
    eps: float = 1e-5
    running_update: str = "paper"
    ranks: Ranks | None = None  # others that share the statistics in training
    gates_matter: bool = True  # whether someone looks at the gates that are returned
    num_modes: int | None = None  # K, where more than the gates tells it
    usage_matters: bool = False  # whether someone looks at the share of the batch of each mode
    relu: bool = False  # whether negative numbers of the output become zero


def check_input(x: Tensor) -> None:
    """Refuse what no norm of this family can take."""
    check_tensor("input", x)
    if x.layout != torch.strided or x.is_nested:
        raise ValueError(
            "input is sparse or nested; expected a dense tensor: use x.to_dense() or "
            "x.to_padded_tensor(0.0) with a mask"
        )
    if x.ndim < 2:
        raise ValueError(
            f"input has shape {tuple(x.shape)}; expected samples and channels first, (N, C, ...)"
        )
    if not x.is_floating_point() or x.dtype.itemsize < 2:
        raise ValueError(
            f"input is {x.dtype}; expected a floating-point type of at least 16 bits: use x.float()"
        )


def check_estimates(estimates: RunningEstimates, x: Tensor) -> None:
    """Refuse estimates of other shapes, beyond whose end a kernel would read, and whole numbers."""
    running_mean, running_var, tracked, share = estimates
    _check_numbers("running_mean", running_mean)
    _check_numbers("running_var", running_var)
    _check_numbers("running_share", share)
    mean, var = tuple(running_mean.shape), tuple(running_var.shape)
    if len(mean) != 2 or mean != var or mean[1] != x.shape[1]:
        raise ValueError(
            f"running_mean and running_var have shapes {mean} and {var}; both must be "
            f"(K, {x.shape[1]}): one row per mode, one column per channel of x, {tuple(x.shape)}"
        )
    if tracked is not None:
        check_tensor("num_batches_tracked", tracked)
        if tracked.numel() != 1:
            raise ValueError(
                f"num_batches_tracked has shape {tuple(tracked.shape)}; it must be one number, "
                f"such as torch.tensor(0)"
            )
    if share is not None and tuple(share.shape) != mean[:1]:
        raise ValueError(
            f"running_share has shape {tuple(share.shape)}; expected {mean[:1]}: one number per "
            f"row of running_mean, {mean}"
        )


def check_affine(
    weight: Tensor | None, bias: Tensor | None, x: Tensor, per_mode: bool = True
) -> None:
    """Refuse a weight or bias for another number of channels, or with rows that no mode has."""
    ranks = (1, 2) if per_mode else (1,)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        _check_numbers(name, tensor)
        # compared one by one: compilers guard no symbol in a tuple
        if tensor.ndim in ranks and (tensor.shape[-1] == 1 or tensor.shape[-1] == x.shape[1]):
            continue
        expected = f"({x.shape[1]},)" + (f" or (K, {x.shape[1]})" if per_mode else "")
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; expected {expected}: a number for each "
            f"channel of x, {tuple(x.shape)}"
        )


def known_modes(
    running_mean: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> int | None:
    """K, if tensors with a row for each mode tell it; they have to tell the same."""
    rows = {} if running_mean is None else {"running_mean": len(running_mean)}
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.ndim == 2 and len(tensor) > 1:  # one row serves any mode
            rows[name] = len(tensor)
    if len(set(rows.values())) > 1:
        told = ", ".join(f"{name} has {count}" for name, count in rows.items())
        raise ValueError(f"{told} rows; all must have K, one row per mode")
    return next(iter(rows.values()), None)


def check_eps(eps: float) -> None:
    """Refuse an eps that cannot keep a variance of zero apart from zero in float32."""
    # a float first: asking for its abstract class takes longer than all else here
    if not isinstance(eps, (float, Real)) or not SMALLEST_EPS <= eps < math.inf:
        raise ValueError(f"eps is {eps!r}; it must be positive and finite, e.g. 1e-5")


def check_momentum(momentum: float) -> None:
    """Refuse a weight of the newest batch that is none."""
    if not isinstance(momentum, (float, Real)) or not 0 < momentum <= 1:
        raise ValueError(
            f"momentum is {momentum!r}; it must lie in (0, 1], the weight of the newest batch, or "
            f"be None, where a layer can average over all batches"
        )


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a word that is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; use one of {', '.join(map(repr, choices))}")


def check_options(options: Options, estimates: RunningEstimates | None = None) -> None:
    """Refuse options out of range."""
    check_eps(options.eps)
    check_choice("running_update", options.running_update, ("paper", "usage"))
    if options.momentum is not None:
        check_momentum(options.momentum)
    if options.momentum is None and options.training and estimates is not None:
        usage = options.running_update == "usage"
        if (estimates.share if usage else estimates.num_batches_tracked) is None:
            name = "running_share" if usage else "num_batches_tracked"
            raise ValueError(
                f"momentum=None averages over batches and needs {name}, which a layer has if it "
                f"was made with running_update={options.running_update!r}"
            )


def masked(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """x, finite wherever the mask is False, and the mask as (N, 1, *positions), boolean.

    There gradients are zero as a rule, and zero times NaN would be NaN.
    """
    check_tensor("mask", mask)
    short, full = (x.shape[0], *x.shape[2:]), (x.shape[0], 1, *x.shape[2:])
    shape = tuple(mask.shape)
    if shape != short and shape != full:  # one by one, as in check_affine
        raise ValueError(f"mask has shape {shape}; expected {short} or {full}")
    mask = mask.reshape(full).bool()
    return torch.where(mask | x.isfinite(), x, 0), mask


def check_tensor(name: str, value: object) -> None:
    """Refuse a list, or an array of another library, where a tensor is expected."""
    if type(value).__module__ == "torch.fx.proxy":
        raise ValueError(
            f"{name} is a proxy, as torch.fx can't look into this layer: make the layer a leaf of "
            "the tracer (for prepare_fx: non_traceable_module_classes)"
        )
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        raise ValueError(f"{name} is a {kind}; expected a tensor: use torch.as_tensor({name})")


def check_channels(layer: nn.Module, name: str, x: Tensor) -> None:
    """Refuse input of another number of channels than a layer's argument of this name says."""
    if x.shape[1] != getattr(layer, name):
        raise ValueError(
            f"{type(layer).__name__} was made for {name}={getattr(layer, name)}; got {x.shape[1]} "
            f"channels in shape {tuple(x.shape)}: make it for {x.shape[1]}, or move channels to "
            f"the second place"
        )


def _check_numbers(name: str, tensor: Tensor | None) -> None:
    """Refuse what holds no real numbers: whole ones would lose what is added to them."""
    if tensor is None:
        return
    check_tensor(name, tensor)
    if not tensor.is_floating_point():
        raise ValueError(
            f"{name} is {tensor.dtype}; expected a floating-point type: use {name}.float()"
        )


def check_module(model: object) -> None:
    """Refuse what is no module."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {model!r}; expected an nn.Module")


def check_count(name: str, value: int) -> None:
    """Refuse a number of things that is not a positive integer."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
