"""Models with batch norm into models with mode norm and back: same numbers, nothing lost."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import fusion, parametrizations, prune

import modenorm
from compare import assert_close
from modenorm import replace_batchnorm, to_batchnorm
from modenorm.substitutes import ModeNormAct2d, ModeNormNd

# Lazy modules say that they are new; quantization and scripting that they are old.
LAZY = pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
OLD = pytest.mark.filterwarnings("ignore::DeprecationWarning")

INPUTS = {1: (6, 3, 4), 2: (6, 3, 4, 4), 3: (6, 3, 2, 4, 4)}
BATCHNORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
MODENORMS = {1: modenorm.ModeNorm1d, 2: modenorm.ModeNorm2d, 3: modenorm.ModeNorm3d}


def trained(norm):
    """A norm in the middle of training: no parameter or buffer at its start."""
    with torch.no_grad():
        for tensor in (norm.weight, norm.bias, norm.running_mean):
            if tensor is not None:
                tensor.normal_()
        if norm.running_var is not None:
            norm.running_var.uniform_(0.5, 2)
            norm.num_batches_tracked.fill_(7)
    return norm


def small_model(norm=nn.BatchNorm2d, **options):
    convs = nn.Conv2d(3, 4, 3, bias=False), nn.Conv2d(4, 5, 3, bias=False)
    layers = [convs[0], norm(4, **options), nn.ReLU(), convs[1]]
    model = nn.Sequential(*layers, norm(5, **options))
    trained(model[1])
    trained(model[4])
    return model


def images(*shape):
    return torch.randn(shape or (6, 3, 8, 8))


# What is taken over.


@pytest.mark.parametrize("per_mode", [False, True], ids=["shared", "per_mode"])
@pytest.mark.parametrize("num_modes", [1, 2, 5])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_evaluation_is_the_same_as_before(rank, num_modes, per_mode):
    model = nn.Sequential(CONVS[rank](3, 4, 1), trained(BATCHNORMS[rank](4))).double().eval()
    x = torch.randn(INPUTS[rank]).double()
    expected = model(x)
    replaced = replace_batchnorm(model, num_modes, per_mode_affine=per_mode)
    assert list(replaced) == ["1"]
    assert replaced["1"] is model[1]
    assert type(model[1]) is MODENORMS[rank]
    assert_close(model(x), expected, 1e-14)


@pytest.mark.parametrize("momentum", [0.03, None])
@pytest.mark.parametrize("training", [True, False])
def test_settings_and_state(training, momentum):
    norm = trained(nn.BatchNorm2d(4, eps=1e-3, momentum=momentum)).train(training)
    norm.weight.requires_grad_(False)
    model = nn.Sequential(norm).double()
    model.training = training
    with pytest.warns(UserWarning, match="frozen.*: 0"):
        layer = replace_batchnorm(model, 3)["0"]
    assert (layer.eps, layer.momentum, layer.num_modes) == (1e-3, momentum, 3)
    assert layer.training == training
    assert layer.gate.training == training
    assert layer.weight is norm.weight
    assert layer.bias is norm.bias
    assert not layer.weight.requires_grad
    assert layer.num_batches_tracked == 7
    assert layer.gate.weight.dtype == layer.running_mean.dtype == torch.float64
    assert torch.equal(layer.running_mean, norm.running_mean.expand(3, 4))
    assert torch.equal(layer.running_var, norm.running_var.expand(3, 4))


def test_a_mode_counts_the_batches_of_the_batch_norm():
    """With equal averages the next batch weighs as much as any of the seven before."""
    model = nn.Sequential(trained(nn.BatchNorm2d(4, momentum=None)))
    mean = model[0].running_mean.clone()
    layer = replace_batchnorm(model, 2, running_update="usage")["0"]
    x = images(8, 4, 3, 3)
    layer(x, gates=torch.full((8, 2), 0.5))
    expected = (7 * mean + x.mean((0, 2, 3))) / 8
    assert_close(layer.running_mean, expected.expand(2, 4), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types(dtype):
    model = small_model().to(dtype).eval()
    x = images().to(dtype)
    expected = model(x)
    replace_batchnorm(model)
    assert model[1].weight.dtype == model[1].gate.weight.dtype == dtype
    assert model[1].running_mean.dtype == torch.float32
    assert_close(model(x), expected, 4 * torch.finfo(dtype).eps)


def test_on_the_meta_device():
    with torch.device("meta"):
        model = small_model()
    replace_batchnorm(model)
    assert all(t.is_meta for t in model.state_dict().values())


@pytest.mark.parametrize(
    "options",
    [{"affine": False}, {"track_running_stats": False}, {"affine": False, "momentum": None}],
    ids=str,
)
def test_norms_without_parameters_or_statistics(options):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), trained(nn.BatchNorm2d(4, **options))).double()
    x = images().double()
    expected = model.eval()(x)
    layer = replace_batchnorm(model, 1)["1"]
    assert_close(model(x), expected, 1e-13)
    assert (layer.weight is None) == (not options.get("affine", True))
    assert (layer.running_mean is None) == (not options.get("track_running_stats", True))


def test_a_norm_without_tensors_goes_where_the_model_is():
    norm = nn.BatchNorm2d(4, affine=False, track_running_stats=False)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), norm).double()
    assert replace_batchnorm(model)["1"].gate.weight.dtype == torch.float64


def test_a_norm_without_bias():
    norm = trained(nn.BatchNorm2d(4))
    norm.register_parameter("bias", None)
    model, x = nn.Sequential(norm).eval(), images(3, 4, 5, 5)
    expected = model(x)
    layer = replace_batchnorm(model)["0"]
    assert layer.bias is None
    assert_close(model(x), expected, 1e-6)
    assert to_batchnorm(model)["0"].bias is None
    assert_close(model(x), expected, 1e-6)


def test_training_with_one_mode_is_batch_norm():
    """Output, gradients and the running mean agree; the variance is the biased one."""
    model, x = small_model().double(), images().double()
    other = copy.deepcopy(model)
    replace_batchnorm(other, 1)
    upstream = torch.randn(6, 5, 4, 4).double()
    for m in (model, other):
        m(x).backward(upstream)
    for name, parameter in model.named_parameters():
        assert_close(other.get_parameter(name).grad, parameter.grad, 1e-10, name)
    assert_close(other[1].running_mean[0], model[1].running_mean, 1e-12)


def test_shared_modules_stay_shared():
    norm = trained(nn.BatchNorm2d(3))
    model = nn.ModuleDict({"a": nn.Sequential(norm), "b": nn.Sequential(nn.ReLU(), norm)})
    replaced = replace_batchnorm(model)
    assert list(replaced) == ["a.0"]
    assert model["a"][0] is model["b"][1] is replaced["a.0"]


def test_shared_modules_are_selected_by_any_name():
    norm = nn.BatchNorm2d(3)
    model = nn.ModuleDict({"a": nn.Sequential(norm), "b": nn.Sequential(norm)})
    replaced = replace_batchnorm(model, where="b.*")
    assert model["a"][0] is model["b"][0] is replaced["a.0"]


def test_the_root_can_be_a_batch_norm():
    norm, x = trained(nn.BatchNorm2d(3)).eval(), images()
    layer = replace_batchnorm(norm)[""]
    assert_close(layer(x), norm(x), 1e-6)
    assert_close(to_batchnorm(layer)[""](x), norm(x), 1e-6)


def test_hooks_are_carried_over_and_can_be_removed():
    model, seen = small_model(), []
    handle = model[1].register_forward_hook(lambda module, args, y: seen.append(type(module)))
    model[1].register_forward_pre_hook(lambda module, args: seen.append("before"))
    replace_batchnorm(model)
    model(images())
    assert seen == ["before", modenorm.ModeNorm2d]
    handle.remove()


def test_sync_batch_norm_takes_any_rank():
    norm = trained(nn.SyncBatchNorm(3)).eval()
    layer = replace_batchnorm(nn.Sequential(norm).eval())["0"]
    assert type(layer) is ModeNormNd
    for shape in ((6, 3), *INPUTS.values()):
        x = torch.randn(shape)
        assert_close(layer(x), norm(x), 1e-6)
    model = nn.Sequential(layer)
    assert type(to_batchnorm(model)["0"]) is nn.SyncBatchNorm
    assert_close(model(x), norm(x), 1e-6)


# Lazy norms.


def lazy_model(**options):
    return nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(eps=1e-3, **options), nn.ReLU())


@LAZY
@pytest.mark.parametrize("per_mode", [False, True], ids=["shared", "per_mode"])
@pytest.mark.parametrize("options", [{}, {"affine": False, "track_running_stats": False}], ids=str)
def test_lazy_norms(options, per_mode):
    model = lazy_model(**options)
    weight = model[1].weight
    layer = replace_batchnorm(model, 3, per_mode_affine=per_mode)["1"]
    y = model(images())
    assert type(layer) is modenorm.ModeNorm2d
    assert (layer.num_features, layer.num_modes, layer.eps) == (4, 3, 1e-3)
    assert layer.gate.weight.shape == (3, 4)
    if not options:
        assert layer.weight.shape == ((3, 4) if per_mode else (4,))
        assert per_mode or layer.weight is weight
        assert layer.num_batches_tracked == 1
    y.sum().backward()


@LAZY
def test_lazy_norms_load_a_state():
    source = lazy_model()
    source(images())
    expected = copy.deepcopy(source).eval()
    replace_batchnorm(expected, 2)
    for state in (source.state_dict(), expected.state_dict()):
        model = lazy_model()
        replace_batchnorm(model, 2)
        model.load_state_dict(state)
        x = images()
        assert_close(model.eval()(x), expected(x), 1e-6)
        assert type(model[1]) is modenorm.ModeNorm2d


@LAZY
def test_lazy_norms_need_a_batch_before_an_optimizer():
    model, optimizer = lazy_model(), torch.optim.SGD(nn.Linear(1, 1).parameters())
    with pytest.raises(ValueError, match="run one batch"):
        replace_batchnorm(model, optimizer=optimizer)


# Classes that do more.


class ScaledBatchNorm2d(nn.BatchNorm2d):
    """A user's own: batch norm times two, which no converter can know."""

    def forward(self, x):
        return 2 * super().forward(x)


