"""Gating networks: from pooled features (N, C) to logits (N, K).

Any `nn.Module` of that signature can be a layer's gate; the layer applies the softmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules

from modenorm.buffers import Float32Buffers, members, recomputing, running_dtype
from modenorm.checks import check_count, check_eps, check_momentum
from modenorm.exchange import Ranks, in_use, statistics
from modenorm.mixing import batch_statistics, product

__all__ = ["LinearGate", "StandardizedGate", "make_gate"]

Gate = Callable[[Tensor], Tensor]

# hooks of every module, in dicts that torch never replaces
before_all, after_all = (
    of_all_modules._global_forward_pre_hooks,
    of_all_modules._global_forward_hooks,
)
before_all_backward, after_all_backward = (
    of_all_modules._global_backward_pre_hooks,
    of_all_modules._global_backward_hooks,
)


class LinearGate(nn.Module):
    """The paper's gate: an affine map of the pooled features, W m + b.

    The weights start as 0.01 · randn: gates that are equal for all samples are an exact stationary
    point of training, so a gate that starts at zero would never learn.

    Args:
        num_features: C.
        num_modes: K.
        device: of the parameters.
        dtype: of the parameters; the map is computed in the features' type, at least float32.

    Shape:
        features (N, C) → logits (N, K)

    Example:
        >>> LinearGate(16, num_modes=2)(torch.randn(8, 16)).shape
        torch.Size([8, 2])
    """

    bias_changes: tuple[Callable[[nn.Module, Tensor], Tensor], ...] = ()
    """Called in every forward with gate and bias, for the one to use: switches of a penalty."""

    def __init__(
        self,
        num_features: int,
        num_modes: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_count("num_features", num_features)
        check_count("num_modes", num_modes)
        self.num_features = num_features
        self.num_modes = num_modes
        self.weight = nn.Parameter(torch.empty(num_modes, num_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_modes, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new parameters."""
        nn.init.normal_(self.weight, std=0.01)
        bound = 1 / math.sqrt(self.num_features)
        nn.init.uniform_(self.bias, -bound, bound)

    def used_parameters(self) -> tuple[Tensor, Tensor]:
        """Weight and bias as they are used now."""
        weight, bias = members(self, ("weight", "bias"))
        for change in self.bias_changes:
            bias = change(self, bias)
        return weight, bias

    def forward(self, features: Tensor) -> Tensor:
        """Logits of each sample's modes."""
        weight, bias = (parameter.to(features.dtype) for parameter in self.used_parameters())
        return product(features, weight.t()) + bias

    def extra_repr(self) -> str:
        """Sizes, as in `nn.Linear`."""
        return f"num_features={self.num_features}, num_modes={self.num_modes}"


