import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import modenorm.gates
from modenorm.lab.layers.dropout import generators
from modenorm.lab.models import GATES, MODELS, NORMS, check_size, count_parameters, create_model

NUM_CLASSES = 10
CHEAP = ["lenet", "lenet1989", "nin", "resnet20"]


def small(name, **options):
    """Create a model from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    return create_model(name, num_classes=NUM_CLASSES, generator=generator, **options)


def batch(name, seed=1):
    """Four images, each with a mean of its own so that gates differ."""
    size = 112 if name == "resnet18" else 32
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(4, 3, 1, 1, generator=generator)
    return torch.randn(4, 3, size, size, generator=generator) + means


def train_step(model, x):
    """One SGD step on cross-entropy with random labels and random sample weights."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(NUM_CLASSES, (len(x),), generator=generator)
    weights = torch.rand(len(x), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    logits = model.train()(x)
    F.cross_entropy(logits, labels, reduction="none").backward(weights)
    optimizer.step()
    return logits.detach()


def norms_of(model):
    kinds = (nn.BatchNorm2d, nn.GroupNorm)
    return [module for module in model.modules() if isinstance(module, kinds)]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_learns(name, norm):
    """In float64: at the start a gate's bias has a gradient near 1e-9, which float32 drowns.

    Equal gates are a stationary point and gates start nearly equal. What float64 leaves of a
    gradient that should be zero is near 1e-16.
    """
    model = small(name, norm=norm).double()
    before = {key: value.clone() for key, value in model.named_parameters()}
    logits = train_step(model, batch(name).double())
    assert logits.shape == (4, NUM_CLASSES)
    assert logits.isfinite().all()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().max() > 1e-12, key
        assert parameter.isfinite().all(), key
        assert not torch.equal(before[key], parameter), key


@pytest.mark.parametrize("name", MODELS)
def test_a_norm_follows_every_convolution_in_place_of_its_bias(name):
    model = small(name)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert all(conv.bias is None for conv in convolutions)
    widths = [conv.out_channels for conv in convolutions]
    assert [norm.num_features for norm in norms_of(model)] == widths


# LeNets, NIN and VGG13 counted by hand, e.g. lenet: 450 + 2400 + 2·22 + 48120 + 10164 + 850. The
# ResNets are published counts: 0.27M, 0.85M, 1.7M for CIFAR-10, and torchvision's for ImageNet.
PARAMETERS = {
    "lenet": (10, 62_028),
    "lenet1989": (10, 27_928),
    "nin": (10, 968_404),
    "vgg13": (10, 9_413_066),
    "resnet20": (10, 269_722),
    "resnet56": (10, 853_018),
    "resnet110": (10, 1_727_962),
    "resnet18": (1000, 11_689_512),
}


@pytest.mark.parametrize("name", MODELS)
def test_number_of_parameters(name):
    num_classes, expected = PARAMETERS[name]
    assert count_parameters(create_model(name, num_classes=num_classes)) == expected


def test_two_modes_add_less_than_one_percent_to_nin():
    bn, mn = count_parameters(small("nin")), count_parameters(small("nin", norm="mn"))
    assert bn < mn < 1.01 * bn


@pytest.mark.parametrize("name", MODELS)
def test_where_first_is_the_first_norm_of_the_forward_pass(name):
    model = small(name, norm="gn", where="first").eval()
    called = []
    for layer in norms_of(model):
        layer.register_forward_hook(lambda module, *_: called.append(type(module)))
    with torch.no_grad():
        model(batch(name)[:1])
    assert called == [nn.GroupNorm] + [nn.BatchNorm2d] * (len(called) - 1)


@pytest.mark.parametrize("norm", NORMS)
def test_where_first_trains(norm):
    model = small("resnet20", norm=norm, where="first")
    train_step(model, batch("resnet20"))
    assert all(parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", CHEAP)
def test_copies_and_round_trips_give_the_same_numbers(name, norm):
    x = batch(name)
    model = small(name, norm=norm)
    train_step(model, x)
    twin = copy.deepcopy(model)
    other = create_model(name, num_classes=NUM_CLASSES, norm=norm)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        first, second = model.eval()(x), model(x)
        assert torch.equal(first, second)
        assert torch.equal(first, twin.eval()(x))
        assert torch.equal(first, other.eval()(x))
    train_step(twin, x)
    with torch.no_grad():
        assert torch.equal(first, model(x)), "the copy shares state with the original"


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", CHEAP)
def test_generator_decides_the_whole_training_step(name, norm):
    outputs = []
    for disturbance in (11, 12):
        torch.manual_seed(disturbance)
        before = torch.get_rng_state()
        model = small(name, norm=norm)
        outputs.append(train_step(model, batch(name)))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", MODELS)
def test_settings_reach_every_norm(name):
    assert {layer.momentum for layer in norms_of(small(name, momentum=0.3))} == {0.3}
    assert {layer.num_groups for layer in norms_of(small(name, norm="ln"))} == {1}
    assert {layer.num_groups for layer in norms_of(small(name, norm="gn", groups=2))} == {2}


def test_one_generator_makes_different_models():
    generator = torch.Generator().manual_seed(0)
    first, second = (create_model("lenet", num_classes=2, generator=generator) for _ in range(2))
    assert not torch.equal(first.classifier.weight, second.classifier.weight)


@pytest.mark.parametrize("pool", ["max", "avg"])
@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid"])
def test_lenet_variants_train(activation, pool):
    model = small("lenet", activation=activation, pool=pool)
    train_step(model, batch("lenet"))
    assert all(parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("gate", [*GATES, modenorm.gates.StandardizedGate])
def test_gates_train(gate):
    model = small("lenet", norm="mn", modes=4, gate=gate)
    train_step(model, batch("lenet"))
    assert all(parameter.grad.any() for parameter in model.parameters())
    kind = GATES.get(gate, gate)
    assert [type(model.get_submodule(f"stage{i}.norm.gate")) for i in (1, 2)] == [kind] * 2


def test_lenet1989_is_sigmoid_unless_asked():
    kinds = {type(module) for module in small("lenet1989").modules()}
    assert nn.Sigmoid in kinds
    kinds = {type(module) for module in small("lenet1989", activation="tanh").modules()}
    assert nn.Tanh in kinds
    assert nn.Sigmoid not in kinds


def test_vgg_layers_of_the_paper_have_names():
    model = small("vgg13")
    assert model.get_submodule("features.conv3_64_1.norm").num_features == 64
    assert model.get_submodule("features.conv3_256_1.norm").num_features == 256
    assert model.get_submodule("features.conv3_512_4.conv").in_channels == 512


def test_nin_drops_only_where_asked():
    assert [layer.p for layer in small("nin").modules() if hasattr(layer, "p")] == [0.25, 0.25]
    assert len({generator.initial_seed() for generator in generators(small("nin"))}) == 2
    assert generators(small("vgg13")) == []


@pytest.mark.parametrize(("stem", "size"), [("imagenet", 4), ("small", 16)])
def test_resnet18_stem_decides_the_resolution(stem, size):
    model = small("resnet18", stem=stem)
    with torch.no_grad():
        assert model.stem(torch.zeros(1, 3, 16, 16)).shape == (1, 64, size, size)


def test_pad_shortcut_keeps_the_values_it_passes():
    shortcut = small("resnet20").stages[1][0].shortcut
    x = torch.randn(2, 16, 8, 8)
    out = shortcut(x)
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any()
    assert not out[:, 24:].any()


def test_he_initialisation():
    weight = small("vgg13").features.conv3_512_4.conv.weight
    torch.testing.assert_close(weight.std().item(), (2 / (512 * 9)) ** 0.5, rtol=0.01, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_repr_and_docstring(name):
    assert "BatchNorm2d" in repr(small(name))
    assert inspect.getdoc(MODELS[name])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "alexnet"}, "unknown model 'alexnet'; known: lenet, lenet1989, nin,"),
        ({"norm": "wn"}, "unknown norm 'wn'; known: bn, in, ln, gn, mn, mgn"),
        ({"where": "last"}, "unknown where 'last'; known: all, first"),
        ({"norm": "mn", "gate": "deep"}, "unknown gate 'deep'; known: linear, standardized"),
        ({"activation": "gelu"}, "unknown activation 'gelu'; known: relu, tanh, sigmoid"),
        ({"pool": "min"}, "unknown pool 'min'; known: max, avg"),
        ({"name": "resnet18", "stem": "big"}, "unknown stem 'big'; known: imagenet, small"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(arguments, message):
    with pytest.raises(ValueError, match=message):
        create_model(**{"name": "lenet", "num_classes": 2} | arguments)


@pytest.mark.parametrize("side", [16, 28, 29, 31, 32, 33, 35, 36, 48, 63, 64])
@pytest.mark.parametrize("name", ["lenet", "lenet1989", "vgg13", "nin", "resnet20"])
def test_sizes_are_refused_that_a_network_cannot_take(name, side):
    model = create_model(name, num_classes=3).eval()
    size, source = (side, 32), "folder:here"
    try:
        model(torch.zeros(1, 3, *size))
    except RuntimeError:
        words = f"{name} needs 32×32 images, folder:here has {side}×32: set --image-size 32 or"
        with pytest.raises(ValueError, match=words):
            check_size(name, size, source)
    else:
        check_size(name, size, source)


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid"])
def test_lenets_may_pool_first(activation):
    """The same numbers and gradients as with the activation before max-pooling."""
    generator = torch.Generator().manual_seed(0)
    settings = {"num_classes": 10, "norm": "mn", "activation": activation}
    model = create_model("lenet", **settings, generator=generator)
    other = copy.deepcopy(model)
    for stage in (other.stage1, other.stage2):
        conv, norm, pool, act = stage
        assert isinstance(pool, nn.MaxPool2d)
        stage._modules = {"conv": conv, "norm": norm, "act": act, "pool": pool}
    x, upstream = torch.randn(16, 3, 32, 32), torch.randn(16, 10)
    results = []
    for each in (model, other):
        y = each(x)
        y.backward(upstream)
        results.append([y, *(parameter.grad for parameter in each.parameters())])
    assert all(map(torch.equal, *results))