def timm_class():
    """A class with timm's name and behaviour, where timm itself can't be imported."""

    class BatchNormAct2d(nn.BatchNorm2d):
        def __init__(self, num_features, eps=1e-5, momentum=0.1, affine=True,
                     track_running_stats=True, act=None, device=None, dtype=None):  # fmt: skip
            super().__init__(
                num_features, eps, momentum, affine, track_running_stats, device, dtype
            )
            self.drop, self.act = nn.Dropout(0.5), nn.SiLU() if act is None else act

        def forward(self, x):
            return self.act(self.drop(super().forward(x)))

    BatchNormAct2d.__module__ = "timm.layers.norm_act"
    return BatchNormAct2d


def test_timm_keeps_dropout_and_activation():
    model, x = small_model(timm_class()).double().eval(), images().double()
    expected, keys = model(x), set(model.state_dict())
    replaced = replace_batchnorm(model)
    assert {type(layer) for layer in replaced.values()} == {ModeNormAct2d}
    assert_close(model(x), expected, 1e-12)
    assert {key for key in model.state_dict() if ".gate." not in key} == keys
    assert (model.train()[1](images(6, 4, 5, 5).double()) == 0).double().mean() > 0.3


def test_timm_comes_back():
    kind = timm_class()
    model, x = small_model(kind).double().eval(), images().double()
    expected = model(x)
    replace_batchnorm(model, 1)
    assert {type(norm) for norm in to_batchnorm(model).values()} == {kind}
    assert_close(model(x), expected, 1e-12)


