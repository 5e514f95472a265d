"""Running estimates of a whole model: recalibrate and freeze."""

import copy

import pytest
import torch
from torch import nn

import modenorm
from compare import assert_close, one_hot


def make_model(**options):
    return nn.Sequential(
        nn.Conv2d(2, 3, 3),
        modenorm.ModeNorm2d(3, **options),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Conv2d(3, 4, 3),
        modenorm.ModeNorm2d(4, gate=modenorm.StandardizedGate),
    ).double()


def batches(count=5):
    return [torch.randn(6, 2, 8, 8).double() * (i + 1) + i for i in range(count)]


def test_recalibrate_averages_all_batches_equally():
    layer, data = modenorm.ModeNorm2d(2, 1).double(), batches()
    layer(batches()[3])  # what was there before is forgotten
    assert modenorm.recalibrate(layer, data) == 5
    everything = torch.cat(data)
    assert_close(layer.running_mean[0], everything.mean((0, 2, 3)), 1e-12)
    assert_close(layer.running_var[0], everything.var((0, 2, 3), correction=0), 1e-12)
    assert layer.num_batches_tracked == 5


def test_recalibrate_leaves_everything_else_as_it_was():
    model = make_model(momentum=0.3).train()
    model[0].eval()
    modenorm.freeze_statistics(model)
    model[5].statistics_frozen = False
    before = {name: p.clone() for name, p in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    modenorm.recalibrate(model, batches())
    assert [module.training for module in model.modules()] == modes
    assert model[1].momentum == 0.3
    assert (model[1].statistics_frozen, model[5].statistics_frozen) == (True, False)
    assert (model[5].gate.statistics_frozen, model[5].gate.momentum) == (True, 0.1)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("fails", [torch.randn(2, 7), None])
def test_recalibrate_keeps_the_estimates_if_a_batch_fails(fails):
    model = make_model()
    model(batches(1)[0])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises((RuntimeError, ValueError)):
        modenorm.recalibrate(model, [*batches(2), fails])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_recalibrate_runs_the_rest_in_evaluation():
    model, data = make_model(), batches()
    results = []
    for _ in range(2):  # dropout would make the second layer's statistics random
        modenorm.recalibrate(model, data)
        results.append(model[5].running_mean.clone())
    assert torch.equal(*results)


def test_recalibrate_makes_eval_agree_with_training_on_one_batch():
    model, (x,) = make_model(), batches(1)
    modenorm.recalibrate(model, [x])
    model.eval()
    expected = model(x)
    model[1].train()
    model[1].momentum = None
    assert_close(model(x), expected, 1e-10)


def test_recalibrate_takes_the_estimates_of_standardized_gates_along():
    gate = modenorm.StandardizedGate(2, 2, dtype=torch.float64)
    model, data = modenorm.ModeNorm2d(2, gate=gate, dtype=torch.float64), batches(3)
    model(100 + data[0])  # estimates of other weights, say
    modenorm.freeze_statistics(model)
    modenorm.recalibrate(model, data)
    features = [x.mean((2, 3)) for x in data]
    assert_close(gate.running_mean, torch.stack([f.mean(0) for f in features]).mean(0), 1e-12)
    expected = torch.stack([f.var(0, correction=0) for f in features]).mean(0)
    assert_close(gate.running_var, expected, 1e-12)
    assert gate.statistics_frozen
    modenorm.freeze_statistics(model, frozen=False)
    model.train()(data[0])  # and momentum counts again
    assert_close(gate.running_var, 0.9 * expected + 0.1 * features[0].var(0, correction=0), 1e-12)


class Head(nn.Module):
    """One norm that takes gates along, and one that evaluation does not reach."""

    def __init__(self, update, gate=None):
        super().__init__()
        self.norm = modenorm.ModeNorm2d(2, 3, running_update=update, gate=gate).double()
        self.auxiliary = modenorm.ModeNorm2d(2, running_update=update, gate=gate).double()
        for norm in (self.norm, self.auxiliary):
            norm.running_mean.fill_(7)
            norm.num_batches_tracked.fill_(9)
            if norm.running_share is not None:
                norm.running_share.fill_(3)

    def forward(self, inputs):
        return self.auxiliary(self.norm(*inputs)) if self.training else self.norm(*inputs)


def kept(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


@pytest.mark.parametrize("update", ["paper", "usage"])
def test_recalibrate_averages_a_mode_over_the_batches_that_have_it(update, backend):
    model, data = Head(update), batches(4)
    before, norm = kept(model.auxiliary), model.norm
    domains = [0, 1, 1, 0]  # mode 2 has none
    given = [[(x, one_hot([k] * 6, 3))] for x, k in zip(data, domains, strict=True)]
    assert modenorm.recalibrate(model, given) == 4
    for k in (0, 1):
        values = torch.cat([x for x, domain in zip(data, domains, strict=True) if domain == k])
        assert_close(norm.running_mean[k], values.mean((0, 2, 3)), 1e-12)
        assert_close(norm.running_var[k], values.var((0, 2, 3), correction=0), 1e-12)
    assert (norm.running_mean[2] == 7).all()
    assert (norm.running_var[2] == 1).all()
    assert norm.num_batches_tracked == 4
    assert update == "paper" or norm.running_share.tolist() == [2, 2, 3]
    assert all(torch.equal(b, before[n]) for n, b in model.auxiliary.named_buffers())


def test_recalibrate_with_the_reference():
    model, (x,) = Head("paper"), batches(1)
    with modenorm.use_backend("reference"):
        modenorm.recalibrate(model, [[(x, one_hot([1] * 6, 3))]])
    assert_close(model.norm.running_mean[1], x.mean((0, 2, 3)), 1e-12)
    assert (model.norm.running_mean[::2] == 7).all()


@pytest.mark.parametrize("update", ["paper", "usage"])
@pytest.mark.parametrize("gate", [None, modenorm.StandardizedGate])
@pytest.mark.parametrize("bad", ["nan", "empty"])
def test_recalibrate_keeps_estimates_that_no_batch_gives(bad, gate, update):
    model, (x,) = Head(update, gate), batches(1)
    x = x[:0] if bad == "empty" else x.index_fill(1, torch.tensor(1), torch.nan)
    before = kept(model)
    assert modenorm.recalibrate(model, [[(x,)], [(x,)]]) == 2
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())


def test_recalibrate_takes_the_samples_that_count():
    model, (x,) = Head("paper", modenorm.StandardizedGate), batches(1)
    mask = torch.ones(6, 8, 8, dtype=torch.bool)
    mask[4:] = False
    modenorm.recalibrate(model, [[(x, None, mask)]])
    assert_close(model.norm.gate.running_mean, x[:4].mean((0, 2, 3)), 1e-12)


def test_recalibrate_leaves_out_batches_with_bad_numbers():
    layer, (x,) = modenorm.ModeNorm2d(2, 1).double(), batches(1)
    modenorm.recalibrate(layer, [x * torch.nan, x, x[:0]])
    assert_close(layer.running_mean[0], x.mean((0, 2, 3)), 1e-12)
    assert layer.num_batches_tracked == 1


def test_recalibrate_takes_pairs_of_input_and_label():
    model, data = make_model(), batches()
    modenorm.recalibrate(model, data)
    expected = model[1].running_mean.clone()
    modenorm.recalibrate(model, [(x, torch.zeros(6)) for x in data])
    assert torch.equal(model[1].running_mean, expected)


def test_recalibrate_restores_after_a_failure():
    model = make_model(momentum=0.3)

    def failing():
        yield batches(1)[0]
        raise RuntimeError("no more data")

    with pytest.raises(RuntimeError, match="no more data"):
        modenorm.recalibrate(model, failing())
    assert model[1].momentum == 0.3
    assert model.training
    assert model[3].training


def test_recalibrate_without_batches_changes_nothing():
    model = make_model()
    model(batches(1)[0])
    before = model[1].running_mean.clone()
    with pytest.raises(ValueError, match="no batches"):
        modenorm.recalibrate(model, [])
    assert torch.equal(model[1].running_mean, before)


def test_recalibrate_without_layers():
    with pytest.raises(ValueError, match="no mode norm"):
        modenorm.recalibrate(nn.BatchNorm2d(3), batches())


def test_freeze_uses_the_estimates_in_training_mode(backend):
    model = make_model()
    for x in batches():
        model(x)
    layer, x = model[1], torch.randn(4, 3, 5, 5).double()
    expected = layer.eval()(x)
    assert modenorm.freeze_statistics(model) == ["1", "5"]
    before = layer.running_mean.clone()
    assert torch.equal(layer.train()(x), expected)
    assert torch.equal(layer.running_mean, before)
    layer(x).backward(torch.randn(4, 3, 5, 5))
    assert all(parameter.grad is not None for parameter in layer.parameters())
    assert modenorm.freeze_statistics(model, frozen=False) == ["1", "5"]
    layer(x)
    assert not torch.equal(layer.running_mean, before)


def test_freeze_also_holds_the_gate_still():
    model = make_model()
    modenorm.freeze_statistics(model)
    gate, before = model[5].gate, model[5].gate.running_mean.clone()
    model(batches(1)[0])
    assert torch.equal(gate.running_mean, before)


def test_freeze_skips_layers_without_estimates():
    layer = modenorm.ModeNorm2d(3, track_running_stats=False)
    assert modenorm.freeze_statistics(layer) == []


def test_weight_averaging_then_recalibration():
    """AveragedModel and recalibrate, as with torch's update_bn."""
    model, data = make_model(), batches()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in data:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        averaged.update_parameters(model)
    modenorm.recalibrate(averaged, data)
    assert averaged.eval()(data[0]).isfinite().all()
    assert averaged.module[1].num_batches_tracked == 5


def test_recalibrate_of_a_synchronised_model_without_a_process_group():
    gate = modenorm.StandardizedGate
    alone, x = modenorm.ModeNorm2d(3, gate=gate), torch.randn(8, 3, 4, 4)
    shared = modenorm.convert_sync_modenorm(copy.deepcopy(alone))
    ranks = shared.ranks, shared.gate.ranks
    for layer in (alone, shared):
        modenorm.recalibrate(layer, [x, x + 1])
    torch.testing.assert_close(shared.state_dict(), alone.state_dict())
    assert (shared.ranks, shared.gate.ranks) == ranks
