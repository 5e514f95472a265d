"""The penalty is the formula it claims, learns as it should, and leaves nothing on the model."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import modenorm
from compare import assert_close
from modenorm import ModeGroupNorm, ModeNorm1d, ModeNorm2d, ModeSparsity
from modenorm.kernels.switches import draw_switches, expected_open

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


def test_the_last_penalty_on_a_layer_is_heard():
    model, x = small_model(), torch.randn(4, 3, 8, 8, dtype=torch.float64)
    first, second = ModeSparsity(model), ModeSparsity(model)
    model(x)
    with pytest.raises(ValueError, match="heard no gates"):
        first()
    first.remove()
    model(x)
    assert float(second().detach()) > 0


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


def test_switches_need_a_bias_to_be_written_into():
    model = nn.Sequential(modenorm.ModeNorm2d(3))
    nn.utils.parametrize.register_parametrization(model[0].gate, "bias", nn.Tanh())
    with pytest.raises(ValueError, match="with one that is computed"):
        modenorm.ModeSparsity(model, method="switch")


def test_a_part_of_a_model_with_switches_can_be_called_by_itself():
    model, x = small_model(), torch.randn(12, 3, 8, 8, dtype=torch.float64)
    plain = copy.deepcopy(model)
    ModeSparsity(model, method="switch")
    # all switches are equally open at first
    assert_close(model[:2](x), plain[:2](x), 1e-6)


def test_a_penalty_is_removed_once():
    model, x = small_model().eval(), torch.randn(12, 3, 8, 8, dtype=torch.float64)
    sparsity = ModeSparsity(model, method="switch")
    with torch.no_grad():
        sparsity.log_odds.copy_(torch.tensor([-5.0, 2, 0.3, 1, 4, -6, 0]))
    sparsity.remove()
    before = model(x)
    sparsity.remove()
    assert torch.equal(model(x), before)


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
    with pytest.raises(ValueError, match="heard no gates"):
        copied["penalty"]()


def test_a_model_with_switches_says_why_it_cannot_be_pickled():
    model = small_model()
    sparsity = ModeSparsity(model, method="switch")
    with pytest.raises(pickle.PicklingError, match=r"state dicts, or call remove\(\)"):
        torch.save(model, io.BytesIO())
    sparsity.remove()
    torch.save(model, io.BytesIO())


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


def test_switches_are_the_hard_concrete_distribution():
    """Values by a count of many draws: P(z > 0) and the mean of the clamped variable."""
    torch.manual_seed(0)
    log_odds = torch.tensor([-3.0, 0.0, 2.0], dtype=torch.float64)
    noise = torch.rand(200_000, 3, dtype=torch.float64)
    drawn = draw_switches(log_odds.expand_as(noise), noise)
    share = (drawn > 1.5e-6).double().mean(0)
    # 200 000 draws have a standard error of at most 0.0011
    assert_close(share, expected_open(log_odds), 5e-3)
    assert float(drawn.min()) == pytest.approx(1e-6)
    assert float(drawn.max()) == 1


def test_switches_multiply_the_gates_and_are_written_into_the_bias():
    model, x = small_model(), torch.randn(12, 3, 8, 8, dtype=torch.float64)
    plain = copy.deepcopy(model)
    sparsity = ModeSparsity(model, strength=0.1, method="switch")
    with torch.no_grad():
        sparsity.log_odds.copy_(torch.tensor([-5.0, 2, 0.3, 1, 4, -6, 0]))
    with modenorm.record_gates(model.eval()) as gates, modenorm.record_gates(plain.eval()) as old:
        before = model(x)
        plain(x)
    factors = draw_switches(sparsity.log_odds, None)[:4].double()
    (first,), (expected,) = gates["1"], old["1"]
    expected = expected * factors
    # switches are float32
    assert_close(first, (expected / expected.sum(1, keepdim=True)).detach(), 1e-6)
    sparsity.remove()
    assert_close(model(x), before, 1e-6)
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_two_penalties_switch_together_and_part_in_any_order():
    model, x = small_model().eval(), torch.randn(12, 3, 8, 8, dtype=torch.float64)

    def gates():
        with modenorm.record_gates(model) as recorded, torch.no_grad():
            model(x)
        return recorded["1"][0]

    plain = gates()
    penalties = [ModeSparsity(model, method="switch") for _ in range(2)]
    states = ([-5.0, 2, 0.3, 1, 4, -6, 0], [3.0, -4, 0.3, 1, -6, 4, 0])
    expected = plain
    for penalty, state in zip(penalties, states, strict=True):
        penalty.log_odds.data.copy_(torch.tensor(state))
        expected = expected * draw_switches(penalty.log_odds.detach(), None)[:4].double()
    expected = expected / expected.sum(1, keepdim=True)
    assert not torch.allclose(expected, plain)
    assert_close(gates(), expected, 1e-6)
    for penalty in penalties:  # what it says is in the biases then
        penalty.remove()
        assert_close(gates(), expected, 1e-6)
        penalty.log_odds.data.zero_()
        assert_close(gates(), expected, 1e-6)


def test_switches_learn_and_differ_between_forwards():
    torch.manual_seed(1)
    model, x = small_model(), torch.randn(12, 3, 8, 8, dtype=torch.float64)
    sparsity = ModeSparsity(model, strength=0.1, method="switch")
    with torch.no_grad():
        sparsity.log_odds.zero_()
    first = model(x)
    assert not torch.equal(first, model(x))
    (g,) = torch.autograd.grad((first * torch.randn_like(first)).sum(), sparsity.log_odds)
    assert bool(g.isfinite().all())
    assert int((g != 0).sum()) >= 2
    (g,) = torch.autograd.grad(sparsity(), sparsity.log_odds)
    p = expected_open(sparsity.log_odds.detach())
    assert_close(g.double(), (0.1 * p * (1 - p)).double(), 1e-6)


@pytest.mark.parametrize("modes", [(4, 4), (4, 3)], ids=str)
def test_switches_of_a_float32_step_are_one_node(modes):
    """Beside a random upstream gradient of the output and a weight of the cost."""
    model, x = small_model(modes), torch.randn(12, 3, 8, 8, dtype=torch.float64)
    upstream, log_odds = torch.randn_like(model(x)), torch.randn(sum(modes))
    found = []
    for module in (copy.deepcopy(model).float(), model):
        penalty = ModeSparsity(module, 0.3, "switch")
        penalty.log_odds.data.copy_(log_odds)
        torch.manual_seed(3)  # the same switches
        dtype = module[0].weight.dtype
        loss = (module(x.to(dtype)) * upstream.to(dtype)).sum() + 5 * penalty()
        assert bool(penalty._switches.draw.used) == (dtype == torch.float32)
        learnt = [penalty.log_odds, *module.parameters()]
        found.append([loss, *torch.autograd.grad(loss, learnt)])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), plain.double(), rtol=1e-3, atol=1e-4)


def test_the_cost_of_switches_is_that_of_now():
    """Also after a step of the optimizer, with another strength, twice, and before any forward."""
    model, x = small_model().float(), torch.randn(12, 3, 8, 8)
    sparsity = ModeSparsity(model, 0.3, "switch")

    def wanted():
        return sparsity.strength * expected_open(sparsity.log_odds.detach()).sum()

    for change in (lambda: None, sparsity.log_odds.neg_, lambda: sparsity.strength.fill_(2.0)):
        model(x)
        with torch.no_grad():
            change()
        for _ in range(2):
            cost = sparsity()
            torch.testing.assert_close(cost.detach(), wanted())
            cost.backward()
    with torch.no_grad():
        model(x)
    sparsity().backward()


def switched(gate=None):
    """A float32 model whose switches differ, and its penalty."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), ModeNorm1d(6, 3, gate=gate), nn.Linear(6, 2))
    nn.init.normal_(model[1].gate.weight if gate is None else model[1].gate[0].weight)
    penalty = ModeSparsity(model, 0.1, "switch")
    penalty.log_odds.data = torch.tensor([1.0, 0.0, -0.5])
    return model, penalty


