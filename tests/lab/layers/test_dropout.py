import copy

import pytest
import torch
from torch import nn

from modenorm.lab.layers.dropout import draw_key
from modenorm.lab.models import (
    SeededDropout,
    create_model,
    generator_states,
    generators,
    load_generator_states,
)
from small_models import counting_backend

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def dropout(p=0.5, seed=0):
    return SeededDropout(p, torch.Generator().manual_seed(seed))


def test_keeps_the_mean_and_the_share():
    x = torch.full((200_000,), 3.0)
    out = dropout(0.25)(x)
    # The share of zeros has a standard deviation of 0.001; five of them.
    assert abs((out == 0).float().mean() - 0.25) < 0.005
    torch.testing.assert_close(out[out != 0].unique(), torch.tensor([4.0]))


def test_gradient_passes_where_the_value_passed():
    x = torch.ones(100, requires_grad=True)
    out = dropout()(x)
    upstream = torch.randn(100)
    out.backward(upstream)
    assert torch.equal(x.grad, upstream * out.detach())


def test_evaluation_and_zero_probability_change_nothing():
    x = torch.randn(10)
    assert dropout().eval()(x) is x
    assert dropout(0.0)(x) is x


def test_draws_are_its_own():
    x = torch.ones(1000)
    alone = [layer(x) for layer in [dropout()] for _ in range(3)]
    layer, neighbour = dropout(), dropout(seed=1)
    beside = []
    for _ in range(3):
        torch.rand(7)
        neighbour(x)
        beside.append(layer(x))
    assert all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True))
    assert not torch.equal(beside[0], beside[1])
    assert not torch.equal(alone[0], dropout(seed=1)(x))


def test_without_a_generator_the_global_seed_decides():
    torch.manual_seed(5)
    first = SeededDropout(0.5)
    torch.manual_seed(5)
    assert SeededDropout(0.5).seed == first.seed
    assert SeededDropout(0.5).seed != first.seed


def test_a_deep_copy_goes_on_by_itself():
    x = torch.ones(1000)
    layer = dropout()
    layer(x)
    twin = copy.deepcopy(layer)
    expected = layer(x)
    assert torch.equal(twin(x), expected)
    assert twin.generator is not layer.generator


def test_conversions_on_one_device_keep_the_state():
    layer = dropout()
    layer(torch.ones(10))
    generator, state = layer.generator, layer.generator.get_state()
    layer.to(torch.bfloat16).cpu().to(memory_format=torch.channels_last)
    assert layer.generator is generator
    assert torch.equal(layer.generator.get_state(), state)
    layer.to("meta")
    assert layer.generator is generator


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_keeps_type_and_layout(dtype):
    x = torch.ones(2, 3, 4, 4, dtype=dtype).to(memory_format=torch.channels_last)
    out = dropout()(x)
    assert out.dtype == dtype
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_states_resume_a_model():
    x = torch.ones(2, 3, 32, 32)
    model = create_model("nin", num_classes=10, norm="gn")
    model(x)
    states = generator_states(model)
    assert list(states) == ["dropout1", "dropout2"]
    expected = model(x)
    resumed = create_model("nin", num_classes=10, norm="gn")
    resumed.load_state_dict(model.state_dict())
    load_generator_states(resumed, states)
    assert torch.equal(resumed(x), expected)


def test_states_of_something_else_are_refused_whole():
    model = nn.Sequential(dropout(), dropout())
    before = [generator.get_state() for generator in generators(model)]
    good = dropout(seed=9).generator.get_state()
    with pytest.raises(ValueError, match=r"\['0'\] given, but the model has \['0', '1'\]"):
        load_generator_states(model, {"0": good})
    with pytest.raises(ValueError, match="dropout layer '1' has 16 bytes, but a generator on cpu"):
        load_generator_states(model, {"0": good, "1": good[:16]})
    assert all(map(torch.equal, before, [g.get_state() for g in generators(model)]))


def correlation(one, other):
    """Of two masks that drop one half; its standard deviation is 1/√count."""
    return float((one.double().sign() - 0.5).mul(other.double().sign() - 0.5).mean() * 4)


COUNT = 1 << 18
MOST = 5 / COUNT**0.5  # five standard deviations


def test_neighbours_are_independent():
    """Along every axis of an image, and at distances that are powers of two."""
    mask = dropout()(torch.ones(COUNT))
    for distance in [1, 2, 3, 5, 96, 192, 3072] + [1 << i for i in range(2, 17)]:
        assert abs(correlation(mask[distance:], mask[:-distance])) < MOST * 1.2, distance


def test_draws_layers_and_seeds_are_independent():
    x = torch.ones(COUNT)
    layers = [dropout(seed=seed) for seed in range(4)]
    masks = [layer(x) for layer in layers for _ in range(4)]
    for i, one in enumerate(masks):
        assert all(abs(correlation(one, other)) < MOST for other in masks[:i])


def test_keys_that_differ_in_one_bit(monkeypatch):
    """Of their first words; equal first words with different second ones don't come in practice."""
    key, x = torch.tensor([0x1234567, -0x7654321], dtype=torch.int32), torch.ones(COUNT)
    monkeypatch.setattr("modenorm.lab.layers.dropout.draw_key", lambda *_: key)
    first = dropout()(x)
    for bit in range(31):
        key[0] ^= 1 << bit
        assert abs(correlation(first, dropout()(x))) < MOST, bit
        key[0] ^= 1 << bit
    key += 1
    assert abs(correlation(first, dropout()(x))) < MOST


