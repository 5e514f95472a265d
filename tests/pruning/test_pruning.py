"""Pruned models compute what they did before, and say so truthfully; states of them load."""

import copy
import io
import json
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import fusion

import modenorm
from compare import assert_close
from modenorm import (
    ModeGroupNorm,
    ModeNorm1d,
    ModeNorm2d,
    StandardizedGate,
    match_modes,
    prune_modes,
)
from modenorm.pruning.resizing import close_modes, combine_modes, last_linear, set_num_modes

torch.set_num_threads(1)
FEATURES = 6


def clusters(count: int, modes: int, seed: int = 0) -> torch.Tensor:
    """Samples around far means, so that modes have something to do."""
    generator = torch.Generator().manual_seed(seed)
    means = 2.5 * torch.randn(modes, FEATURES, generator=torch.Generator().manual_seed(9)).double()
    which = torch.randint(modes, (count,), generator=generator)
    noise = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    return means[which] + noise


def with_copies(layer: ModeNorm1d, copies: dict[int, int], offsets: dict[int, float]) -> ModeNorm1d:
    """The layer with some modes repeated: the same rows but for the bias, which shares them out."""
    order = [*range(layer.num_modes), *copies.values()]
    big = ModeNorm1d(FEATURES, len(order), per_mode_affine=layer.per_mode_affine).double()
    with torch.no_grad():
        for name, tensor in layer.state_dict().items():
            per_mode = tensor.ndim > 0 and len(tensor) == layer.num_modes and name != "weight"
            per_mode |= layer.per_mode_affine and name in ("weight", "bias")
            per_mode &= name != "bias" or layer.per_mode_affine
            big.state_dict()[name].copy_(tensor[order] if per_mode else tensor)
        for k, offset in offsets.items():
            big.gate.bias[k] += offset
    return big


def trained(modes: int = 3, per_mode_affine: bool = False) -> nn.Sequential:
    """A network whose mode norm tells the clusters apart."""
    torch.manual_seed(modes)
    norm = ModeNorm1d(FEATURES, modes, per_mode_affine=per_mode_affine)
    model = nn.Sequential(norm, nn.Tanh(), nn.Linear(FEATURES, 5)).double()
    x = clusters(400, modes)
    means = 2.5 * torch.randn(modes, FEATURES, generator=torch.Generator().manual_seed(9)).double()
    with torch.no_grad():
        norm.gate.weight.copy_(means)
        norm.gate.bias.copy_(-(means**2).sum(1) / 2)
        if per_mode_affine:
            norm.weight.uniform_(0.5, 2)
            norm.bias.normal_()
    modenorm.recalibrate(model, x.split(100))
    return model.eval()


def relative_change(after: torch.Tensor, before: torch.Tensor) -> float:
    return float(
        (after - before).square().mean().sqrt().detach() / before.std(correction=0).detach()
    )


@pytest.mark.parametrize("per_mode_affine", [False, True], ids=["shared", "per_mode"])
def test_duplicates_are_merged_without_a_trace(per_mode_affine):
    """Copies of a mode, with other biases, are one mode: to the last digits."""
    model = trained(3, per_mode_affine)
    x = clusters(300, 3, seed=1)
    big = nn.Sequential(with_copies(model[0], {3: 0, 4: 1, 5: 1}, {4: -1.0, 5: 0.5}), *model[1:])
    big.eval()
    before = big(x)
    report = prune_modes(big, [x[:150], x[150:]], tolerance=1e-9)
    assert report.num_modes == {"0": 3}
    (layer,) = report.layers
    assert layer.merged == ((0, 3), (1, 4, 5))
    assert layer.removed == ()
    assert max(layer.statistics_distances + layer.gate_distances) < 1e-6
    # rounding of float64 sums alone
    assert_close(big(x), before, 1e-11)
    assert report.change == pytest.approx(relative_change(big(x), before), abs=1e-12)
    assert big[0].gate.weight.shape == (3, FEATURES)


