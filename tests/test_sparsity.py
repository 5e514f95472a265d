"""The penalty is the formula it claims, learns as it should, and leaves nothing on the model."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import modenorm
from compare import assert_close
from modenorm import ModeGroupNorm, ModeNorm1d, ModeNorm2d, ModeSparsity
from modenorm.kernels.switches import expected_open

torch.set_num_threads(1)


def small_model(modes=(4, 3)) -> nn.Sequential:
    first, second = (ModeNorm2d(c, k) for c, k in zip((8, 6), modes, strict=True))
    model = nn.Sequential(nn.Conv2d(3, 8, 3), first, nn.ReLU(), nn.Conv2d(8, 6, 3), second)
    return model.double()


def gradients(model, loss):
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss, parameters.values(), allow_unused=True)
    return {n: g for n, g in zip(parameters, found, strict=True) if g is not None}


def test_entropy_is_that_of_the_batch_usage():
    model, x = small_model(), torch.randn(12, 3, 8, 8, dtype=torch.float64)
    sparsity = ModeSparsity(model, strength=0.7)
    with modenorm.record_gates(model) as gates:
        model(x)
    expected = 0.0
    for (used,) in gates.values():
        usage = used.mean(0)
        expected = expected - 0.7 * (usage * usage.log()).sum()
    # the strength is kept in float32
    torch.testing.assert_close(sparsity().double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["operators", "c"])
@pytest.mark.parametrize("scale", [1.0, -2.5])
def test_gradients_of_the_entropy(dtype, scale):
    """Beside a random upstream gradient of the output, as in a training step."""
    model, x = small_model(), torch.randn(12, 3, 8, 8, dtype=torch.float64)
    upstream = torch.randn_like(model(x))
    plain = copy.deepcopy(model)
    model.to(dtype)
    sparsity = ModeSparsity(model, strength=0.5)
    y = model(x.to(dtype))
    cost = sparsity()
    ours = gradients(model, (y * upstream.to(dtype)).sum() + scale * cost)
    heard = []
    for layer in (plain[1], plain[4]):
        layer.gate_listener = heard.append
    y = plain(x)
    penalty = sum(-0.5 * (u * u.log()).sum() for u in (g.mean(0) for g in heard))
    theirs = gradients(plain, (y * upstream).sum() + scale * penalty)
    # a gate's gradients are what is left of sums that are a thousand times as large
    tolerance = 1e-7 if dtype == torch.float64 else 3e-4
    assert_close(cost.double(), penalty, tolerance)
    assert ours.keys() == theirs.keys()
    for name in ours:
        if dtype == torch.float64 or name not in ("0.bias", "3.bias"):  # nearly zero before a norm
            assert_close(ours[name], theirs[name], tolerance)
    alone = gradients(plain, (plain(x) * upstream).sum())
    assert not torch.allclose(theirs["1.gate.bias"], alone["1.gate.bias"])


def test_penalties_on_one_model_add_up():
    model, x = small_model(), torch.randn(4, 3, 8, 8, dtype=torch.float64)
    first, second = ModeSparsity(model, 0.1), ModeSparsity(model, 0.2)
    found = gradients(model, model(x).sum() + first() + second())
    first.remove()
    model(x)
    alone = float(second().detach())
    second.remove()
    together = ModeSparsity(model, 0.3)
    wanted = gradients(model, model(x).sum() + (loss := together()))
    assert alone == pytest.approx(2 / 3 * float(loss.detach()), rel=1e-6)
    for name, gradient in wanted.items():
        assert_close(found[name], gradient, 1e-6)  # float32 strengths


@pytest.mark.parametrize("method", ["entropy", "switch"])
def test_a_penalty_that_was_removed_says_so(method):
    model, x = small_model(), torch.randn(4, 3, 8, 8, dtype=torch.float64)
    sparsity = ModeSparsity(model, method=method)
    sparsity.remove()
    model(x)
    with pytest.raises(ValueError, match=r"on no model: remove\(\) was called, or it is a copy"):
        sparsity()


def test_a_mode_without_any_sample_has_no_gradient():
    """Its gates are exactly 0, where the entropy's slope is infinite."""
    model, x = small_model(), torch.randn(4, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        model[1].gate.bias[2] = -1e4
    sparsity = ModeSparsity(model, strength=0.5)
    found = gradients(model, model(x).sum() * 0 + sparsity())
    assert all(bool(g.isfinite().all()) for g in found.values())
    assert float(found["1.gate.bias"][2]) == 0
    assert float(found["1.gate.bias"].abs().max()) > 0


def test_strength_is_a_tensor_that_can_be_changed():
    model, x = small_model(), torch.randn(4, 3, 8, 8, dtype=torch.float64)
    sparsity = ModeSparsity(model, strength=0.5)
    model(x)
    first = sparsity()
    sparsity.strength.fill_(0.25)
    model(x)
    torch.testing.assert_close(sparsity(), first / 2)


@pytest.mark.parametrize("strength", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", [torch.float64, torch.float32], ids=str)
def test_strength_of_any_type(model_type, strength):
    model, x = small_model().to(model_type), torch.randn(4, 3, 8, 8, dtype=model_type)
    sparsity = ModeSparsity(model, strength=0.5)
    model(x)
    wanted = sparsity()
    sparsity.to(strength)
    model(x)
    torch.testing.assert_close(sparsity(), wanted)


def test_it_hears_training_alone_and_asks_to_be_called_after_the_model():
    model, x = small_model(), torch.randn(4, 3, 8, 8, dtype=torch.float64)
    sparsity = ModeSparsity(model)
    with pytest.raises(ValueError, match="call it after each forward of the model in training"):
        sparsity()
    with torch.no_grad():
        model(x)
    with pytest.raises(ValueError, match="heard no gates"):
        sparsity()
    model(x)
    sparsity.forget()
    with pytest.raises(ValueError, match="heard no gates"):
        sparsity()
    sparsity.remove()
    assert model[1].usage_listener is None
    assert len(list(ModeSparsity(model, method="entropy").parameters())) == 0


def test_bad_arguments():
    with pytest.raises(ValueError, match="strength is -1"):
        ModeSparsity(small_model(), -1)
    with pytest.raises(ValueError, match=r"method.*entropy"):
        ModeSparsity(small_model(), method="l1")
    for model in (nn.Linear(3, 3), ModeNorm1d(4, 1), ModeGroupNorm(4)):
        with pytest.raises(ValueError, match="no mode norm with several modes"):
            ModeSparsity(model)
    custom = ModeNorm1d(4, 2, gate=nn.Identity())
    with pytest.raises(ValueError, match="needs gates that end in a linear layer"):
        ModeSparsity(custom, method="switch")


def test_a_refused_penalty_leaves_nothing_on_the_model():
    """Also if only a later layer is why it is refused."""
    model = nn.Sequential(ModeNorm1d(4, 2), ModeNorm1d(4, 2, gate=nn.Linear(4, 2, bias=False)))
    with pytest.raises(ValueError, match="linear layer with a bias; got Linear"):
        ModeSparsity(model, method="switch")
    assert model[0].gate.bias_changes == ()
    model(torch.randn(8, 4))


@pytest.mark.parametrize("method", ["entropy", "switch"])
def test_a_module_that_holds_its_penalty_can_be_averaged(method):
    """As a LightningModule does, whose parameters go to the optimizer together."""
    whole = nn.Module()
    whole.net = small_model()
    whole.penalty = ModeSparsity(whole.net, method=method)
    x = torch.randn(8, 3, 8, 8).double()
    whole.net(x)
    averaged = AveragedModel(whole)
    averaged.update_parameters(whole)
    copied = averaged.module
    torch.testing.assert_close(copied.state_dict(), whole.state_dict())
    copied.penalty.remove()  # it is on no model, so nothing happens
    assert_close(copied.net.eval()(x), whole.net.eval()(x), 1e-12)
    whole.net.train()(x)
    whole.penalty().backward()


def test_a_module_that_holds_its_penalty_can_be_pickled():
    whole = nn.ModuleDict({"net": small_model()})
    whole["penalty"] = ModeSparsity(whole["net"])
    whole["net"](torch.randn(8, 3, 8, 8).double())
    copied = pickle.loads(pickle.dumps(whole))
    torch.testing.assert_close(copied.state_dict(), whole.state_dict())
    with pytest.raises(ValueError, match="on no model"):
        copied["penalty"]()


def test_penalties_and_recordings_may_overlap():
    model, x = small_model(), torch.randn(4, 3, 8, 8, dtype=torch.float64)
    first = ModeSparsity(model)
    with modenorm.record_gates(model) as gates:
        model(x)
        first.remove()
        second = ModeSparsity(model)
        model(x)
    assert len(gates["1"]) == 2
    model(x)
    assert float(second().detach()) > 0
    second.remove()
    assert model[1].usage_listener is None


def test_the_entropy_is_that_of_training_alone():
    """Also if a forward in evaluation, with gradients, comes after it."""
    model, x = small_model(), torch.randn(12, 3, 8, 8, dtype=torch.float64)
    sparsity = ModeSparsity(model)
    model(x)
    model.eval()(x.flip(0)[:5])
    found = sparsity()
    model.train()(x)
    assert_close(found, sparsity().detach(), 1e-12)
    model.eval()(x)
    with pytest.raises(ValueError, match="heard no gates"):
        sparsity()


def test_a_batch_without_samples_costs_nothing(backend):
    model = small_model()
    sparsity = ModeSparsity(model, 1.0)
    loss = model(torch.randn(0, 3, 8, 8, dtype=torch.float64)).sum() + sparsity()
    loss.backward()
    assert float(loss.detach()) < 1e-25
    assert not any(parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("method", ["entropy", "switch"])
def test_training_with_a_strong_penalty_leaves_one_mode(method):
    torch.manual_seed(0)
    model = nn.Sequential(ModeNorm1d(4, 4), nn.Linear(4, 1))
    sparsity = ModeSparsity(model, 5.0, method)
    parameters = [*model.parameters(), *sparsity.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    for _ in range(200):
        optimizer.zero_grad()
        (model(torch.randn(64, 4)).square().mean() + sparsity()).backward()
        optimizer.step()
    sparsity.remove()
    shares = modenorm.mode_report(model, [torch.randn(256, 4)]).layers[0].shares
    if method == "entropy":
        assert max(shares) > 0.99
    else:
        assert float(expected_open(sparsity.log_odds.detach()).max()) < 0.05


def test_switches_are_made_under_any_default_device():
    model = ModeNorm1d(4, 3)
    with torch.device("meta"):
        penalty = ModeSparsity(model, method="switch")
    model(torch.randn(8, 4))
    assert penalty().isfinite()
