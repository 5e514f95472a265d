"""Errors counted over samples, on the device, with one look at the numbers per evaluation."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from modenorm.lab.data.loader import Images

PIXELS_PER_BATCH = 2048 * 32 * 32


class Errors(NamedTuple):
    """Shares of wrong samples, in percent."""

    top1: float
    top5: float
    by_domain: dict[str, float]


@torch.no_grad()
def count_errors(
    model: nn.Module,
    data: Images,
    num_domains: int,
    dtype: torch.dtype,
    part: slice = slice(None),
) -> Tensor:
    """Count samples, wrong samples and samples outside the top five: int64 (num_domains, 3).

    Only a part of the samples is counted if one is given, such as a rank's.

    The model is left in the mode, training or evaluation, in which it came. Nothing here waits
    for the device.
    """
    was_training = model.training
    model.eval()
    counts = torch.zeros((num_domains, 3), dtype=torch.int64, device=data.device)
    size = max(1, PIXELS_PER_BATCH // (data.size[0] * data.size[1]))
    for images, labels, domains in data.batches(size, part):
        with torch.autocast(data.device.type, dtype=dtype, enabled=dtype != torch.float32):
            logits = model(images)
        rank = true_rank(logits, labels)
        seen = torch.stack((torch.ones_like(rank), (rank >= 1).long(), (rank >= 5).long()), dim=1)
        counts.index_add_(0, domains, seen)
    model.train(was_training)
    return counts


def true_rank(logits: Tensor, labels: Tensor) -> Tensor:
    """Place of the true class among the logits, 0 for the best; ties and NaN count against it."""
    truth = logits.gather(1, labels[:, None])
    return logits.shape[1] - 1 - (logits < truth).sum(1)


def errors(counts: Tensor, domain_names: tuple[str, ...]) -> Errors:
    """Turn the counts of `count_errors` into percent; domains without samples are left out."""
    samples, top1, top5 = counts.sum(0).tolist()
    return Errors(
        top1=100 * top1 / samples,
        top5=100 * top5 / samples,
        by_domain={
            name: 100 * wrong / seen
            for name, (seen, wrong, _) in zip(domain_names, counts.tolist(), strict=True)
            if seen
        },
    )