def test_dead_modes_are_dropped():
    model = trained(3)
    x = clusters(300, 3, seed=1)
    big = nn.Sequential(
        with_copies(model[0], {3: 0, 4: 2}, {3: -60.0, 4: -60.0}), *model[1:]
    ).eval()
    with torch.no_grad():
        big[0].running_mean[3:].normal_()  # no duplicates: other statistics, other directions
        big[0].gate.weight[3:].mul_(0.5)
    before = big(x)
    report = prune_modes(big, [x], tolerance=1e-6)
    assert report.num_modes == {"0": 3}
    assert report.layers[0].removed == (3, 4)
    assert report.layers[0].merged == ()
    assert_close(big(x), before, 1e-5)


def test_collapsed_gates_use_all_modes_alike_and_are_one_mode():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), ModeNorm2d(8, 5), nn.ReLU(), nn.Conv2d(8, 4, 3))
    with torch.no_grad():
        model[1].gate.weight.zero_()
        model[1].gate.bias.zero_()
    x = torch.randn(64, 3, 9, 9)
    for _ in range(60):
        model(x)
    model.eval()
    before = model(x)
    assert modenorm.mode_report(model, [x]).layers[0].effective_modes == pytest.approx(5)
    report = prune_modes(model, [x], batchnorm=True)
    assert report.num_modes == {"1": 1}
    assert report.layers[0].batchnorm
    assert type(model[1]) is nn.BatchNorm2d
    fused = nn.Sequential(fusion.fuse_conv_bn_eval(model[0], model[1]), *model[2:])
    # float32, one convolution
    assert_close(fused(x), before, 1e-5)


@pytest.mark.parametrize("tolerance", [0.0, 0.02, 0.3, 10.0])
def test_the_tolerance_is_kept_and_the_change_is_true(tolerance):
    model = trained(4)
    x = clusters(256, 4, seed=2)
    before = model(x)
    report = prune_modes(model, x.split(64), tolerance)
    change = relative_change(model(x), before)
    assert report.change == pytest.approx(change, abs=1e-12)
    assert change <= tolerance
    assert report.num_samples == 256
    assert (
        report.num_modes["0"] == {0.0: 4, 0.02: 4, 0.3: report.num_modes["0"], 10.0: 1}[tolerance]
    )


def test_two_layers_and_tuples_of_outputs():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = trained(3)[0], trained(3)[0]

        def forward(self, x):
            return {"a": self.a(x), "b": (self.b(x), torch.arange(3))}

    model = Two().eval()
    model.a = with_copies(model.a, {3: 1}, {}).eval()
    report = prune_modes(model, [clusters(100, 3)], 1e-6)
    assert report.num_modes == {"a": 3, "b": 3}


def test_gates_that_end_in_a_linear_layer_and_others():
    torch.manual_seed(0)
    gates = [
        nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, 4)),
        StandardizedGate(FEATURES, 4),
        nn.Linear(FEATURES, 4),
    ]
    for gate in gates:
        model = ModeNorm1d(FEATURES, 4, gate=gate).double()
        with torch.no_grad():
            linear = last_linear(gate, 4)
            linear.weight[3] = linear.weight[0]
        x = clusters(200, 3)
        modenorm.recalibrate(model, x.split(50))
        with torch.no_grad():
            for name in ("running_mean", "running_var"):
                getattr(model, name)[3] = getattr(model, name)[0]
        before = model.eval()(x)
        report = prune_modes(model, [x], 1e-9)
        assert report.num_modes == {"": 3}
        assert_close(model(x), before, 1e-11)

    class Own(nn.Module):
        def forward(self, features):
            return features[:, :4]

    model = ModeNorm1d(FEATURES, 4, gate=Own()).double().eval()
    report = prune_modes(model, [clusters(50, 3)])
    assert report.num_modes == {"": 4}
    assert "Own" in report.layers[0].note
    given = ModeNorm1d(FEATURES, 2).double().eval()
    wrapped = nn.Module()
    wrapped.layer = given
    wrapped.forward = lambda x: given(x, torch.full((len(x), 2), 0.5, dtype=x.dtype))
    assert "from outside" in prune_modes(wrapped, [clusters(20, 2)]).layers[0].note


