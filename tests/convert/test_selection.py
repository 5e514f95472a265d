"""Which norms a conversion means, how many modes they get, and which models are refused."""

import pytest
import torch
from torch import nn

import modenorm
from modenorm import replace_batchnorm, to_batchnorm
from small_models import images, small_model

# Quantization and scripting say that they are old.
OLD = pytest.mark.filterwarnings("ignore::DeprecationWarning")


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


def test_modes_as_a_number_of_numpy():
    np = pytest.importorskip("numpy")
    replaced = replace_batchnorm(nested_model(), {"stem": np.int64(3)})
    assert replaced["stem"].running_mean.shape[0] == 3


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
    "no text": ({"num_modes": {1: 2}}, "num_modes has the pattern 1; it must be a text"),
    "a number": ({"where": [1]}, "where has the pattern 1; it must be a text, such as '1'"),
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


def test_norms_that_are_compiled_by_themselves():
    """What was compiled would go on to run the norm that it was made from."""
    for convert, norm in (
        (replace_batchnorm, nn.BatchNorm2d(3)),
        (to_batchnorm, modenorm.ModeNorm2d(3, 1)),
    ):
        compiled = torch.compile(norm, backend="eager")
        with pytest.raises(ValueError, match=f"{type(norm).__name__} at '1' .* then compile"):
            convert(nn.Sequential(nn.Conv2d(3, 3, 1), compiled))
        with pytest.raises(ValueError, match="compiled by itself"):
            convert(compiled)


def test_a_compiled_model():
    model = torch.compile(small_model(), backend="eager")
    model(images())
    layers = replace_batchnorm(model)
    before = [int(layer.num_batches_tracked) for layer in layers.values()]
    model(images())
    assert [int(layer.num_batches_tracked) for layer in layers.values()] == [n + 1 for n in before]


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
