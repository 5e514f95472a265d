"""Recorded gates are the layers' own, and every number of a report is right on hand-made gates."""

import contextlib
import copy
import json
import math
import statistics
import sys
import time
from collections import Counter

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from modenorm import ModeGroupNorm, ModeNorm1d, ModeNorm2d, mode_report, record_gates, recording
from modenorm.modes import effective_size, mutual_information, statistics_distances

torch.set_num_threads(1)


def small_model(norm=ModeNorm2d) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm(8, 4), nn.ReLU(), nn.Conv2d(8, 6, 3), norm(6, 2))


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


# --- record_gates


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_recorded_gates_are_the_layers_softmax(training, memory_format):
    model = small_model().train(training)
    x = torch.randn(16, 3, 8, 8).to(memory_format=memory_format)
    with record_gates(model) as gates:
        model(x)
        model(x[:5])
    assert {name: [tuple(g.shape) for g in seen] for name, seen in gates.items()} == {
        "1": [(16, 4), (5, 4)],
        "4": [(16, 2), (5, 2)],
    }
    features = model[0](x).mean((2, 3))
    torch.testing.assert_close(gates["1"][0], torch.softmax(model[1].gate(features), 1))
    assert not any(g.requires_grad for seen in gates.values() for g in seen)


def test_group_gates_are_recorded_per_channel():
    model, x = small_model(ModeGroupNorm), torch.randn(5, 3, 8, 8)
    with record_gates(model) as gates:
        model(x)
    features = model[0](x).mean((2, 3))
    expected = torch.softmax(features[..., None] * model[1].gate_weight + model[1].gate_bias, -1)
    torch.testing.assert_close(gates["1"][0], expected)


@pytest.mark.parametrize("norm", [ModeNorm2d, ModeGroupNorm])
def test_autocast(norm):
    model = small_model(norm)
    with record_gates(model) as gates, torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(4, 3, 8, 8))
    assert all(seen[0].dtype == torch.float32 for seen in gates.values())
    torch.testing.assert_close(gates["4"][0].sum(-1), torch.ones_like(gates["4"][0].sum(-1)))


def test_outputs_gradients_and_state_stay_as_they_are():
    model = small_model()
    other, x = copy.deepcopy(model), torch.randn(8, 3, 8, 8)
    attributes = [dict(module.__dict__) for module in model.modules()]
    with record_gates(model):
        y = model(x)
        y.square().sum().backward()
    other(x).square().sum().backward()
    assert torch.equal(y, other.train()(x))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    for module, before in zip(model.modules(), attributes, strict=True):
        assert module.__dict__.keys() == before.keys()
    assert all(module.gate_listener is None for module in (model[1], model[4]))


def test_recordings_nest_and_everything_is_restored_after_an_exception():
    model, heard = small_model(), []
    model[1].gate_listener = mine = heard.append
    x = torch.randn(2, 3, 8, 8)
    with record_gates(model) as outer:
        model(x)
        with contextlib.suppress(RuntimeError), record_gates(model[:3]) as inner:
            model(x)
            raise RuntimeError
        model(x)
    model(x)
    assert model[1].gate_listener is mine
    assert model[4].gate_listener is None
    assert [len(outer["1"]), len(outer["4"]), len(inner["1"]), len(heard)] == [3, 3, 1, 4]


def test_recorded_gates_do_not_change_with_what_was_given():
    layer, given = ModeNorm2d(3), torch.full((4, 2), 0.5)
    with record_gates(layer) as gates:
        layer(torch.randn(4, 3, 2, 2), gates=given)
    given.zero_()
    assert torch.equal(gates[""][0], torch.full((4, 2), 0.5))


def test_checkpointing_records_a_forward_once():
    model, x = small_model(), torch.randn(4, 3, 8, 8, requires_grad=True)
    with record_gates(model) as gates:
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert [len(gates["1"]), len(gates["4"])] == [1, 1]


def test_a_compiled_model_is_recorded():
    model, x = small_model().eval(), torch.randn(4, 3, 8, 8)
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    with record_gates(model) as gates:
        compiled(x)
    with record_gates(model) as expected:
        model(x)
    torch.testing.assert_close(gates["1"][0], expected["1"][0])
    compiled(x)
    assert len(gates["1"]) == 1


def test_recording_compiles_nothing():
    model, x = small_model().eval(), torch.randn(4, 3, 8, 8)
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=count, fullgraph=True)
    compiled(x)
    with record_gates(model) as gates:
        for _ in range(12):  # more than Dynamo would compile
            compiled(x)
    compiled(x)
    assert len(gates["1"]) == 12
    assert len(graphs) == 1


def test_memory_is_bounded_and_what_is_kept_is_spread_over_the_recording():
    layer, limit = ModeGroupNorm(10, 2), 2000
    with record_gates(layer, limit) as gates:
        for _ in range(100):
            layer(torch.randn(3, 10, 2, 2))
    assert sum(g.numel() for g in gates[""]) <= limit
    steps = gates.steps[""]
    assert len(steps) == len(gates[""]) >= 4
    assert steps == list(range(0, 100, steps[1]))


