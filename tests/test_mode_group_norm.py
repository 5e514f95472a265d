"""Mode group normalization against Algorithm 3 in float64: values and all gradients."""

import copy

import pytest
import torch
from torch import nn

import modenorm
from compare import TOLERANCES, assert_close
from modenorm import functional, reference

VARIANCES = pytest.mark.parametrize("variance", ["pooled", "pixel"])
NAMES = ("x", "gate_weight", "gate_bias", "weight", "bias")


def make_layer(num_channels, num_modes, variance, dtype=torch.float64, **options):
    layer = modenorm.ModeGroupNorm(
        num_channels, num_modes, variance=variance, dtype=dtype, **options
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return layer


def run(layer, x, upstream, with_reference=False):
    layer = copy.deepcopy(layer)
    if with_reference:
        layer, x, upstream = layer.double(), x.double(), upstream.double()
    x = x.detach().requires_grad_()
    parameters = layer.gate_weight, layer.gate_bias, layer.weight, layer.bias
    if with_reference:
        y = reference.mode_group_norm(x, *parameters, layer.eps, variance=layer.variance)
    else:
        y = layer(x)
    y.backward(upstream)
    gradients = [tensor.grad for tensor in (x, *parameters) if tensor is not None]
    return y, dict(zip(NAMES, gradients, strict=False))


def check(layer, x, upstream, slack=1.0):
    y, gradients = run(layer, x, upstream)
    expected_y, expected = run(layer, x, upstream, with_reference=True)
    assert y.dtype == x.dtype
    assert_close(y, expected_y, TOLERANCES[x.dtype] * slack, "output")
    for name, gradient in gradients.items():
        limit = TOLERANCES[gradient.dtype] * slack
        assert_close(gradient, expected[name], limit, f"gradient of {name}")


@VARIANCES
@pytest.mark.parametrize("num_modes", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 7), (4, 5, 3, 4), (3, 5, 2, 3, 4)], ids=str)
def test_every_rank_and_number_of_modes(shape, num_modes, variance, backend):
    layer = make_layer(5, num_modes, variance)
    check(layer, torch.randn(shape).double() * 2 + 1, torch.randn(shape).double())


@VARIANCES
@pytest.mark.parametrize(
    "shape", [(1, 2, 1, 1), (3, 2, 1, 7), (1, 17, 3, 1), (2, 1, 5, 5)], ids=str
)
def test_odd_sizes(shape, variance, backend):
    layer = make_layer(shape[1], 2, variance, eps=0.1)  # one channel, "pooled": no variance but eps
    check(layer, torch.randn(shape).double(), torch.randn(shape).double())


@VARIANCES
@pytest.mark.parametrize("parameters", [None, torch.float32], ids=["same", "float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_type(dtype, parameters, variance, backend):
    layer = make_layer(12, 2, variance, parameters or dtype)
    x, upstream = torch.randn(4, 12, 5, 3).to(dtype), torch.randn(4, 12, 5, 3).to(dtype)
    # Plain operators add two gradients of x's type; "pooled" divides by the means' smaller spread.
    check(layer, x, upstream, slack=6)


LAYOUTS = {
    "channels_last": lambda: torch.randn(4, 6, 5, 3).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: torch.randn(2, 6, 2, 5, 3).to(memory_format=torch.channels_last_3d),
    "permuted_NLC": lambda: torch.randn(4, 7, 6).transpose(1, 2),
    "slice": lambda: torch.randn(4, 12, 5, 6)[:, ::2, :, ::2],
}


@VARIANCES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout, variance, backend):
    x = LAYOUTS[layout]().double()
    layer = make_layer(6, 2, variance)
    check(layer, x, torch.randn(x.shape).double())
    check(layer, x, torch.randn(()).double().expand(x.shape))
    if "channels_last" in layout:
        assert layer(x).stride() == x.stride()


def test_without_affine(backend):
    layer = make_layer(6, 2, "pooled", affine=False)
    assert layer.weight is None
    assert layer.bias is None
    check(layer, torch.randn(4, 6, 3, 3).double(), torch.randn(4, 6, 3, 3).double())


@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 5), (4, 6, 5, 3)], ids=str)
def test_one_mode_over_pixels_is_groupnorm_with_one_group(shape, backend):
    layer, norm = make_layer(6, 1, "pixel"), nn.GroupNorm(1, 6).double()
    norm.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    x, upstream = torch.randn(shape).double(), torch.randn(shape).double()
    y, gradients = run(layer, x, upstream)
    x = x.requires_grad_()
    expected = norm(x)
    expected.backward(upstream)
    assert_close(y, expected, 1e-12)
    for name, gradient in (("x", x.grad), ("weight", norm.weight.grad), ("bias", norm.bias.grad)):
        assert_close(gradients[name], gradient, 1e-11, name)


@VARIANCES
def test_equal_gates_are_one_mode(variance, backend):
    one, four = make_layer(6, 1, variance), make_layer(6, 4, variance)
    four.load_state_dict({**four.state_dict(), "weight": one.weight, "bias": one.bias})
    nn.init.zeros_(four.gate_weight)
    x = torch.randn(4, 6, 5, 3).double()
    assert_close(four(x), one(x), 1e-12)


