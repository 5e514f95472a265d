"""The fused norms against reference.py: values, all gradients, running estimates."""

import copy

import pytest
import torch

import modenorm
from modenorm.kernels import choice
from modenorm.kernels.choice import choose_path

SHAPES = {
    "2d-small": (6, 5),
    "3d": (4, 17, 3),
    "odd": (5, 3, 5, 7),
    "one-position": (7, 20, 1, 1),
    "many-channels": (9, 40, 3, 3),
    "volume": (3, 6, 2, 3, 2),
    "long": (3, 2, 40, 40),
}
MODES = (1, 2, 5)

# Half types round the input and the output to 8 or 11 bits; everything between is float32, so the
# error is that of rounding y or dx once. float32 sums over a few thousand terms lose a few ulps.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def relative_error(found, wanted):
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def assert_close(found, wanted, tolerance, name, floor=1e-6):
    """Compare norms; what is zero but for rounding is compared with a floor."""
    difference = (found.double() - wanted.double()).norm().item()
    assert difference <= tolerance * wanted.double().norm().item() + floor, name


def tensor(shape, device, dtype, channels_last, mean=0.0):
    x = torch.randn(shape, dtype=torch.float64) + mean
    x = x.to(device=device, dtype=dtype)
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last else x


def layer_for(shape, num_modes, device, **options):
    rank = {2: "1d", 3: "1d", 4: "2d", 5: "3d"}[len(shape)]
    layer = getattr(modenorm, f"ModeNorm{rank}")(shape[1], num_modes, **options).to(device)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, mean=0.2, std=0.5)
    if shape[1] > 100 and hasattr(layer.gate, "weight"):  # sums of many: gates all but 0 or 1
        with torch.no_grad():
            layer.gate.weight.mul_(0.1)
    return layer


def gradients(layer, x, dy, **inputs):
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    learnt = [t.detach().clone().requires_grad_() for t in inputs.values()]
    y = layer(x, **dict(zip(inputs, learnt, strict=True)))
    used = [p for n, p in layer.named_parameters() if not (inputs and n.startswith("gate."))]
    return y, torch.autograd.grad(y, [x, *learnt, *used], dy)


def truth_of(layer, x, dy, **inputs):
    twin = copy.deepcopy(layer).double()
    with modenorm.use_backend("reference"):
        doubled = {name: value.double() for name, value in inputs.items()}
        y, found = gradients(twin, x.double(), dy.double(), **doubled)
    return twin, y, found


@pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("num_modes", MODES, ids="K{}".format)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_training(device, shape, num_modes, channels_last):
    compare_training(device, shape, num_modes, channels_last)


@pytest.mark.parametrize("options", [{"per_mode_affine": True}, {"affine": False}], ids=str)
@pytest.mark.parametrize("num_modes", MODES, ids="K{}".format)
def test_training_with_options(device, num_modes, options):
    compare_training(device, (5, 20, 3, 2), num_modes, True, **options)


@pytest.mark.parametrize("options", [{}, {"per_mode_affine": True}, {"affine": False}], ids=str)
def test_many_modes_and_channels(device, options):
    """More than a program holds at once."""
    compare_training(device, (6, 520, 2, 1), 8, True, **options)


def test_given_gates_of_many_modes(device):
    shape = (5, 600, 2, 1)
    layer = layer_for(shape, 8, device)
    x, dy = (tensor(shape, device, torch.float32, False) for _ in range(2))
    gates = torch.softmax(torch.randn(5, 8, device=device), 1)
    _, _, wanted = truth_of(layer, x, dy, gates=gates)
    _, found = gradients(layer, x, dy, gates=gates)
    for value, other in zip(found, wanted, strict=True):
        assert_close(value, other, 3e-5, "", floor=3e-5)


