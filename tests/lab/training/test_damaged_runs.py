"""Files of runs that are damaged, or of something else: refused by name, or made again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_data import fake_config, fake_data, fake_images
from safetensors import safe_open

from modenorm.lab.data import DataSet
from modenorm.lab.training import (
    Checkpoint,
    CheckpointError,
    Run,
    load_model,
    train,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("trained")
    config = fake_config(total=3)
    train(config, folder, data=fake_data())
    return Run.of(config, folder)


def put(source: bytes, config: Any, folder: Path) -> Path:
    run = Run.of(config, folder)
    run.path.mkdir(parents=True)
    run.checkpoint.write_bytes(source)
    return run.checkpoint


def test_a_checkpoint_of_another_training_is_refused(trained: Run, tmp_path: Path) -> None:
    other = fake_config(total=3, lr=0.5, norm="gn")
    path = put(trained.checkpoint.read_bytes(), other, tmp_path)
    with pytest.raises(CheckpointError) as error:
        train(other, tmp_path, data=fake_data())
    assert str(path) in str(error.value)
    assert "norm 'mn' instead of 'gn'; lr 0.01 instead of 0.5" in str(error.value)


def test_a_checkpoint_of_other_data_is_refused(trained: Run, tmp_path: Path) -> None:
    path = put(trained.checkpoint.read_bytes(), trained.config, tmp_path)
    data = fake_data()["fake"]
    renamed = replace(data.train, classes=("a", "x", "c", "d"))
    turned = data.train.images.flip(3)  # the same mean and deviation
    for changed, words in (
        (DataSet("fake", renamed, data.test), r"classes with 'b' instead of 'x'; 70 training and"),
        (DataSet("fake", fake_images(71), data.test), r"mean .*; 70 training.* instead of 71 "),
        (DataSet("fake", replace(data.train, images=turned), data.test), r"data \(70 .* \(sum"),
    ):
        with pytest.raises(CheckpointError, match=words) as error:
            train(trained.config, tmp_path, data={"fake": changed})
        assert str(path) in str(error.value)
        assert "restore the data it was trained on" in str(error.value)
    train(trained.config, tmp_path, data=fake_data())


def test_a_checkpoint_that_does_not_describe_its_data(trained: Run, tmp_path: Path) -> None:
    """As of versions before it did: what it knows of them is compared."""
    config, data = trained.config, fake_data()["fake"]
    put(b"", config, tmp_path)
    replace(Checkpoint.load(trained.checkpoint), data=None).save(
        Run.of(config, tmp_path).checkpoint
    )
    domains = replace(data.train, domain_names=("plain",))
    with pytest.raises(CheckpointError, match="2 domain_names instead of 1"):
        train(config, tmp_path, data={"fake": DataSet("fake", domains, data.test)})
    train(config, tmp_path, data=fake_data())


@pytest.mark.parametrize("length", [0, 5, 500, 100_000, -1])
def test_a_truncated_checkpoint_is_refused(trained: Run, tmp_path: Path, length: int) -> None:
    path = put(trained.checkpoint.read_bytes()[:length], trained.config, tmp_path)
    with pytest.raises(CheckpointError, match="is not a whole safetensors file") as error:
        train(trained.config, tmp_path, data=fake_data())
    assert str(path) in str(error.value)


def test_weights_of_another_model_are_refused(trained: Run, tmp_path: Path) -> None:
    checkpoint = Checkpoint.load(trained.checkpoint)
    name = next(name for name in checkpoint.tensors if name.endswith("conv.weight"))
    checkpoint.tensors[name] = torch.zeros(2, 2)
    checkpoint.save(tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"other\.safetensors is of another model.*\(2, 2\)"):
        load_model(tmp_path / "other.safetensors")


def test_plain_safetensors_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "plain.safetensors")
    with pytest.raises(CheckpointError, match="holds no training"):
        Checkpoint.load(tmp_path / "plain.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "odd.safetensors", {"training": json.dumps([1])})
    with pytest.raises(CheckpointError, match="no checkpoint of a training"):
        Checkpoint.load(tmp_path / "odd.safetensors")
    with pytest.raises(CheckpointError, match="does not exist"):
        Checkpoint.load(tmp_path / "absent.safetensors")


@pytest.mark.parametrize("where", ["tensors", "header"])
def test_a_changed_byte_is_noticed(trained: Run, tmp_path: Path, where: str) -> None:
    content = bytearray(trained.checkpoint.read_bytes())
    mark = b'"train_loss\\": '  # quotes are escaped in the header
    content[-5 if where == "tensors" else content.index(mark) + len(mark)] ^= 1
    path = put(bytes(content), trained.config, tmp_path)
    with pytest.raises(CheckpointError, match="another checksum") as error:
        train(trained.config, tmp_path, data=fake_data())
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "change", ["{", {"step": "x"}, {"step": -1}, {"step": 99}, {"crc32": None}]
)
def test_a_checkpoint_with_another_header(
    trained: Run, tmp_path: Path, change: str | dict[str, Any]
) -> None:
    from safetensors.torch import save

    tensors = Checkpoint.load(trained.checkpoint).tensors
    with safe_open(trained.checkpoint, framework="pt") as file:
        header = json.loads(file.metadata()["training"])
    if change == {"crc32": None}:
        del header["crc32"]  # as before there was one
    elif isinstance(change, dict):
        header["position"] |= change
    text = change if isinstance(change, str) else json.dumps(header)
    path = put(save(tensors, {"training": text}), trained.config, tmp_path)
    if "crc32" in change:
        train(trained.config, tmp_path, data=fake_data())
        return
    with pytest.raises(CheckpointError) as error:
        train(trained.config, tmp_path, data=fake_data())
    assert str(path) in str(error.value)


@pytest.mark.parametrize("content", ["{", "[]", '{"final_error": 1}', None])
def test_a_broken_result_is_named_and_can_be_made_again(
    tmp_path: Path, content: str | None
) -> None:
    config = fake_config(total=3)
    first = train(config, tmp_path, data=fake_data())
    run = Run.of(config, tmp_path)
    file = run.path / "result.json"
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(ValueError, match="no result of a training") as error:
        train(config, tmp_path, data=fake_data())
    assert str(file) in str(error.value)
    for change in ({"final_error": "a"}, {"domain_errors": 1}, {"domain_errors": {"a": None}}):
        file.write_text(json.dumps(first | change))
        with pytest.raises(ValueError, match=f"no result of a training .its {min(change)}"):
            run.result()
    (run.path / "done").unlink()
    assert train(config, tmp_path, data=fake_data())["final_error"] == first["final_error"]


@pytest.mark.parametrize("line", [b"{", b"[]", b"{}", b"\xff"])
def test_broken_metrics_are_named(tmp_path: Path, line: bytes) -> None:
    run = Run.of(fake_config(), tmp_path)
    run.path.mkdir()
    (run.path / "metrics.jsonl").write_bytes(line + b"\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl holds no evaluations"):
        run.metrics()


def test_a_trained_model_can_be_loaded_without_its_data(trained: Run) -> None:
    model, checkpoint = load_model(trained.checkpoint)
    assert not model.training
    assert checkpoint.about.domain_names == ("plain", "odd")
    images = fake_data()["fake"].test.images
    about = checkpoint.about
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (about.mean, about.std))
    with torch.no_grad():
        guess = model((images - mean) / std).argmax(1)
    wrong = (guess != fake_data()["fake"].test.labels).double().mean().item()
    assert 100 * wrong == pytest.approx(trained.result()["final_error"])


def test_a_run_in_use_is_refused(trained: Run) -> None:
    with (
        trained.hold(),
        pytest.raises(ValueError, match="is being trained by another process"),
        trained.hold(),
    ):
        pass
