"""Evaluation after n training steps, against a loop over the paper's averages of ⟨x⟩ and ⟨x²⟩."""

import pytest
import torch
from torch import nn

import modenorm
from compare import assert_close, make_layer, one_hot

NUM_STEPS = 7


def batches(dtype=torch.float64, mean=0.0, sd=1.0):
    generator = torch.Generator().manual_seed(1)
    for step in range(NUM_STEPS):
        noise = torch.randn(6, 3, 4, 5, generator=generator, dtype=torch.float64)
        yield (noise * sd * (1 + step / 4) + mean + sd * step).to(dtype)


def hand_loop(layer: nn.Module, momentum: float | None, update: str):
    """⟨x⟩_k and ⟨x²⟩_k averaged as the paper writes it, from mean 0 and variance 1."""
    first, second = torch.zeros(2, 3).double(), torch.ones(2, 3).double()
    shares = torch.zeros(2, 1).double()
    for step, x in enumerate(batches(), start=1):
        gates = torch.softmax(layer.gate.double()(x.mean((2, 3))), 1).detach()
        mass = gates.sum(0)[:, None]
        batch_first = gates.t() @ x.mean((2, 3)) / mass
        batch_second = gates.t() @ (x**2).mean((2, 3)) / mass
        share = mass / 6
        shares += share
        if momentum is not None:
            rate = momentum * (share if update == "usage" else 1)
        else:
            rate = share / shares if update == "usage" else 1 / step
        first = (1 - rate) * first + rate * batch_first
        second = (1 - rate) * second + rate * batch_second
    return first, second - first**2


@pytest.mark.parametrize("update", ["paper", "usage"])
@pytest.mark.parametrize("momentum", [0.1, 0.5, 1.0, None])
def test_eval_after_training_steps(momentum, update, backend):
    layer = make_layer(3, 2, momentum=momentum, running_update=update)
    layer.reset_running_stats()
    for x in batches():
        layer(x)
    mean, var = hand_loop(layer, momentum, update)
    assert_close(layer.running_mean, mean, 1e-12, "running_mean")
    assert_close(layer.running_var, var, 1e-11, "running_var")
    assert layer.num_batches_tracked == NUM_STEPS
    x = torch.randn(5, 3, 4, 5).double()
    gates = torch.softmax(layer.gate(x.mean((2, 3))), 1)[..., None, None, None]
    normed = (x[:, None] - mean[..., None, None]) / torch.sqrt(var + 1e-5)[..., None, None]
    expected = (gates * normed).sum(1) * layer.weight[:, None, None] + layer.bias[:, None, None]
    assert_close(layer.eval()(x), expected, 1e-11)


def test_one_mode_tracks_the_same_mean_as_batchnorm(backend):
    layer, norm = modenorm.ModeNorm2d(3, 1).double(), nn.BatchNorm2d(3).double()
    for x in batches():
        layer(x)
        norm(x)
    assert_close(layer.running_mean[0], norm.running_mean, 1e-14)
    assert layer.num_batches_tracked == norm.num_batches_tracked


def test_one_batch_with_momentum_one_gives_its_biased_variance(backend):
    layer, norm = modenorm.ModeNorm2d(3, 1, momentum=1.0), nn.BatchNorm2d(3, momentum=1.0)
    x = torch.randn(6, 3, 4, 5)
    layer(x)
    norm(x)
    assert_close(layer.running_var[0], x.var((0, 2, 3), correction=0), 1e-5)
    assert_close(norm.running_var, x.var((0, 2, 3), correction=1), 1e-5)


# One float32 rounding of a number of size 1000 is 3e-5, or 3e-4 of sd: the variance, where it
# enters as the square of a difference of means, is good to a few of those. ⟨x²⟩ − ⟨x⟩², each
# rounded to 0.03, could be off by three times the variance itself.
def test_large_mean_in_float32_keeps_the_running_variance(backend):
    layer = modenorm.ModeNorm2d(3, 1, momentum=None)
    for x in batches(torch.float32, mean=1000.0, sd=0.1):
        layer(x)
    everything = torch.cat(list(batches(torch.float32, mean=1000.0, sd=0.1))).double()
    assert_close(layer.running_var[0], everything.var((0, 2, 3), correction=0), 4e-3)
    assert_close(layer.running_mean[0], everything.mean((0, 2, 3)), 2e-7)


@pytest.mark.parametrize("gate", [None, modenorm.StandardizedGate])
def test_a_batch_beyond_the_type_of_the_estimates_changes_nothing(gate):
    layer = modenorm.ModeNorm2d(3, 2, gate=gate)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    y = layer(1e30 * next(batches()))
    assert y.isfinite().all()
    for name, buffer in layer.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_usage_keeps_domains_apart_in_batches_of_one_domain(backend):
    """The paper's update pulls an absent mode towards the others; "usage" does not."""
    kept = {}
    for update in ("paper", "usage"):
        layer = modenorm.ModeNorm2d(1, 2, running_update=update).double()
        gates = torch.tensor([[0.99, 0.01], [0.01, 0.99]]).double()
        for step in range(200):
            x = torch.randn(8, 1, 2, 2).double() + (-5, 5)[step % 2]
            layer(x, gates=gates[step % 2].expand(8, 2))
        kept[update] = layer.running_mean.flatten()
    assert kept["paper"].abs().max() < 1
    assert kept["usage"][0] < -4.5
    assert kept["usage"][1] > 4.5


def test_shares_add_up(backend):
    layer = modenorm.ModeNorm2d(3, 2, running_update="usage")
    layer(torch.randn(4, 3, 2, 2), gates=one_hot([0, 0, 0, 1], 2))
    layer(torch.randn(4, 3, 2, 2), gates=one_hot([0, 0, 1, 1], 2))
    assert torch.equal(layer.running_share, torch.tensor([1.25, 0.75]))


def test_eval_changes_nothing(backend):
    layer = make_layer(3, 2, running_update="usage").eval()
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    layer(torch.randn(4, 3, 2, 2).double())
    assert all(torch.equal(before[name], buffer) for name, buffer in layer.named_buffers())


def test_without_running_stats_eval_uses_the_batch(backend):
    layer = make_layer(3, 2, track_running_stats=False)
    x = torch.randn(4, 3, 2, 2).double()
    assert torch.equal(layer.train()(x), layer.eval()(x))
    assert list(layer.buffers()) == []


def test_an_average_without_its_counter_is_refused():
    """As in a layer whose way to update was changed after it was made."""
    layer, x = modenorm.ModeNorm2d(3), torch.randn(4, 3, 2, 2)
    layer.running_update = "usage"
    layer(x)
    with pytest.raises(ValueError, match="needs running_share"):
        modenorm.recalibrate(layer, [x])
    layer.momentum = None
    with pytest.raises(ValueError, match="needs running_share"):
        layer(x)


def test_a_state_of_the_other_running_update_loads():
    paper, usage = modenorm.ModeNorm2d(3), modenorm.ModeNorm2d(3, running_update="usage")
    for _ in range(4):
        paper(torch.randn(5, 3, 2, 2)), usage(torch.randn(5, 3, 2, 2))
    assert "running_share" in usage.state_dict()
    other = modenorm.ModeNorm2d(3, running_update="usage")
    assert str(other.load_state_dict(paper.state_dict())) == "<All keys matched successfully>"
    assert other.running_share.tolist() == [2.0, 2.0]
    assert torch.equal(other.running_mean, paper.running_mean)
    other = modenorm.ModeNorm2d(3)
    assert str(other.load_state_dict(usage.state_dict())) == "<All keys matched successfully>"
    assert torch.equal(other.running_var, usage.running_var)
