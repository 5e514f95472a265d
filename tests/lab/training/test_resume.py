"""A training that stops at any moment goes on from its last checkpoint and ends the same."""

import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_data import fake_config, fake_data, fake_images
from PIL import Image
from safetensors import safe_open

from modenorm.lab.data import DataSet
from modenorm.lab.training import (
    Checkpoint,
    CheckpointError,
    Diverged,
    Run,
    Training,
    load_model,
    train,
    train_many,
)
from modenorm.lab.training.interrupts import Terminated

TIMES = ("seconds", "date")


def same_end(one: Run, other: Run) -> None:
    """Check that two runs ended with the same numbers, down to the last bit."""
    assert one.state == other.state == "done"

    def numbers(record: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in record.items() if name not in TIMES}

    assert numbers(one.result()) == numbers(other.result())
    ours, theirs = (json.dumps([*map(numbers, run.metrics())]) for run in (one, other))
    assert ours == theirs  # in the same order: layers are listed as the network has them
    ours, theirs = (Checkpoint.load(run.checkpoint).tensors for run in (one, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from fake_data import fake_config, fake_data
from modenorm.lab.training import train
torch.set_num_threads(1)
say = lambda training: print(training.position.step, flush=True)
train(fake_config(), Path(sys.argv[2]), data=fake_data(), checkpoint_every=0.0, listener=say)
"""


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """SIGKILL falls anywhere: in a step, an evaluation, a checkpoint."""
    command = [sys.executable, "-c", CHILD, str(Path(__file__).parent), str(tmp_path / "killed")]
    kills = 0
    for attempt in range(4):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            first = child.stdout.readline()  # it trains, or it has nothing left to do
            if first and attempt < 2:
                time.sleep(random.random() * 0.5)
                child.send_signal(signal.SIGKILL)
                kills += 1
            child.stdout.read()
        if child.returncode == 0:
            break
        assert child.returncode == -signal.SIGKILL
    assert kills
    train(fake_config(), tmp_path / "whole", data=fake_data())
    same_end(Run.of(fake_config(), tmp_path / "killed"), Run.of(fake_config(), tmp_path / "whole"))


class Stop(Exception):
    pass


def stop_after(calls: int) -> Callable[[Training], None]:
    count = 0

    def listener(training: Training) -> None:
        nonlocal count
        count += 1
        if count == calls:
            raise Stop

    return listener


def test_stopped_again_and_again(tmp_path: Path) -> None:
    config = fake_config(norm="bn")
    train(config, tmp_path / "whole", data=fake_data())
    run = Run.of(config, tmp_path / "stopped")
    attempts = 0
    while attempts < 9:
        attempts += 1
        with contextlib.suppress(Stop):
            train(
                config,
                tmp_path / "stopped",
                data=fake_data(),
                checkpoint_every=0.0,
                listener=stop_after(3),
            )
            break
    assert 2 < attempts < 9
    same_end(run, Run.of(config, tmp_path / "whole"))


@pytest.mark.parametrize(
    ("signum", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]
)
def test_interrupt_writes_a_checkpoint_of_the_moment(
    tmp_path: Path, signum: signal.Signals, error: type[KeyboardInterrupt]
) -> None:
    config = fake_config(norm="bn", total=25)

    def interrupt(training: Training) -> None:
        if training.position.step == 16:
            signal.raise_signal(signum)

    before = signal.getsignal(signum)
    with pytest.raises(KeyboardInterrupt) as stopped:
        train(config, tmp_path / "stopped", data=fake_data(), listener=interrupt)
    assert stopped.type is error
    assert signal.getsignal(signum) is before
    run = Run.of(config, tmp_path / "stopped")
    assert Checkpoint.load(run.checkpoint).position.step >= 16
    assert run.state == "incomplete"
    train(config, tmp_path / "stopped", data=fake_data())
    train(config, tmp_path / "whole", data=fake_data())
    same_end(run, Run.of(config, tmp_path / "whole"))


def full_disk(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_full_disk_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    config = fake_config(norm="bn")
    run = Run.of(config, tmp_path / "full")

    def fill_disk(training: Training) -> None:
        if training.position.step == 36:
            monkeypatch.setattr(os, call, full_disk)

    with pytest.raises(OSError, match=r"cannot write .*No space left on device; what was saved"):
        train(config, tmp_path / "full", data=fake_data(), listener=fill_disk)
    monkeypatch.undo()
    assert Checkpoint.load(run.checkpoint).position.step == 18
    assert not list(run.path.glob(".*"))
    train(config, tmp_path / "full", data=fake_data())
    train(config, tmp_path / "whole", data=fake_data())
    same_end(run, Run.of(config, tmp_path / "whole"))


def test_divergence_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    config = fake_config(norm="bn", milestones=(7,), factor=1e30, eval_every=5)
    message = r"no longer finite at step \d+ \(learning rate 1e\+28\); the checkpoint of step 5 is"
    with pytest.raises(Diverged, match=message):
        train(config, tmp_path, data=fake_data())
    run = Run.of(config, tmp_path)
    assert run.state == "failed"
    assert "no longer finite" in (run.path / "failed").read_text()
    checkpoint = Checkpoint.load(run.checkpoint)
    assert checkpoint.position.step == 5
    assert all(tensor.isfinite().all() for tensor in checkpoint.tensors.values())


def test_a_diverging_training_leaves_the_others_alone(tmp_path: Path) -> None:
    good, bad = fake_config(total=20), fake_config(total=20, lr=1e30)
    outcomes = train_many([bad, good], tmp_path, data=fake_data())
    assert outcomes[0].failure
    assert outcomes[1].result


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


def test_a_streamed_training_notices_other_files(tmp_path: Path) -> None:
    for name in ("train/a/1", "train/b/1", "val/a/1", "val/b/1"):
        path = tmp_path / "pictures" / f"{name}.png"
        path.parent.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(path)
    config = fake_config(
        dataset=f"folder:{tmp_path / 'pictures'}", stream=True, image_size=8, crop="resized"
    )
    config = replace(config, norm="bn", total=2, eval_every=1, milestones=(), batch=2)

    def stop(training: Training) -> None:
        if training.position.step == 2:
            raise Stop

    options = {"workers": 0, "checkpoint_every": 0.0}
    with pytest.raises(Stop):
        train(config, tmp_path, listener=stop, **options)
    added = tmp_path / "pictures" / "train" / "a" / "0.png"
    Image.new("RGB", (8, 8)).save(added)
    with pytest.raises(CheckpointError, match=r"2 training and 2 test .* instead of 3 training"):
        train(config, tmp_path, **options)
    added.unlink()
    train(config, tmp_path, **options)


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


def test_the_end_writes_all_metrics(tmp_path: Path) -> None:
    def cut(training: Training) -> None:
        training.run.set_metrics(training.position.metrics[:1])

    train(fake_config(), tmp_path, data=fake_data(), listener=cut)
    assert [entry["step"] for entry in Run.of(fake_config(), tmp_path).metrics()] == [18, 36, 40]


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    config = fake_config(total=3)
    run = Run.of(config, tmp_path)
    run.path.mkdir()
    (run.path / ".checkpoint.safetensors.1.partial").write_bytes(b"half")
    train(config, tmp_path, data=fake_data())
    assert not list(run.path.glob(".*"))


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
