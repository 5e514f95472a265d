"""The layers: parameters, buffers, training and evaluation; mode group norm is in group_layer.py.

Letters: N samples, C channels, L positions, K modes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from modenorm.buffers import Float32Buffers, members, recomputing, running_dtype
from modenorm.checks import (
    Options,
    check_channels,
    check_count,
    check_options,
    check_tensor,
)
from modenorm.exchange import Ranks, in_use
from modenorm.gates import GateFactory, make_gate, reset_gate
from modenorm.group_layer import ModeGroupNorm
from modenorm.listeners import HasListeners
from modenorm.mixing import RunningEstimates
from modenorm.paths import normalize_modes
from modenorm.state import explain_modes, fit_share, spread_batchnorm

__all__ = ["ModeGroupNorm", "ModeNorm1d", "ModeNorm2d", "ModeNorm3d"]

ESTIMATES = ("running_mean", "running_var", "num_batches_tracked", "running_share")
MEMBERS = ("gate", "weight", "bias", *ESTIMATES)


class ModeNorm(HasListeners, Float32Buffers):
    r"""What `ModeNorm1d`, `ModeNorm2d` and `ModeNorm3d` share; they differ in the shapes they take.

    Not a subclass of torch's `_BatchNorm`: converters for batch norm would replace it silently.
    """

    _version = 1
    _dimensions: tuple[int, ...] = ()
    ranks: Ranks | None = None
    """Who shares the statistics; set by `convert_sync_modenorm`."""

    gate: nn.Module
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor | None
    running_var: Tensor | None
    running_share: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(
        self,
        num_features: int,
        num_modes: int = 2,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        gate: nn.Module | GateFactory | None = None,
        per_mode_affine: bool = False,
        running_update: str = "paper",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_count("num_features", num_features)
        check_count("num_modes", num_modes)
        check_options(Options(False, momentum, eps, running_update))
        self.num_features = num_features
        self.num_modes = num_modes
        self.eps = eps
        self.momentum = momentum
        self.affine = affine
        self.track_running_stats = track_running_stats
        self.per_mode_affine = per_mode_affine
        self.running_update = running_update
        self.statistics_frozen = False
        self.gate_listener = None
        self.gate = make_gate(gate, num_features, num_modes, device, dtype)
        self._add_affine(device, dtype)
        self._add_running(device, dtype)
        self._reset_own()

    def _add_affine(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        modes = (self.num_modes,) if self.per_mode_affine else ()
        for name in ("weight", "bias"):
            parameter = None
            if self.affine:
                shape = (*modes, self.num_features)
                parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            self.register_parameter(name, parameter)

    def _add_running(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        shape = (self.num_modes, self.num_features)
        kind: dict[str, Any] = {"device": device, "dtype": running_dtype(dtype)}
        tracked = self.track_running_stats
        usage = tracked and self.running_update == "usage"
        count = torch.tensor(0, dtype=torch.long, device=device) if tracked else None
        self.register_buffer("running_mean", torch.empty(shape, **kind) if tracked else None)
        self.register_buffer("running_var", torch.empty(shape, **kind) if tracked else None)
        self.register_buffer("num_batches_tracked", count)
        self.register_buffer("running_share", torch.empty(shape[0], **kind) if usage else None)

    def reset_running_stats(self) -> None:
        """Forget the running estimates: mean 0, variance 1, no batches.

        >>> layer = ModeNorm1d(4)
        >>> y = layer(torch.randn(6, 4))
        >>> layer.reset_running_stats()
        >>> int(layer.num_batches_tracked), float(layer.running_mean.abs().sum())
        (0, 0.0)
        """
        for buffer, value in (
            (self.running_mean, 0),
            (self.running_var, 1),
            (self.num_batches_tracked, 0),
            (self.running_share, 0),
        ):
            if buffer is not None:
                buffer.fill_(value)

    def reset_parameters(self) -> None:
        """Forget everything learnt: affine parameters, running estimates, and the gate.

        >>> layer = ModeNorm1d(4)
        >>> before = layer.gate.weight.clone()
        >>> layer.reset_parameters()
        >>> torch.equal(layer.gate.weight, before)
        False
        """
        self._reset_own()
        reset_gate(self.gate)

    def _reset_own(self) -> None:
        self.reset_running_stats()
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Tensor,
        gates: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        relu: bool = False,
    ) -> Tensor:
        """Normalise x.

        Args:
            x: (N, C, *positions).
            gates: (N, K) assignments from outside, used instead of the gate.
            mask: (N, *positions), True where a position counts in the statistics.
            relu: apply a ReLU too; in compiled training on a GPU that is cheaper than one apart.

        Example:
            >>> layer, x = ModeNorm1d(4, num_modes=2), torch.randn(6, 4)
            >>> y = layer(x, gates=torch.eye(2).repeat(3, 1))
            >>> torch.allclose(y[::2].mean(0), torch.zeros(4), atol=1e-5)
            True
        """
        self._check_input(x)
        gate, weight, bias, mean, var, *counts = members(self, MEMBERS)
        estimates = None
        if mean is not None and var is not None:
            estimates = RunningEstimates(mean, var, *counts)
        if gates is not None:
            self._check_gates(gates, x)
        training = self.training and not (self.statistics_frozen and estimates is not None)
        ranks = in_use(self.ranks) if training else None
        options = Options(
            training,
            self.momentum,
            self.eps,
            self.running_update,
            ranks,
            gates_matter=self.gate_listener is not None,
            num_modes=self.num_modes,
            usage_matters=self.usage_listener is not None and torch.is_grad_enabled(),
            relu=relu,
        )
        given = gate if gates is None else gates
        y, used, usage = normalize_modes(x, given, estimates, weight, bias, options, mask)
        if self.usage_listener is not None and usage is not None and not recomputing():
            self.usage_listener(usage)
        if self.gate_listener is not None:
            assert used is not None
            self.gate_listener(used if gates is None else used.clone())  # theirs may change
        return y

    def _check_input(self, x: Tensor) -> None:
        check_tensor("input", x)
        if x.ndim not in self._dimensions:
            taken = " or ".join(f"{count}-d" for count in self._dimensions)
            raise ValueError(
                f"{type(self).__name__} takes {taken} input (samples, channels, positions); "
                f"got shape {tuple(x.shape)}: use the layer for that shape, or x[None] for one "
                f"sample"
            )
        check_channels(self, "num_features", x)

    def _check_gates(self, gates: Tensor, x: Tensor) -> None:
        check_tensor("gates", gates)
        if tuple(gates.shape) != (x.shape[0], self.num_modes):
            raise ValueError(
                f"gates have shape {tuple(gates.shape)}; expected ({x.shape[0]}, {self.num_modes}):"
                f" one row per sample, one column per mode"
            )

    def extra_repr(self) -> str:
        """The arguments, as in torch's norms."""
        text = (
            f"{self.num_features}, num_modes={self.num_modes}, eps={self.eps}, "
            f"momentum={self.momentum}, affine={self.affine}, "
            f"track_running_stats={self.track_running_stats}"
        )
        if self.per_mode_affine:
            text += ", per_mode_affine=True"
        if self.running_update != "paper":
            text += f", running_update={self.running_update!r}"
        if self.ranks is not None:
            text += ", synchronized=True"
        return text

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        spread_batchnorm(self, state_dict, prefix)
        fit_share(self, state_dict, prefix)
        explain_modes(self, state_dict, prefix, args[-1])
        super()._load_from_state_dict(state_dict, prefix, *args)


