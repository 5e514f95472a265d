"""Converted models in other people's code: real architectures, training loops, averages."""

import copy
import math
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import fusion
from torch.optim import swa_utils
from torch.utils.data import DataLoader, TensorDataset

import modenorm
from compare import assert_close

OLD = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore:Please use quant_min:UserWarning",
    "ignore:must run observer before calling:UserWarning",
)


def images(n=8):
    return torch.randn(n, 3, 32, 32)


def small_model(num_classes=4):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes),
    )  # fmt: skip


def mode_layers(model):
    return [m for m in model.modules() if isinstance(m, modenorm.ModeNorm2d)]


# Architectures of transformers, from small configurations: nothing is downloaded.


def resnet():
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=4
    )
    return ResNetForImageClassification(config), 8


def regnet():
    from transformers import RegNetConfig, RegNetForImageClassification

    config = RegNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4, num_labels=4
    )
    return RegNetForImageClassification(config), 9


def mobilenet():
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(
        depth_multiplier=0.25, num_labels=4, image_size=32, classifier_dropout_prob=0.0
    )
    model = MobileNetV2ForImageClassification(config)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1  # the configuration's 0.997 is meant the other way round
    return model, 52


@pytest.mark.parametrize("make", [resnet, regnet, mobilenet], ids=lambda f: f.__name__)
def test_models_of_transformers(make, tmp_path):
    """Trained, converted with the same numbers, fine-tuned, saved and loaded."""
    pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    model, count = make()
    x, labels = images(16), torch.arange(16) % 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train(model, optimizer, x, labels, steps=3)
    before = in_double(model, x)
    assert len(modenorm.replace_batchnorm(model, 2, optimizer=optimizer)) == count
    assert_close(in_double(model, x), before, 1e-10)
    losses = train(model, optimizer, x, labels, steps=8)
    assert min(losses) < losses[0]
    assert all(math.isfinite(loss) for loss in losses)
    tuned = model.eval()(x).logits
    model.save_pretrained(tmp_path)
    again, _ = make()
    modenorm.replace_batchnorm(again, 2)
    again.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"))
    assert torch.equal(again.eval()(x).logits, tuned)


def in_double(model, x):
    """Logits in evaluation without the roundings that dozens of layers amplify."""
    return copy.deepcopy(model).double().eval()(x.double()).logits


def train(model, optimizer, x, labels, steps):
    model.train()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x, labels=labels).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# Training loops.


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        return {"pixel_values": torch.randn(3, 32, 32, generator=generator), "labels": i % 4}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_trainer_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    safetensors = pytest.importorskip("safetensors.torch")
    model, _ = resnet()
    modenorm.replace_batchnorm(model, 2)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=4, save_steps=4, per_device_train_batch_size=8, weight_decay=0.1,
        report_to=[], use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=Samples())
    before = mode_layers(model)[0].gate.weight.detach().clone()
    assert math.isfinite(trainer.train().training_loss)
    layer = mode_layers(model)[0]
    assert layer.num_batches_tracked == 4
    assert not torch.equal(layer.gate.weight, before)
    again, _ = resnet()
    modenorm.replace_batchnorm(again, 2)
    again.load_state_dict(safetensors.load_file(tmp_path / "checkpoint-4" / "model.safetensors"))
    x = images(2)
    assert torch.equal(again.eval()(x).logits, model.eval()(x).logits)


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = small_model()
    modenorm.replace_batchnorm(model, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(images(16), torch.arange(16) % 4), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    before = [p.detach().clone() for p in model.parameters()]
    for x, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(x), labels))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    unwrapped = accelerator.unwrap_model(model)
    assert [layer.num_batches_tracked.item() for layer in mode_layers(unwrapped)] == [2, 2]
    assert not torch.equal(next(iter(model.parameters())), before[0])


