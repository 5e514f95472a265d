"""The paper's algorithms, written out: the truth that every other path is tested against.

Letters: N samples, C channels, L positions, K modes. Sums run over the tensors as the paper
writes them, once per mode, with K-fold activations and ⟨x²⟩ − ⟨x⟩²: slow, and exact
only in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["mode_group_norm", "mode_norm"]


def mode_norm(
    x: Tensor,
    gates: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    mask: Tensor | None = None,
    running_update: str = "paper",
) -> Tensor:
    """Algorithms 1 (training) and 2 (inference): MN(x_n) = α Σ_k g_nk (x_n − μ_k)/σ_k + β.

    Args:
        x: (N, C, *positions).
        gates: (N, K), the assignment g_nk of each sample to each mode.
        running_mean: (K, C), running ⟨x⟩_k, updated in place in training.
        running_var: (K, C), running ⟨x²⟩_k − ⟨x⟩_k², updated in place in training.
        weight: α, (C,), or (K, C) for one per mode.
        bias: β, (C,), or (K, C) for one per mode.
        training: take μ_k and σ_k from this batch; otherwise from the running estimates.
        momentum: λ, the weight of this batch in the running estimates.
        eps: added to σ²_k.
        mask: (N, *positions), True where a position counts in the statistics.
        running_update: "paper" (λ for every mode) or "usage" (λ N_k/N).

    Example:
        >>> x = torch.randn(8, 3, 4, 4, dtype=torch.float64)
        >>> y = mode_norm(x, torch.ones(8, 1, dtype=torch.float64), training=True)
        >>> torch.allclose(y, torch.nn.functional.batch_norm(x, None, None, training=True))
        True
    """
    num_channels, num_modes = x.shape[1], gates.shape[1]
    along_channels = (1, num_channels) + (1,) * (x.ndim - 2)
    along_samples = (-1,) + (1,) * (x.ndim - 1)
    counts = torch.ones_like(x) if mask is None else mask.unsqueeze(1).to(x).expand_as(x)
    all_but_channels = (0, *range(2, x.ndim))
    smallest = torch.finfo(x.dtype).tiny

    y = torch.zeros_like(x)
    for k in range(num_modes):
        g = gates[:, k].view(along_samples).to(x)  # g_nk, the same for all channels and positions
        if training or running_mean is None or running_var is None:
            n_k = (g * counts).sum(all_but_channels)
            # no sample in the mode: all sums are 0, and so are their slopes
            divisor = n_k.clamp_min(smallest).masked_fill(n_k == 0, torch.inf)
            mean = (g * counts * x).sum(all_but_channels) / divisor
            second = (g * counts * x**2).sum(all_but_channels) / divisor
            if running_mean is not None and running_var is not None and (n_k >= smallest).all():
                share = n_k / counts.sum(all_but_channels)
                rate = momentum * (share if running_update == "usage" else 1)
                _update(running_mean[k], running_var[k], mean, second, rate)
        else:
            mean, second = running_mean[k], running_var[k] + running_mean[k] ** 2
        mu = mean.view(along_channels)
        sigma = torch.sqrt(second - mean**2 + eps).view(along_channels)
        term = g * (x - mu) / sigma
        if weight is not None:
            term = (weight if weight.ndim == 1 else weight[k]).view(along_channels) * term
        if bias is not None and bias.ndim == 2:
            term = term + g * bias[k].view(along_channels)
        y = y + term
    if bias is not None and bias.ndim == 1:
        y = y + bias.view(along_channels)
    return y


def _update(
    running_mean: Tensor, running_var: Tensor, mean: Tensor, second: Tensor, rate: float | Tensor
) -> None:
    """⟨x⟩ ← λ⟨x⟩_batch + (1−λ)⟨x⟩ and the same for ⟨x²⟩, stored as mean and variance."""
    with torch.no_grad():
        running_second = rate * second + (1 - rate) * (running_var + running_mean**2)
        running_mean.copy_(rate * mean + (1 - rate) * running_mean)
        running_var.copy_(running_second - running_mean**2)


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
    """Algorithm 3: MGN(x) = (α/K) Σ_k (x − μ_k)/σ_k + β, each sample by itself.

    Args:
        x: (N, C, *positions).
        gate_weight: w, (K,).
        gate_bias: b, (K,).
        weight: α, (C,).
        bias: β, (C,).
        eps: added to σ²_k.
        variance: "pooled" takes σ² over the channels' averages (the paper's text); "pixel" over
            all values of the channels (K=1 is then GroupNorm with one group).

    Example:
        >>> x = torch.randn(2, 6, 4, 4, dtype=torch.float64)
        >>> w = b = torch.zeros(1, dtype=torch.float64)
        >>> y = mode_group_norm(x, w, b, variance="pixel")
        >>> torch.allclose(y, torch.nn.functional.group_norm(x, 1))
        True
    """
    num_samples, num_channels, num_modes = x.shape[0], x.shape[1], gate_weight.shape[0]
    along_channels = (num_channels,) + (1,) * (x.ndim - 2)
    outputs = []
    for n in range(num_samples):
        values = x[n].reshape(num_channels, -1)
        pooled = values.mean(1)  # one number per channel
        logs = torch.log_softmax(pooled[:, None] * gate_weight + gate_bias, dim=1)  # (C, K)
        second_moments = pooled**2 if variance == "pooled" else (values**2).mean(1)
        y = torch.zeros_like(x[n])
        for k in range(num_modes):
            weights = torch.softmax(logs[:, k], dim=0)  # g_ck / C_k, also where C_k vanishes
            mean = (weights * pooled).sum()
            second = (weights * second_moments).sum()
            y = y + (x[n] - mean) / torch.sqrt(second - mean**2 + eps)
        y = y / num_modes
        if weight is not None:
            y = weight.view(along_channels) * y
        if bias is not None:
            y = y + bias.view(along_channels)
        outputs.append(y)
    return torch.stack(outputs) if outputs else x.clone()
