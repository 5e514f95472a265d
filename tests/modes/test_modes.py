"""Every number of a report is right on hand-made gates."""

import copy
import json
import math
import re
from collections import OrderedDict

import pytest
import torch
from torch import nn

from modenorm import ModeGroupNorm, ModeNorm1d, ModeNorm2d, mode_report, prune_modes, record_gates
from modenorm.modes.report import effective_size, mutual_information, statistics_distances
from small_models import counting_backend, mode_model

torch.set_num_threads(1)


class GivenGates(nn.Module):
    """A gate whose softmax is what the first K features of the input say."""

    def __init__(self, modes: int) -> None:
        super().__init__()
        self.modes = modes

    def forward(self, features):
        return features[:, : self.modes].clamp_min(1e-38).log()


def layer_with_given_gates(modes: int) -> ModeNorm1d:
    return ModeNorm1d(modes, modes, gate=GivenGates(modes))


def report_of(gates, labels=None, domains=None):
    """The report of a layer that gets these gates, all in one batch."""
    gates = torch.tensor(gates)
    report = mode_report(layer_with_given_gates(gates.shape[1]), [gates], labels, domains)
    return report.layers[0]


def test_one_hot_gates():
    layer = report_of([[1.0, 0], [1, 0], [1, 0], [0, 1]], labels=[0, 0, 1, 1], domains=[0, 0, 0, 1])
    assert layer.shares == pytest.approx((0.75, 0.25))
    assert layer.claims == (0.75, 0.25)
    assert layer.entropy == pytest.approx(0, abs=1e-6)
    assert layer.effective_modes == pytest.approx(2 ** (0.75 * math.log2(4 / 3) + 0.25 * 2))
    assert layer.effective_size == pytest.approx((3, 1))
    # the domain is the mode; of the classes, one is split 1:1
    assert layer.domain_information == pytest.approx(0.75 * math.log2(4 / 3) + 0.25 * 2)
    expected = 0.5 * math.log2(0.5 / (0.5 * 0.75)) + 0.25 * math.log2(0.25 / 0.375) + 0.25
    assert layer.class_information == pytest.approx(expected)
    assert layer.domain_shares == (pytest.approx((1, 0)), pytest.approx((0, 1)))
    assert layer.class_shares == (pytest.approx((1, 0)), pytest.approx((0.5, 0.5)))
    assert layer.dead == layer.duplicates == ()


def test_soft_gates():
    layer = report_of([[0.5, 0.25, 0.25], [0.25, 0.25, 0.5]])
    assert layer.shares == pytest.approx((0.375, 0.25, 0.375))
    assert layer.entropy == pytest.approx(1.5)
    assert layer.effective_size == pytest.approx((0.75**2 / 0.3125, 2, 0.75**2 / 0.3125))
    assert layer.spread == pytest.approx((0.125, 0, 0.125), abs=1e-7)
    # log g_0/g_2 is ± log 2, log g_0/g_1 is log 2 or 0
    assert layer.gate_distances[0] == pytest.approx((0, math.log(2) / 2, math.log(2)))
    assert layer.class_information is None
    assert layer.class_shares is None


def test_dead_duplicate_and_constant_modes_are_told_in_plain_words():
    half = [[0.4, 0.2, 0.4, 0.0], [0.1, 0.8, 0.1, 0.0]] * 20
    layer = report_of(half)
    assert (layer.dead, layer.duplicates, layer.constant) == ((3,), ((0, 2),), False)
    assert layer.findings() == [
        "layer model: mode 3 receives 0.0 % of the samples",
        "layer model: modes 0 and 2 are duplicates",
    ]
    constant = report_of([[0.3, 0.7]] * 5)
    assert constant.findings() == ["layer model: gates are constant: this layer is batch norm"]
    assert report_of([[1.0]] * 3).findings() == [
        "layer model: there is one mode: this layer is batch norm"
    ]
    (few,) = report_of([[1.0, 0.0]] * 50 + [[0.0, 1.0]] * 3).findings()
    assert few == "layer model: mode 1 has an effective sample size of 3.0 per batch: " + (
        "too few for statistics"
    )


@pytest.mark.parametrize("variance", ["pooled", "pixel"])
def test_constant_channel_gates_are_told_as_what_they_are(variance):
    layer = ModeGroupNorm(4, num_modes=2, variance=variance)
    nn.init.zeros_(layer.gate_weight)
    x = torch.randn(5, 4, 3, 3)
    (finding,) = mode_report(layer, [x]).findings()
    told = "gates are constant: all channels share one mean and one variance"
    assert finding == f"layer model: {told}"
    one = ModeGroupNorm(4, num_modes=1, variance=variance)
    torch.testing.assert_close(layer(x), one(x))