def test_one_forward_beyond_the_limit_keeps_evenly_spaced_samples():
    layer, x = ModeGroupNorm(10, 2), torch.randn(100, 10, 2, 2)
    with record_gates(layer, limit=500) as gates, record_gates(layer) as everything:
        layer(x)
    assert torch.equal(gates[""][0], everything[""][0][::4])
    with pytest.raises(ValueError, match="limit is 0"), record_gates(layer, 0):
        pass


def test_a_model_without_modes_records_nothing():
    with record_gates(nn.Conv2d(3, 3, 3)) as gates:
        pass
    assert gates == {}


def operators(function) -> Counter:
    """How often each of torch's operators is called."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        function()
    names = (event.name for event in profiler.events())
    return Counter(name for name in names if name.startswith("aten::"))


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("norm", [ModeNorm2d, ModeGroupNorm])
def test_operators_that_recording_adds(norm, training, autocast, backend):
    """None where no gradient is wanted, else one detach for every layer and forward."""
    model, forwards = small_model(norm).train(training), 3
    x = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)

    def run():
        with (
            torch.set_grad_enabled(training),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            for _ in range(forwards):
                model(x)

    def record():
        with record_gates(model):
            run()

    run()
    plain = operators(run)
    assert sum(plain.values()) > 2 * forwards
    added = operators(record)
    added.subtract(plain)
    detached = 2 * forwards if training else 0
    assert {name: count for name, count in added.items() if count} == (
        {"aten::detach": detached} if detached else {}
    )


def test_a_kept_forward_costs_few_python_calls():
    """Calls into the recorder, and from it, for every layer and forward."""
    layer, gates, calls = ModeNorm2d(3), torch.full((8, 2), 0.5), []
    with record_gates(layer) as recorded:
        layer.gate_listener(gates)
        sys.setprofile(lambda frame, event, _: calls.append(event))
        for _ in range(10):
            layer.gate_listener(gates)
        sys.setprofile(None)
    assert len(recorded[""]) == 11
    assert len([event for event in calls if event in ("call", "c_call")]) <= 10 * 10


def test_gates_of_inference_mode_are_recorded():
    model, x = small_model().eval(), torch.randn(4, 3, 8, 8)
    with record_gates(model) as gates, torch.inference_mode():
        model(x)
    with record_gates(model) as expected, torch.no_grad():
        model(x)
    torch.testing.assert_close(gates["4"][0].clone(), expected["4"][0])


def test_what_is_kept_is_not_changed_by_later_forwards():
    model, parts = small_model().eval(), torch.randn(3, 4, 3, 8, 8)
    with record_gates(model) as gates, torch.no_grad():
        for x in parts:
            model(x)
    for i, x in enumerate(parts):
        with record_gates(model) as alone, torch.no_grad():
            model(x)
        assert torch.equal(gates["1"][i], alone["1"][0])


@pytest.mark.parametrize("norm", ["mn", "mgn"])
def test_recording_costs_at_most_5_percent_of_an_evaluation(norm, monkeypatch):
    """Time spent in the recorder, as a share of the same evaluation.

    The median, since a process that has to wait for others waits anywhere.
    """
    from modenorm.lab.models import create_model

    model = create_model("resnet20", num_classes=10, norm=norm).eval()
    x, spent, add = torch.randn(64, 3, 32, 32), [], recording._Track.add

    def timed(*arguments):
        began = time.perf_counter()
        add(*arguments)
        spent.append(time.perf_counter() - began)

    monkeypatch.setattr(recording._Track, "add", timed)
    with record_gates(model), torch.no_grad():
        model(x)
        spent.clear()
        began = time.perf_counter()
        for _ in range(3):
            model(x)
        whole = time.perf_counter() - began
    assert len(spent) == 3 * 19
    assert statistics.median(spent) * len(spent) < 0.05 * whole


# --- mode_report


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
    model, x = small_model(ModeGroupNorm), torch.randn(6, 3, 8, 8)
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
    model = small_model()
    model[0].eval()
    before = copy.deepcopy(model.state_dict())
    mode_report(model, [torch.randn(4, 3, 8, 8)])
    assert model.training
    assert not model[0].training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_json_and_table():
    rich = pytest.importorskip("rich.console")
    model = small_model()
    report = mode_report(model, [torch.randn(8, 3, 8, 8)], labels=[0] * 8)
    found = json.loads(report.to_json())
    assert [layer["name"] for layer in found["layers"]] == ["1", "4"]
    assert found["layers"][1]["shares"] == list(report.layers[1].shares)
    assert found["findings"] == report.findings()
    console = rich.Console(width=200)
    with console.capture() as text:
        console.print(report.table())
    assert f"{report.layers[0].entropy:.3f}" in text.get()


def test_bad_input():
    layer = layer_with_given_gates(2)
    with pytest.raises(ValueError, match="no mode norm"):
        mode_report(nn.Conv2d(3, 3, 3), [])
    with pytest.raises(ValueError, match="no samples"):
        mode_report(layer, [])
    with pytest.raises(ValueError, match="labels has 3 entries, but the batches hold 2 samples"):
        mode_report(layer, [torch.full((2, 2), 0.5)], labels=[0, 1, 2])