GATES = pytest.mark.parametrize(
    "gate", [None, lambda c, k: nn.Sequential(nn.Linear(c, k))], ids=["linear", "other"]
)


@GATES
def test_a_part_in_evaluation_has_the_most_likely_switches(gate):
    (model, _), x = switched(gate), torch.randn(32, 4)
    wanted = model.eval()(x)
    for _ in range(3):
        model.train()(x)
        found = model[2](model.eval()[:2](x))
        # training moves the running estimates, so the whole model is asked again
        assert_close(found, model(x).detach(), 1e-6)
    assert not torch.equal(wanted, model(x))


@GATES
def test_copies_have_no_switches_once_they_are_removed(gate):
    (model, penalty), x = switched(gate), torch.randn(32, 4)
    copied = copy.deepcopy(model).eval()
    assert torch.equal(copied(x), model.eval()(x))
    penalty.remove()
    copied.load_state_dict(model.state_dict())
    assert torch.equal(copied(x), model(x))
    modenorm.prune_modes(copied, [x])
    restored = pickle.loads(pickle.dumps(copied))
    assert torch.equal(restored(x), copied(x))


@GATES
def test_checkpointing(gate):
    """One forward is right, others in evaluation don't disturb it, and two are refused."""
    found = []
    for often in (False, True):
        (model, penalty), x = switched(gate), torch.randn(32, 4)
        torch.manual_seed(1)
        body, head = model[:2], model[2]

        def forward(x, body=body, head=head, often=often):
            y = checkpoint(body, x, use_reentrant=False) if often else body(x)
            return head(y).square().sum()

        model.forward = forward
        loss = model(x)
        model.eval()
        copy.deepcopy(model)(x)
        model(x)
        model.train()
        loss.backward()
        found.append([penalty.log_odds.grad, *(p.grad for p in model.parameters())])
    for plain, repeated in zip(*found, strict=True):
        assert_close(repeated, plain, 1e-5)
    model.zero_grad()
    losses = model(x), model(x)
    with pytest.raises(RuntimeError, match="which switches it had is not known"):
        sum(losses).backward()
    del losses
    model(x).backward()  # what was given up is no longer counted


def test_strength_may_be_another_tensor():
    (model, sparsity), x = switched(), torch.randn(8, 4)
    model(x)
    before = float(sparsity().detach())
    model(x)
    sparsity.strength = torch.tensor(1.0)
    assert float(sparsity().detach()) == pytest.approx(10 * before)


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