def test_unknown_subclasses_are_refused_by_name():
    model = nn.Sequential(nn.BatchNorm2d(3), ScaledBatchNorm2d(3))
    with pytest.raises(ValueError, match=r"1 \(ScaledBatchNorm2d\).*subclasses="):
        replace_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm2d
    assert list(replace_batchnorm(model, where="0")) == ["0"]


def test_unknown_subclasses_with_a_replacement():
    class Twice(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm

        def forward(self, x):
            return 2 * self.norm(x)

    model, x = nn.Sequential(trained(ScaledBatchNorm2d(3))).eval(), images()
    expected = model(x)
    replace_batchnorm(model, subclasses={ScaledBatchNorm2d: lambda old, norm: Twice(norm)})
    assert_close(model(x), expected, 1e-6)


def test_parametrized_and_pruned_norms_are_refused():
    model = nn.Sequential(nn.BatchNorm2d(3))
    parametrizations.weight_norm(model[0], "weight", dim=0)
    with pytest.raises(ValueError, match="ParametrizedBatchNorm2d"):
        replace_batchnorm(model)
    model = nn.Sequential(nn.BatchNorm2d(3))
    prune.identity(model[0], "weight")
    with pytest.raises(ValueError, match=r"weight_mask, weight_orig.*pruned"):
        replace_batchnorm(model)


def test_a_forward_on_the_instance_is_refused():
    model = nn.Sequential(nn.BatchNorm2d(3))
    model[0].forward = lambda x: x
    with pytest.raises(ValueError, match="0 has its own forward"):
        replace_batchnorm(model)


class FrozenBatchNorm2d(nn.Module):
    def __init__(self, num_features):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(num_features))


