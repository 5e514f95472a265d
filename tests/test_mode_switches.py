"""Switches on modes: as they are drawn, in copies, in parts of a model, and once removed."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import modenorm
from compare import assert_close
from modenorm import ModeNorm1d, ModeSparsity
from modenorm.kernels.switches import _plain, draw_for_biases, draw_switches, expected_open
from test_sparsity import small_model

torch.set_num_threads(1)


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


def test_a_model_with_switches_says_why_it_cannot_be_pickled():
    model = small_model()
    sparsity = ModeSparsity(model, method="switch")
    with pytest.raises(pickle.PicklingError, match=r"state dicts, or call remove\(\)"):
        torch.save(model, io.BytesIO())
    sparsity.remove()
    torch.save(model, io.BytesIO())


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
    """One forward is right, others without a graph don't disturb it, and two are refused."""
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
        with torch.no_grad():
            model(x)
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


@pytest.mark.parametrize("sizes", [(3,), (8, 8), (3,) * 8, (2, 5, 1), (64,) * 20], ids=str)
def test_one_node_in_c(sizes):
    """Values and all gradients, beside operators in float64."""
    torch.manual_seed(0)
    biases = [torch.randn(size, requires_grad=True) for size in sizes]
    log_odds = (3 * torch.randn(sum(sizes))).requires_grad_()
    drawn = draw_for_biases(log_odds, torch.tensor(0.3), torch.tensor([5, 0]), biases)
    if drawn is None:
        pytest.skip("there is no C compiler")
    noise = drawn.changes.grad_fn.saved_tensors[2]
    given = [t.detach().double().requires_grad_() for t in (log_odds, *biases)]
    cost, changes, *used = _plain(given[0], torch.tensor(0.3).double(), noise.double(), *given[1:])
    upstream = [torch.randn_like(t) for t in (drawn.cost, *drawn.used)]
    ours = torch.autograd.grad((drawn.cost, *drawn.used), (log_odds, *biases), upstream)
    wanted = torch.autograd.grad((cost, *used), given, [t.double() for t in upstream])
    found = (drawn.cost, drawn.changes, *drawn.used, *ours)
    for ours, plain in zip(found, (cost, changes, *used, *wanted), strict=True):
        assert_close(ours.detach(), plain.detach(), 1e-5)
