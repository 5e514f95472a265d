"""Recorded gates are the layers' own, and recording them costs little."""

import contextlib
import copy
import pickle
import statistics
import sys
import time
from collections import Counter

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from modenorm import ModeGroupNorm, ModeNorm2d, record_gates
from modenorm.modes import recording
from small_models import counting_backend, mode_model

torch.set_num_threads(1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_recorded_gates_are_the_layers_softmax(training, memory_format):
    model = mode_model().train(training)
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
    model, x = mode_model(ModeGroupNorm), torch.randn(5, 3, 8, 8)
    with record_gates(model) as gates:
        model(x)
    features = model[0](x).mean((2, 3))
    expected = torch.softmax(features[..., None] * model[1].gate_weight + model[1].gate_bias, -1)
    torch.testing.assert_close(gates["1"][0], expected)


@pytest.mark.parametrize("norm", [ModeNorm2d, ModeGroupNorm])
def test_autocast(norm):
    model = mode_model(norm)
    with record_gates(model) as gates, torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(4, 3, 8, 8))
    assert all(seen[0].dtype == torch.float32 for seen in gates.values())
    torch.testing.assert_close(gates["4"][0].sum(-1), torch.ones_like(gates["4"][0].sum(-1)))


def test_outputs_gradients_and_state_stay_as_they_are():
    model = mode_model()
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
    model, heard = mode_model(), []
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


def test_recordings_may_end_in_any_order():
    model, x = mode_model(), torch.randn(2, 3, 8, 8)
    graphs = []
    compiled = torch.compile(
        lambda x: x + 1, backend=lambda graph, _: graphs.append(graph) or graph.forward
    )
    torch.compiler.reset()  # Dynamo is there
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    early = first.enter_context(record_gates(model))
    late = second.enter_context(record_gates(model))
    model(x)
    first.close()
    model(x)
    second.close()
    model(x)
    assert [len(early["1"]), len(late["1"]), len(early["4"]), len(late["4"])] == [1, 2, 1, 2]
    assert model[1].gate_listener is model[4].gate_listener is None
    compiled(x)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "pickle"],
)
@pytest.mark.parametrize("norm", [ModeNorm2d, ModeGroupNorm])
def test_copies_of_a_recorded_model_are_not_recorded(norm, copied):
    model, x = mode_model(norm), torch.randn(2, 3, 8, 8)
    with record_gates(model) as gates:
        other = copied(model)
        other(x)
        assert gates == {}
        model(x)
    assert len(gates["1"]) == 1
    assert torch.equal(other(x), model(x))


def test_recorded_gates_do_not_change_with_what_was_given():
    layer, given = ModeNorm2d(3), torch.full((4, 2), 0.5)
    with record_gates(layer) as gates:
        layer(torch.randn(4, 3, 2, 2), gates=given)
    given.zero_()
    assert torch.equal(gates[""][0], torch.full((4, 2), 0.5))


def test_checkpointing_records_a_forward_once():
    model, x = mode_model(), torch.randn(4, 3, 8, 8, requires_grad=True)
    with record_gates(model) as gates:
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert [len(gates["1"]), len(gates["4"])] == [1, 1]


def test_a_compiled_model_is_recorded():
    model, x = mode_model().eval(), torch.randn(4, 3, 8, 8)
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
    model, x = mode_model().eval(), torch.randn(4, 3, 8, 8)
    backend, graphs = counting_backend()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
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


@pytest.mark.parametrize("limit", [8, 14, 50, 129, 300])
@pytest.mark.parametrize("norm", [lambda: ModeNorm2d(2, 3), lambda: ModeGroupNorm(2, 4)])
def test_no_more_values_than_the_limit(norm, limit):
    layer = norm()
    with record_gates(layer, limit) as gates:
        for count in (20, 7, 100):
            layer(torch.randn(count, 2, 2, 2))
            assert 0 < sum(g.numel() for g in gates[""]) <= limit


def test_a_limit_below_one_sample():
    model = nn.Sequential(ModeNorm2d(10, 2), ModeGroupNorm(10, 2))
    with pytest.raises(ValueError, match="limit is 14, but one sample of 1 has 20 gates"):
        record_gates(model, 14).__enter__()
    with record_gates(model, 20) as gates:
        model(torch.randn(3, 10, 2, 2))
    assert [tuple(g.shape) for g in gates["1"]] == [(1, 10, 2)]


def test_a_model_without_modes_records_nothing():
    with record_gates(nn.Conv2d(3, 3, 3)) as gates:
        pass
    assert gates == {}


def operators(function) -> Counter:
    """How often each of torch's operators is called."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        function()
    names = (event.name for event in profiler.events())
    return Counter(name for name in names if name.startswith("aten::"))


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("norm", [ModeNorm2d, ModeGroupNorm])
def test_operators_that_recording_adds(norm, training, autocast, backend):
    """One detach for every layer and forward where gradients are wanted, and memory for gates."""
    model, forwards = mode_model(norm).train(training), 3
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
    assert added.pop("aten::empty", 0) <= 2 * forwards
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
    model, x = mode_model().eval(), torch.randn(4, 3, 8, 8)
    with record_gates(model) as gates, torch.inference_mode():
        model(x)
    with record_gates(model) as expected, torch.no_grad():
        model(x)
    torch.testing.assert_close(gates["4"][0].clone(), expected["4"][0])


def test_what_is_kept_is_not_changed_by_later_forwards():
    model, parts = mode_model().eval(), torch.randn(3, 4, 3, 8, 8)
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