def test_a_healthy_layer_has_no_findings():
    assert report_of([[0.9, 0.1], [0.1, 0.9]] * 20).findings() == []


def test_gates_that_are_not_finite():
    (finding,) = report_of([[float("nan"), 0.5], [0.5, 0.5]]).findings()
    assert "not finite" in finding


def test_batches_are_put_together():
    gates = torch.softmax(torch.randn(60, 3), 1)
    labels = torch.randint(4, (60,))
    layer = layer_with_given_gates(3)
    whole = mode_report(layer, [gates], labels).layers[0]
    parts = mode_report(layer, zip(gates.split(7), labels.split(7), strict=True)).layers[0]
    assert parts.num_batches == 9
    for name in ("shares", "entropy", "class_information", "effective_modes"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name))
    sizes = torch.stack([effective_size(part) for part in gates.split(7)])
    assert parts.effective_size == pytest.approx(sizes.mean(0).tolist())
    assert parts.smallest_effective_size == pytest.approx(sizes.amin(0).tolist())


def test_distances_come_from_the_running_estimates_if_there_are_any():
    layer = layer_with_given_gates(2)
    gates = torch.tensor([[0.9, 0.1], [0.2, 0.8]] * 4)
    with torch.no_grad():
        layer.running_mean.copy_(torch.tensor([[0.0, 0.0], [3.0, 0.0]]))
        layer.running_var.copy_(torch.tensor([[1.0, 1.0], [1.0, math.e**2]]))
    layer.eps = 1e-12
    fresh = mode_report(layer, [gates]).layers[0].statistics_distances
    layer.num_batches_tracked.fill_(1)
    trained = mode_report(layer, [gates]).layers[0].statistics_distances
    assert trained[0] == pytest.approx((0, math.sqrt((9 + 1) / 2)))
    assert fresh[0][1] != pytest.approx(trained[0][1])


def test_statistics_distance_of_equal_modes_is_zero():
    mean = torch.randn(1, 5).repeat(3, 1)
    assert statistics_distances(mean, mean.exp(), 1e-5).tolist() == torch.zeros(3, 3).tolist()


def test_mutual_information_of_independent_and_equal_variables():
    assert mutual_information(torch.ones(4, 2).double()) == pytest.approx(0)
    assert mutual_information(torch.eye(4).double()) == pytest.approx(2)


def test_mode_group_norm_is_reported_over_channels():
    model, x = mode_model(ModeGroupNorm), torch.randn(6, 3, 8, 8)
    with record_gates(model) as gates:
        model(x)
    layer = mode_report(model, [x], labels=[0, 1, 0, 1, 0, 1]).layers[0]
    assert layer.kind == "mode group norm"
    assert layer.shares == pytest.approx(gates["1"][0].mean((0, 1)).tolist(), rel=1e-5)
    kish = gates["1"][0].sum(1) ** 2 / gates["1"][0].square().sum(1)
    assert layer.effective_size == pytest.approx(kish.mean(0).tolist(), rel=1e-5)
    assert layer.class_information >= 0
    assert max(max(row) for row in layer.statistics_distances) > 0


def test_the_model_is_left_as_it_was():
    model = mode_model()
    model[0].eval()
    before = copy.deepcopy(model.state_dict())
    mode_report(model, [torch.randn(4, 3, 8, 8)])
    assert model.training
    assert not model[0].training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_compiled_model_is_reported_and_compiles_nothing():
    model, x = nn.Sequential(ModeNorm2d(3, 2), ModeGroupNorm(3, 2)).eval(), torch.randn(8, 3, 4, 4)
    backend, graphs = counting_backend()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    compiled(x)
    labels = torch.arange(8) % 2
    found, expected = (mode_report(m, [x], labels).layers for m in (compiled, model))
    assert [layer.shares for layer in found] == [layer.shares for layer in expected]
    prune_modes(compiled, [x])
    assert len(graphs) == 1


def test_json_and_table():
    rich = pytest.importorskip("rich.console")
    model = mode_model()
    report = mode_report(model, [torch.randn(8, 3, 8, 8)], labels=[0] * 8)
    found = json.loads(report.to_json())
    assert [layer["name"] for layer in found["layers"]] == ["1", "4"]
    assert found["layers"][1]["shares"] == list(report.layers[1].shares)
    assert found["findings"] == report.findings()
    console = rich.Console(width=80)
    with console.capture() as text:
        console.print(report.table())
    assert f"{report.layers[0].entropy:.3f}" in text.get()