def test_frozen_batch_norm_classes_are_left_and_mentioned():
    model = nn.Sequential(nn.BatchNorm2d(3), FrozenBatchNorm2d(3))
    with pytest.warns(UserWarning, match=r"left as they are.*1 \(FrozenBatchNorm2d\)"):
        assert list(replace_batchnorm(model)) == ["0"]
    model = nn.Sequential(nn.BatchNorm2d(3), FrozenBatchNorm2d(3))
    assert list(replace_batchnorm(model, where="0")) == ["0"]
    with pytest.raises(ValueError, match="1 FrozenBatchNorm2d"):
        replace_batchnorm(nn.Sequential(FrozenBatchNorm2d(3)))


# Which norms, how many modes.


def nested_model():
    def block():
        return nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3))

    return nn.ModuleDict({"stem": nn.BatchNorm2d(3), "layer1": block(), "layer2": block()})


SELECTIONS = {
    "pattern": ("layer1.*", ["layer1.0", "layer1.2"]),
    "patterns": (["stem", "*.0"], ["stem", "layer1.0", "layer2.0"]),
    "first": ("first", ["stem"]),
    "predicate": (lambda name, norm: name.endswith("2") and norm.affine, ["layer1.2", "layer2.2"]),
}


@pytest.mark.parametrize(("where", "names"), SELECTIONS.values(), ids=SELECTIONS)
def test_where(where, names):
    model = nested_model()
    assert list(replace_batchnorm(model, where=where)) == names
    found = [n for n, m in model.named_modules() if isinstance(m, modenorm.ModeNorm2d)]
    assert found == names


def test_modes_by_pattern():
    replaced = replace_batchnorm(nested_model(), {"layer2.0": 8, "layer*": 4})
    modes = {name: layer.num_modes for name, layer in replaced.items()}
    assert modes == {"layer1.0": 4, "layer1.2": 4, "layer2.0": 8, "layer2.2": 4}