def test_mode_group_norm_is_pruned_when_its_modes_are_equal():
    torch.manual_seed(0)
    layer = ModeGroupNorm(8, 3, variance="pixel").double()
    x = torch.randn(16, 8, 5, 5, dtype=torch.float64)
    assert prune_modes(copy.deepcopy(layer), [x], 1e-9).num_modes == {"": 3}
    with torch.no_grad():
        layer.gate_weight.fill_(0.3)
    before = layer(x)
    assert prune_modes(layer, [x], 1e-9).num_modes == {"": 1}
    assert_close(layer(x), before, 1e-11)
    assert_close(layer(x), nn.functional.group_norm(x, 1), 1e-11)


def test_the_optimizer_goes_on():
    """Momentum of merged rows is added up; Adam's state has the rows too; other state stays."""
    x = clusters(200, 3)
    for make in (lambda p: torch.optim.SGD(p, 0.01, momentum=0.9), torch.optim.Adam):
        model = trained(3)
        model[0] = with_copies(model[0], {3: 2}, {}).train()
        optimizer = make(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        gate = model[0].gate.weight
        key = "momentum_buffer" if "momentum_buffer" in optimizer.state[gate] else "exp_avg"
        before = optimizer.state[gate][key].clone()
        shares = torch.tensor([0.2, 0.2, 0.4, 0.2])
        mean, var = model[0].running_mean.clone(), model[0].running_var.clone()
        weight = gate.detach().clone()
        combine_modes(model[0], [(3,), (1, 2)], shares, torch.tensor([0.0, 0.7]), optimizer)
        assert model[0].gate.weight is gate
        assert_close(gate.detach()[1], weight[1] / 3 + weight[2] * 2 / 3, 1e-12)
        assert_close(optimizer.state[gate][key], torch.stack([before[3], before[1] + before[2]]), 0)
        pooled = mean[1] / 3 + mean[2] * 2 / 3
        second = (var[1] + mean[1] ** 2) / 3 + (var[2] + mean[2] ** 2) * 2 / 3
        assert_close(model[0].running_mean[1], pooled, 1e-12)
        assert_close(model[0].running_var[1], second - pooled**2, 1e-9)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_training_goes_on_while_the_last_loss_is_kept(dtype):
    """As in any loop: the last step's graph still lives when modes are pruned."""
    model = trained(3)
    model = nn.Sequential(with_copies(model[0], {3: 2}, {}), *model[1:]).to(dtype).train()
    x = clusters(200, 3).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for step in range(3):
        if step == 1:
            assert prune_modes(model, [x], 0.01, optimizer=optimizer).num_modes == {"0": 3}
        if step == 2:
            set_num_modes(model[0], 2)
            optimizer.state.clear()
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert model[0].gate.weight.grad.shape == (2, FEATURES)
    assert model[0].gate.weight.dtype == dtype


@pytest.mark.parametrize("per_mode_affine", [False, True], ids=["shared", "per_mode"])
def test_closed_modes_are_as_if_pruned_and_stay_closed(per_mode_affine):
    """In evaluation and training, and after further steps with momentum and weight decay."""
    model = trained(3, per_mode_affine)
    norm = with_copies(model[0], {3: 0, 4: 1}, {4: -1.0})
    model = nn.Sequential(norm, *model[1:]).eval()
    x, pruned = clusters(300, 3, seed=1), copy.deepcopy(model)
    assert prune_modes(pruned, [x], 1e-9).num_modes == {"0": 3}
    places = [tensor.data_ptr() for tensor in model.state_dict().values()]
    changed = close_modes(model, pruned)
    assert [tensor.data_ptr() for tensor in model.state_dict().values()] == places
    assert len(changed) == (4 if per_mode_affine else 2)
    assert_close(model(x), pruned(x), 1e-12)
    optimizers = [
        torch.optim.SGD(m.train().parameters(), 0.1, momentum=0.9, weight_decay=1e-3)
        for m in (model, pruned)
    ]
    for _ in range(20):
        for m, optimizer in zip((model, pruned), optimizers, strict=True):
            optimizer.zero_grad()
            (m(x) - x[:, :5]).square().mean().backward()
            optimizer.step()
    assert_close(model.eval()(x), pruned.eval()(x), 1e-9)
    assert prune_modes(model, [x], 0.0).num_modes == {"0": 3}


def test_pruned_states_load():
    model = trained(3)
    model[0] = with_copies(model[0], {3: 0, 4: 1}, {}).eval()
    fresh = copy.deepcopy(model)
    x = clusters(100, 3)
    prune_modes(model, [x], 1e-6)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    with pytest.raises(RuntimeError) as error:
        fresh.load_state_dict(state)
    assert (
        "0 has num_modes=3 in this state, but num_modes=5 in the model: call "
        "modenorm.match_modes(model, state_dict) before loading"
    ) in str(error.value)
    assert match_modes(fresh, state) == {"0": (5, 3)}
    fresh.load_state_dict(state)
    assert torch.equal(fresh(x), model(x))
    assert match_modes(fresh, state) == {}
    group = ModeGroupNorm(4, 2)
    with pytest.raises(RuntimeError, match="the layer has num_modes=3 in this state"):
        group.load_state_dict(ModeGroupNorm(4, 3).state_dict())
    match_modes(group, ModeGroupNorm(4, 3).state_dict())
    assert group.gate_weight.shape == (3,)


def test_set_num_modes_begins_anew():
    layer = ModeNorm1d(4, 2, per_mode_affine=True, momentum=None, running_update="usage")
    layer(torch.randn(16, 4))
    set_num_modes(layer, 5)
    shapes = {name: tuple(t.shape) for name, t in layer.state_dict().items()}
    fresh = ModeNorm1d(4, 5, per_mode_affine=True, momentum=None, running_update="usage")
    assert shapes == {name: tuple(t.shape) for name, t in fresh.state_dict().items()}
    assert torch.equal(layer.running_var, torch.ones(5, 4))
    assert 0 < float(layer.gate.weight.detach().std()) < 0.05
    layer(torch.randn(16, 4)).sum().backward()
    with pytest.raises(ValueError, match="can't be changed"):
        set_num_modes(ModeNorm1d(4, 2, gate=nn.Identity()), 3)


def test_the_report_reads_well():
    model = trained(3)
    model[0] = with_copies(model[0], {3: 2}, {}).eval()
    report = prune_modes(model, [clusters(100, 3)], 1e-4)
    text = str(report)
    assert "0  4 → 3  merged 2+3 (statistics 0.00, gates 0.00)" in text
    assert "on 100 samples (allowed: 0.0001)" in text
    assert report.table().row_count == 1
    assert json.loads(report.to_json())["layers"][0]["merged"] == [[2, 3]]
    unbounded = prune_modes(model, [clusters(100, 3)], math.inf).to_json()
    assert json.loads(unbounded, parse_constant=pytest.fail)["tolerance"] is None


def test_bad_arguments():
    with pytest.raises(ValueError, match="found no mode norm"):
        prune_modes(nn.Linear(2, 2), [torch.randn(3, 2)])
    with pytest.raises(ValueError, match="tolerance is -1"):
        prune_modes(ModeNorm1d(2), [torch.randn(3, 2)], -1)
    for batches in ([], [torch.zeros(0, 2)]):
        with pytest.raises(ValueError, match="got no samples"):
            prune_modes(ModeNorm1d(2), batches)
    for output in (None, torch.arange(3), ()):
        silent = nn.Sequential(ModeNorm1d(2))
        silent.register_forward_hook(lambda *_, output=output: (output,))
        with pytest.raises(ValueError, match="returned no floating-point tensor"):
            prune_modes(silent, [torch.randn(3, 2)])
