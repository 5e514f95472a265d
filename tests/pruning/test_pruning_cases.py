"""Pruning of models, inputs and optimizers out of the ordinary: done right, left, or refused."""

import copy

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

from modenorm import (
    ModeGroupNorm,
    ModeNorm1d,
    ModeNorm2d,
    ModeSparsity,
    match_modes,
    prune_modes,
    record_gates,
    replace_batchnorm,
    use_backend,
)
from modenorm.kernels.choice import FUSED, choose_path, without_compiling
from modenorm.pruning import layer_view
from modenorm.pruning.resizing import combine_modes

torch.set_num_threads(1)


def small_model(**options) -> nn.Sequential:
    torch.manual_seed(0)
    norm = ModeNorm2d(6, 4, **options)
    return nn.Sequential(nn.Conv2d(3, 6, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(96, 5))


def images(count: int = 32) -> torch.Tensor:
    return torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    def loss() -> float:
        optimizer.zero_grad()
        value = (model(x) - 1).square().mean()
        value.backward()
        return float(value.detach())

    optimizer.step(loss)


def test_adafactor_goes_on():
    """It keeps one number for each row and each column of a gate's weight."""
    model, x = small_model(), images()
    optimizer = torch.optim.Adafactor(model.parameters())
    train(model, optimizer, x)
    weight = model[1].gate.weight
    rows, columns = (optimizer.state[weight][key].clone() for key in ("row_var", "col_var"))
    shares = torch.full((4,), 0.25)
    combine_modes(model[1], [(0, 3), (2,)], shares, torch.zeros(2), optimizer)
    state = optimizer.state[weight]
    torch.testing.assert_close(state["row_var"], torch.stack([rows[0] + rows[3], rows[2]]))
    assert torch.equal(state["col_var"], columns)
    train(model, optimizer, x)
    assert all(p.isfinite().all() for p in model.parameters())


def assert_refused(model: nn.Module, message: str, x: torch.Tensor, **options) -> None:
    """The call is refused, and the model is as it was."""
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        prune_modes(model, [x], tolerance=0.5, **options)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_lbfgs_is_refused_after_a_step():
    model, x = small_model(), images()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    train(model, optimizer, x)
    assert_refused(model, "make a new LBFGS", x, optimizer=optimizer)

    fresh = torch.optim.LBFGS(model.parameters(), max_iter=2)
    report = prune_modes(model, [x], tolerance=100.0, optimizer=fresh)
    assert set(report.num_modes.values()) == {1}
    train(model, fresh, x)


def test_the_optimizer_of_another_model_is_refused():
    model, x = small_model(), images()
    another = torch.optim.SGD(small_model().parameters(), 0.1)
    assert_refused(model, "no parameter of this model", x, optimizer=another)
    of_a_part = torch.optim.SGD([next(model.parameters())], 0.1)
    prune_modes(model, [x], tolerance=0.5, optimizer=of_a_part)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_outputs_that_are_not_finite(value):
    model, x = small_model(), images()
    model(x)
    x[3, 0, 0, 0] = value
    assert_refused(model, "NaN or infinity", x)


@pytest.mark.parametrize(
    "gate", [None, nn.Linear, lambda c, k: nn.Sequential(nn.Tanh(), nn.Linear(c, k))]
)
def test_switches_have_to_go_first(gate):
    """Those in the bias of a linear gate, and those that other gates have as a hook."""
    model, x = small_model(gate=gate), images()
    sparsity = ModeSparsity(model, method="switch")
    model(x)
    assert_refused(model, r"switches on 1, one for each mode; call its remove\(\)", x)
    sparsity.remove()
    assert prune_modes(model, [x], tolerance=0.5).num_modes == {"1": 1}


def test_other_hooks_of_a_gate_stay():
    model, x, seen = small_model(gate=nn.Linear), images(), []
    model[1].gate.register_forward_hook(lambda gate, args, logits: seen.append(logits.shape[1]))
    prune_modes(model, [x], tolerance=100.0)
    model(x)
    assert seen[-1] == 1


@pytest.mark.parametrize("batchnorm", [False, True], ids=["modes", "batchnorm"])
def test_a_wrapped_model_is_refused(batchnorm, process_group):
    """Its reducer would go on to expect gradients of the old shapes."""
    model, x = nn.parallel.DistributedDataParallel(small_model()), images()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), x)
    for wrapped in (model, nn.Sequential(model)):
        message = "DistributedDataParallel.*prune the module inside, then wrap it again"
        assert_refused(wrapped, message, x, batchnorm=batchnorm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prune_modes(model.module, [x], tolerance=100.0, optimizer=optimizer)
    train(nn.parallel.DistributedDataParallel(model.module), optimizer, x)


def test_a_shared_gate_is_left():
    gate = nn.Linear(6, 4)
    model = small_model(gate=gate)
    model.insert(2, ModeNorm2d(6, 4, gate=gate))
    model(images())
    report = prune_modes(model, [images()], tolerance=0.5)
    assert report.num_modes == {"1": 4, "2": 4}
    assert "another layer has the same gate" in str(report)


def by_weight_norm(layer: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(layer.gate)


def by_spectral_norm(layer: nn.Module) -> None:
    nn.utils.parametrizations.spectral_norm(layer.gate)


def by_a_mask(layer: nn.Module) -> None:
    nn.utils.prune.random_unstructured(layer.gate, "weight", 0.3)


@pytest.mark.parametrize("compute", [by_weight_norm, by_spectral_norm, by_a_mask])
def test_rows_that_are_computed_from_other_parameters_are_left(compute):
    model, x = small_model(), images()
    compute(model[1])
    model(x)
    before = model.eval()(x)
    (layer,) = prune_modes(model, [x], tolerance=0.5).layers
    assert (layer.after, layer.words()) == (4, layer.note)
    assert "computed from other parameters" in layer.note
    torch.testing.assert_close(model(x), before)
    fewer = {"1.running_mean": torch.zeros(2, 6)}
    with pytest.raises(ValueError, match=r"computed from other parameters.*remove"):
        match_modes(model, fewer)
    torch.testing.assert_close(model(x), before)


@pytest.mark.parametrize("options", [{"per_mode_affine": True}, {"track_running_stats": False}])
def test_a_shared_gate_matches_a_state(options):
    saved, model = (
        nn.Sequential(*(ModeNorm2d(3, k, gate=gate, **options) for _ in range(2)))
        for k, gate in ((4, nn.Linear(3, 4)), (2, nn.Linear(3, 2)))
    )
    assert match_modes(model, saved.state_dict()) == {"0": (2, 4), "1": (2, 4)}
    model.load_state_dict(saved.state_dict())
    assert model[0].gate is model[1].gate
    assert torch.equal(model(images()), saved(images()))


def test_a_layer_that_cannot_match_a_state_leaves_the_others_as_they_were():
    def build(modes: int) -> nn.Sequential:
        gate = nn.Linear(3, modes, bias=False)
        return nn.Sequential(ModeNorm2d(3, modes), ModeNorm2d(3, modes, gate=gate)).eval()

    model, x = build(4), images()
    before = model(x)
    with pytest.raises(ValueError, match="it must end in a linear layer with a bias"):
        match_modes(model, build(2).state_dict())
    assert model[0].num_modes == 4
    assert torch.equal(model(x), before)


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_a_lazy_layer_cannot_match_a_state_yet():
    model = nn.Sequential(nn.LazyBatchNorm2d())
    replace_batchnorm(model, 4)
    with pytest.raises(ValueError, match="lazy; run one batch"):
        match_modes(model, nn.Sequential(ModeNorm2d(3)).state_dict())
    model(images())
    assert match_modes(model, nn.Sequential(ModeNorm2d(3)).state_dict()) == {"0": (4, 2)}


def in_turns(count: int) -> torch.Tensor:
    """Samples of two kinds, every second one of the same."""
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(count // 2)
    return torch.stack([5 * sign, 2 * sign - 1], 1) + 0.7 * torch.randn(count, 2)


def telling(x: torch.Tensor, modes: int = 2) -> nn.Sequential:
    """A layer with one mode for each sign of the first channel; further ones receive nothing."""
    layer = ModeNorm1d(2, modes)
    with torch.no_grad():
        layer.gate.weight.zero_()[:2, 0] = torch.tensor([20.0, -20.0])
        layer.gate.bias.copy_(torch.tensor([0.0, 0.0, *[-1e4] * (modes - 2)]))
        for k, chosen in enumerate((x[:, 0] > 0, x[:, 0] <= 0)):
            layer.running_mean[k] = x[chosen].mean(0)
    return nn.Sequential(layer).double().eval()


def test_many_samples_in_turns_keep_both_modes():
    torch.manual_seed(0)
    x = in_turns(2050)  # some of them decide, and not those of one kind
    model, state = telling(x), torch.get_rng_state()
    before = model(x)
    report = prune_modes(model, x.split(500), tolerance=0.05)
    assert torch.equal(torch.get_rng_state(), state)
    assert report.num_modes == {"0": 2}
    assert torch.equal(model(x), before)
    assert report.layers[0].shares == pytest.approx((0.5, 0.5), abs=1e-9)


def test_shares_are_those_of_all_samples():
    torch.manual_seed(0)
    x = in_turns(4000)
    x[3000:] = x[0]
    report = prune_modes(telling(x), [x], tolerance=0)
    assert report.layers[0].shares == pytest.approx((0.625, 0.375), abs=1e-9)
    layer = ModeGroupNorm(2, 3).double()
    with record_gates(layer) as gates:
        layer(x)
    expected = gates[""][0].mean((0, 1)).tolist()
    assert prune_modes(layer, [x], tolerance=0).layers[0].shares == pytest.approx(expected)


def test_a_mode_of_few_among_many_samples_makes_a_difference():
    """Others make none, also in a sum that is rounded otherwise."""
    torch.manual_seed(0)
    x = in_turns(2)[:1].repeat(20_000, 1)
    x[12_345] *= -1
    model = telling(x, modes=5)
    before = model(x)
    report = prune_modes(model, x.split(5000), tolerance=0)
    assert report.layers[0].removed == (2, 3, 4)
    torch.testing.assert_close(model(x), before)


def test_equal_modes_merge_without_any_tolerance():
    """What merging them changes is rounding: that of the search, and that of the new bias."""
    torch.manual_seed(0)
    layer, x = ModeNorm1d(6, 3), torch.randn(200, 6)
    for tensor in layer.state_dict().values():
        if tensor.shape[:1] == (3,):
            tensor.uniform_(0.5, 2)
            tensor[1] = tensor[0]
    before = layer.eval()(x)
    report = prune_modes(layer, [x], tolerance=0)
    assert report.layers[0].merged == ((0, 1),)
    assert report.change <= 1e-6
    torch.testing.assert_close(layer(x), before)


def test_a_change_that_no_layer_sees_is_measured(monkeypatch):
    """Samples that decide may be all alike; the model is compared on every one."""
    monkeypatch.setattr(layer_view, "_chosen", lambda usage: torch.arange(0, len(usage), 2))
    torch.manual_seed(0)
    x = in_turns(100)
    model = telling(x)
    for tolerance in (0.0, 0.05):
        report = prune_modes(model, [x], tolerance)
        assert (report.num_modes, report.change) == ({"0": 2}, 0.0)


@pytest.mark.filterwarnings("error")
def test_empty_batches_count_for_nothing():
    model, x = small_model(), images()
    model(x)
    other = copy.deepcopy(model)
    report = prune_modes(model, [x[:0], x, x[:0]], tolerance=0.5)
    assert report.num_samples == len(x)
    assert report == prune_modes(other, [x], tolerance=0.5)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "adagrad": torch.optim.Adagrad,
    "adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_goes_on_with_a_batch_norms_parameters(make):
    """Those of a layer with parameters per mode are others than before."""
    model, x = small_model(per_mode_affine=True), images()
    optimizer = make(model.parameters())
    train(model, optimizer, x)
    prune_modes(model, [x], tolerance=0.5, optimizer=optimizer, batchnorm=True)
    assert type(model[1]) is nn.BatchNorm2d
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, x)
    for name in ("1.weight", "1.bias"):
        assert not torch.equal(model.get_parameter(name), before[name])


def test_the_state_of_a_batch_norms_parameters():
    model, x = small_model(per_mode_affine=True), images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, x)
    momentum = optimizer.state[model[1].bias]["momentum_buffer"].sum(0)
    prune_modes(model, [x], tolerance=0.5, optimizer=optimizer, batchnorm=True)
    torch.testing.assert_close(optimizer.state[model[1].bias]["momentum_buffer"], momentum)


class Called(nn.Module):
    """A layer with one mode, called with what a batch norm doesn't take."""

    def __init__(self, **arguments: torch.Tensor | None) -> None:
        super().__init__()
        self.norm = ModeNorm2d(3, 1)
        self.arguments = arguments

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x, **self.arguments)


