"""Batch norms of other classes become mode norms: lazy ones, timm's, a user's own."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import modenorm
from compare import assert_close
from modenorm import replace_batchnorm, to_batchnorm
from modenorm.convert.substitutes import LazyModeNorm2d, ModeNormAct2d
from small_models import images, small_model, trained

# Lazy modules say that they are new.
LAZY = pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")


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
@pytest.mark.parametrize("per_mode", [False, True], ids=["shared", "per_mode"])
def test_lazy_norms_load_a_state_without_numbers(per_mode):
    source, model = lazy_model(), lazy_model()
    for each in (source, model):
        replace_batchnorm(each, 2, per_mode_affine=per_mode)
    model.load_state_dict(source.state_dict())
    model(images())
    assert model[1].running_mean.shape == (2, 4)


@LAZY
def test_lazy_norms_keep_hooks():
    model, seen, loaded = lazy_model(), [], []
    model[1].register_forward_pre_hook(lambda module, args: seen.append("before"))
    model[1].register_forward_hook(lambda module, args, y: seen.append(type(module)))
    model[1].register_full_backward_hook(lambda module, dx, dy: seen.append("backward"))
    model[1].register_load_state_dict_pre_hook(lambda module, *_: loaded.append(type(module)))
    replace_batchnorm(model)
    model.load_state_dict(model.state_dict())
    for _ in range(2):
        model(images()).sum().backward()
    model.load_state_dict(model.state_dict())
    assert seen == ["before", modenorm.ModeNorm2d, "backward"] * 2
    assert loaded == [LazyModeNorm2d, modenorm.ModeNorm2d]


@LAZY
def test_the_gate_of_a_lazy_norm_follows_a_move():
    model = nn.Sequential(nn.LazyBatchNorm2d(affine=False))
    replace_batchnorm(model)
    model.double()(images().double())
    assert model[0].gate.weight.dtype == torch.float64


@LAZY
def test_the_gate_of_a_lazy_norm_is_frozen_with_it():
    model = nn.Sequential(nn.LazyBatchNorm2d())
    replace_batchnorm(model, gate=modenorm.StandardizedGate)
    modenorm.freeze_statistics(model)
    model(5 + images())
    assert model[0].gate.running_mean.tolist() == [0, 0, 0]


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


@pytest.mark.parametrize("part", ["drop", "act"])
def test_hooks_of_what_follows_the_norm_run(part):
    layer = ModeNormAct2d(4, drop=nn.Identity(), act=nn.ReLU())
    getattr(layer, part).register_forward_hook(lambda module, given, y: y * 0)
    assert (layer(images(6, 4, 5, 5)) == 0).all()


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


class Twice(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return 2 * self.norm(x)


def test_unknown_subclasses_with_a_replacement():
    model, x = nn.Sequential(trained(ScaledBatchNorm2d(3))).eval(), images()
    expected = model(x)
    replace_batchnorm(model, subclasses={ScaledBatchNorm2d: lambda old, norm: Twice(norm)})
    assert_close(model(x), expected, 1e-6)


@pytest.mark.parametrize("made", [None, "norm"])
def test_a_replacement_that_is_no_module(made):
    model = nn.Sequential(nn.BatchNorm2d(3), ScaledBatchNorm2d(3))
    with pytest.raises(ValueError, match=r"of 1 \(ScaledBatchNorm2d\).*must return an nn\.Module"):
        replace_batchnorm(model, subclasses={ScaledBatchNorm2d: lambda old, norm: made})
    assert type(model[0]) is nn.BatchNorm2d


def test_hooks_of_a_subclass_go_to_what_replaces_it():
    def replacement(old, norm):
        module = Twice(norm)
        module.register_forward_hook(lambda module, inputs, y: y - 1)
        return module

    model, x = nn.Sequential(trained(ScaledBatchNorm2d(3))).eval(), images()
    handle = model[0].register_forward_hook(lambda module, inputs, y: y + 3)
    expected = model(x)
    replace_batchnorm(model, subclasses={ScaledBatchNorm2d: replacement})
    assert_close(model(x), expected - 1, 1e-6)
    handle.remove()
    assert_close(model(x), expected - 4, 1e-6)


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
