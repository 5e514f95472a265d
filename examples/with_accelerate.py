"""A converted network in a loop with Hugging Face Accelerate: convert, then prepare.

    python examples/with_accelerate.py             about half a minute on a CPU
    python examples/with_accelerate.py --quick     seconds, only to see that it runs

Needs the package accelerate. `accelerate launch` starts it on several devices.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors.torch import load_file
from shared import BATCH, choose, errors, load, network
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import modenorm


def build() -> nn.Module:
    """The network with modes: converted before `prepare` wraps it, and before a state is loaded."""
    model = network()
    modenorm.replace_batchnorm(model, num_modes=2)
    return model


def main(quick: bool) -> None:
    """Train, save, load, and print the test error of what was loaded."""
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    training, test = load(quick)
    data = choose(training, training.domain_names)
    loader = DataLoader(
        TensorDataset(data.images, data.labels), BATCH, shuffle=True, drop_last=True
    )
    model = build()
    norms, gates, others = modenorm.norm_parameters(model)
    optimizer = torch.optim.SGD(
        [
            {"params": others.values(), "weight_decay": 1e-4},
            {"params": [*norms.values(), *gates.values()], "weight_decay": 0.0},
        ],
        lr=0.05,
        momentum=0.9,
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(1 if quick else 4):
        for images, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(images), labels))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    again = build()
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_model(model, folder)
        again.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    error = errors(again, choose(test, test.domain_names))[-1]
    accelerator.print(f"Test error of the saved model: {error:.1f} %")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny data")
    torch.set_num_threads(1)
    main(parser.parse_args().quick)
