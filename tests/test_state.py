"""What a layer keeps, and how it travels: checkpoints, copies, devices, types."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import modenorm
from compare import assert_close, make_layer

LAYERS = [modenorm.ModeNorm1d, modenorm.ModeNorm2d, modenorm.ModeNorm3d]


def train_a_little(layer):
    for _ in range(3):
        layer(torch.randn(6, 3, 4, 5) * 2 + 1)
    return layer


@pytest.mark.parametrize("layer_type", LAYERS)
def test_names_shapes_and_types_of_the_state(layer_type):
    state = layer_type(5, num_modes=3).state_dict()
    assert {name: (tuple(t.shape), t.dtype) for name, t in state.items()} == {
        "weight": ((5,), torch.float32),
        "bias": ((5,), torch.float32),
        "running_mean": ((3, 5), torch.float32),
        "running_var": ((3, 5), torch.float32),
        "num_batches_tracked": ((), torch.int64),
        "gate.weight": ((3, 5), torch.float32),
        "gate.bias": ((3,), torch.float32),
    }


def test_names_of_optional_state():
    names = modenorm.ModeNorm2d(5, affine=False, track_running_stats=False).state_dict().keys()
    assert names == {"gate.weight", "gate.bias"}
    usage = modenorm.ModeNorm2d(5, 3, running_update="usage", per_mode_affine=True).state_dict()
    assert usage["running_share"].shape == (3,)
    assert usage["weight"].shape == usage["bias"].shape == (3, 5)
    gate = modenorm.ModeNorm2d(5, gate=modenorm.StandardizedGate).state_dict()
    assert gate["gate.running_mean"].shape == gate["gate.running_var"].shape == (5,)


def test_state_of_mode_group_norm():
    state = modenorm.ModeGroupNorm(5, num_modes=3).state_dict()
    assert {name: tuple(t.shape) for name, t in state.items()} == {
        "gate_weight": (3,),
        "gate_bias": (3,),
        "weight": (5,),
        "bias": (5,),
    }


def test_start_values():
    layer = modenorm.ModeNorm2d(5)
    assert torch.equal(layer.weight, torch.ones(5))
    assert torch.equal(layer.bias, torch.zeros(5))
    assert torch.equal(layer.running_mean, torch.zeros(2, 5))
    assert torch.equal(layer.running_var, torch.ones(2, 5))
    assert layer.num_batches_tracked == 0
    assert layer.gate.weight.abs().max() > 0


def test_version_is_written():
    assert modenorm.ModeNorm2d(5).state_dict()._metadata[""]["version"] == 1
    assert modenorm.ModeGroupNorm(5).state_dict()._metadata[""]["version"] == 1


COPIES = {
    "state_dict": lambda layer: _loaded(layer, layer.state_dict()),
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.save": lambda layer: _loaded(layer, _saved_and_read(layer.state_dict())),
}


def _loaded(layer, state):
    options = {"running_update": "usage"} if "running_share" in state else {}
    fresh = type(layer)(3, gate=type(layer.gate), **options)
    fresh.load_state_dict(state, strict=True)
    return fresh


def _saved_and_read(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("gate", [modenorm.LinearGate, modenorm.StandardizedGate])
@pytest.mark.parametrize("update", ["paper", "usage"])
def test_copies_give_the_same_numbers(copied, gate, update):
    layer = train_a_little(modenorm.ModeNorm2d(3, gate=gate, running_update=update))
    other, x = copied(layer), torch.randn(4, 3, 4, 5)
    assert other is not layer
    assert torch.equal(other.eval()(x), layer.eval()(x))
    assert torch.equal(other.train()(x), layer.train()(x))
    for (name, a), b in zip(layer.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
        assert a.data_ptr() != b.data_ptr(), name


def test_a_missing_key_is_an_error():
    state = modenorm.ModeNorm2d(3).state_dict()
    del state["running_mean"]
    with pytest.raises(RuntimeError, match="running_mean"):
        modenorm.ModeNorm2d(3).load_state_dict(state)


def test_a_wrong_number_of_modes_is_an_error():
    with pytest.raises(RuntimeError, match="size mismatch"):
        modenorm.ModeNorm2d(3, 4).load_state_dict(modenorm.ModeNorm2d(3, 2).state_dict())


class Columns(nn.Module):
    """A gate with its modes in columns, under the name that a linear gate has for rows."""

    def __init__(self, num_features: int, num_modes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_features, num_modes))

    def forward(self, features):
        return features @ self.weight


def two_layers(num_features, num_modes):
    return nn.Sequential(nn.Linear(num_features, 5), nn.ReLU(), nn.Linear(5, num_modes))


@pytest.mark.parametrize("tracked", [True, False], ids=["running", "batch"])
@pytest.mark.parametrize("gate", [Columns, two_layers, nn.Linear])
def test_any_gates_state_is_its_own(gate, tracked):
    layer, other = (
        modenorm.ModeNorm1d(4, 3, gate=gate, track_running_stats=tracked) for _ in range(2)
    )
    assert modenorm.match_modes(layer, other.state_dict()) == {}
    layer.load_state_dict(other.state_dict())


@pytest.mark.parametrize("gate", [two_layers, nn.Linear, None])
def test_gates_tell_the_number_of_modes_without_running_estimates(gate):
    options = {"gate": gate, "track_running_stats": False}
    saved, layer = (modenorm.ModeNorm1d(4, k, **options) for k in (3, 2))
    with pytest.raises(RuntimeError, match="num_modes=3 in this state, but num_modes=2"):
        layer.load_state_dict(saved.state_dict())
    assert modenorm.match_modes(layer, saved.state_dict()) == {"": (2, 3)}
    layer.load_state_dict(saved.state_dict())


def test_parameters_per_mode_tell_the_number_of_modes():
    options = {"gate": Columns, "per_mode_affine": True, "track_running_stats": False}
    saved, layer = (modenorm.ModeNorm1d(4, k, **options) for k in (3, 2))
    with pytest.raises(RuntimeError, match="num_modes=3 in this state, but num_modes=2"):
        layer.load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match=r"Columns, whose number of modes can't be changed"):
        modenorm.match_modes(layer, saved.state_dict())


# A batch norm's state.


def trained_batchnorm():
    norm = nn.BatchNorm2d(3)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return train_a_little(norm)


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("per_mode_affine", [False, True], ids=["shared", "per_mode"])
@pytest.mark.parametrize("update", ["paper", "usage"])
@pytest.mark.parametrize("gate", [modenorm.LinearGate, modenorm.StandardizedGate])
def test_batchnorm_state_evaluates_to_the_same(gate, update, per_mode_affine, assign):
    norm = trained_batchnorm()
    options = {"gate": gate, "running_update": update, "per_mode_affine": per_mode_affine}
    layer = modenorm.ModeNorm2d(3, 4, **options)
    gate_weight = layer.gate.weight.clone()
    layer.load_state_dict(norm.state_dict(), strict=True, assign=assign)
    x = torch.randn(5, 3, 4, 5)
    assert_close(layer.eval()(x), norm.eval()(x), 1e-6)
    assert torch.equal(layer.gate.weight, gate_weight)
    assert layer.num_batches_tracked == 3
    train_a_little(layer.train())  # the modes must not share memory
    assert layer.running_mean.std(0).max() > 0


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_batchnorm_state_is_not_forgotten_by_an_average_over_usage(assign):
    norm, x = trained_batchnorm().double(), torch.randn(6, 3, 4, 5).double()
    options = {"momentum": None, "running_update": "usage", "dtype": torch.float64}
    layer = modenorm.ModeNorm2d(3, **options)
    layer.load_state_dict(norm.state_dict(), assign=assign)
    assert layer.running_share.tolist() == [1.5, 1.5]  # of three batches, as replace_batchnorm does
    layer(x, gates=torch.full((6, 2), 0.5))
    expected = (3 * norm.running_mean + x.mean((0, 2, 3))) / 4
    assert_close(layer.running_mean, expected.expand(2, 3), 1e-12)


def test_batchnorm_state_inside_a_model():
    bn = nn.Sequential(nn.Conv2d(2, 3, 3), trained_batchnorm(), nn.ReLU())
    mn = nn.Sequential(nn.Conv2d(2, 3, 3), modenorm.ModeNorm2d(3), nn.ReLU())
    state = bn.state_dict()
    mn.load_state_dict(state, strict=True)
    x = torch.randn(5, 2, 6, 6)
    assert_close(mn.eval()(x), bn.eval()(x), 1e-6)
    assert state.keys() == bn.state_dict().keys()  # the caller's dictionary is left alone


@pytest.mark.parametrize("per_mode_affine", [False, True], ids=["shared", "per_mode"])
def test_batchnorm_state_without_estimates(per_mode_affine):
    norm = nn.BatchNorm2d(3, track_running_stats=False)
    nn.init.normal_(norm.weight)
    layer = modenorm.ModeNorm2d(3, track_running_stats=False, per_mode_affine=per_mode_affine)
    layer.load_state_dict(norm.state_dict(), strict=True)
    assert torch.equal(layer.weight.expand(2, 3), norm.weight.expand(2, 3))


def test_batchnorm_state_of_old_torch_has_no_counter():
    state = dict(trained_batchnorm().state_dict())
    del state["num_batches_tracked"]
    modenorm.ModeNorm2d(3).load_state_dict(state, strict=True)


def test_batchnorm_state_has_no_gate_for_a_layer_without_values():
    layer = modenorm.ModeNorm2d(3, device="meta", running_update="usage")
    state = trained_batchnorm().state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*: \"gate\.weight"):
        layer.load_state_dict(state, assign=True)
    layer = modenorm.ModeNorm2d(3, device="meta")
    layer.gate.to_empty(device="cpu").reset_parameters()
    layer.load_state_dict(state, assign=True)
    assert not any(tensor.is_meta for tensor in layer.state_dict().values())


def test_converters_of_batchnorm_leave_the_layer_alone():
    model = nn.Sequential(modenorm.ModeNorm2d(3))
    assert not isinstance(model[0], nn.modules.batchnorm._BatchNorm)
    assert isinstance(nn.SyncBatchNorm.convert_sync_batchnorm(model)[0], modenorm.ModeNorm2d)


# Devices and types.


@pytest.mark.parametrize(
    "cast",
    [
        lambda layer: layer.half(),
        lambda layer: layer.bfloat16(),
        lambda layer: layer.to(torch.bfloat16),
        lambda layer: nn.Sequential(layer).half()[0],
    ],
    ids=["half", "bfloat16", "to", "inside_a_model"],
)
def test_half_types_keep_the_estimates_exactly(cast):
    layer = modenorm.ModeNorm2d(3, gate=modenorm.StandardizedGate, running_update="usage")
    train_a_little(layer)
    before = {name: b.clone() for name, b in layer.named_buffers()}
    layer = cast(layer)
    assert layer.weight.dtype == layer.gate.weight.dtype != torch.float32
    for name, buffer in layer.named_buffers():
        assert buffer.dtype == before[name].dtype, name
        assert torch.equal(buffer, before[name]), name
    x = torch.randn(4, 3, 4, 5).to(layer.weight.dtype)
    layer(x).float().square().sum().backward()
    assert layer.weight.grad.dtype == layer.weight.dtype
    assert layer.num_batches_tracked == 4


@pytest.mark.parametrize("of_batchnorm", [False, True], ids=["mode_norm", "batch_norm"])
def test_half_states_that_are_assigned_leave_the_estimates_whole(of_batchnorm):
    layer = modenorm.ModeNorm2d(3, momentum=1.0, gate=modenorm.StandardizedGate)
    state = (trained_batchnorm() if of_batchnorm else layer).state_dict()
    state = {name: t.half() if t.is_floating_point() else t for name, t in state.items()}
    layer.load_state_dict(state, assign=True)
    assert layer.weight.dtype == torch.float16
    layer(1000 * torch.randn(6, 3, 4, 5).half())
    assert layer.running_mean.dtype == layer.gate.running_var.dtype == torch.float32
    assert layer.running_var.isfinite().all()


def test_half_type_at_construction():
    layer = modenorm.ModeNorm2d(3, dtype=torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    assert layer.running_mean.dtype == torch.float32


def test_double_and_back():
    layer = train_a_little(modenorm.ModeNorm2d(3))
    before = layer.running_var.clone()
    assert layer.double().running_var.dtype == torch.float64
    assert torch.equal(layer.float().running_var, before)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "half"])
@pytest.mark.parametrize("gate", [modenorm.LinearGate, modenorm.StandardizedGate])
def test_meta_device_then_real(gate, half):
    layer = modenorm.ModeNorm2d(3, gate=gate, device="meta", running_update="usage")
    if half:
        layer = layer.half()
    assert layer(torch.randn(4, 3, 2, 2, device="meta")).shape == (4, 3, 2, 2)
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    fresh = modenorm.ModeNorm2d(3, gate=gate, running_update="usage")
    for name, tensor in fresh.state_dict().items():
        if not name.startswith("gate.") or "running" in name:
            assert torch.equal(layer.state_dict()[name].to(tensor.dtype), tensor), name
    assert layer.running_mean.dtype == torch.float32
    assert 0 < layer.gate.weight.abs().max() < 0.1
    assert layer(torch.randn(4, 3, 2, 2)).isfinite().all()


def test_meta_device_of_mode_group_norm():
    layer = modenorm.ModeGroupNorm(3, device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    assert layer.gate_weight.abs().max() <= 1
    assert torch.equal(layer.weight, torch.ones(3))


def test_reset_parameters_forgets_everything():
    layer = make_layer(3, 2, running_update="usage", gate=modenorm.StandardizedGate)
    layer(torch.randn(4, 3, 2, 2).double())
    layer.reset_parameters()
    fresh = modenorm.ModeNorm2d(3, running_update="usage", gate=modenorm.StandardizedGate).double()
    for name, tensor in fresh.state_dict().items():
        if name not in ("gate.weight", "gate.bias"):
            assert torch.equal(layer.state_dict()[name], tensor), name
    assert layer.gate.weight.abs().max() < 0.1


def test_reset_parameters_of_a_gate_in_parts():
    gate = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    layer, before = modenorm.ModeNorm2d(3, gate=gate), copy.deepcopy(gate.state_dict())
    layer.reset_parameters()
    assert not any(torch.equal(t, before[name]) for name, t in gate.state_dict().items())


@pytest.mark.parametrize("missing", ["weight", "bias"])
def test_reset_parameters_of_half_an_affine_map(missing):
    norm = nn.BatchNorm2d(3)
    setattr(norm, missing, None)
    model = nn.Sequential(norm)
    modenorm.replace_batchnorm(model)
    for parameter in (model[0].weight, model[0].bias):
        if parameter is not None:
            nn.init.constant_(parameter, 7.0)
    model[0].reset_parameters()
    left = torch.zeros(3) if missing == "weight" else torch.ones(3)
    assert torch.equal(model[0].bias if missing == "weight" else model[0].weight, left)


def test_reset_running_stats_keeps_the_parameters():
    layer = make_layer(3, 2)
    weight = layer.weight.clone()
    layer(torch.randn(4, 3, 2, 2).double())
    layer.reset_running_stats()
    assert layer.num_batches_tracked == 0
    assert torch.equal(layer.running_mean, torch.zeros(2, 3))
    assert torch.equal(layer.weight, weight)


def test_affine_parameters_are_one_dimensional_for_weight_decay_filters():
    layer = modenorm.ModeNorm2d(5)
    names = [name for name, parameter in layer.named_parameters() if parameter.ndim == 1]
    assert names == ["weight", "bias", "gate.bias"]


REPRS = {
    "ModeNorm1d(16, num_modes=2, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True\n"
    "  (gate): LinearGate(num_features=16, num_modes=2)\n)": lambda: modenorm.ModeNorm1d(16),
    "ModeNorm2d(\n  16, num_modes=3, eps=0.001, momentum=None, affine=False, "
    "track_running_stats=True, running_update='usage'\n"
    "  (gate): StandardizedGate(num_features=16, num_modes=3)\n)": lambda: modenorm.ModeNorm2d(
        16,
        3,
        1e-3,
        None,
        affine=False,
        running_update="usage",
        gate=modenorm.StandardizedGate,
    ),
    "ModeNorm3d(\n  16, num_modes=2, eps=1e-05, momentum=0.1, affine=True, "
    "track_running_stats=False, per_mode_affine=True\n"
    "  (gate): LinearGate(num_features=16, num_modes=2)\n)": lambda: modenorm.ModeNorm3d(
        16, per_mode_affine=True, track_running_stats=False
    ),
    "ModeGroupNorm(16, num_modes=2, eps=1e-05, affine=True, variance='pixel')": lambda: (
        modenorm.ModeGroupNorm(16, variance="pixel")
    ),
    "LinearGate(num_features=4, num_modes=2)": lambda: modenorm.LinearGate(4, 2),
}


@pytest.mark.parametrize(("text", "make"), REPRS.items(), ids=lambda value: str(value)[:10])
def test_repr(text, make):
    assert "".join(repr(make()).split()) == "".join(text.split())
