"""Switches of all gates, drawn into their biases by one launch, and its backward."""

import copy

import pytest
import torch
from test_fused import assert_close, layer_for

import modenorm
from modenorm import ModeSparsity
from modenorm.kernels import switches
from modenorm.kernels.choice import runs_triton
from modenorm.kernels.several import together

SIZES = [(3,), (8, 8), (3,) * 8, (2, 5, 1), (64,) * 20]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def drawn_for(sizes, device, spread=3.0):
    """Inputs of a draw, on leaves that learn."""
    numbers = torch.randn(sum(sizes)) * spread
    biases = [torch.randn(size, device=device, requires_grad=True) for size in sizes]
    log_odds = numbers.to(device).requires_grad_()
    strength = torch.tensor(0.3, device=device)
    return log_odds, strength, torch.tensor([5, 0], device=device), biases


def noise_of(drawn):
    _, _, noise, *_ = drawn.changes.grad_fn.saved_tensors
    return noise


@pytest.fixture
def own_noise(monkeypatch):
    """As while a graph is captured."""
    monkeypatch.setattr(switches, "_makes_own_noise", lambda _: True)


def results(outputs, upstream, inputs):
    pairs = [(o, d) for o, d in zip(outputs, upstream, strict=True) if d is not None]
    used, pulled = ([*side] for side in zip(*pairs, strict=True))
    found = torch.autograd.grad(used, inputs, pulled)
    return [*outputs, *found]


def compare(given, upstream):
    log_odds, strength, random, biases = given
    assert runs_triton(log_odds)
    ours = switches.draw_for_biases(log_odds, strength, random, biases)
    doubles = [t.detach().double() for t in (log_odds, strength, noise_of(ours), *biases)]
    wanted = [doubles[0].requires_grad_(), *(t.requires_grad_() for t in doubles[3:])]
    plain = switches._plain(*doubles)
    doubled = [None if d is None else d.double() for d in upstream]
    wanted = results(plain, doubled, wanted)
    found = results((ours.cost, ours.changes, *ours.used), upstream, [log_odds, *biases])
    for place, (value, other) in enumerate(zip(found, wanted, strict=True)):
        assert value.dtype == torch.float32
        # switches that are all but closed have large slopes, and rounding errors to match
        slopes = place == len(found) - len(biases) - 1
        assert_close(value, other, 3e-4 if slopes else 3e-6, "")


