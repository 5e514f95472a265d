"""Tensors of another kind or shape than a norm takes beside its input."""

import numpy as np
import pytest
import torch
from torch import nn

import modenorm
from modenorm import functional

ESTIMATES = (torch.zeros(2, 3), torch.ones(2, 3))


@pytest.mark.parametrize("name", ["gates", "mask"])
def test_lists_and_arrays(name):
    x, given = torch.randn(4, 3, 2), {"gates": torch.full((4, 2), 0.5)}
    for value in ([[1, 0]] * 4, torch.ones(4, 2).numpy()):
        says = rf"{name} is a {type(value).__name__}.*torch\.as_tensor\({name}\)"
        with pytest.raises(ValueError, match=says):
            modenorm.ModeNorm1d(3)(x, **{name: value})
        with pytest.raises(ValueError, match=says):
            functional.mode_norm(x, **given | {name: value})


@pytest.mark.parametrize("shape", [(2,), (0,)], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_counter_that_is_not_one_number(shape, training):
    x, gates, counter = torch.randn(4, 3, 2), torch.full((4, 2), 0.5), torch.zeros(shape).long()
    with pytest.raises(ValueError, match=r"num_batches_tracked has shape .*one number"):
        functional.mode_norm(x, gates, *ESTIMATES, training=training, num_batches_tracked=counter)
    assert not counter.any()


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3)], ids=str)
def test_shares_of_another_number_of_modes(shape):
    x, gates, share = torch.randn(4, 3, 2), torch.full((4, 2), 0.5), torch.zeros(shape)
    with pytest.raises(ValueError, match=r"running_share has shape .*expected \(2,\)"):
        functional.mode_norm(
            x, gates, *ESTIMATES, training=True, running_update="usage", running_share=share
        )
    assert not share.any()


@pytest.mark.parametrize("make", [modenorm.ModeNorm2d, modenorm.ModeGroupNorm])
@pytest.mark.parametrize("x", [None, [1.0], np.zeros((2, 3, 4, 4))], ids=["None", "list", "array"])
def test_inputs_that_are_no_tensors(make, x):
    with pytest.raises(ValueError, match=r"input is a (NoneType|list|ndarray); expected a tensor"):
        make(3)(x)


def test_tensors_of_kinds_that_no_norm_takes():
    dense, gates = torch.randn(2, 3, 4), torch.ones(2, 1)
    nested = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(3, 5)], layout=torch.jagged)
    for x in (dense.to_sparse(), nested):
        with pytest.raises(ValueError, match="sparse or nested"):
            functional.mode_norm(x, gates, training=True)
    with pytest.raises(ValueError, match=r"float8.*at least 16 bits"):
        functional.mode_norm(dense.to(torch.float8_e4m3fn), gates, training=True)


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var", "running_share"])
@pytest.mark.parametrize("dtype", [torch.long, torch.complex64], ids=str)
def test_numbers_that_are_not_real(name, dtype):
    """Whole ones would silently lose what a step adds to them."""
    x, gates = torch.randn(6, 3, 4, 4), torch.full((6, 2), 0.5)
    given = {"running_mean": torch.zeros(2, 3), "running_var": torch.ones(2, 3)}
    given["running_share"] = torch.ones(2)
    given[name] = given.get(name, torch.ones(3)).to(dtype)
    with pytest.raises(ValueError, match=rf"{name} is {dtype}; expected a floating-point type"):
        functional.mode_norm(x, gates, **given, training=True)


@pytest.mark.parametrize("name", ["weight", "bias", "num_batches_tracked"])
def test_parameters_that_are_no_tensors(name):
    x, gates = torch.randn(6, 3, 4, 4), torch.full((6, 2), 0.5)
    given = {"running_mean": torch.zeros(2, 3), "running_var": torch.ones(2, 3), name: [1.0]}
    with pytest.raises(ValueError, match=f"{name} is a list; expected a tensor"):
        functional.mode_norm(x, gates, **given, training=True)


def test_the_gate_of_a_group_norm_that_is_no_tensor():
    with pytest.raises(ValueError, match="gate_weight is a list; expected a tensor"):
        functional.mode_group_norm(torch.randn(2, 3, 4), [1.0], [0.0])


@pytest.mark.parametrize("eps", [1e-46, float("inf"), float("nan"), "1e-5", None], ids=str)
@pytest.mark.parametrize("make", [modenorm.ModeNorm2d, modenorm.ModeGroupNorm])
def test_an_eps_that_float32_does_not_have(make, eps):
    with pytest.raises(ValueError, match=rf"eps is {eps!r}; it must be positive and finite"):
        make(3, eps=eps)


def test_a_bias_without_values_is_not_left_out():
    layer = modenorm.ModeNorm2d(3)
    layer.bias = nn.Parameter(layer.bias.to("meta"))
    with pytest.raises(RuntimeError, match="meta"):
        layer(torch.randn(6, 3, 4, 4))