BAD = {
    "nowhere": ({"where": "layer9.*"}, r"'layer9.\*'.*matches no batch norm.*stem, layer1.0"),
    "container": ({"where": "layer1"}, r"use 'layer1\.\*' for what is inside"),
    "no patterns": ({"where": []}, "selects none of the 5 batch norms"),
    "predicate": ({"where": lambda name, norm: False}, "selects none of the 5"),
    "no pattern": ({"where": 3}, "where is 3; expected a name pattern"),
    "modes": ({"num_modes": 0}, "num_modes is 0; it must be an integer of at least 1"),
    "no modes": ({"num_modes": 2.0}, "num_modes is 2.0"),
    "modes of a pattern": ({"num_modes": {"*": True}}, "num_modes is True"),
    "modes nowhere": ({"num_modes": {"*": 2, "head.*": 4}}, r"num_modes has the pattern 'head.\*'"),
    "one gate": ({"gate": nn.Linear(3, 2)}, "gate is one Linear for 5 norms"),
    "gate": ({"gate": 3}, "stem can't become a mode norm: gate is 3"),
    "update": ({"running_update": "never"}, "stem can't become a mode norm.*never"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_bad_arguments_change_nothing(options, message):
    model = nested_model()
    with pytest.raises(ValueError, match=message):
        replace_batchnorm(model, **options)
    assert sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == 5


def test_one_gate_for_one_norm():
    gate = nn.Linear(3, 2)
    assert replace_batchnorm(nested_model(), where="first", gate=gate)["stem"].gate is gate


def test_gates_by_a_factory():
    replaced = replace_batchnorm(nested_model(), 3, gate=modenorm.StandardizedGate)
    assert all(type(layer.gate) is modenorm.StandardizedGate for layer in replaced.values())
    assert len({id(layer.gate) for layer in replaced.values()}) == 5


# Models that can't be converted.


def test_a_model_without_batch_norm():
    with pytest.raises(ValueError, match=r"Sequential has no batch norm.*1 LayerNorm"):
        replace_batchnorm(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)))
    with pytest.raises(ValueError, match="no norm at all"):
        replace_batchnorm(nn.Linear(3, 3))


def test_not_a_model():
    for convert in (replace_batchnorm, to_batchnorm):
        with pytest.raises(ValueError, match=r"expected an nn\.Module"):
            convert("resnet18")


def test_a_model_that_is_converted_already():
    model = small_model()
    replace_batchnorm(model)
    with pytest.raises(ValueError, match="it has 2 ModeNorm2d"):
        replace_batchnorm(model)


@OLD
@pytest.mark.parametrize("compiled", ["script", "trace"])
def test_a_scripted_model(compiled):
    model = small_model().eval()
    model = torch.jit.script(model) if compiled == "script" else torch.jit.trace(model, images())
    for convert in (replace_batchnorm, to_batchnorm):
        with pytest.raises(ValueError, match="convert the Python model"):
            convert(model)


