"""A ResNet of Hugging Face Transformers with modes, trained by its Trainer.

    python examples/with_trainer.py             about half a minute on a CPU
    python examples/with_trainer.py --quick     seconds, only to see that it runs

Needs the packages transformers and accelerate. Nothing is downloaded: the network is small and new.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from shared import BATCH, Samples, choose, load
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

import modenorm


class Images(Dataset[dict[str, Any]]):
    """Samples by the names that the model's forward has."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixel_values": self.samples.images[index], "labels": self.samples.labels[index]}


def build() -> nn.Module:
    """The network with modes; a state that was saved is loaded into the same."""
    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=40
    )
    model = ResNetForImageClassification(config)
    modenorm.replace_batchnorm(model, num_modes=2)
    return model


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """No weight decay for norms and gates; the Trainer's own rule would decay the gates."""
    norms, gates, others = modenorm.norm_parameters(model)
    return [
        {"params": list(others.values()), "weight_decay": 0.01},
        {"params": [*norms.values(), *gates.values()], "weight_decay": 0.0},
    ]


def main(quick: bool) -> None:
    """Train, save, load, and print the test error of what was loaded."""
    set_seed(0)
    training, test = load(quick)
    model = build()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=1 if quick else 3,
            per_device_train_batch_size=BATCH,
            dataloader_drop_last=True,
            dataloader_pin_memory=False,
            max_grad_norm=1.0,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        optimizer = torch.optim.AdamW(groups(model), lr=3e-3)
        data = Images(choose(training, training.domain_names))
        trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
        trainer.train()
        trainer.save_model(folder)
        again = build()
        again.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    print(f"Test error of the saved model: {error(again, choose(test, test.domain_names)):.1f} %")


@torch.no_grad()
def error(model: nn.Module, samples: Samples) -> float:
    """Test error in percent."""
    model.eval()
    logits = torch.cat([model(images).logits for images in samples.images.split(500)])
    return (logits.argmax(1) != samples.labels).double().mean().item() * 100


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny data")
    torch.set_num_threads(1)
    main(parser.parse_args().quick)
