"""A converted network in Lightning: optimizer groups, gradient clipping, checkpoints as usual.

    python examples/with_lightning.py             about half a minute on a CPU
    python examples/with_lightning.py --quick     seconds, only to see that it runs

Needs the package lightning.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from shared import BATCH, choose, errors, load, network
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import modenorm


class Classifier(lightning.LightningModule):
    """Converted when it is made, so that `load_from_checkpoint` finds the gates."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        modenorm.replace_batchnorm(self.net, num_modes=2)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """No weight decay for norms and gates."""
        norms, gates, others = modenorm.norm_parameters(self)
        groups = [
            {"params": others.values(), "weight_decay": 1e-4},
            {"params": [*norms.values(), *gates.values()], "weight_decay": 0.0},
        ]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def main(quick: bool) -> None:
    """Train, save, load, and print the test error of what was loaded."""
    training, test = load(quick)
    data = choose(training, training.domain_names)
    torch.manual_seed(0)
    loader = DataLoader(
        TensorDataset(data.images, data.labels), BATCH, shuffle=True, drop_last=True
    )
    trainer = lightning.Trainer(
        max_epochs=1 if quick else 4,
        gradient_clip_val=1.0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), loader)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "last.ckpt"
        trainer.save_checkpoint(path)
        model = Classifier.load_from_checkpoint(path, weights_only=True)
    error = errors(model.net, choose(test, test.domain_names))[-1]
    print(f"Test error after {trainer.global_step} steps: {error:.1f} %")
    for layer in modenorm.mode_report(model.net, [data.images[:500]]).layers:
        print(f"layer {layer.name}: {layer.effective_modes:.2f} of {layer.num_modes} modes in use")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny data")
    torch.set_num_threads(1)
    main(parser.parse_args().quick)