@pytest.mark.filterwarnings("ignore", category=DeprecationWarning)
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = small_model()
            modenorm.replace_batchnorm(self.net, 2)

        def training_step(self, batch, index):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            norms, gates, others = modenorm.norm_parameters(self)
            plain = [*norms.values(), *gates.values()]
            groups = [
                {"params": others.values(), "weight_decay": 0.1},
                {"params": plain, "weight_decay": 0},
            ]
            return torch.optim.SGD(groups, lr=0.1)

    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
    )  # fmt: skip
    model = Classifier()
    trainer.fit(model, DataLoader(TensorDataset(images(16), torch.arange(16) % 4), batch_size=8))
    assert [layer.num_batches_tracked.item() for layer in mode_layers(model)] == [4, 4]
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = Classifier.load_from_checkpoint(tmp_path / "last.ckpt")
    x = images(2)
    assert torch.equal(again.eval().net(x), model.eval().net(x))


def test_gradient_clipping():
    model, x = small_model(), images()
    modenorm.replace_batchnorm(model, 2)
    (1000 * model(x)).square().sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    norms = torch.stack([p.grad.norm() for p in model.parameters()])
    assert_close(norms.norm(), torch.tensor(1.0), 1e-4)


# Averages of weights.


def trained_average(average):
    model = small_model()
    modenorm.replace_batchnorm(model, 2)
    averaged = average(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [images() for _ in range(4)]
    for x in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), torch.arange(8) % 4).backward()
        optimizer.step()
        averaged.update_parameters(model)
    return model, averaged, batches


def test_stochastic_weight_averaging():
    """The averaged weights get statistics of their own; torch's update_bn doesn't know them."""
    _, averaged, batches = trained_average(swa_utils.AveragedModel)
    layer = mode_layers(averaged)[0]
    before = layer.running_mean.clone()
    swa_utils.update_bn(batches, averaged)
    assert torch.equal(layer.running_mean, before)
    assert modenorm.recalibrate(averaged, batches) == 4
    seen = averaged.module[0](torch.cat(batches)).mean((0, 2, 3))
    gates_sum = layer.running_mean.mean(0)
    assert_close(gates_sum, seen, 0.2)
    assert not torch.equal(layer.running_mean, before)
    assert layer.num_batches_tracked == 4


def test_exponential_moving_average_of_weights_and_statistics():
    def ema(model):
        function = swa_utils.get_ema_multi_avg_fn(0.5)
        return swa_utils.AveragedModel(model, multi_avg_fn=function, use_buffers=True)

    model, averaged, batches = trained_average(ema)
    live, mean = mode_layers(model)[0], mode_layers(averaged)[0]
    assert not torch.equal(live.running_mean, mean.running_mean)
    assert (live.running_mean - mean.running_mean).abs().max() < 1
    assert averaged.eval()(batches[0]).isfinite().all()


# Weight decay.


def test_norm_parameters_cover_the_model():
    model = nn.Sequential(
        small_model(), modenorm.ModeGroupNorm(4), nn.LayerNorm(4), nn.GroupNorm(2, 4)
    )
    modenorm.replace_batchnorm(model, where="0.1")
    norms, gates, others = modenorm.norm_parameters(model)
    assert list(gates) == [
        "0.1.gate.weight", "0.1.gate.bias", "1.gate_weight", "1.gate_bias"
    ]  # fmt: skip
    assert {name.rpartition(".")[0] for name in norms} == {"0.1", "0.4", "1", "2", "3"}
    assert {name.rpartition(".")[0] for name in others} == {"0.0", "0.3", "0.8"}
    everything = {**norms, **gates, **others}
    assert everything.keys() == dict(model.named_parameters()).keys()
    assert all(model.get_parameter(name) is p for name, p in everything.items())


def test_norm_parameters_of_a_custom_gate():
    gate = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    norms, gates, others = modenorm.norm_parameters(modenorm.ModeNorm2d(3, gate=gate))
    assert list(norms) == ["weight", "bias"]
    assert len(gates) == 6
    assert others == {}


def test_filters_by_dimension_leave_the_norms_alone():
    """As timm and many others do it: no decay for parameters of at most one dimension."""
    norms, _, _ = modenorm.norm_parameters(modenorm.ModeNorm2d(3))
    assert all(parameter.ndim == 1 for parameter in norms.values())


