import pytest
import torch
from fake_data import fake_images
from torch import Tensor, nn

from modenorm.lab.data.loader import DeviceImages
from modenorm.lab.training import evaluate
from modenorm.lab.training.evaluate import count_errors, errors, true_rank


class Lookup(nn.Module):
    """Gives prepared logits, batch after batch."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits, self.position = logits, 0

    def forward(self, images: Tensor) -> Tensor:
        assert not self.training
        start, self.position = self.position, self.position + len(images)
        return self.logits[start : self.position]


def test_errors_count_samples_not_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    source = fake_images(23)
    monkeypatch.setattr(evaluate, "PIXELS_PER_BATCH", 10 * 8 * 8)  # batches of 10, 10 and 3
    logits = torch.randn(23, 12, generator=torch.Generator().manual_seed(0))
    model = Lookup(logits).train()
    counts = count_errors(model, DeviceImages(source, torch.device("cpu")), 2, torch.float32)
    found = errors(counts, source.domain_names)

    wrong = logits.argmax(1) != source.labels
    missed = (logits.topk(5).indices != source.labels[:, None]).all(1)
    assert found.top1 == pytest.approx(100 * wrong.double().mean().item())
    assert found.top5 == pytest.approx(100 * missed.double().mean().item())
    for domain, name in enumerate(source.domain_names):
        own = wrong[source.domains == domain].double().mean().item()
        assert found.by_domain[name] == pytest.approx(100 * own)
    assert counts[:, 0].sum() == 23
    assert model.training


def test_ties_and_nan_are_errors() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0], [float("nan")] * 3, [0.0, 2.0, 1.0]])
    assert true_rank(logits, torch.tensor([0, 0, 1])).tolist() == [2, 2, 0]


def test_a_domain_without_samples_is_left_out() -> None:
    found = errors(torch.tensor([[4, 1, 0], [0, 0, 0]]), ("here", "absent"))
    assert found.by_domain == {"here": 25.0}