class ModeNorm1d(ModeNorm):
    r"""Mode normalization of (N, C) or (N, C, L) input: batch norm that discovers K modes.

    .. math:: y_n = \alpha \sum_k g_{nk} (x_n - \mu_k) / \sqrt{\sigma_k^2 + \epsilon} + \beta

    A drop-in for `nn.BatchNorm1d`; see `ModeNorm2d` for the arguments and for training and
    evaluation.

    Example:
        >>> ModeNorm1d(16, num_modes=4)(torch.randn(32, 16)).shape
        torch.Size([32, 16])
    """

    _dimensions = (2, 3)


class ModeNorm2d(ModeNorm):
    r"""Mode normalization of (N, C, H, W) input: batch norm that discovers K modes.

    .. math:: y_n = \alpha \sum_k g_{nk} (x_n - \mu_k) / \sqrt{\sigma_k^2 + \epsilon} + \beta

    A gating network looks at each sample's pooled features and assigns it softly to the modes,
    g_n = softmax(gate(mean_l x_n)). In training μ_k and σ²_k are the batch's gate-weighted mean and
    biased variance, and move the running estimates; in evaluation they are the running estimates.
    K=1, or gates that are equal for all samples, give batch normalization. The running variance is
    the biased one, where torch's batch norm keeps the unbiased one.

    Args:
        num_features: C.
        num_modes: K; the cost hardly depends on it.
        eps: added to the variance.
        momentum: weight of the newest batch in the running estimates (the paper's λ); None averages
            over all batches.
        affine: learn a weight and a bias per channel.
        track_running_stats: keep running estimates; without them evaluation uses the batch's.
        gate: an `nn.Module` from pooled features (N, C) to logits (N, K), or a function of
            (num_features, num_modes) that makes one; default is the paper's `LinearGate`.
        per_mode_affine: one weight and bias per mode, (K, C).
        running_update: "paper" moves every mode's estimates at the same rate; "usage" weights the
            rate by the share of the batch that the mode received.
        device: of parameters and buffers.
        dtype: of parameters; running estimates are float32 for half types.

    Example:
        >>> layer = ModeNorm2d(64)  # instead of nn.BatchNorm2d(64)
        >>> layer(torch.randn(8, 64, 5, 5)).shape
        torch.Size([8, 64, 5, 5])
        >>> layer.running_mean.shape
        torch.Size([2, 64])
    """

    _dimensions = (4,)


class ModeNorm3d(ModeNorm):
    r"""Mode normalization of (N, C, D, H, W) input: batch norm that discovers K modes.

    .. math:: y_n = \alpha \sum_k g_{nk} (x_n - \mu_k) / \sqrt{\sigma_k^2 + \epsilon} + \beta

    A drop-in for `nn.BatchNorm3d`; see `ModeNorm2d` for the arguments and for training and
    evaluation.

    Example:
        >>> ModeNorm3d(8)(torch.randn(2, 8, 3, 4, 4)).shape
        torch.Size([2, 8, 3, 4, 4])
    """

    _dimensions = (5,)