# Quantization.


@OLD
def test_quantization_aware_training_keeps_the_modes():
    from torch.ao import quantization

    model = small_model()
    modenorm.replace_batchnorm(model, 2)
    for layer in mode_layers(model):
        layer.qconfig = None
    model.qconfig = quantization.get_default_qat_qconfig("x86")
    prepared = quantization.prepare_qat(copy.deepcopy(model).train())
    layers = mode_layers(prepared)
    assert [layer.num_modes for layer in layers] == [2, 2]
    assert type(prepared[0]).__name__ == "Conv2d"
    assert type(prepared[0]).__module__.startswith("torch.ao.nn.qat")
    prepared(images()).sum().backward()
    assert layers[0].num_batches_tracked == 1
    assert layers[0].gate.weight.grad is not None


@OLD
def test_fusion_for_quantization_refuses_mode_norms_and_takes_them_back():
    from torch.ao import quantization

    model = small_model()
    modenorm.replace_batchnorm(model, 1)
    with pytest.raises(AssertionError, match=r"did not find fuser method.*ModeNorm2d"):
        quantization.fuse_modules_qat(copy.deepcopy(model), [["0", "1", "2"]])
    modenorm.to_batchnorm(model)
    fused = quantization.fuse_modules_qat(model.train(), [["0", "1", "2"], ["3", "4", "5"]])
    fused.qconfig = quantization.get_default_qat_qconfig("x86")
    prepared = quantization.prepare_qat(fused)
    assert type(prepared[0]).__name__ == "ConvBnReLU2d"
    assert prepared(images()).isfinite().all()


FUSIONS = {
    "conv": (nn.Conv2d(3, 4, 1), modenorm.ModeNorm2d, fusion.fuse_conv_bn_eval),
    "linear": (nn.Linear(3, 4), modenorm.ModeNorm1d, fusion.fuse_linear_bn_eval),
}


@pytest.mark.parametrize("num_modes", [1, 2, 4])
@pytest.mark.parametrize(("before", "norm", "fuse"), FUSIONS.values(), ids=FUSIONS)
def test_fusion_of_a_mode_norm_itself_never_gives_wrong_numbers(before, norm, fuse, num_modes):
    """Torch offers no place for a message of ours; what matters is that it can't pass unnoticed."""
    x = torch.randn(5, 3) if isinstance(before, nn.Linear) else images()
    with pytest.raises(RuntimeError):
        fuse(before.eval(), norm(4, num_modes).eval())(x)


# Symbolic traces.


def test_mode_norms_as_leaves_of_a_trace():
    """As torchvision's create_feature_extractor does it with leaf_modules."""

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return isinstance(module, modenorm.ModeNorm2d) or super().is_leaf_module(module, name)

    model, x = small_model().eval(), images()
    modenorm.replace_batchnorm(model, 2)
    traced = torch.fx.GraphModule(model, Tracer().trace(model))
    assert torch.equal(traced(x), model(x))


# Examples.

EXAMPLES = Path(__file__).parents[1] / "examples"
RESULTS = {
    "finetune_mixture": "Modes change the error by",
    "domain_specific": "domain-specific  ",
    "custom_gate": "Share of mode 0",
    "with_lightning": "of 2 modes in use",
    "with_accelerate": "Test error of the saved model",
    "with_trainer": "Test error of the saved model",
}
NEEDS = {
    "with_lightning": "lightning",
    "with_accelerate": "accelerate",
    "with_trainer": "transformers",
}
# The loops of others may warn about themselves.
LOOPS = pytest.mark.filterwarnings("ignore", "error:::__main__")


def test_every_example_is_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*RESULTS, "shared"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=LOOPS if name in NEEDS else ()) for name in RESULTS]
)
def test_examples(name, monkeypatch, capsys):
    """As from the command line, but without starting Python and torch six times."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--quick"])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert RESULTS[name] in capsys.readouterr().out
