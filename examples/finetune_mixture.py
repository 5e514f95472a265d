"""Fine-tune a trained batch-norm network on a mixture of two data sets, with and without modes.

The network learns white digits on black. Then dark shapes on light paper join them. With batch norm
both kinds of images share one mean and variance per channel; after `replace_batchnorm` the same
network, computing the same at first, may give each kind its own.

    python examples/finetune_mixture.py            about a minute on a CPU
    python examples/finetune_mixture.py --quick    seconds, only to see that it runs
"""

from __future__ import annotations

import argparse
import copy

import torch
from shared import choose, errors, load, network, table, train
from torch import Tensor

import modenorm

OLD, NEW = "digits", "shapes"


def main(quick: bool) -> None:
    """Print test errors on both domains after fine-tuning, averaged over the seeds."""
    training, test = load(quick)
    first, mixture = choose(training, [OLD]), choose(training, [OLD, NEW])
    test_mixture = choose(test, [OLD, NEW])
    results: dict[str, list[Tensor]] = {"batch norm": [], "2 modes": []}
    for seed in range(1 if quick else 3):
        torch.manual_seed(seed)
        plain = network()
        train(plain, first, epochs=4, seed=seed)
        modes = copy.deepcopy(plain)
        modenorm.replace_batchnorm(modes, num_modes=2)
        for name, model in zip(results, (plain, modes), strict=True):
            train(model, mixture, epochs=1 if quick else 6, seed=seed)
            results[name].append(errors(model, test_mixture))
    print(f"Test error in percent after fine-tuning on {OLD} and {NEW}:\n")
    print(table(results, [OLD, NEW, "both"]))
    before, after = (torch.stack(values)[:, -1] for values in results.values())
    better = int((after < before).sum())
    print(
        f"\nModes change the error by {(after - before).mean():+.1f} points; "
        f"it is lower with them in {better} of {len(before)} runs."
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny data and one seed")
    torch.set_num_threads(1)
    main(parser.parse_args().quick)
