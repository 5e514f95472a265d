"""Bad input: messages that name the value, the rule and the fix, and state that stays as it was."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import modenorm
from compare import assert_close, make_layer, one_hot
from modenorm import functional

MODE_NORMS = [modenorm.ModeNorm1d, modenorm.ModeNorm2d, modenorm.ModeNorm3d]


def assert_says(error: pytest.ExceptionInfo, *parts: str) -> None:
    for part in parts:
        assert part in str(error.value), f"{part!r} is not in {error.value}"


@pytest.mark.parametrize(
    ("layer_type", "shape", "parts"),
    [
        (modenorm.ModeNorm1d, (3,), ["2-d or 3-d", "(3,)"]),
        (modenorm.ModeNorm1d, (2, 3, 4, 5), ["2-d or 3-d", "(2, 3, 4, 5)"]),
        (modenorm.ModeNorm2d, (2, 3), ["4-d", "(2, 3)"]),
        (modenorm.ModeNorm2d, (2, 3, 4), ["4-d", "(2, 3, 4)"]),
        (modenorm.ModeNorm3d, (2, 3, 4, 5), ["5-d", "(2, 3, 4, 5)"]),
    ],
)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_wrong_rank(layer_type, shape, parts, training):
    with pytest.raises(ValueError) as error:
        layer_type(3).train(training)(torch.randn(shape))
    assert_says(error, layer_type.__name__, *parts)


@pytest.mark.parametrize("layer_type", [modenorm.ModeNorm2d, modenorm.ModeGroupNorm])
def test_wrong_channel_count(layer_type):
    with pytest.raises(ValueError) as error:
        layer_type(3)(torch.randn(2, 4, 5, 5))
    assert_says(error, "=3", "got 4", "(2, 4, 5, 5)")


def test_channels_last_data_that_was_not_permuted():
    with pytest.raises(ValueError, match=r"num_features=3.*got 32"):
        modenorm.ModeNorm2d(3)(torch.randn(2, 32, 32, 3))


def test_mode_group_norm_wants_samples_and_channels():
    with pytest.raises(ValueError, match=r"\(3,\).*\(N, C, \.\.\.\)"):
        modenorm.ModeGroupNorm(3)(torch.randn(3))


@pytest.mark.parametrize("layer_type", [modenorm.ModeNorm2d, modenorm.ModeGroupNorm])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
def test_integer_input(layer_type, dtype):
    with pytest.raises(ValueError) as error:
        layer_type(3)(torch.ones(2, 3, 4, 4).to(dtype))
    assert_says(error, str(dtype), "floating-point", "x.float()")


@pytest.mark.parametrize("layer_type", [*MODE_NORMS, modenorm.ModeGroupNorm])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None], ids=str)
def test_sizes(layer_type, value):
    with pytest.raises(ValueError) as error:
        layer_type(3, num_modes=value)
    assert_says(error, "num_modes", repr(value), "at least 1")
    with pytest.raises(ValueError) as error:
        layer_type(value)
    assert_says(error, "num_", repr(value), "at least 1")


def test_sizes_may_be_numpy_integers():
    layer = modenorm.ModeNorm2d(np.int64(3), np.int32(2))
    assert layer(torch.randn(4, 3, 2, 2)).shape == (4, 3, 2, 2)


@pytest.mark.parametrize("layer_type", [*MODE_NORMS, modenorm.ModeGroupNorm])
@pytest.mark.parametrize("eps", [0, -1e-5, math.nan])
def test_eps(layer_type, eps):
    with pytest.raises(ValueError) as error:
        layer_type(3, eps=eps)
    assert_says(error, f"eps is {eps}", "positive", "1e-5")


@pytest.mark.parametrize("layer_type", MODE_NORMS)
@pytest.mark.parametrize("momentum", [0, -0.1, 1.1, math.nan])
def test_momentum(layer_type, momentum):
    with pytest.raises(ValueError) as error:
        layer_type(3, momentum=momentum)
    assert_says(error, f"momentum is {momentum}", "(0, 1]", "None")


def test_words():
    with pytest.raises(ValueError, match=r"running_update is 'mean'.*'paper', 'usage'"):
        modenorm.ModeNorm2d(3, running_update="mean")
    with pytest.raises(ValueError, match=r"variance is 'both'.*'pooled', 'pixel'"):
        modenorm.ModeGroupNorm(3, variance="both")
    with pytest.raises(ValueError, match=r"backend is 'fast'.*fused"):
        modenorm.use_backend("fast")
    with pytest.raises(ValueError, match=r"gate is 'linear'.*nn\.Module"):
        modenorm.ModeNorm2d(3, gate="linear")
    with pytest.raises(ValueError, match=r"gate\(3, 2\) made <function.*expected an nn\.Module"):
        modenorm.ModeNorm2d(3, gate=lambda channels, modes: lambda features: features[:, :modes])


@pytest.mark.parametrize(
    "batch", [{"pixels": torch.ones(4, 3, 2, 2)}, 3, ()], ids=["dict", "number", "nothing"]
)
@pytest.mark.parametrize(
    "function", [modenorm.recalibrate, modenorm.prune_modes, modenorm.mode_report]
)
def test_batches_that_do_not_begin_with_an_input(function, batch):
    says = f"a batch is a {type(batch).__name__}.*tuple or list that begins with it"
    with pytest.raises(ValueError, match=says):
        function(modenorm.ModeNorm2d(3), [batch])


@pytest.mark.parametrize("shape", [(4,), (4, 3), (2, 5), (5, 2, 1)], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_gates_of_the_wrong_shape(shape, training):
    with pytest.raises(ValueError) as error:
        modenorm.ModeNorm2d(3, 2).train(training)(torch.randn(4, 3, 2, 2), gates=torch.ones(shape))
    assert_says(error, str(shape), "(4, 2)", "one row per sample", "one column per mode")


def test_gates_of_the_wrong_shape_in_the_function():
    x, state = torch.randn(4, 3, 2, 2), (torch.zeros(2, 3), torch.ones(2, 3))
    for training in (True, False):
        with pytest.raises(ValueError, match=r"\(4, 3\); expected \(4, 2\)"):
            functional.mode_norm(x, torch.ones(4, 3), *state, training=training)
    with pytest.raises(ValueError, match=r"\(5, 3\)"):
        functional.mode_norm(x, torch.ones(5, 3), training=True)


def test_gate_with_the_wrong_number_of_logits():
    layer = modenorm.ModeNorm2d(3, 2, gate=nn.Linear(3, 5))
    with pytest.raises(ValueError, match=r"gate's logits have shape \(4, 5\); expected \(4, 2\)"):
        layer(torch.randn(4, 3, 2, 2))


@pytest.mark.parametrize("gate", [nn.Linear(3, 2), modenorm.LinearGate(3, 2)])
def test_gate_with_the_wrong_number_of_logits_without_estimates(gate, backend):
    layer = modenorm.ModeNorm2d(3, 4, gate=gate, track_running_stats=False)
    with pytest.raises(ValueError, match=r"gate's logits have shape \(4, 2\); expected \(4, 4\)"):
        layer(torch.randn(4, 3, 2, 2))


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("num_modes", [1, 2])
def test_rows_for_another_number_of_modes(name, num_modes, backend):
    x, gates, rows = torch.randn(4, 3, 2, 2), torch.ones(4, num_modes), torch.ones(5, 3)
    with pytest.raises(
        ValueError, match=rf"gates have shape \(4, {num_modes}\); expected \(4, 5\)"
    ):
        functional.mode_norm(x, gates, training=True, **{name: rows})
    estimates = (torch.zeros(num_modes, 3), torch.ones(num_modes, 3))
    with pytest.raises(ValueError, match=f"running_mean has {num_modes}, {name} has 5 rows"):
        functional.mode_norm(x, gates, *estimates, training=True, **{name: rows})


def test_mask_of_the_wrong_shape():
    with pytest.raises(ValueError, match=r"mask has shape \(4, 3\); expected \(4, 2, 2\)"):
        modenorm.ModeNorm2d(3)(torch.randn(4, 3, 2, 2), mask=torch.ones(4, 3))


def test_gate_parameters_of_the_wrong_shape():
    with pytest.raises(ValueError, match=r"\(2,\) and \(3,\); both must be \(K,\)"):
        functional.mode_group_norm(torch.randn(4, 3, 2, 2), torch.ones(2), torch.ones(3))


def test_one_running_buffer_without_the_other():
    x, gates = torch.randn(4, 3, 2, 2), torch.ones(4, 1)
    with pytest.raises(ValueError, match="running_mean is given without running_var"):
        functional.mode_norm(x, gates, torch.zeros(1, 3), None)
    with pytest.raises(ValueError, match="running_var is given without running_mean"):
        functional.mode_norm(x, gates, None, torch.zeros(1, 3))


def test_cumulative_average_without_a_counter():
    x, state = torch.randn(4, 3, 2, 2), (torch.zeros(1, 3), torch.ones(1, 3))
    with pytest.raises(ValueError, match="needs num_batches_tracked"):
        functional.mode_norm(x, torch.ones(4, 1), *state, training=True, momentum=None)
    with pytest.raises(ValueError, match="needs running_share"):
        functional.mode_norm(
            x, torch.ones(4, 1), *state, training=True, momentum=None, running_update="usage"
        )


@pytest.mark.parametrize(
    ("layer_type", "shape"),
    [
        (modenorm.ModeNorm1d, (1, 3)),
        (modenorm.ModeNorm1d, (1, 3, 1)),
        (modenorm.ModeNorm2d, (1, 3, 1, 1)),
        (modenorm.ModeNorm3d, (1, 3, 1, 1, 1)),
    ],
)
def test_one_value_per_channel_in_training(layer_type, shape, backend):
    layer = layer_type(3)
    with pytest.raises(ValueError) as error:
        layer(torch.randn(shape))
    assert_says(error, str(shape), "one value per channel", "more samples or positions", "eval()")
    assert layer.num_batches_tracked == 0
    assert layer.eval()(torch.randn(shape)).isfinite().all()


def test_one_value_per_channel_without_running_estimates(backend):
    layer = modenorm.ModeNorm1d(3, track_running_stats=False).eval()
    with pytest.raises(ValueError, match="one value per channel"):
        layer(torch.randn(1, 3))


def test_one_sample_with_positions_trains(backend):
    layer, x = modenorm.ModeNorm2d(3).double(), torch.randn(1, 3, 4, 4).double()
    expected = nn.functional.batch_norm(x, None, None, training=True)
    assert torch.allclose(layer(x), expected)


def snapshot(layer):
    return {name: buffer.clone() for name, buffer in layer.named_buffers()}


def assert_unchanged(layer, before):
    for name, buffer in layer.named_buffers():
        assert torch.equal(buffer, before[name]), name


LAYER_OPTIONS = {
    "paper": {},
    "usage": {"running_update": "usage"},
    "cumulative": {"momentum": None},
    "cumulative_usage": {"momentum": None, "running_update": "usage"},
    "standardized": {"gate": modenorm.StandardizedGate},
}
EVERY_LAYER = pytest.mark.parametrize("options", LAYER_OPTIONS.values(), ids=LAYER_OPTIONS)


@EVERY_LAYER
@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 3, 0, 4)], ids=["samples", "positions"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_empty_batch(options, shape, training, backend):
    layer = make_layer(3, 2, **options).train(training)
    before, x = snapshot(layer), torch.randn(shape).double().requires_grad_()
    y = layer(x)
    assert y.shape == shape
    assert y.dtype == torch.float64
    y.sum().backward()
    assert x.grad.shape == shape
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name
    assert_unchanged(layer, before)


@pytest.mark.parametrize("gate", [modenorm.LinearGate, modenorm.StandardizedGate])
def test_empty_batch_with_gates_and_mask(gate, backend):
    layer = make_layer(3, 2, gate=gate)
    assert layer(torch.randn(0, 3, 4, 4).double(), gates=torch.zeros(0, 2)).shape == (0, 3, 4, 4)
    assert layer(torch.randn(2, 3, 0, 4).double(), gates=torch.ones(2, 2)).shape == (2, 3, 0, 4)
    for shape in ((0, 3, 4, 4), (2, 3, 0, 4)):
        mask = torch.ones(shape[:1] + shape[2:], dtype=torch.bool)
        assert layer(torch.randn(shape).double(), mask=mask).shape == shape


def test_empty_batch_of_mode_group_norm(backend):
    layer, x = modenorm.ModeGroupNorm(3), torch.randn(0, 3, 4, 4, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == x.shape
    assert all(parameter.grad.abs().max() == 0 for parameter in layer.parameters())


@EVERY_LAYER
@pytest.mark.parametrize("outside", [False, True], ids=["gate", "gates="])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_numbers_leave_all_buffers_alone(options, bad, outside, backend):
    layer = make_layer(3, 2, **options)
    layer(torch.randn(4, 3, 4, 4).double())
    before, x = snapshot(layer), torch.randn(4, 3, 4, 4).double()
    x[1, 2, 3, 0] = bad
    gates = one_hot([0, 0, 1, 1], 2) if outside else None  # only mode 0 sees the bad sample
    assert layer(x, gates=gates).isnan().any()
    assert_unchanged(layer, before)
    assert layer(torch.randn(4, 3, 4, 4).double()).isfinite().all()


@pytest.mark.parametrize("update", ["paper", "usage"])
def test_bad_numbers_leave_all_buffers_alone_in_the_reference(update):
    layer, x = make_layer(3, 2, running_update=update), torch.randn(4, 3, 4, 4).double()
    before = snapshot(layer)
    x[1, 2, 3, 0] = math.nan
    with modenorm.use_backend("reference"):
        assert layer(x).isnan().any()
    assert_unchanged(layer, before)


@EVERY_LAYER
def test_a_batch_that_is_masked_out_leaves_all_buffers_alone(options):
    layer = make_layer(3, 2, **{**options, "gate": None})
    before = snapshot(layer)
    y = layer(torch.randn(4, 3, 5, 5).double(), mask=torch.zeros(4, 5, 5, dtype=torch.bool))
    assert y.isfinite().all()
    assert_unchanged(layer, before)


@EVERY_LAYER
@pytest.mark.parametrize("mean", [0.0, 1e4])
def test_starved_mode_is_finite_and_keeps_its_estimates(options, mean, backend):
    layer = make_layer(3, 3, **options)
    x = (torch.randn(6, 3, 4, 4).double() + mean).requires_grad_()
    before = snapshot(layer)
    gates = one_hot([0, 2, 0, 2, 2, 0], 3).requires_grad_()
    y = layer(x, gates=gates)
    y.backward(torch.randn_like(y))
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    assert gates.grad.isfinite().all()
    assert torch.equal(layer.running_mean[1], before["running_mean"][1])
    assert torch.equal(layer.running_var[1], before["running_var"][1])
    assert not torch.equal(layer.running_mean[0], before["running_mean"][0])
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize("kernels", ["eager", "fused"])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("update", ["paper", "usage"])
def test_gates_below_the_normal_numbers(update, momentum, kernels):
    """Eight of 1e-40 are below 2^-126, eight of 5e-39 above; their quotients by 8 are below."""
    x = torch.randn(8, 1) + 50
    layer = modenorm.ModeNorm1d(1, 3, momentum=momentum, running_update=update)
    with modenorm.use_backend(kernels):
        layer(x, gates=torch.tensor([[1.0, 5e-39, 1e-40]]).expand(8, 3))
    assert (float(layer.running_mean[2]), float(layer.running_var[2])) == (0, 1)  # as it was
    if momentum is None or update == "paper":
        assert_close(layer.running_mean[1], layer.running_mean[0], 1e-5)
        assert_close(layer.running_var[1], layer.running_var[0], 1e-4)
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "shapes", [[(2, 4)] * 2, [(2, 2)] * 2, [(3,)] * 2, [(2, 3), (2, 1)]], ids=str
)
def test_running_estimates_of_another_shape(shapes, training, backend):
    x, gates = torch.randn(4, 3, 2, 2), torch.full((4, 2), 0.5)
    state = [torch.ones(shape) for shape in shapes]
    with pytest.raises(ValueError) as error:
        functional.mode_norm(x, gates, *state, training=training)
    assert_says(error, *map(str, shapes), "must be (K, 3)", "(4, 3, 2, 2)")
    assert all((t == 1).all() for t in state)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("shape", [(), (2,), (2, 4), (2, 1, 3)], ids=str)
def test_affine_parameters_of_another_shape(name, shape):
    x, given = torch.randn(4, 3, 2, 2), {name: torch.ones(shape)}
    with pytest.raises(ValueError) as error:
        functional.mode_norm(x, torch.full((4, 2), 0.5), training=True, **given)
    assert_says(error, f"{name} has shape {shape}", "(3,) or (K, 3)")
    with pytest.raises(ValueError, match=f"{name} has shape"):
        functional.mode_group_norm(x, torch.ones(2), torch.zeros(2), **given)


def test_a_gate_that_underflows_is_finite(backend):
    layer = modenorm.ModeNorm2d(3, 2)
    with torch.no_grad():
        layer.gate.bias.copy_(torch.tensor([0.0, -200.0]))
    x = torch.randn(4, 3, 4, 4, requires_grad=True)
    y = layer(x)
    y.backward(torch.randn_like(y))
    assert torch.allclose(y, nn.functional.batch_norm(x, None, None, training=True), atol=1e-5)
    gradients = [x.grad, layer.gate.weight.grad, layer.gate.bias.grad]
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_spatial_size_one(training, backend):
    layer = make_layer(3, 2).train(training)
    flat = modenorm.ModeNorm1d(3, 2).double().train(training)
    flat.load_state_dict(layer.state_dict())
    x = torch.randn(5, 3).double()
    assert torch.allclose(layer(x[..., None, None])[..., 0, 0], flat(x), atol=1e-13)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_constant_input_gives_the_bias(training, backend):
    layer = make_layer(3, 2, dtype=torch.float32).train(training)
    y = layer(torch.full((4, 3, 5, 5), 7.0, requires_grad=True))
    assert y.isfinite().all()
    if training:
        assert torch.allclose(y, layer.bias.view(1, 3, 1, 1).expand_as(y), atol=1e-5)


def test_tracers_of_fx_are_told_to_leave_the_layer_whole():
    with pytest.raises(ValueError, match="make the layer a leaf of the tracer"):
        torch.fx.symbolic_trace(nn.Sequential(modenorm.ModeNorm2d(3)))