def test_batch_size_and_training_mode_do_not_matter(backend):
    layer, x = make_layer(6, 2, "pooled"), torch.randn(4, 6, 5, 3).double()
    y = layer.train()(x)
    assert torch.equal(layer.eval()(x), y)
    assert_close(layer(x[2:3]), y[2:3], 1e-13)


# As for mode normalization: means of size 1000 are known to 3e-5 in float32, and sd is 0.1.
@VARIANCES
def test_large_mean_in_float32(variance, backend):
    layer = make_layer(8, 2, variance, torch.float32)
    nn.init.normal_(layer.gate_weight, std=1e-3)
    x = torch.randn(4, 8, 6, 6) * 0.1 + 1000 + torch.randn(1, 8, 1, 1) * 0.1
    y, _ = run(layer, x, x)
    expected, _ = run(layer, x, x, with_reference=True)
    assert_close(y, expected, 4 * 3e-5 / 0.1)


def test_functional_is_the_layer(backend):
    layer, x = make_layer(6, 2, "pixel"), torch.randn(4, 6, 5, 3).double()
    y = functional.mode_group_norm(x, *layer.parameters(), variance="pixel")
    assert torch.equal(y, layer(x))
    assert [name for name, _ in layer.named_parameters()] == list(NAMES[1:])


@pytest.mark.parametrize("name", ["reference", "eager", "fused"])
def test_one_weight_and_bias_for_all_channels(name):
    x, gate = torch.randn(4, 6, 5), torch.randn(2, 2)
    weight, bias = torch.randn(2, 1)
    with modenorm.use_backend(name):
        y = functional.mode_group_norm(x, *gate, weight, bias)
        expected = functional.mode_group_norm(x, *gate) * weight + bias
    assert_close(y, expected, 1e-6)  # a few roundings


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("shape", [(4, 6), (1, 6), (4, 1)], ids=str)
def test_one_weight_or_bias_per_mode_is_refused(name, shape):
    given = {name: torch.ones(shape)}
    with pytest.raises(ValueError, match=rf"{name} has shape .*; expected \(6,\): "):
        functional.mode_group_norm(torch.randn(4, 6, 5), torch.ones(4), torch.zeros(4), **given)


def test_gates_learn():
    layer, x = make_layer(6, 2, "pooled"), torch.randn(4, 6, 5, 3).double()
    _, gradients = run(layer, x, torch.randn_like(x))
    assert gradients["gate_weight"].abs().min() > 1e-3


@VARIANCES
@pytest.mark.parametrize("offset", [12.0, 3e3])
def test_a_mode_that_no_channel_belongs_to(offset, variance, backend):
    """Its gates are zero in float32; the weights of its channels, gates over their sum, are not."""
    layer = modenorm.ModeGroupNorm(16, 2, variance=variance)
    with torch.no_grad():
        layer.gate_weight.copy_(torch.tensor([60.0, -60.0]) / offset)
        layer.gate_bias.zero_()
    x, upstream = torch.randn(4, 16, 3, 3) + offset, torch.randn(4, 16, 3, 3)
    assert not torch.softmax(x.mean((2, 3))[..., None] * layer.gate_weight, -1)[..., 1].any()
    y, gradients = run(layer, x, upstream)
    expected_y, expected = run(layer, x, upstream, with_reference=True)
    assert_close(y, expected_y, 1e-3)  # logits of 60 have five digits after the point
    for name, gradient in gradients.items():
        if "gate" in name:  # sums whose parts cancel
            assert bool(gradient.isfinite().all())
        else:
            assert_close(gradient, expected[name], 1e-3, name)


def test_gates_without_a_mode_are_refused():
    x, none = torch.randn(4, 3, 2, 2), torch.zeros(0)
    with pytest.raises(ValueError, match="at least one mode"):
        modenorm.functional.mode_group_norm(x, none, none)
    for training in (True, False):
        with pytest.raises(ValueError, match=r"gates have shape \(4, 0\)"):
            modenorm.functional.mode_norm(x, torch.zeros(4, 0), training=training)


@pytest.mark.parametrize("layer", [modenorm.ModeNorm2d(3), modenorm.ModeGroupNorm(3)])
def test_errors_of_shape_say_what_to_do(layer):
    with pytest.raises(ValueError, match=r"got 5 .* make it for 5, or move channels"):
        layer(torch.randn(4, 5, 2, 2))
    if isinstance(layer, modenorm.ModeNorm2d):
        with pytest.raises(ValueError, match=r"use the layer for that shape, or x\[None\]"):
            layer(torch.randn(3, 2, 2))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_reset_with_one_affine_parameter(name):
    layer = modenorm.ModeGroupNorm(3)
    setattr(layer, name, None)
    kept = layer.bias if name == "weight" else layer.weight
    with torch.no_grad():
        kept.fill_(5.0)
    layer.reset_parameters()
    assert kept.tolist() == [float(name == "bias")] * 3


def test_means_whose_sum_is_too_large():
    layer, x = modenorm.ModeGroupNorm(8, variance="pixel"), torch.full((2, 8, 4), 1.5e38)
    with modenorm.use_backend("eager"):
        assert bool(layer(x).isfinite().all())