def compare_training(device, shape, num_modes, channels_last, **options):
    layer = layer_for(shape, num_modes, device, **options)
    x = tensor(shape, device, torch.float32, channels_last, mean=1.0)
    dy = tensor(shape, device, torch.float32, False)
    assert choose_path(x) == "gpu"
    twin, truth, true_gradients = truth_of(layer, x, dy)
    y, found = gradients(layer, x, dy)
    assert y.stride() == x.stride()
    assert_close(y, truth, TOLERANCES[torch.float32], "y")
    names = ("x", *dict(layer.named_parameters()))
    for name, value, wanted in zip(names, found, true_gradients, strict=True):
        assert_close(value, wanted, 3e-5, name, floor=3e-5)
    for (name, value), wanted in zip(layer.named_buffers(), twin.buffers(), strict=True):
        assert_close(value, wanted, 1e-6, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
def test_half_types(device, dtype, channels_last):
    shape = (6, 12, 5, 5)
    layer = layer_for(shape, 2, device)
    x = tensor(shape, device, dtype, channels_last)
    dy = tensor(shape, device, dtype, channels_last)
    _, truth, true_gradients = truth_of(layer, x, dy)
    y, found = gradients(layer, x, dy)
    assert y.dtype == dtype
    assert relative_error(y, truth) < TOLERANCES[dtype]
    assert relative_error(found[0], true_gradients[0]) < TOLERANCES[dtype]
    for value, wanted in zip(found[1:], true_gradients[1:], strict=True):
        assert_close(value, wanted, 1e-4, "parameter", floor=1e-4)


@pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
def test_gates_from_outside(device, channels_last):
    shape = (6, 5, 3, 4)
    layer = layer_for(shape, 3, device)
    x = tensor(shape, device, torch.float32, channels_last)
    dy = tensor(shape, device, torch.float32, False)
    gates = torch.softmax(torch.randn(6, 3, device=device), 1)
    _, truth, true_gradients = truth_of(layer, x, dy, gates=gates)
    y, found = gradients(layer, x, dy, gates=gates)
    assert_close(y, truth, 2e-6, "y")
    for value, wanted in zip(found, true_gradients, strict=True):
        assert_close(value, wanted, 3e-5, "gradient", floor=3e-5)


@pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("num_modes", MODES, ids="K{}".format)
def test_evaluation(device, num_modes, channels_last):
    shape = (5, 20, 3, 5)
    layer = layer_for(shape, num_modes, device).eval()
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    x = tensor(shape, device, torch.float32, channels_last)
    twin, truth, true_gradients = truth_of(layer, x, x)
    with torch.no_grad():
        assert_close(layer(x), truth, 2e-6, "without gradients")
    y, found = gradients(layer, x, x)
    assert_close(y, truth, 2e-6, "with gradients")
    for value, wanted in zip(found, true_gradients, strict=True):
        assert_close(value, wanted, 3e-5, "gradient", floor=3e-5)
    for value, wanted in zip(layer.buffers(), twin.buffers(), strict=True):
        assert_close(value, wanted, 1e-6, "buffers don't move")


@pytest.mark.parametrize("variance", ["pooled", "pixel"])
@pytest.mark.parametrize("num_modes", MODES, ids="K{}".format)
@pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("shape", [(5, 3, 5, 7), (3, 40, 3, 3), (4, 6)], ids=str)
def test_mode_group_norm(device, shape, num_modes, channels_last, variance):
    layer = modenorm.ModeGroupNorm(shape[1], num_modes, variance=variance).to(device)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, mean=0.2, std=0.5)
    x = tensor(shape, device, torch.float32, channels_last, mean=1.0)
    dy = tensor(shape, device, torch.float32, False)
    truth, true_gradients = truth_of(layer, x, dy)[1:]
    y, found = gradients(layer, x, dy)
    # Few channels leave a variance close to zero, which magnifies the rounding of float32.
    assert_close(y, truth, 2e-5, "y")
    for value, wanted in zip(found, true_gradients, strict=True):
        assert_close(value, wanted, 2e-4, "gradient", floor=1e-4)


AFFINE_FORMS = {
    "strided": (lambda: torch.randn(6)[::2], lambda: torch.randn(6)[::2]),
    "expanded": (lambda: torch.randn(1).expand(3), lambda: torch.randn(1).expand(3)),
    "broadcast": (lambda: torch.randn(1), lambda: torch.randn(1)),
    "transposed": (lambda: torch.randn(3, 2).t(), lambda: torch.randn(3, 2).t()),
    "bias-per-mode": (lambda: torch.randn(3), lambda: torch.randn(2, 3)),
    "weight-per-mode": (lambda: torch.randn(2, 3), lambda: torch.randn(3)),
    "bias-alone": (lambda: None, lambda: torch.randn(2, 3)),
}