@pytest.fixture
def process_group(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_distributed_model(process_group):
    model = nn.parallel.DistributedDataParallel(small_model())
    with pytest.raises(ValueError, match=r"DistributedDataParallel.*before wrapping"):
        replace_batchnorm(model)
    with pytest.raises(ValueError, match="at '0'"):
        replace_batchnorm(nn.Sequential(model))


@OLD
@pytest.mark.filterwarnings("ignore:Please use quant_min:UserWarning")
def test_a_model_prepared_for_quantization():
    from torch.ao import quantization

    model = quantization.QuantWrapper(small_model())
    model.qconfig = quantization.get_default_qat_qconfig("x86")
    prepared = quantization.prepare_qat(model.train())
    with pytest.raises(ValueError, match=r"prepared for quantization.*convert the float model"):
        replace_batchnorm(prepared)
    fused = quantization.fuse_modules_qat(small_model(), [["0", "1", "2"]])
    with pytest.raises(ValueError, match=r"prepared for quantization \(ConvBnReLU2d at '0'\)"):
        replace_batchnorm(fused)
    assert replace_batchnorm(quantization.QuantWrapper(small_model()))


def test_frozen_norms_are_named():
    model = small_model()
    model[1].requires_grad_(False)
    with pytest.warns(UserWarning, match=r"were frozen.*learn: 1\. Unfreeze"):
        replaced = replace_batchnorm(model)
    assert not replaced["1"].weight.requires_grad
    assert replaced["1"].gate.weight.requires_grad
    model = small_model()
    model[4].eval()
    with pytest.warns(UserWarning, match=r"in evaluation mode.*learn: 4\."):
        assert not replace_batchnorm(model)["4"].training


@pytest.mark.parametrize("options", [{"eps": 0.0}, {"momentum": 0.0}], ids=str)
def test_settings_that_no_mode_norm_has(options):
    with pytest.raises(ValueError, match=f"1 can't become a mode norm: {next(iter(options))}"):
        replace_batchnorm(small_model(**options))


def test_statistics_that_are_not_tracked_any_more():
    model = small_model()
    model[1].track_running_stats = False
    with pytest.raises(ValueError, match="1 has running statistics but"):
        replace_batchnorm(model)


# Saving and loading.


def test_state_pickle_and_copy():
    model, x = small_model(), images()
    replace_batchnorm(model, 3)
    model(x)
    model.eval()
    expected = model(x)
    other = small_model()
    replace_batchnorm(other, 3)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for again in (other.eval(), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(x), expected)


def test_a_batch_norm_checkpoint_loads_after_conversion():
    source, x = small_model().eval(), images()
    model = small_model().eval()
    replace_batchnorm(model, 3)
    model.load_state_dict(source.state_dict())
    assert_close(model(x), source(x), 1e-5)


# Optimizers.


def step(model, optimizer, x):
    optimizer.zero_grad()
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y) ** 3).sum().backward()
    optimizer.step()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
}