@pytest.mark.parametrize("by_changes", [False, True], ids=["biases", "changes"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values_and_gradients(device, sizes, by_changes):
    given = drawn_for(sizes, device)
    upstream = [torch.randn(size, device=device) for size in ((), sum(sizes), *sizes)]
    if not by_changes:  # which only gates without a bias of their own need
        upstream[1] = None
    compare(given, upstream)


@pytest.mark.parametrize("missing", ["cost", "a layer"])
def test_parts_of_a_loss(device, missing):
    upstream = [torch.randn(size, device=device) for size in ((), 9, 3, 3, 3)]
    upstream[1] = None
    upstream[0 if missing == "cost" else 3] = None
    log_odds, *given, biases = drawn_for((3, 3, 3), device)
    if missing == "cost":
        return compare((log_odds, *given, biases), upstream)
    ours = switches.draw_for_biases(log_odds, *given, biases)
    plain = switches._plain(log_odds, given[0], noise_of(ours), *biases)
    found = [
        results(outputs, upstream, [log_odds, biases[0], biases[2]])
        for outputs in ((ours.cost, ours.changes, *ours.used), plain)
    ]
    for value, other in zip(*found, strict=True):
        assert_close(value, other, 3e-6, "", floor=1e-6)


@pytest.mark.parametrize("first", ["cost", "outputs"])
def test_one_loss_after_the_other(device, first):
    """The graph may be gone from the first one on."""
    log_odds, *given, biases = drawn_for((4, 4), device)
    ours = switches.draw_for_biases(log_odds, *given, biases)
    (both,) = torch.autograd.grad(
        ours.cost + sum(u.sum() for u in ours.used), log_odds, retain_graph=True
    )
    losses = [ours.cost, sum(u.sum() for u in ours.used)]
    for loss in losses if first == "cost" else losses[::-1]:
        loss.backward()
    assert_close(log_odds.grad, both, 1e-6, "")


def test_second_derivatives(device):
    log_odds, *given, biases = drawn_for((3, 3), device, spread=0.5)
    ours = switches.draw_for_biases(log_odds, *given, biases)
    found = []
    for cost, _, *used in (
        (ours.cost, None, *ours.used),
        switches._plain(log_odds, given[0], noise_of(ours).clone(), *biases),
    ):
        loss = 5 * cost + sum(u.square().sum() for u in used)
        (slopes,) = torch.autograd.grad(loss, log_odds, create_graph=True)
        found.append(torch.autograd.grad(slopes.square().sum(), [log_odds, *biases]))
    for ours, plain in zip(*found, strict=True):
        assert_close(ours, plain, 1e-5, "")


def test_own_noise_is_uniform_new_and_repeatable(device, own_noise):
    sizes = (64,) * 40
    log_odds, strength, random, biases = drawn_for(sizes, device)
    again = random.clone()
    draws = [
        noise_of(switches.draw_for_biases(log_odds, strength, random, biases)) for _ in range(3)
    ]
    assert random.tolist() == [5, 3]
    noise = torch.cat(draws).double().cpu()
    assert 0 <= float(noise.min()) < float(noise.max()) < 1
    # 7680 numbers: 240 in each of 32 bins expected; χ² of 31 degrees is above 70 once in 14 000
    counts = torch.histc(noise, 32, 0, 1)
    assert float(((counts - 240) ** 2 / 240).sum()) < 70
    assert noise.unique().numel() > 7600
    lagged = torch.corrcoef(torch.stack([noise[:-1], noise[1:]]))[0, 1]
    assert abs(float(lagged)) < 0.05  # four standard errors
    same = noise_of(switches.draw_for_biases(log_odds, strength, again, biases))
    assert torch.equal(same, draws[0])
    assert not torch.equal(draws[0], draws[1])
    other = torch.tensor([6, 0], device=device)
    assert not torch.equal(
        noise_of(switches.draw_for_biases(log_odds, strength, other, biases)), same
    )


@pytest.mark.parametrize("where", ["shifted", "strided"])
def test_arrays_that_lie_elsewhere(device, where):
    log_odds, strength, random, _ = drawn_for((4, 4), device)
    numbers = torch.randn(2, 9, device=device)
    biases = [row[1:5] if where == "shifted" else row[::2][:4] for row in numbers]
    biases = [bias.requires_grad_() for bias in biases]
    upstream = [torch.randn(size, device=device) for size in ((), 4, 4)]
    compare((log_odds, strength, random, biases), [upstream[0], None, *upstream[1:]])


def test_other_types_are_left_to_operators(device):
    log_odds, strength, random, biases = drawn_for((4, 4), device)
    halves = [bias.bfloat16() for bias in biases]
    assert switches.draw_for_biases(log_odds, strength, random, halves) is None
    with modenorm.use_backend("eager"):
        assert switches.draw_for_biases(log_odds, strength, random, biases) is None
    assert random.tolist() == [5, 0]


def test_many_or_uneven_arrays_are_brought_together():
    arrays = [torch.randn(3) for _ in range(8)]
    assert together(arrays) is arrays
    (one,) = together([*arrays, torch.randn(3)])
    assert one.shape == (27,)
    (one,) = together([torch.randn(3), torch.randn(2)])
    assert one.shape == (5,)


def model_of(device):
    first, second, third = (layer_for((5, c, 3, 3), 4, device) for c in (6, 8, 4))
    conv = torch.nn.Conv2d
    return torch.nn.Sequential(first, conv(6, 8, 1), second, conv(8, 4, 1), third).to(device)


@pytest.mark.parametrize("how", ["eager", "compiled", "recomputed", "copied"])
def test_a_training_step(device, how):
    """Gradients of all parameters, by the switches' cost beside the loss of the output."""
    model = model_of(device)
    x, upstream = torch.randn(5, 6, 3, 3, device=device), torch.randn(5, 4, 3, 3, device=device)
    twin, found = copy.deepcopy(model), []
    for module, backend in ((model, "auto"), (twin, "eager")):
        penalty = ModeSparsity(module, 0.5, "switch")
        torch.manual_seed(1)  # the same switches
        with modenorm.use_backend(backend):
            if how == "recomputed":
                y = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)
            else:
                module = copy.deepcopy(module) if how == "copied" else module
                compiled = how == "compiled" and backend == "auto"
                call = torch.compile(module, fullgraph=True, backend="aot_eager")
                y = (call if compiled else module)(x)
            loss = (y * upstream).sum() + 3 * penalty()
            learnt = [penalty.log_odds, *module.parameters()]
            found.append([loss, *torch.autograd.grad(loss, learnt)])
    for ours, plain in zip(*found, strict=True):
        assert_close(ours, plain, 1e-4, "", floor=1e-4)


def test_a_captured_step_draws_anew(device):
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    model, x = model_of(device), torch.randn(5, 6, 3, 3, device=device)
    penalty = ModeSparsity(model, 0.5, "switch")
    learnt = [penalty.log_odds, *model.parameters()]

    def step():
        loss = model(x).square().sum() + penalty()
        return penalty._switches.draw.changes, *torch.autograd.grad(loss, learnt)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        changes, gradient, *_ = step()
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append((changes.clone(), gradient.clone()))
    assert int(penalty.random[1]) == 3  # what ran outside of the graph had torch's noise
    assert not torch.equal(seen[0][0], seen[1][0])
    for _, slopes in seen:
        assert bool(slopes.isfinite().all())
