"""The usage noted during evaluations equals what `mode_report` finds."""

import json

import pytest
import torch
from fake_data import fake_images
from torch import nn
from torch._dynamo.testing import CompileCounter

from modenorm import mode_report
from modenorm.lab.data.loader import DeviceImages
from modenorm.lab.models import create_model
from modenorm.lab.training import evaluate
from modenorm.lab.training.evaluate import count_errors
from modenorm.lab.training.usage import ModeUsage, scalars, with_gates
from modenorm.modes.findings import distinct_modes, duplicate_modes
from modenorm.modes.recording import mode_layers
from modenorm.modes.report import statistics_distances


def tell_apart(model: nn.Module) -> None:
    """Modes with other samples; modes 1 and 2 have the same statistics in every second layer."""
    for i, layer in enumerate(mode_layers(model).values()):
        layer.gate.weight.data.mul_(100)
        layer.running_mean[1:] += 1
        layer.running_mean[2] += i % 2


@pytest.mark.parametrize("norm", ["mn", "mgn", "bn"])
def test_usage_equals_the_report(norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "PIXELS_PER_BATCH", 10 * 8 * 8)
    source = fake_images(23)
    data = DeviceImages(source, torch.device("cpu"))
    model = create_model("resnet20", num_classes=12, norm=norm, modes=3).train()
    if norm == "mn":
        tell_apart(model)
    usage = ModeUsage(model, distinct=True)
    plain = count_errors(model, data, 2, torch.float32, forward=usage)
    totals = usage.totals(data.domains, 2)
    found = usage.describe(totals, source.domain_names)
    assert json.loads(json.dumps(found)) == found
    assert torch.equal(plain, count_errors(model, data, 2, torch.float32))
    if norm == "bn":
        assert found == scalars(found) == {}
        return
    report = mode_report(model, data.batches(10))
    assert list(found) == [layer.name for layer in report.layers]
    for layer in report.layers:
        own = found[layer.name]
        assert own["shares"] == pytest.approx(layer.shares, abs=1e-4)
        assert own["entropy"] == pytest.approx(layer.entropy, abs=1e-4)
        assert layer.domain_shares is not None
        for name, shares in zip(source.domain_names, layer.domain_shares, strict=True):
            assert own["by_domain"][name] == pytest.approx(shares, abs=1e-4)
        assert scalars(found)[f"mode_share/{layer.name}/2"] == own["shares"][2]
        if norm == "mn":
            norm_layer = mode_layers(model)[layer.name]
            apart = statistics_distances(norm_layer.running_mean, norm_layer.running_var, 1e-5)
            same = duplicate_modes(layer.shares, apart.tolist(), layer.gate_distances)
            assert own["distinct"] == distinct_modes(layer.shares, same)
    if norm == "mn":
        assert {own["distinct"] for own in found.values()} > {2, 3}


def test_gates_of_equal_models_are_heard_by_one_compiled_function() -> None:
    """Trainings share what was compiled, and batches too."""
    counter = CompileCounter()
    forward = torch.compile(with_gates, backend=counter, fullgraph=True, dynamic=False)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        model = create_model("resnet20", num_classes=3, norm="mn", generator=generator).eval()
        layers = list(mode_layers(model).values())
        for _ in range(2):
            images = torch.randn(2, 3, 8, 8)
            with torch.no_grad():
                found, wanted = (f(model, layers, images) for f in (forward, with_gates))
            torch.testing.assert_close(found, wanted)
            assert len(found[1]) == 19
            assert all(layer.gate_listener is None for layer in layers)
    assert counter.frame_count == 1
