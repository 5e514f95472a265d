"""Models with batch norm into models with mode norm: same numbers, nothing lost."""

import copy
import gc
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

import modenorm
from compare import assert_close
from modenorm import match_modes, prune_modes, replace_batchnorm, to_batchnorm
from modenorm.convert.substitutes import ModeNormNd
from small_models import BATCHNORMS, INPUTS, images, small_model, trained

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
MODENORMS = {1: modenorm.ModeNorm1d, 2: modenorm.ModeNorm2d, 3: modenorm.ModeNorm3d}


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
    replace_batchnorm(model, 1)
    model(images())
    assert seen == ["before", modenorm.ModeNorm2d]
    handle.remove()
    model(images())
    assert seen == ["before", modenorm.ModeNorm2d, "before"]
    handle = model[1].register_forward_hook(lambda module, args, y: seen.append(type(module)))
    to_batchnorm(model)
    model(images())
    assert seen[3:] == ["before", nn.BatchNorm2d]
    handle.remove()
    model(images())
    assert seen[5:] == ["before"]


def test_backward_hooks_are_carried_over():
    model, seen = small_model(), []
    model[1].register_full_backward_hook(lambda module, dx, dy: seen.append(type(module)))
    replace_batchnorm(model, 1)
    model(images()).sum().backward()
    to_batchnorm(model)
    model(images()).sum().backward()
    assert seen == [modenorm.ModeNorm2d, nn.BatchNorm2d]


def hear_states(norm: nn.Module, seen: list) -> list:
    """Hooks of all four kinds around a state dict; what removes them."""
    return [
        norm.register_state_dict_pre_hook(lambda m, *_: seen.append(("save", type(m)))),
        norm.register_state_dict_post_hook(lambda m, *_: seen.append(("saved", type(m)))),
        norm.register_load_state_dict_pre_hook(lambda m, *_: seen.append(("load", type(m)))),
        norm.register_load_state_dict_post_hook(lambda m, _: seen.append(("loaded", type(m)))),
    ]


def test_hooks_of_states_are_carried_over_and_can_be_removed():
    model, seen = small_model(), []
    handles = hear_states(model[1], seen)
    for convert, kind in ((replace_batchnorm, modenorm.ModeNorm2d), (to_batchnorm, nn.BatchNorm2d)):
        convert(model)
        gc.collect()  # the norm before is gone
        copy.deepcopy(model).load_state_dict(model.state_dict())
        assert seen == [(when, kind) for when in ("save", "saved", "load", "loaded")]
        seen.clear()
    for handle in handles:
        handle.remove()
    model.load_state_dict(model.state_dict())
    assert seen == []


def test_hooks_of_a_norm_that_is_refused_stay_its_own():
    model, seen = small_model(), []
    hear_states(model[1], seen)
    model[4].eps = 0.0
    with pytest.raises(ValueError, match="4 can't become a mode norm"):
        replace_batchnorm(model)
    model.load_state_dict(model.state_dict())
    assert {kind for _, kind in seen} == {nn.BatchNorm2d}


def test_numbers_of_modes_by_any_name_of_a_shared_norm():
    norm = nn.BatchNorm2d(3)
    model = nn.ModuleDict({"a": nn.Sequential(norm), "b": nn.Sequential(norm)})
    layers = replace_batchnorm(model, {"b.*": 4})
    assert {name: layer.num_modes for name, layer in layers.items()} == {"a.0": 4}
    assert model["b"][0] is layers["a.0"]


def test_numbers_of_modes_for_no_norm():
    with pytest.raises(ValueError, match="num_modes is an empty dict"):
        replace_batchnorm(small_model(), {})


def test_a_bias_alone_gets_a_row_per_mode():
    norm = trained(nn.BatchNorm2d(3))
    norm.weight = None
    model, x = nn.Sequential(norm).eval(), images()
    expected = model(x)
    layer = replace_batchnorm(model, 2, per_mode_affine=True)["0"]
    assert layer.weight is None
    assert layer.bias.shape == (2, 3)
    assert_close(model(x), expected, 1e-6)
    with torch.no_grad():
        layer.bias[1] += 1
    assert to_batchnorm(model) == {}


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


def test_conversion_warns_about_nothing_else():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = small_model()
        replace_batchnorm(model)
        to_batchnorm(model)


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


@pytest.mark.parametrize("change", ["replace", "back", "prune", "match"])
def test_changed_in_inference_mode(change):
    """What is made there can be trained afterwards all the same."""
    model, x = small_model(), images()
    if change != "replace":
        replace_batchnorm(model, 3)
        model(x)
    with torch.inference_mode():
        if change == "replace":
            replace_batchnorm(model, 3)
        elif change == "back":
            assert to_batchnorm(model, tolerance=1e9)
        elif change == "prune":
            assert any(layer.after < layer.before for layer in prune_modes(model, [x], 1e9).layers)
        else:
            other = small_model()
            replace_batchnorm(other, 2)
            assert match_modes(model, other.state_dict())
    model.train()
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    "call",
    [
        modenorm.replace_batchnorm, modenorm.to_batchnorm, modenorm.norm_parameters,
        modenorm.freeze_statistics, modenorm.convert_sync_modenorm, modenorm.ModeSparsity,
        lambda model: modenorm.recalibrate(model, []),
        lambda model: modenorm.mode_report(model, []),
        lambda model: modenorm.prune_modes(model, []),
        lambda model: modenorm.match_modes(model, {}),
        lambda model: modenorm.record_gates(model).__enter__(),
    ],
)  # fmt: skip
def test_what_is_no_model(call):
    with pytest.raises(ValueError, match=r"model is None; expected an nn.Module"):
        call(None)