@pytest.mark.parametrize("per_mode", [False, True], ids=["shared", "per_mode"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_goes_on(make, per_mode):
    """Everything learns after the conversion, and momenta of before count."""
    model, x = small_model(), images()
    optimizer = make(model.parameters())
    step(model, optimizer, x)
    replaced = replace_batchnorm(model, 2, optimizer=optimizer, per_mode_affine=per_mode)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    assert {id(p) for p in optimizer.state} <= held
    momenta = [v for v in optimizer.state[replaced["1"].weight].values() if v.ndim]
    assert all(v.shape == replaced["1"].weight.shape and v.abs().sum() > 0 for v in momenta)
    for layer in replaced.values():  # nearly equal gates have gradients of a rounding error's size
        nn.init.normal_(layer.gate.weight)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(model, optimizer, x)
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[name]), name


def test_gates_join_the_group_of_their_norm():
    model = small_model()
    norms, _, others = modenorm.norm_parameters(model)
    optimizer = torch.optim.SGD(
        [
            {"params": list(others.items()), "weight_decay": 0.1},
            {"params": list(norms.items()), "weight_decay": 0.0, "lr": 0.5},
        ],
        lr=0.1,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    replace_batchnorm(model, optimizer=optimizer)
    first, second = optimizer.param_groups
    assert [id(p) for p in first["params"]] == [id(p) for p in others.values()]
    names = second["param_names"]
    assert names[4:] == ["1.gate.weight", "1.gate.bias", "4.gate.weight", "4.gate.bias"]
    assert all(model.get_parameter(n) is p for n, p in zip(names, second["params"], strict=True))
    step(model, optimizer, images())
    scheduler.step()


def test_gates_of_norms_that_the_optimizer_does_not_hold_join_the_first_group():
    model = small_model(affine=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replaced = replace_batchnorm(model, optimizer=optimizer)
    assert any(p is replaced["1"].gate.weight for p in optimizer.param_groups[0]["params"])


def test_without_the_argument_an_optimizer_keeps_the_norms_parameters():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replaced = replace_batchnorm(model)
    before = replaced["1"].weight.detach().clone()
    step(model, optimizer, images())
    assert not torch.equal(replaced["1"].weight, before)


# Back to batch norm.


@pytest.mark.parametrize("per_mode", [False, True], ids=["shared", "per_mode"])
@pytest.mark.parametrize("num_modes", [1, 2, 3])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_there_and_back(rank, num_modes, per_mode):
    original = trained(BATCHNORMS[rank](3, eps=1e-3, momentum=0.2))
    model = nn.Sequential(original).eval()
    replace_batchnorm(model, num_modes, per_mode_affine=per_mode)
    norm = to_batchnorm(model)["0"]
    assert model[0] is norm
    assert type(norm) is BATCHNORMS[rank]
    assert (norm.eps, norm.momentum, norm.training) == (1e-3, 0.2, False)
    for name, tensor in original.state_dict().items():
        assert torch.equal(norm.state_dict()[name], tensor), name


def test_one_mode_after_training_is_the_same_batch_norm():
    model, x = small_model().double(), images().double()
    replace_batchnorm(model, 1)
    model(x)
    expected = model.eval()(x)
    assert list(to_batchnorm(model)) == ["1", "4"]
    assert_close(model(x), expected, 1e-12)


def test_modes_that_differ_are_left():
    model, x = small_model(), images()
    replace_batchnorm(model, 2)
    model(x)
    model[4].running_mean[1] = model[4].running_mean[0]
    model[4].running_var[1] = model[4].running_var[0]
    expected = model.eval()(x)
    assert list(to_batchnorm(model)) == ["4"]
    assert type(model[1]) is modenorm.ModeNorm2d
    assert_close(model(x), expected, 1e-5)


@pytest.mark.parametrize("name", ["running_mean", "running_var", "weight", "bias"])
def test_one_difference_keeps_the_modes(name):
    model = small_model()
    layer = replace_batchnorm(model, 2, per_mode_affine=True)["1"]
    with torch.no_grad():
        getattr(layer, name)[1, 2] *= 1.01
    assert list(to_batchnorm(copy.deepcopy(model))) == ["4"]
    assert list(to_batchnorm(model, tolerance=0.05)) == ["1", "4"]


def test_modes_within_the_tolerance_are_averaged():
    layer = modenorm.ModeNorm2d(3).eval()
    layer.running_mean[1] = 0.01
    norm = to_batchnorm(layer, tolerance=0.02)[""]
    assert_close(norm.running_mean, torch.full((3,), 0.005), 1e-6)
    assert to_batchnorm(layer, tolerance=0.005) == {}


def test_modes_without_running_estimates_are_left():
    assert to_batchnorm(modenorm.ModeNorm2d(3, track_running_stats=False)) == {}
    assert list(to_batchnorm(modenorm.ModeNorm2d(3, 1, track_running_stats=False))) == [""]


def test_frozen_statistics_are_mentioned_on_the_way_back():
    model = small_model()
    replace_batchnorm(model, 1)
    modenorm.freeze_statistics(model)
    with pytest.warns(UserWarning, match="statistics of 1, 4 were frozen"):
        to_batchnorm(model)


def test_a_negative_tolerance():
    with pytest.raises(ValueError, match="tolerance is -1"):
        to_batchnorm(small_model(), tolerance=-1)


def test_folding_into_the_convolution():
    model, x = small_model().double(), images().double()
    replace_batchnorm(model, 1)
    model(x)
    expected = model.eval()(x)
    to_batchnorm(model)
    folded = nn.Sequential(
        fusion.fuse_conv_bn_eval(model[0], model[1]),
        model[2],
        fusion.fuse_conv_bn_eval(model[3], model[4]),
    )
    assert_close(folded(x), expected, 1e-12)


def test_conversion_warns_about_nothing_else():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = small_model()
        replace_batchnorm(model)
        to_batchnorm(model)
