"""Mode normalization as people write it today: a loop over the modes in PyTorch operators.

The baseline of the benchmark, and of nothing else: it keeps K activations for backward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["LoopModeNorm"]


class LoopModeNorm(nn.Module):
    """Algorithm 1 as a loop over K."""

    running_mean: Tensor
    running_second: Tensor

    def __init__(self, num_features: int, num_modes: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.gate = nn.Linear(num_features, num_modes)
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_modes, num_features))
        self.register_buffer("running_second", torch.ones(num_modes, num_features))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise a training batch."""
        gates = torch.softmax(self.gate(x.float().mean((2, 3))), 1)
        y = torch.zeros_like(x)
        for k in range(gates.shape[1]):
            g = gates[:, k].view(-1, 1, 1, 1)
            mass = g.sum() * x[0, 0].numel()
            mean = (g * x).sum((0, 2, 3), keepdim=True) / mass
            var = (g * (x - mean) ** 2).sum((0, 2, 3), keepdim=True) / mass
            with torch.no_grad():
                self.running_mean[k].lerp_(mean.flatten().float(), 0.1)
                self.running_second[k].lerp_((var + mean**2).flatten().float(), 0.1)
            y = y + g * (x - mean) / torch.sqrt(var + self.eps)
        return (self.weight.view(1, -1, 1, 1) * y + self.bias.view(1, -1, 1, 1)).to(x.dtype)
