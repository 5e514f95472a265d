"""Mode group normalization as a layer. Letters: N samples, C channels, K modes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from modenorm.checks import check_channels, check_choice, check_count, check_eps, check_tensor
from modenorm.group_paths import normalize_channels
from modenorm.listeners import HasListeners
from modenorm.state import explain_modes

__all__ = ["ModeGroupNorm"]


class ModeGroupNorm(HasListeners):
    r"""Mode group normalization: each sample's channels are assigned softly to K modes.

    .. math:: y = (\alpha / K) \sum_k (x - \mu_k) / \sqrt{\sigma_k^2 + \epsilon} + \beta

    The gate looks at each channel's average, g_c = softmax(w mean_l x_c + b). Samples are
    independent, so training and evaluation are the same and the batch size doesn't matter.

    Args:
        num_channels: C.
        num_modes: K.
        eps: added to the variance.
        affine: learn a weight and a bias per channel.
        variance: "pooled" takes σ²_k over the channels' averages, the paper's text; "pixel" over
            all their values, so that K=1 is GroupNorm with one group.
        device: of the parameters.
        dtype: of the parameters.

    Shape:
        (N, C, *positions) → the same

    Example:
        >>> ModeGroupNorm(64, num_modes=2)(torch.randn(8, 64, 5, 5)).shape
        torch.Size([8, 64, 5, 5])
    """

    _version = 1

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        num_channels: int,
        num_modes: int = 2,
        eps: float = 1e-5,
        affine: bool = True,
        *,
        variance: str = "pooled",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_count("num_channels", num_channels)
        check_count("num_modes", num_modes)
        check_eps(eps)
        check_choice("variance", variance, ("pooled", "pixel"))
        self.num_channels = num_channels
        self.num_modes = num_modes
        self.eps = eps
        self.affine = affine
        self.variance = variance
        self.gate_listener = None
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate_weight = nn.Parameter(torch.empty(num_modes, **kind))
        self.gate_bias = nn.Parameter(torch.empty(num_modes, **kind))
        for name in ("weight", "bias"):
            parameter = nn.Parameter(torch.empty(num_channels, **kind)) if affine else None
            self.register_parameter(name, parameter)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw a new gate and forget the affine parameters.

        The gate's weights start as 0.01 · randn, like those of `LinearGate`, since modes that are
        equal for all channels would stay so; its bias as that of `nn.Linear(1, K)`.

        >>> layer = ModeGroupNorm(4)
        >>> before = layer.gate_weight.clone()
        >>> layer.reset_parameters()
        >>> torch.equal(layer.gate_weight, before)
        False
        """
        nn.init.normal_(self.gate_weight, std=0.01)
        nn.init.uniform_(self.gate_bias, -1, 1)
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x, (N, C, *positions).

        >>> layer, x = ModeGroupNorm(8), torch.randn(4, 8, 5, 5)
        >>> torch.allclose(layer(x)[:1], layer(x[:1]), atol=1e-5)
        True
        """
        check_tensor("input", x)
        if x.ndim >= 2:
            check_channels(self, "num_channels", x)
        y, used = normalize_channels(
            x,
            self.gate_weight,
            self.gate_bias,
            self.weight,
            self.bias,
            self.eps,
            self.variance,
            gates_matter=self.gate_listener is not None,
        )
        if self.gate_listener is not None:
            assert used is not None
            self.gate_listener(used)
        return y

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        explain_modes(self, state_dict, prefix, args[-1])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """The arguments, as in torch's norms."""
        return (
            f"{self.num_channels}, num_modes={self.num_modes}, eps={self.eps}, "
            f"affine={self.affine}, variance={self.variance!r}"
        )
