"""Domain-specific batch normalization: modes that are given, not learnt.

When it is known which data set a sample comes from, also at test time, one-hot gates normalise each
domain with its own statistics: `layer(x, gates=...)`. Layers inside a network get them by a hook.

    python examples/domain_specific.py             about half a minute on a CPU
    python examples/domain_specific.py --quick     seconds, only to see that it runs
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from shared import choose, errors, load, network, table, train
from torch import Tensor, nn

import modenorm


class DomainSpecific(nn.Module):
    """A network whose batch norms keep statistics per domain."""

    def __init__(self, net: nn.Module, num_domains: int) -> None:
        super().__init__()
        self.net, self.num_domains = net, num_domains
        self.gates: Tensor | None = None
        layers = modenorm.replace_batchnorm(
            net,
            num_domains,
            gate=lambda num_features, num_modes: nn.Identity(),  # never asked: gates are given
            running_update="usage",  # a domain that is absent from a batch keeps its estimates
        )
        for layer in layers.values():
            layer.register_forward_pre_hook(self._give_gates, with_kwargs=True)

    def _give_gates(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "gates": self.gates}

    def forward(self, images: Tensor, domains: Tensor) -> Tensor:
        """Logits of images whose domains are known, (N,)."""
        self.gates = F.one_hot(domains, self.num_domains).float()
        return self.net(images)


def main(quick: bool) -> None:
    """Print test errors on all four domains, averaged over the seeds."""
    training, test = load(quick)
    names = training.domain_names
    data, test_data = choose(training, names), choose(test, names)
    results: dict[str, list[Tensor]] = {"batch norm": [], "domain-specific": []}
    for seed in range(1 if quick else 2):
        torch.manual_seed(seed)
        model = network()
        specific = DomainSpecific(network(), len(names))
        specific.net.load_state_dict(model.state_dict())  # a batch norm's state fits
        epochs = 1 if quick else 4
        train(model, data, epochs, seed)
        train(specific, data, epochs, seed, forward=specific)
        results["batch norm"].append(errors(model, test_data))
        results["domain-specific"].append(errors(specific, test_data, forward=specific))
    print("Test error in percent on a mixture of four domains:\n")
    print(table(results, [*names, "all"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny data and one seed")
    torch.set_num_threads(1)
    main(parser.parse_args().quick)
