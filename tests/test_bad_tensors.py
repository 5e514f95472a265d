"""Tensors of another kind or shape than a norm takes beside its input."""

import pytest
import torch

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
