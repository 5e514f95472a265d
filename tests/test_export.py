"""A converted ResNet18 as a compiled, exported and ONNX program, with the same numbers."""

import copy
import warnings

import pytest
import torch
from torch import nn

import modenorm
from compare import LAYERS, assert_close, make_layer
from modenorm.kernels import choice
from modenorm.kernels.layout import can_count
from modenorm.lab.models import create_model
from test_zoo import create

DYNAMIC_BATCH = ({0: torch.export.Dim("batch", min=1)},)
OPSET = 18

# What torch and the exporter say about themselves.
EXPORTER = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.* is deprecated:FutureWarning",
    "ignore:.torch.jit.script:DeprecationWarning",
)


def converted_resnet(**options):
    """A ResNet18 that was converted and has trained: modes that differ, gates that decide."""
    model = create_model("resnet18", num_classes=10)
    replaced = modenorm.replace_batchnorm(model, 2, **options)
    with torch.no_grad():
        for layer in replaced.values():
            layer.running_mean.normal_(std=0.3)
            layer.running_var.uniform_(0.5, 2)
            layer.gate.weight.normal_()
    return model


def images(n):
    return torch.randn(n, 3, 64, 64)


def run_onnx(model, example, inputs, path):
    """Export with a dynamic batch and run onnxruntime on each input."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    program = torch.onnx.export(
        model,
        (example,),
        dynamo=True,
        opset_version=OPSET,
        dynamic_shapes=DYNAMIC_BATCH,
        verbose=False,
    )
    program.save(path)
    assert {entry.domain: entry.version for entry in program.model_proto.opset_import} == {
        "": OPSET
    }
    session = onnxruntime.InferenceSession(path)
    name = session.get_inputs()[0].name
    return [torch.from_numpy(session.run(None, {name: x.numpy()})[0]) for x in inputs]


@pytest.mark.slow
def test_export_of_a_converted_resnet():
    model = converted_resnet().eval()
    program = torch.export.export(model, (images(2),), dynamic_shapes=DYNAMIC_BATCH)
    assert not program.graph_signature.buffers_to_mutate
    for n in (1, 2, 5):
        x = images(n)
        assert_close(program.module()(x), model(x), 1e-5)


@pytest.mark.parametrize("operators_serve", [False, True], ids=["plain", "operators"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("layer", ["ModeNorm2d", "ModeGroupNorm"])
def test_export_of_a_layer_for_any_batch(layer, training, operators_serve, monkeypatch):
    monkeypatch.setattr(choice, "runs_operators", lambda x: operators_serve and can_count(x))
    module = getattr(modenorm, layer)(4, 2).train(training)
    example = (torch.randn(4, 4, 5, 5),)
    program = torch.export.export(module, example, dynamic_shapes=DYNAMIC_BATCH)
    (batch,) = program.range_constraints.values()
    assert batch.upper > 1 << 40


@EXPORTER
@pytest.mark.slow
def test_onnx_of_a_converted_resnet(tmp_path):
    model = converted_resnet().eval()
    inputs = [images(n) for n in (1, 2, 5)]
    outputs = run_onnx(model, images(2), inputs, tmp_path / "resnet18.onnx")
    for x, y in zip(inputs, outputs, strict=True):
        assert_close(y, model(x), 1e-5)


ONNX_LAYERS = {
    "2-d": (2, {}),
    "4-d": (4, {}),
    "per_mode_affine": (4, {"per_mode_affine": True}),
    "standardized": (4, {"gate": modenorm.StandardizedGate}),
    "no running estimates": (4, {"track_running_stats": False}),
}


@EXPORTER
@pytest.mark.parametrize(("rank", "options"), ONNX_LAYERS.values(), ids=ONNX_LAYERS)
def test_onnx_of_a_layer(rank, options, tmp_path):
    layer = make_layer(4, 3, rank=rank, dtype=torch.float32, **options).eval()
    assert type(layer) is LAYERS[rank]
    inputs = [torch.randn(n, 4, *(5,) * (rank - 2)) for n in (2, 7)]
    outputs = run_onnx(layer, inputs[0], inputs, tmp_path / "layer.onnx")
    for x, y in zip(inputs, outputs, strict=True):
        assert_close(y, layer(x), 1e-5)


@EXPORTER
def test_onnx_of_mode_group_norm(tmp_path):
    layer, x = modenorm.ModeGroupNorm(4).eval(), torch.randn(3, 4, 5, 5)
    (y,) = run_onnx(layer, torch.randn(2, 4, 5, 5), [x], tmp_path / "layer.onnx")
    assert_close(y, layer(x), 1e-5)


@EXPORTER
def test_a_batch_norm_again_is_one_onnx_node(tmp_path):
    """After `to_batchnorm` the exporter folds the norm into the convolution."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    modenorm.replace_batchnorm(model, 1)
    model(torch.randn(4, 3, 6, 6))
    modenorm.to_batchnorm(model.eval())
    x = torch.randn(3, 3, 6, 6)
    (y,) = run_onnx(model, torch.randn(2, 3, 6, 6), [x], tmp_path / "model.onnx")
    assert_close(y, model(x), 1e-5)


