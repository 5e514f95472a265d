"""Mode normalization as functions: what they compute, and which arguments they refuse.

Letters: N samples, C channels, L positions, K modes.
"""

from __future__ import annotations

from torch import Tensor

from modenorm.checks import (
    Options,
    check_affine,
    check_choice,
    check_eps,
    check_estimates,
    check_input,
    check_options,
    check_tensor,
    known_modes,
)
from modenorm.gates import Gate
from modenorm.group_paths import normalize_channels
from modenorm.mixing import RunningEstimates
from modenorm.paths import normalize_modes

__all__ = ["mode_group_norm", "mode_norm"]


def mode_norm(
    x: Tensor,
    gates: Tensor | Gate,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    mask: Tensor | None = None,
    running_update: str = "paper",
    num_batches_tracked: Tensor | None = None,
    running_share: Tensor | None = None,
) -> Tensor:
    r"""Normalise each sample with the statistics of its modes.

    .. math:: y_n = \alpha \sum_k g_{nk} (x_n - \mu_k) / \sqrt{\sigma_k^2 + \epsilon} + \beta

    Args:
        x: (N, C, *positions), any rank from 2.
        gates: (N, K), how far each sample belongs to each mode; one-hot rows give domain-specific
            batch normalization. Or a function from pooled features (N, C) to logits (N, K).
        running_mean: (K, C), updated in place in training.
        running_var: (K, C), biased, updated in place in training.
        weight: α, (C,), or (K, C) for one per mode.
        bias: β, (C,), or (K, C) for one per mode.
        training: normalise with this batch's statistics and update the running ones; otherwise
            normalise with the running ones, or with the batch's if there are none.
        momentum: λ, the weight of this batch in the running estimates; None averages all batches
            and needs `num_batches_tracked`.
        eps: added to the variance.
        mask: (N, *positions) or (N, 1, *positions), True where a position counts in the
            statistics. Every position is normalised.
        running_update: "paper" moves every mode by λ, "usage" by λ times its share of the batch.
        num_batches_tracked: a counter of the batches used, changed in place.
        running_share: (K,), summed shares of the batches, for momentum None with "usage".

    Returns:
        A tensor of x's shape, type and memory format.

    Example:
        >>> import torch
        >>> x = torch.randn(6, 3, 4, 4)
        >>> domains = torch.nn.functional.one_hot(torch.tensor([0, 0, 0, 1, 1, 1])).float()
        >>> y = mode_norm(x, domains, training=True)
        >>> torch.allclose(y[:3].mean((0, 2, 3)), torch.zeros(3), atol=1e-6)
        True
    """
    check_input(x)
    check_affine(weight, bias, x)
    if not callable(gates):
        check_tensor("gates", gates)
    estimates = None
    if (running_mean is None) != (running_var is None):
        given, missing = "running_mean", "running_var"
        if running_mean is None:
            given, missing = missing, given
        raise ValueError(f"{given} is given without {missing}; give both or neither")
    if running_mean is not None and running_var is not None:
        estimates = RunningEstimates(running_mean, running_var, num_batches_tracked, running_share)
        check_estimates(estimates, x)
    modes = known_modes(running_mean, weight, bias)
    options = Options(training, momentum, eps, running_update, gates_matter=False, num_modes=modes)
    check_options(options, estimates)
    return normalize_modes(x, gates, estimates, weight, bias, options, mask)[0]


def mode_group_norm(
    x: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    variance: str = "pooled",
) -> Tensor:
    r"""Normalise each sample with the statistics of its channels' modes.

    .. math:: y = (\alpha / K) \sum_k (x - \mu_k) / \sqrt{\sigma_k^2 + \epsilon} + \beta

    Args:
        x: (N, C, *positions), any rank from 2.
        gate_weight: (K,), w in the logits w_k m_c + b_k of a channel with average m_c.
        gate_bias: (K,), b.
        weight: α, (C,).
        bias: β, (C,).
        eps: added to the variance.
        variance: "pooled", over the channels' averages (the paper's text), or "pixel", over all
            their values (K=1 is then GroupNorm with one group).

    Returns:
        A tensor of x's shape, type and memory format.

    Example:
        >>> import torch
        >>> x = torch.randn(2, 8, 4, 4)
        >>> mode_group_norm(x, torch.randn(2), torch.zeros(2)).shape
        torch.Size([2, 8, 4, 4])
    """
    check_input(x)
    check_affine(weight, bias, x, per_mode=False)
    check_eps(eps)
    check_choice("variance", variance, ("pooled", "pixel"))
    for name, parameter in (("gate_weight", gate_weight), ("gate_bias", gate_bias)):
        check_tensor(name, parameter)
    if gate_weight.ndim != 1 or gate_weight.shape != gate_bias.shape or len(gate_weight) == 0:
        raise ValueError(
            f"gate_weight and gate_bias have shapes {tuple(gate_weight.shape)} and "
            f"{tuple(gate_bias.shape)}; both must be (K,), one number for each of at least one mode"
        )
    y, _ = normalize_channels(
        x, gate_weight, gate_bias, weight, bias, eps, variance, gates_matter=False
    )
    return y