def test_every_channel_and_place_has_its_share():
    """Each share has a standard deviation of 0.0034 or less; five of them."""
    kept = (dropout(0.25)(torch.ones(64, 32, 16, 16)) != 0).double()
    for axis in range(4):
        rest = [other for other in range(4) if other != axis]
        assert (kept.mean(rest) - 0.75).abs().max() < 5 * (0.25 * 0.75 * 64 / kept.numel()) ** 0.5


def test_order_in_memory_makes_no_difference():
    x = torch.randn(2, 3, 4, 5)
    first, last = dropout()(x), dropout()(x.to(memory_format=torch.channels_last))
    assert torch.equal(first, last)
    assert first.is_contiguous()


@pytest.mark.parametrize("p", [1e-12, 0.999999999999])
def test_extreme_probabilities(p):
    x = torch.ones(100)
    assert dropout(p)(x).count_nonzero() == (100 if p < 0.5 else 0)


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (2, 3, 0, 5)], ids=str)
def test_any_shape(shape):
    assert dropout()(torch.ones(shape)).shape == shape


def compiled_copy(model, backend):
    torch.compiler.reset()
    return torch.compile(copy.deepcopy(model), fullgraph=True, dynamic=False, backend=backend)


def values_and_gradients(function, x):
    """A random upstream gradient, the same for all."""
    leaf = x.detach().requires_grad_()
    y = function(leaf)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    return y.detach(), torch.autograd.grad(y, leaf, dy)[0]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_networks_are_one_graph(backend):
    """As drawn without compilation, step by step, in training; and nothing in evaluation."""
    model = create_model("nin", num_classes=4, norm="gn")
    compiled = compiled_copy(model, backend)
    x = torch.randn(2, 3, 16, 16)
    outputs = []
    for _ in range(2):
        (y, dx), (wanted, wanted_dx) = (values_and_gradients(f, x) for f in (compiled, model))
        # float32; masks that differ would change the logits by a tenth and more
        torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(dx, wanted_dx, rtol=1e-3, atol=1e-5)
        outputs.append(y)
    assert not torch.allclose(*outputs, rtol=1e-2)
    torch.testing.assert_close(compiled.eval()(x), model.eval()(x), rtol=1e-4, atol=1e-5)


class Twice(nn.Module):
    """One layer in two places, on the same numbers."""

    def __init__(self):
        super().__init__()
        self.dropout = dropout()

    def forward(self, x):
        return self.dropout(x) + 3 * self.dropout(x)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layers_draw_at_every_call(backend):
    """Integers that Inductor computes by itself are the same; two calls are not taken for one."""
    model = Twice()
    compiled = compiled_copy(model, backend)
    x = torch.ones(2, 5, 7, 6).to(memory_format=torch.channels_last)
    for _ in range(3):
        results = [values_and_gradients(f, x) for f in (compiled, model)]
        assert all(map(torch.equal, *results))
        y, dx = results[0]
        assert y.unique().tolist() == [0, 2, 6, 8]
        assert torch.equal(dx == 0, y == 0)


def test_compiled_models_of_equal_form_share_code_and_nothing_else():
    torch.compiler.reset()
    backend, graphs = counting_backend()
    x = torch.ones(1000)
    models = [nn.Sequential(dropout(seed=seed)) for seed in range(3)]
    twins = copy.deepcopy(models)
    compiled = [torch.compile(model, backend=backend, fullgraph=True) for model in models]
    for _ in range(2):
        drawn = [function(x) for function in compiled]
        assert all(map(torch.equal, drawn, [twin(x) for twin in twins]))
        assert not torch.equal(drawn[0], drawn[1])
    assert len(graphs) == 1


def test_keys_of_a_layer_that_is_gone():
    layer = dropout()
    handle = layer.handle
    torch.library.opcheck(draw_key, (handle, torch.device("cpu")), test_utils="test_faketensor")
    del layer
    with pytest.raises(KeyError):
        draw_key(handle, torch.device("cpu"))


def test_state_of_a_model_is_as_if_there_were_no_dropout():
    assert not dropout().state_dict()
    assert list(dropout().buffers()) == []


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_probability_is_checked(p):
    with pytest.raises(ValueError, match=r"p must be in \[0, 1\)"):
        SeededDropout(p)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_cuda_graph_draws_afresh_and_resumes(compiled):
    model = nn.Sequential(dropout()).cuda()
    x = torch.ones(1000, device="cuda")
    eager = copy.deepcopy(model)
    function = torch.compile(model, fullgraph=True) if compiled else model
    states = generator_states(model)
    function(x)
    load_generator_states(model, states)
    expected = [eager(x) for _ in range(4)]

    graph = torch.cuda.CUDAGraph()
    for generator in generators(model):
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        out = function(x)

    def replay():
        graph.replay()
        return out.clone()

    assert all(torch.equal(replay(), mask) for mask in expected[:2])
    states = generator_states(model)
    assert all(torch.equal(replay(), mask) for mask in expected[2:])
    load_generator_states(model, states)
    assert all(torch.equal(replay(), mask) for mask in expected[2:])


@pytest.mark.gpu
@needs_gpu
def test_moving_starts_the_device_from_the_seed():
    x = torch.ones(1000, device="cuda")
    model, other = nn.Sequential(dropout()).cuda(), nn.Sequential(dropout())
    other(torch.ones(10))
    assert generators(other.cuda())[0].device.type == "cuda"
    assert torch.equal(model(x), other(x))
    generator = generators(model)[0]
    assert generators(model.to("cuda"))[0] is generator