@pytest.mark.parametrize(
    "arguments", [{"gates": torch.ones(32, 1)}, {"mask": torch.ones(32, 6, 6)}, {"gates": None}]
)
def test_layers_that_a_batch_norm_could_not_stand_in_for(arguments):
    model = Called(**arguments)
    before = model.eval()(images())
    report = prune_modes(model, [images()], batchnorm=True)
    assert type(model.norm) is ModeNorm2d
    assert not report.layers[0].batchnorm
    assert torch.equal(model(images()), before)


def test_a_layer_by_itself_stays_a_mode_norm():
    layer, x = ModeNorm2d(3, 2), images()
    layer(x)
    report = prune_modes(layer, [x], tolerance=0.5, batchnorm=True)
    assert report.num_modes == {"": 1}
    assert "batch norm" not in str(report)


def test_trials_compile_no_kernels():
    """Plain operators compare models on a GPU, unless another path is forced."""
    with without_compiling():
        assert choose_path(images()) == "eager"
    with use_backend("reference"), without_compiling():
        assert choose_path(images()) == "reference"
    assert choose_path(images()) in FUSED


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pruning_on_a_gpu():
    """As on a CPU, and without a launch for a number of modes that is only tried."""
    from modenorm.kernels.gpu import mode_norm_plan

    found = []
    for device in ("cpu", "cuda"):
        model, x = small_model().to(device), images(200).to(device)
        for _ in range(50):
            model(x)
        launched = set(mode_norm_plan._plans)
        found.append(prune_modes(model, [x], 0.05))
        assert set(mode_norm_plan._plans) == launched
    cpu, gpu = found
    assert [layer.after for layer in cpu.layers] == [layer.after for layer in gpu.layers]
    assert gpu.change == pytest.approx(cpu.change, abs=1e-4)
