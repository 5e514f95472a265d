import copy

import pytest
import torch
from torch import nn

from modenorm.lab.models import (
    SeededDropout,
    create_model,
    generator_states,
    generators,
    load_generator_states,
)

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


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_probability_is_checked(p):
    with pytest.raises(ValueError, match=r"p must be in \[0, 1\)"):
        SeededDropout(p)


@pytest.mark.gpu
@needs_gpu
def test_cuda_graph_draws_afresh_and_resumes():
    model = nn.Sequential(dropout()).cuda()
    x = torch.ones(1000, device="cuda")
    eager = copy.deepcopy(model)
    expected = [eager(x) for _ in range(4)]

    graph = torch.cuda.CUDAGraph()
    for generator in generators(model):
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        out = model(x)

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
