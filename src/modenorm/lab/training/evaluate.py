"""Errors counted over samples, on the device, with one look at the numbers per evaluation."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from modenorm.lab.data.loader import DeviceImages, Images
from modenorm.lab.training.lane import Lane
from modenorm.lab.training.ranks import Ranks
from modenorm.lab.training.step import capturing, compiled, fast_convolutions
from modenorm.lab.training.usage import ModeUsage, with_gates

PIXELS_PER_BATCH = 1024 * 32 * 32


class Errors(NamedTuple):
    """Shares of wrong samples, in percent."""

    top1: float
    top5: float
    by_domain: dict[str, float]

    def record(self) -> dict[str, Any]:
        """Under the names that they have in a run's files."""
        names = ("test_error", "top5_error", "domain_errors")
        return dict(zip(names, self, strict=True))


class Found(NamedTuple):
    """What `Evaluation` found, on the device."""

    counts: Tensor
    totals: Tensor


class Evaluation:
    """Errors on a test set, and which modes its samples use, time and again in a training.

    On a GPU the second evaluation is captured as a CUDA graph, which later ones replay: hundreds of
    launches would keep the host from other trainings.

    Args:
        model: Is evaluated as it is at the time.
        data: The test set.
        domain_names: Of its domains.
        dtype: Autocast to it unless it is float32.
        lane: Where the work is queued.
        ranks: Those who share the samples out among them.
        distinct: Also find out how many modes are distinct.
        compile: Let Inductor make the model's kernels.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Images,
        domain_names: tuple[str, ...],
        dtype: torch.dtype,
        lane: Lane,
        ranks: Ranks,
        *,
        distinct: bool = False,
        compile: bool = False,
    ) -> None:
        self._model, self._data, self._dtype = model, data, dtype
        self._lane, self._ranks = lane, ranks
        self.domain_names = domain_names
        forward = compiled(with_gates) if compile else with_gates
        self.usage = ModeUsage(model, distinct, forward)
        self._fixed = lane.stream is not None and ranks.size == 1 and isinstance(data, DeviceImages)
        self._times = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._found: Found | None = None

    def queue(self) -> Found:
        """Queue an evaluation of the model as it is after all that is queued.

        What is found stays until the next evaluation.
        """
        self._times += 1
        if self._fixed and self._times == 2:
            graph = torch.cuda.CUDAGraph()
            with capturing(graph, self._lane):
                self._found = self._evaluate()
            self._graph = graph
        if self._graph is None or self._found is None:
            with self._lane.enter():
                return self._evaluate()
        with self._lane.enter():
            self._graph.replay()
        return self._found

    def _evaluate(self) -> Found:
        data, ranks, domains = self._data, self._ranks, len(self.domain_names)
        part = ranks.share(len(data))
        self.usage.forget()
        with fast_convolutions(self._dtype):
            counts = count_errors(self._model, data, domains, self._dtype, part, self.usage)
        totals = self.usage.totals(data.domains[part], domains, len(data))
        return Found(ranks.total(counts), ranks.total(totals))


@torch.no_grad()
def count_errors(
    model: nn.Module,
    data: Images,
    num_domains: int,
    dtype: torch.dtype,
    part: slice = slice(None),
    forward: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Count samples, wrong samples and samples outside the top five: int64 (num_domains, 3).

    Only a part of the samples is counted if one is given, such as a rank's. The model is asked
    through `forward`, if that is given.

    The model is left in the mode, training or evaluation, in which it came. Nothing here waits
    for the device.
    """
    was_training = model.training
    model.eval()
    counts = torch.zeros((num_domains, 3), dtype=torch.int64, device=data.device)
    for images, labels, domains in data.batches(batch_size(data), part):
        with torch.autocast(data.device.type, dtype=dtype, enabled=dtype != torch.float32):
            logits = (forward or model)(images)
        rank = true_rank(logits, labels)
        seen = torch.stack((torch.ones_like(rank), (rank >= 1).long(), (rank >= 5).long()), dim=1)
        counts.index_add_(0, domains, seen)
    model.train(was_training)
    return counts


def batch_size(data: Images) -> int:
    """Samples in each of the fewest batches that are not too large, which are alike if possible."""
    most = max(1, PIXELS_PER_BATCH // (data.size[0] * data.size[1]))
    return -(-len(data) // -(-len(data) // most)) if len(data) else most


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