def test_words_of_the_table_stay_whole_on_80_columns():
    rich = pytest.importorskip("rich.console")
    model = nn.Sequential(OrderedDict(a_layer_with_a_long_name=ModeNorm2d(3, num_modes=8)))
    report = mode_report(model, [torch.randn(8, 3, 8, 8)])
    console = rich.Console(width=80)
    with console.capture() as text:
        console.print(report.table())
    assert "…" not in text.get()
    assert text.get().count("effective") == 2


def test_bad_input():
    layer = layer_with_given_gates(2)
    with pytest.raises(ValueError, match="no mode norm"):
        mode_report(nn.Conv2d(3, 3, 3), [])
    with pytest.raises(ValueError, match="no samples"):
        mode_report(layer, [])
    with pytest.raises(ValueError, match="labels has 3 entries, but the batches hold 2 samples"):
        mode_report(layer, [torch.full((2, 2), 0.5)], labels=[0, 1, 2])


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        (torch.eye(2), "torch.float32 of shape (2, 2)"),
        (torch.zeros(2, 1).long(), "torch.int64 of shape (2, 1)"),
        (torch.tensor([0.2, 0.9]), "torch.float32 of shape (2,)"),
        (["cat", "dog"], "list"),
        (3, "torch.int64 of shape ()"),
    ],
)
def test_labels_that_are_not_one_integer_per_sample(labels, kind):
    layer, x = layer_with_given_gates(2), torch.full((2, 2), 0.5)
    for name in ("labels", "domains"):
        with pytest.raises(ValueError, match=re.escape(f"{name} is a {kind}; expected one int")):
            mode_report(layer, [x], **{name: labels})


def test_labels_of_any_integer_type():
    for dtype in (torch.uint8, torch.uint16, torch.int32):
        labels = torch.tensor([0, 1]).to(dtype)
        assert report_of([[1.0, 0], [0, 1]], labels).class_information == pytest.approx(1)


def test_padding_does_not_count_in_the_distances():
    layer, x = ModeNorm1d(4, 3), torch.randn(16, 4, 5)

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = layer

        def forward(self, x):
            return self.norm(x, mask=~x.isnan().any(1))

    padded = torch.cat([x, torch.full((16, 4, 3), math.nan)], 2)
    (found,), (expected,) = (mode_report(*m).layers for m in ((Masked(), [padded]), (layer, [x])))
    for one, other in zip(found.statistics_distances, expected.statistics_distances, strict=True):
        # of float32 gates that differ by rounding
        assert one == pytest.approx(other, rel=1e-4)


def test_distances_of_modes_without_channels():
    """A sample that leaves a mode nothing, to float32, has it still, to logarithms."""
    layer = ModeGroupNorm(8, 3)
    layer.gate_weight.data = torch.tensor([3.0, -3.0, 0.0])
    x = 50 + torch.rand(4, 8, 4, 4)
    report = mode_report(layer, [torch.cat([x, -x])]).layers[0]
    assert report.shares[0] == pytest.approx(0.5)
    assert all(map(math.isfinite, sum(report.statistics_distances, ())))


@pytest.mark.parametrize("norm", [ModeNorm1d, ModeGroupNorm])
def test_a_layer_may_be_called_by_keyword(norm):
    class ByKeyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = norm(4, 3)

        def forward(self, x):
            return self.norm(x=x)

    model, x = ByKeyword(), torch.randn(16, 4, 5)
    (layer,), (expected,) = (mode_report(m, [x]).layers for m in (model, model.norm))
    assert layer.statistics_distances == expected.statistics_distances


class Partly(nn.ModuleDict):
    """Uses one of its layers."""

    def forward(self, x):
        return self["used"](x)


def test_layers_that_no_batch_reaches_are_named():
    model = Partly({"used": ModeNorm2d(3), "left": ModeNorm2d(3)})
    report = mode_report(model, [torch.randn(64, 3, 4, 4)])
    assert [layer.name for layer in report.layers] == ["used"]
    assert report.unreached == ("left",)
    assert "layer left: no batch reached it" in report.findings()


def test_labels_in_batches_may_be_lists():
    layer, x = ModeNorm2d(3), torch.randn(4, 3, 2, 2)
    for labels in ([0, 1, 1, 0], (0, 1, 1, 0)):
        assert mode_report(layer, [(x, labels)]).layers[0].class_shares is not None
    assert mode_report(layer, [(x, ["a"] * 4)]).layers[0].class_shares is None
