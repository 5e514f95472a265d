"""Positions that don't count, against the paper's sums in float64."""

import dataclasses

import pytest
import torch

import modenorm
from compare import assert_close, assert_same, data, make_layer, one_hot, run, run_reference
from marks import TRAINING


@TRAINING
@pytest.mark.parametrize("shape", [(6, 3, 8), (6, 3, 4, 5)], ids=["3d", "4d"])
@pytest.mark.parametrize("update", ["paper", "usage"])
def test_mask(shape, update, training, backend):
    layer = make_layer(3, 2, len(shape), running_update=update).train(training)
    mask = torch.rand(shape[0], *shape[2:]) < 0.6
    mask[:, ..., 0] = True  # at least one position per sample
    x, upstream = data(*shape), torch.randn(shape).double()
    actual, expected = (
        run(layer, x, upstream, mask=mask),
        run_reference(layer, x, upstream, mask=mask),
    )
    assert_same(actual, expected, torch.float64)


@pytest.mark.parametrize("name", ["reference", "eager", "fused"])
def test_shares_count_the_positions_of_the_mask(name):
    layer = make_layer(3, 2, 2, running_update="usage")
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    gates = one_hot([0, 1, 1], 2) * 0.5  # gates from outside need not sum to one
    with modenorm.use_backend(name):
        layer(data(3, 3, 2), gates=gates, mask=mask)
    torch.testing.assert_close(layer.running_share, torch.tensor([1 / 3, 1 / 6]).double())


@pytest.mark.parametrize("update", ["paper", "usage"])
def test_a_batch_that_is_masked_out_leaves_all_buffers_alone_in_the_reference(update):
    layer = make_layer(3, 2, running_update=update)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    with modenorm.use_backend("reference"):
        y = layer(data(4, 3, 5, 5), mask=torch.zeros(4, 5, 5, dtype=torch.bool))
    assert y.isfinite().all()
    assert all(torch.equal(buffer, before[name]) for name, buffer in layer.named_buffers())


@pytest.mark.parametrize("name", ["reference", "eager", "fused"])
@pytest.mark.parametrize("update", ["paper", "usage"])
def test_a_mask_that_leaves_one_value_leaves_all_buffers_alone(update, name):
    layer = make_layer(3, 2, running_update=update)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    mask = torch.zeros(4, 5, 5, dtype=torch.bool)
    mask[1, 2, 3] = True
    with modenorm.use_backend(name):
        y = layer(data(4, 3, 5, 5), mask=mask)
        assert y.isfinite().all()
        assert all(torch.equal(buffer, before[name]) for name, buffer in layer.named_buffers())
        mask[2, 2, 3] = True  # two have a variance
        layer(data(4, 3, 5, 5), mask=mask)
    assert layer.num_batches_tracked == 1


def test_mask_with_a_channel_axis_and_half_type():
    layer = make_layer(3, 2, 2, dtype=torch.float32)
    x, mask = data(6, 3, dtype=torch.bfloat16), torch.tensor([True] * 5 + [False])
    expected = layer(x.float(), mask=mask)
    assert torch.equal(layer(x, mask=mask[:, None]), expected.bfloat16())


def test_mask_hides_what_the_padding_holds(backend):
    layer = make_layer(3, 2, 3)
    x, mask = data(6, 3, 8), torch.arange(8) < torch.tensor([8, 3, 5, 1, 8, 2])[:, None]
    upstream = torch.where(mask[:, None], torch.randn(6, 3, 8).double(), 0)
    expected = run(layer, x, upstream, mask=mask)
    for padding in (1e6, float("nan"), float("inf")):
        padded = torch.where(mask[:, None], x, padding)
        found = run(layer, padded, upstream, mask=mask)
        counts = torch.where(mask[:, None], found.y, expected.y)
        assert torch.equal(counts, expected.y)
        assert_same(dataclasses.replace(found, y=counts), expected, torch.float64)


@pytest.mark.parametrize("name", ["reference", "eager", "fused"])
@pytest.mark.parametrize("gate", [modenorm.LinearGate, modenorm.StandardizedGate])
def test_samples_of_padding_change_nothing(gate, name):
    layer = make_layer(3, 2, 3, gate=gate)
    x, upstream = data(4, 3, 8), torch.randn(4, 3, 8).double()
    mask = torch.rand(4, 8) < 0.7
    mask[:, 0] = True
    x_padded, upstream_padded = (torch.cat([t, torch.zeros_like(t)]) for t in (x, upstream))
    with modenorm.use_backend(name):
        expected = run(layer, x, upstream, mask=mask)
        padded = torch.cat([mask, torch.zeros_like(mask)])
        found = run(layer, x_padded, upstream_padded, mask=padded)
    assert not found.gradients["x"][4:].any()
    found.y, found.gradients["x"] = found.y[:4], found.gradients["x"][:4]
    assert_same(found, expected, torch.float64)
    assert found.buffers.keys() == expected.buffers.keys()
    for key, buffer in expected.buffers.items():
        assert_close(found.buffers[key], buffer, 1e-12, key)


@pytest.mark.parametrize("gate", [modenorm.LinearGate, modenorm.StandardizedGate])
def test_full_mask_is_no_mask(gate, backend):
    layer = make_layer(3, 2, 3, gate=gate)
    x, upstream = data(6, 3, 8), torch.randn(6, 3, 8).double()
    masked = run(layer, x, upstream, mask=torch.ones(6, 8, dtype=torch.bool))
    assert_same(masked, run(layer, x, upstream), torch.float64)


@pytest.mark.parametrize("name", ["reference", "eager", "fused"])
def test_a_mode_of_padding_alone_has_finite_gradients(name):
    layer = make_layer(3, 2, 3)
    mask = torch.ones(4, 8, dtype=torch.bool)
    mask[3] = False
    x, upstream = data(4, 3, 8), torch.randn(4, 3, 8).double()
    with modenorm.use_backend(name):
        found = run(layer, x, upstream, mask=mask, gates=one_hot([0, 0, 0, 1], 2))
    assert {"x", "gates"} <= found.gradients.keys()
    assert all(gradient.isfinite().all() for gradient in found.gradients.values())
