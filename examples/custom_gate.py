"""A gating network of your own: any module from pooled features (N, C) to logits (N, K).

This one compares a sample's features with K learnt prototypes by their angle, so brightness and
contrast of the image don't matter, and learns how sharp the gates are.

    python examples/custom_gate.py             about half a minute on a CPU
    python examples/custom_gate.py --quick     seconds, only to see that it runs
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from shared import Samples, choose, errors, load, network, train
from torch import Tensor, nn

import modenorm


class PrototypeGate(nn.Module):
    """Logits: s · cos(features, prototype_k)."""

    def __init__(self, num_features: int, num_modes: int) -> None:
        super().__init__()
        # Prototypes differ from the start: gates that are equal for all samples would stay so.
        self.prototypes = nn.Parameter(torch.randn(num_modes, num_features))
        self.sharpness = nn.Parameter(torch.tensor(5.0))

    def forward(self, features: Tensor) -> Tensor:
        """From (N, C) to (N, K); the layer applies the softmax."""
        return self.sharpness * F.linear(
            F.normalize(features, dim=1), F.normalize(self.prototypes, dim=1)
        )


def main(quick: bool) -> None:
    """Print the test error, and which domains the modes of each layer have taken."""
    training, test = load(quick)
    names = training.domain_names
    torch.manual_seed(0)
    model = network()
    modenorm.replace_batchnorm(model, num_modes=2, gate=PrototypeGate)
    train(model, choose(training, names), epochs=1 if quick else 6, seed=0)
    data = choose(test, names)
    print(
        f"Test error {errors(model, data)[-1]:.1f} %. Share of mode 0 among each domain's images:\n"
    )
    print(f"{'layer':<8}" + "".join(f"{name:>10}" for name in names))
    for layer, gates in gates_of(model, data).items():
        shares = [gates[data.domains == domain, 0].mean() for domain in range(len(names))]
        print(f"{layer:<8}" + "".join(f"{share:10.2f}" for share in shares))


@torch.no_grad()
def gates_of(model: nn.Module, data: Samples) -> dict[str, Tensor]:
    """The gates of every layer, (N, K)."""
    model.eval()
    with modenorm.record_gates(model) as recorded:
        model(data.images)
    return {layer: torch.cat(list(gates)) for layer, gates in recorded.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny data")
    torch.set_num_threads(1)
    main(parser.parse_args().quick)
