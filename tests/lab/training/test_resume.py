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
from fake_data import fake_config, fake_data
from PIL import Image

from modenorm.lab.training import (
    Checkpoint,
    CheckpointError,
    Diverged,
    Run,
    Training,
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
from fake_data import fake_config, fake_data, fake_images
from PIL import Image
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