@pytest.mark.parametrize("form", AFFINE_FORMS)
def test_parameters_of_any_form(device, form):
    x, dy = (tensor((4, 3, 2, 5), device, torch.float32, False) for _ in range(2))
    gates = torch.softmax(torch.randn(4, 2, device=device), 1)
    given = [make() for make in AFFINE_FORMS[form]]
    given = [None if p is None else p.to(device).requires_grad_() for p in given]
    leaves = [p for p in given if p is not None]
    found = []
    for backend in ("fused", "eager"):
        with modenorm.use_backend(backend):
            y = modenorm.functional.mode_norm(x, gates, None, None, *given, training=True)
        found.append([y, *torch.autograd.grad(y, leaves, dy)])
    torch.testing.assert_close(*found, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("form", ["strided", "expanded", "broadcast"])
def test_mode_group_norm_with_parameters_of_any_form(device, form):
    x = tensor((4, 3, 2, 5), device, torch.float32, False)
    gate = torch.randn(2, 4, device=device)[:, ::2]
    given = [make().to(device) for make in AFFINE_FORMS[form]]
    found = []
    for backend in ("fused", "eager"):
        with modenorm.use_backend(backend):
            found.append(modenorm.functional.mode_group_norm(x, *gate, *given))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_estimates_in_any_order(device, training):
    x = tensor((4, 3, 2, 5), device, torch.float32, False)
    start = [torch.randn(3, 2, device=device).t(), torch.rand(3, 2, device=device).t()]
    gate = modenorm.LinearGate(3, 2).to(device)
    found = []
    for backend in ("fused", "eager"):
        running = [t.clone() for t in start]  # in the same order
        with modenorm.use_backend(backend), torch.no_grad():
            y = modenorm.functional.mode_norm(x, gate, *running, training=training)
        found.append([y, *running])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["weight", "gate", "running"])
def test_tensors_elsewhere_are_refused(device, name):
    x = tensor((4, 3, 2, 5), device, torch.float32, False)
    layer = layer_for(x.shape, 2, device)
    layer(x)
    state = layer.state_dict().items()
    elsewhere = {key: value.to("meta") for key, value in state if key.startswith(name)}
    with pytest.raises(RuntimeError, match="device"):
        torch.func.functional_call(layer, elsewhere, (x,))


def test_gates_elsewhere_are_refused(device):
    x = tensor((4, 3, 2, 5), device, torch.float32, False)
    with pytest.raises(RuntimeError, match="device"):
        layer_for(x.shape, 2, device)(x, gates=torch.full((4, 2), 0.5, device="meta"))


def test_gates_are_a_differentiable_output(device):
    shape = (6, 5, 3, 4)
    layer = layer_for(shape, 3, device)
    x = tensor(shape, device, torch.float32, False)
    heard = []
    layer.gate_listener = heard.append
    y = layer(x)
    pull = torch.randn(6, 3, device=device)
    found = torch.autograd.grad((y.sin().sum(), heard[0]), layer.gate.weight, (None, pull))[0]
    with modenorm.use_backend("eager"):
        y = layer(x)
        wanted = torch.autograd.grad((y.sin().sum(), heard[1]), layer.gate.weight, (None, pull))[0]
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-4)


def test_double_backward(device):
    shape = (4, 3, 2, 3)
    layer = layer_for(shape, 2, device)
    x = tensor(shape, device, torch.float32, False)
    penalties = {}
    for backend in ("fused", "eager"):
        with modenorm.use_backend(backend):
            leaf = x.clone().requires_grad_()
            gradient = torch.autograd.grad(layer(leaf).sin().sum(), leaf, create_graph=True)[0]
            penalties[backend] = torch.autograd.grad(gradient.square().sum(), leaf)[0]
    torch.testing.assert_close(penalties["fused"], penalties["eager"], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [modenorm.ModeNorm2d, modenorm.ModeGroupNorm])
def test_a_vectorised_backward(device, kind):
    layer, x = kind(3).to(device), torch.randn(4, 3, 2, 2, device=device, requires_grad=True)
    inputs, upstream = [x, *layer.parameters()], torch.randn(5, 4, 3, 2, 2, device=device)
    y = layer(x)
    each = [torch.autograd.grad(y, inputs, one, retain_graph=True) for one in upstream]
    found = torch.autograd.grad(y, inputs, upstream, is_grads_batched=True)
    for actual, *expected in zip(found, *each, strict=True):
        torch.testing.assert_close(actual, torch.stack(expected), atol=1e-4, rtol=1e-4)


