"""Mode norms that only a conversion makes: of unknown shape, of unknown width, with an activation.

Letters: C channels, K modes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from modenorm.gates import GateFactory, StandardizedGate, is_just, make_gate
from modenorm.layers import ModeNorm, ModeNorm1d, ModeNorm2d, ModeNorm3d

__all__ = ["LazyModeNorm1d", "LazyModeNorm2d", "LazyModeNorm3d", "ModeNormAct2d", "ModeNormNd"]


class ModeNormNd(ModeNorm):
    """Mode normalization of input of any shape, for `nn.SyncBatchNorm`, which takes any.

    Example:
        >>> layer = ModeNormNd(8)
        >>> layer(torch.randn(4, 8)).shape, layer(torch.randn(4, 8, 5, 5)).shape
        (torch.Size([4, 8]), torch.Size([4, 8, 5, 5]))
    """

    _dimensions = (2, 3, 4, 5)


class ModeNormAct2d(ModeNorm2d):
    """Mode normalization, then dropout and an activation: what timm's `BatchNormAct2d` does.

    Args:
        num_features: C.
        num_modes: K.
        drop: applied to the normalised values.
        act: applied after it.
        **options: as `ModeNorm2d` takes them.

    Example:
        >>> layer = ModeNormAct2d(8, drop=nn.Identity(), act=nn.ReLU())
        >>> bool((layer(torch.randn(4, 8, 5, 5)) >= 0).all())
        True
    """

    batchnorm_class: type[nn.BatchNorm2d] | None = None
    """The class that was converted, for the way back."""

    def __init__(
        self,
        num_features: int,
        num_modes: int = 2,
        *,
        drop: nn.Module,
        act: nn.Module,
        **options: Any,
    ) -> None:
        super().__init__(num_features, num_modes, **options)
        self.drop = drop
        self.act = act

    def forward(
        self,
        x: Tensor,
        gates: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        relu: bool = False,
    ) -> Tensor:
        """Normalise x, (N, C, H, W), drop and activate; see `ModeNorm2d.forward`."""
        if is_just(nn.Identity, self.drop) and is_just(nn.ReLU, self.act):
            return super().forward(x, gates, mask, relu=True)
        y = self.act(self.drop(super().forward(x, gates, mask)))
        return y.relu() if relu else y


class _LazyModeNorm(LazyModuleMixin, ModeNorm):
    """A mode norm that learns C from its first input, or from a state it loads."""

    cls_to_become: type[ModeNorm]

    def __init__(
        self,
        num_modes: int = 2,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        gate: GateFactory | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(
            1, num_modes, eps, momentum, affine, track_running_stats,
            gate=nn.Identity(), **options, **kind,
        )  # fmt: skip
        self.num_features = 0
        self._gate_arguments = (gate, device, dtype)
        for name in ("weight", "bias"):
            if getattr(self, name) is not None:
                setattr(self, name, UninitializedParameter(**kind))
        for name in ("running_mean", "running_var"):
            if (buffer := getattr(self, name)) is not None:
                like: dict[str, Any] = {"device": buffer.device, "dtype": buffer.dtype}
                setattr(self, name, UninitializedBuffer(**like))

    def initialize_parameters(self, x: Tensor, *_: Any, **__: Any) -> None:
        """Take C from the input."""
        if self.num_features == 0:
            self._initialize(x.shape[1])

    def _initialize(self, num_features: int) -> None:
        self.num_features = num_features
        modes = (self.num_modes,) if self.per_mode_affine else ()
        shapes = dict.fromkeys(("weight", "bias"), (*modes, num_features))
        shapes |= dict.fromkeys(("running_mean", "running_var"), (self.num_modes, num_features))
        for name, shape in shapes.items():
            if (tensor := getattr(self, name)) is not None:
                tensor.materialize(shape)
        gate, device, dtype = self._gate_arguments
        del self._gate_arguments
        known = (self.weight, self.running_mean)
        if (like := next((t for t in known if t is not None), None)) is not None:
            device, dtype = like.device, like.dtype  # where `.to()` has moved it since
        self.gate = make_gate(gate, num_features, self.num_modes, device, dtype)
        self.gate.train(self.training)
        for part in self.gate.modules():
            if isinstance(part, StandardizedGate):
                part.ranks, part.statistics_frozen = self.ranks, self.statistics_frozen
        self._reset_own()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        known = (state_dict.get(prefix + name) for name in ("running_mean", "weight"))
        width = next((t.shape[-1] for t in known if t is not None and not _is_lazy(t)), 0)
        if self.num_features == 0 and width:
            self._initialize(width)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _is_lazy(tensor: Tensor) -> bool:
    return torch.nn.parameter.is_lazy(tensor)


class LazyModeNorm1d(_LazyModeNorm):
    """A `ModeNorm1d` that takes C from its first input, for `nn.LazyBatchNorm1d`.

    Example:
        >>> layer = LazyModeNorm1d(num_modes=2)
        >>> _ = layer(torch.randn(4, 8))
        >>> layer.running_mean.shape
        torch.Size([2, 8])
    """

    cls_to_become = ModeNorm1d


class LazyModeNorm2d(_LazyModeNorm):
    """A `ModeNorm2d` that takes C from its first input, for `nn.LazyBatchNorm2d`.

    Example:
        >>> layer = LazyModeNorm2d(num_modes=2)
        >>> _ = layer(torch.randn(4, 8, 5, 5))
        >>> type(layer).__name__
        'ModeNorm2d'
    """

    cls_to_become = ModeNorm2d


class LazyModeNorm3d(_LazyModeNorm):
    """A `ModeNorm3d` that takes C from its first input, for `nn.LazyBatchNorm3d`.

    Example:
        >>> layer = LazyModeNorm3d(num_modes=2)
        >>> _ = layer(torch.randn(4, 8, 2, 5, 5))
        >>> layer.gate
        LinearGate(num_features=8, num_modes=2)
    """

    cls_to_become = ModeNorm3d