class StandardizedGate(Float32Buffers, LinearGate):
    """A linear gate on standardised features, so that its sharpness is free of their scale.

    Features are standardised over the batch in training, and with running estimates otherwise.

    Args:
        num_features: C.
        num_modes: K.
        eps: added to the variance of the features.
        momentum: weight of the newest batch in the running estimates.
        device: of the parameters.
        dtype: of the parameters.

    Example:
        >>> gate = StandardizedGate(16, num_modes=2)
        >>> features = torch.randn(8, 16)
        >>> torch.allclose(gate(features), gate(1000 * features + 5), atol=1e-4)
        True
    """

    running_mean: Tensor
    running_var: Tensor
    ranks: Ranks | None = None
    averaged: Tensor | None = None
    """While `recalibrate` takes the estimates anew: of how many batches they are the average."""

    def __init__(
        self,
        num_features: int,
        num_modes: int,
        *,
        eps: float = 1e-5,
        momentum: float = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_eps(eps)
        check_momentum(momentum)
        super().__init__(num_features, num_modes, device=device, dtype=dtype)
        self.eps = eps
        self.momentum = momentum
        self.statistics_frozen = False
        kind: dict[str, Any] = {"device": device, "dtype": running_dtype(dtype)}
        self.register_buffer("running_mean", torch.zeros(num_features, **kind))
        self.register_buffer("running_var", torch.ones(num_features, **kind))

    def reset_parameters(self) -> None:
        """Draw new parameters and forget the running estimates."""
        super().reset_parameters()
        if hasattr(self, "running_mean"):
            self.running_mean.zero_()
            self.running_var.fill_(1)

    def forward(self, features: Tensor, counted: Tensor | None = None) -> Tensor:
        """Logits of each sample's modes.

        Args:
            features: (N, C).
            counted: (N,), False for samples that are all padding: they are standardised like the
                others, but are not among those whose mean and variance are taken.
        """
        mean, var = self.running_mean.to(features), self.running_var.to(features)
        if self.training and not self.statistics_frozen:
            ranks = in_use(self.ranks)
            if ranks is not None or counted is not None:
                mean, var = self._of_counted(features, counted, ranks, mean, var)
            elif features.shape[0] > 1:
                var, mean = torch.var_mean(features, 0, correction=0)
                self._update(mean, var, True)
        return super().forward((features - mean) * torch.rsqrt(var + self.eps))

    def _of_counted(
        self,
        features: Tensor,
        counted: Tensor | None,
        ranks: Ranks | None,
        mean: Tensor,
        var: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The features' statistics over all ranks; the running ones if only one sample counts."""
        weights = torch.ones_like(features[:, :1])
        if counted is not None:
            weights = counted[:, None].to(features)
        within = torch.zeros_like(features)  # a sample has one value
        if ranks is None:
            batch = batch_statistics(features, within, weights)
        else:
            batch = statistics(features, within, weights, ranks)
        several = batch.mass[0] > 1
        self._update(batch.mean[0], batch.var[0], several)
        return torch.where(several, batch.mean[0], mean), torch.where(several, batch.var[0], var)

    @torch.no_grad()
    def _update(self, mean: Tensor, var: Tensor, several: Tensor | bool) -> None:
        if recomputing():
            return
        mean, var = mean.to(self.running_mean), var.to(self.running_var)
        usable = torch.isfinite(mean).all() & torch.isfinite(var).all() & several
        rate: Tensor | float = self.momentum
        if self.averaged is not None:
            self.averaged += usable
            rate = 1 / self.averaged.clamp_min(1)
        for running, batch in ((self.running_mean, mean), (self.running_var, var)):
            moved = torch.lerp(running, batch, rate)
            running.copy_(torch.where(usable, moved, running))


GateFactory = Callable[[int, int], nn.Module]


def make_gate(
    gate: nn.Module | GateFactory | None,
    num_features: int,
    num_modes: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """The gate a layer was asked for: a module as it is, a factory called with (C, K).

    Example:
        >>> make_gate(StandardizedGate, 16, 2)
        StandardizedGate(num_features=16, num_modes=2)
    """
    if gate is None:
        return LinearGate(num_features, num_modes, device=device, dtype=dtype)
    if isinstance(gate, nn.Module):
        return _fitting(gate, num_features)
    if not callable(gate):
        raise ValueError(
            f"gate is {gate!r}; expected an nn.Module from (N, {num_features}) to "
            f"(N, {num_modes}), or a function of (num_features, num_modes) that makes one"
        )
    made = gate(num_features, num_modes)
    if not isinstance(made, nn.Module):
        raise ValueError(
            f"gate({num_features}, {num_modes}) made {made!r}; expected an nn.Module from "
            f"(N, {num_features}) to (N, {num_modes})"
        )
    return _fitting(made, num_features).to(device=device, dtype=dtype)


def _fitting(gate: nn.Module, num_features: int) -> nn.Module:
    """The gate, unless it is a linear one for another number of channels."""
    if isinstance(gate, LinearGate) and gate.num_features != num_features:
        raise ValueError(
            f"the gate was made for num_features={gate.num_features}, but the layer has "
            f"{num_features}: make it for these, or give its class, {type(gate).__name__}"
        )
    return gate


def reset_gate(gate: nn.Module) -> None:
    """Draw a gate's parameters anew: by its own `reset_parameters`, or those of its parts.

    Example:
        >>> gate = nn.Sequential(nn.Linear(16, 2))
        >>> before = gate[0].weight.clone()
        >>> reset_gate(gate)
        >>> bool((gate[0].weight == before).any())
        False
    """
    reset = getattr(gate, "reset_parameters", None)
    if callable(reset):
        reset()
        return
    for part in gate.children():
        reset_gate(part)


def is_just(kind: type[nn.Module], module: object) -> bool:
    """Whether a module is of this very class, unchanged and without hooks.

    Then kernels may compute what it does without calling it.
    """
    if type(module) is not kind:
        return False
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or before_all
        or after_all
        or before_all_backward
        or after_all_backward
        or "forward" in module.__dict__
    )


def logits_of(gate: Gate, pooled: Tensor, mask: Tensor | None) -> Tensor:
    """A gate's logits for pooled features, (N, C), of the positions where the mask is True."""
    if isinstance(gate, StandardizedGate) and mask is not None:
        return gate(pooled, mask.flatten(1).any(1))
    return gate(_features_for(gate, pooled))


def _features_for(gate: Gate, pooled: Tensor) -> Tensor:
    """A gating network of the user's own gets a copy, of the type that its parameters compute in.

    It may work in place, and pooled features are needed again; those of (N, C) input are x itself.
    """
    if isinstance(gate, LinearGate):
        return pooled
    parameters = gate.parameters() if isinstance(gate, nn.Module) else ()
    like = next((p for p in parameters if p.is_floating_point()), pooled)  # others are quantised
    return pooled.to(like.dtype, copy=True)