def test_large_means_cost_no_digits(device):
    # float32 holds 1000 to 3e-5; averaged over many values that is 1e-4 of a standard deviation.
    x = tensor((16, 4, 50, 50), device, torch.float64, False) * 0.1 + 1000
    layer = layer_for(x.shape, 2, device)
    twin = copy.deepcopy(layer).double()
    x = x.float()
    with modenorm.use_backend("reference"):
        truth = twin(x.double())
    assert relative_error(layer(x), truth) < 1e-3


def test_repeated_calls_and_unaligned_memory(device):
    layer = layer_for((4, 5, 3, 3), 2, device)
    for start in (0, 1, 0, 3):
        memory = torch.randn(4 * 5 * 9 + 8, device=device)
        x = memory[start : start + 4 * 5 * 9].view(4, 5, 3, 3)
        dy = torch.randn_like(x)
        _, truth, true_gradients = truth_of(layer, x, dy)
        x = x.detach().requires_grad_()
        y = layer(x)
        assert_close(y, truth, 2e-6, "y")
        assert_close(torch.autograd.grad(y, x, dy)[0], true_gradients[0], 3e-5, "dx", 3e-5)


CHANGES = {
    "weight transposed": lambda layer: setattr(layer.weight, "data", layer.weight.data.t()),
    "gate of float64": lambda layer: layer.gate.double(),
    "gate transposed": lambda layer: setattr(layer.gate.weight, "data", layer.gate.weight.data.t()),
    "estimates transposed": lambda layer: setattr(layer, "running_var", layer.running_var.t()),
    "estimates of float64": lambda layer: setattr(
        layer, "running_mean", layer.running_mean.double()
    ),
    "momentum": lambda layer: setattr(layer, "momentum", 0.7),
    "momentum of none": lambda layer: setattr(layer, "momentum", None),
    "eps": lambda layer: setattr(layer, "eps", 0.5),
    "update": lambda layer: setattr(layer, "running_update", "usage"),
    "evaluation": lambda layer: layer.eval(),
    "hook": lambda layer: layer.gate.register_forward_hook(lambda *given: given[-1] + 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_after_a_call(device, change):
    x = tensor((4, 3, 2, 5), device, torch.float32, False)
    found = []
    for backend in ("fused", "eager"):
        torch.manual_seed(1)
        layer = layer_for(x.shape, 3, device, per_mode_affine=True)
        with modenorm.use_backend(backend), torch.no_grad():
            layer(x)
            CHANGES[change](layer)
            found.append([layer(x), *layer.buffers()])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter always repeats")
def test_results_repeat(device):
    x = tensor((32, 40, 9, 9), device, torch.float32, True)
    layer = layer_for(x.shape, 4, device)
    first, second = (gradients(layer, x, x.sin()) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


def test_plain_operators_where_triton_refuses(device, monkeypatch):
    from modenorm.kernels.gpu import passes as gpu_passes

    def refuse(*_):
        raise RuntimeError("no such architecture")

    monkeypatch.setattr(gpu_passes, "moments", refuse)
    choice._triton_works.cache_clear()
    layer = layer_for((4, 3, 5, 5), 2, device)
    x = tensor((4, 3, 5, 5), device, torch.float32, False)
    try:
        if device.type == "cuda":
            with pytest.warns(UserWarning, match="plain PyTorch operators .* no such architecture"):
                y = layer(x)
            assert choose_path(x) == "eager"
            assert_close(y, truth_of(layer, x, x)[1], 1e-5, "y")
        else:
            assert choice._triton_works(-1)  # the interpreter is not put to the test
    finally:
        choice._triton_works.cache_clear()


@pytest.mark.parametrize("kind", ["modes", "channels"])
def test_saved_tensors_may_come_back_in_another_order(device, kind):
    layer = layer_for((4, 6, 5, 3), 2, device)
    if kind == "channels":
        layer = modenorm.ModeGroupNorm(6, 2, variance="pixel").to(device)
    x, dy = (tensor((4, 6, 5, 3), device, torch.float32, True) for _ in range(2))
    found = []
    for unpack in (lambda saved: saved, torch.Tensor.contiguous):
        leaf = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
            y = layer(leaf)
        found.append(torch.autograd.grad(y, [leaf, *layer.parameters()], dy))
    for kept, moved in zip(*found, strict=True):
        assert torch.equal(kept, moved)
