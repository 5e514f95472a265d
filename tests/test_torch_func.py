"""Layers under torch.func: functional calls, gradients of every sample, ensembles."""

import copy

import torch
from torch.func import functional_call, grad, vmap

import modenorm
from compare import assert_close, double, make_layer, run
from marks import TRAINING


def parameters_and_buffers(layer):
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    return parameters, dict(layer.named_buffers())


@TRAINING
def test_functional_grad_is_autograd(training):
    layer = make_layer(3, 2, track_running_stats=not training).train(training)
    parameters, buffers = parameters_and_buffers(layer)
    x, upstream = double(4, 3, 2, 2), double(4, 3, 2, 2)

    def loss(parameters):
        return (functional_call(layer, (parameters, buffers), (x,)) * upstream).sum()

    expected = run(layer, x, upstream).gradients
    for name, gradient in grad(loss)(parameters).items():
        assert_close(gradient, expected[name], 1e-12, name)


def test_per_sample_gradients_in_eval():
    layer = make_layer(3, 2).eval()
    parameters, buffers = parameters_and_buffers(layer)
    x, upstream = double(4, 3, 2, 2), double(4, 3, 2, 2)

    def loss(parameters, sample, weights):
        y = functional_call(layer, (parameters, buffers), (sample[None],))
        return (y * weights).sum()

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, upstream)
    for n in range(4):
        expected = run(layer, x[n : n + 1], upstream[n : n + 1]).gradients
        for name, gradient in gradients.items():
            assert_close(gradient[n], expected[name], 1e-12, name)


@TRAINING
def test_vmap_over_an_ensemble(training):
    layers = [make_layer(3, 2, track_running_stats=not training).train(training) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(layers)
    base, x = copy.deepcopy(layers[0]).to("meta"), double(4, 3, 2, 2)

    def call(parameters, buffers, x):
        return functional_call(base, (parameters, buffers), (x,))

    actual = vmap(call, in_dims=(0, 0, None))(parameters, buffers, x)
    for y, layer in zip(actual, layers, strict=True):
        assert_close(y, layer(x), 1e-12)


def test_vmap_in_stateless_training_treats_batches_alone():
    layer, x = make_layer(3, 2, track_running_stats=False), double(5, 4, 3, 2, 2)
    expected = torch.stack([layer(batch) for batch in x])
    assert_close(vmap(layer)(x), expected, 1e-12)


def test_functional_call_moves_the_buffers_it_was_given():
    layer, x = make_layer(3, 2), double(4, 3, 2, 2)
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    before = layer.running_mean.clone()
    functional_call(layer, state, (x,))
    assert torch.equal(layer.running_mean, before)
    layer(x)
    assert torch.equal(layer.running_mean, state["running_mean"])


def test_vmap_of_mode_group_norm():
    layer, x = modenorm.ModeGroupNorm(3).double(), double(5, 4, 3, 2, 2)
    assert_close(vmap(layer)(x), torch.stack([layer(batch) for batch in x]), 1e-12)
