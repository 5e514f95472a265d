"""What the examples have in common: a small network, the built-in data, a training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modenorm.lab.data import ImageSet, builtin

BATCH = 64
Forward = Callable[[Tensor, Tensor], Tensor]


class Samples(NamedTuple):
    """Images (N, 3, 32, 32), labels and domains (N,)."""

    images: Tensor
    labels: Tensor
    domains: Tensor


def load(quick: bool) -> tuple[ImageSet, ImageSet]:
    """The built-in training and test set: four domains with ten classes each."""
    data = builtin.make(400, 200) if quick else builtin.make(6000, 4000)
    return data.train, data.test


def choose(source: ImageSet, names: Sequence[str]) -> Samples:
    """The samples of some domains, centred and scaled."""
    wanted = torch.tensor([source.domain_names.index(name) for name in names])
    keep = torch.isin(source.domains, wanted)
    images = (source.images[keep].float() / 255 - 0.45) / 0.3
    return Samples(images, source.labels[keep], source.domains[keep])


def network() -> nn.Sequential:
    """Three convolutions with batch norm and a classifier of all forty classes."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 40),
    )  # fmt: skip


def train(
    model: nn.Module, data: Samples, epochs: int, seed: int, forward: Forward | None = None
) -> None:
    """SGD with momentum and a cosine schedule; `forward` of (images, domains) if not the model."""
    forward = forward or (lambda images, domains: model(images))
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    steps = len(data.images) // BATCH
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps)
    model.train()
    for _ in range(epochs):
        order = torch.randperm(len(data.images), generator=generator)
        for index in order[: steps * BATCH].view(steps, BATCH):
            optimizer.zero_grad()
            logits = forward(data.images[index], data.domains[index])
            F.cross_entropy(logits, data.labels[index]).backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def errors(model: nn.Module, data: Samples, forward: Forward | None = None) -> Tensor:
    """Test error in percent: of each domain that occurs, then over all."""
    forward = forward or (lambda images, domains: model(images))
    model.eval()
    parts = zip(data.images.split(500), data.domains.split(500), strict=True)
    predicted = torch.cat([forward(images, domains).argmax(1) for images, domains in parts])
    wrong = (predicted != data.labels).float() * 100
    by_domain = [wrong[data.domains == domain].mean() for domain in data.domains.unique()]
    return torch.stack([*by_domain, wrong.mean()])


def table(rows: dict[str, list[Tensor]], columns: Sequence[str]) -> str:
    """Mean errors over the seeds, with the standard error of the last column."""
    width = max(map(len, rows)) + 2
    lines = [" " * width + "".join(f"{column:>10}" for column in columns)]
    for name, results in rows.items():
        values = torch.stack(results)
        line = f"{name:<{width}}" + "".join(f"{value:10.1f}" for value in values.mean(0))
        if len(values) > 1:
            line += f" ± {values[:, -1].std() / len(values) ** 0.5:.1f}"
        lines.append(line)
    return "\n".join(lines)