@pytest.fixture
def fullgraph():
    torch._dynamo.reset()
    yield lambda model, backend: torch.compile(model, fullgraph=True, backend=backend)
    torch._dynamo.reset()


def assert_compiles(model, compiled, x, tolerance):
    """One training step, then evaluation; `compiled` wraps a copy of the model."""
    copied = compiled._orig_mod
    upstream = torch.randn(len(x), 10)
    for function in (model, compiled):
        function.train()
        function(x).backward(upstream)
    for (name, expected), actual in zip(model.named_parameters(), copied.parameters(), strict=True):
        assert_close(actual.grad, expected.grad, tolerance, f"gradient of {name}")
    for (name, expected), actual in zip(model.named_buffers(), copied.buffers(), strict=True):
        assert_close(actual, expected, tolerance, name)
    assert_close(compiled.eval()(x), model.eval()(x), tolerance)


@pytest.mark.slow
def test_compile_of_a_converted_resnet(fullgraph):
    """One graph without breaks, in float64, so that twenty layers' roundings hide nothing."""
    model = converted_resnet().double()
    compiled = fullgraph(copy.deepcopy(model), "eager")
    assert_compiles(model, compiled, torch.randn(4, 3, 32, 32).double(), 1e-8)


def test_converting_a_compiled_model_compiles_it_again(fullgraph):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    compiled, x = fullgraph(model, "aot_eager"), torch.randn(3, 3, 6, 6)
    compiled(x)
    layer = modenorm.replace_batchnorm(model, 2)["1"]
    layer.running_mean[1] += 1
    layer.gate.weight.data.normal_()
    assert_close(compiled(x), model(x), 1e-6)


GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)
WARM_UP_STEPS = 3


def captured(function):
    """A CUDA graph of a function and its result, after the calls that warm it up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_STEPS):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


@pytest.fixture
def exact_convolutions():
    """In float32, and adding in the same order each time."""
    flags = {"enabled": True, "deterministic": True, "allow_tf32": False}
    with torch.backends.cudnn.flags(**flags):
        yield


@pytest.mark.parametrize("kind", [pytest.param("cuda", marks=GPU)])
def test_cuda_graph_of_a_converted_resnet(kind):
    model, x = converted_resnet().to(kind).eval(), images(8).to(kind)
    with torch.no_grad():
        graph, y = captured(lambda: model(x))
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert_close(y, model(x), 1e-5)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node")
@pytest.mark.parametrize("kind", [pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("source", ["lab", "torchvision"])
def test_cuda_graph_of_a_training_step(source, kind, exact_convolutions):
    """Replayed steps move parameters and running estimates as plain steps do."""
    model = (converted_resnet() if source == "lab" else converted_torchvision()).to(kind)
    plain = copy.deepcopy(model)
    x, labels = images(16).to(kind), torch.arange(16, device=kind) % 10

    def make_step(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        def step():
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(x), labels)
            loss.backward()
            optimizer.step()
            return loss

        return step

    plain_step = make_step(plain)
    for _ in range(WARM_UP_STEPS):
        plain_step()
    graph, loss = captured(make_step(model))
    for _ in range(4):
        x.copy_(torch.randn_like(x))
        graph.replay()
        expected = plain_step()
    # Seven steps of sums in another order, which steep gates and small variances enlarge.
    assert_close(loss.detach(), expected.detach(), 1e-3, "loss")
    steps = WARM_UP_STEPS + 4
    for name, buffer in plain.named_buffers():
        assert_close(model.get_buffer(name), buffer, 1e-3, name)
        assert not name.endswith("num_batches_tracked") or buffer == steps, name
    for name, parameter in plain.named_parameters():
        assert_close(model.get_parameter(name), parameter, 1e-3, name)


def converted_torchvision():
    model = create("torchvision", "resnet18")
    modenorm.replace_batchnorm(model, 2)
    model.fc = nn.Linear(model.fc.in_features, 10)
    return model


def test_a_traced_model():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), make_layer(4, 2, dtype=torch.float32)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, torch.randn(2, 3, 6, 6))
    x = torch.randn(5, 3, 6, 6)
    assert_close(traced(x), model(x), 1e-5)


@pytest.mark.parametrize("kind", [modenorm.ModeNorm2d, modenorm.ModeGroupNorm])
def test_operators_that_are_recorded(kind):
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    layer, x = kind(4).requires_grad_(False), torch.randn(6, 4, 5, 5)
    recorded = make_fx(layer, tracing_mode="real")(x)
    assert_close(recorded(2 * x + 1), layer(2 * x + 1), 1e-5)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert layer(x).shape == x.shape
