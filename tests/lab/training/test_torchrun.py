"""Two processes that train together: the same numbers, one voice, and an end without a hang."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_data import fake_config, fake_data
from PIL import Image
from ranks_child import GROWN, MORTAL, PER_RANK, STOPPED, UNEVEN, streamed
from test_resume import same_end

from modenorm.lab.training import Checkpoint, Run, TrainConfig, Training, recipe, train
from modenorm.lab.training.ranks import Ranks

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SECONDS = 120  # for what takes ten


def torchrun(*arguments: str, ranks: int = 2) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*command, f"--nproc-per-node={ranks}", *arguments]


def write_images(folder: Path, count: int) -> None:
    for number in range(count):
        part, label = ("train", "val")[number % 4 == 3], "ab"[number // 4 % 2]
        path = folder / part / label / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (30 + number, 24), (9 * number, 80, 99)).save(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have run ranks_child.py."""
    folder = tmp_path_factory.mktemp("ranks")
    for rank in range(2):
        write_images(folder / f"rank{rank}" / "images", 21)
        write_images(folder / f"rank{rank}" / "differs", 20 + rank)
    write_images(folder / "rank0" / "only0", 8)
    (folder / "occupied").write_text("a file where runs should be")
    begin(folder / "two")
    command = torchrun(str(HERE / "ranks_child.py"), str(folder))
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


def begin(runs: Path) -> None:
    """Train by one process for a while."""

    class Stopped(Exception):
        pass

    def stop(training: Training) -> None:
        training.save()
        raise Stopped

    with pytest.raises(Stopped):
        train(GROWN, runs, data=fake_data(), listener=stop)
    assert 0 < Checkpoint.load(Run.of(GROWN, runs).checkpoint).position.step < GROWN.total


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("config", [UNEVEN, GROWN], ids=["uneven", "grown"])
def test_uneven_shares_give_the_numbers_of_one_process(folder: Path, config: TrainConfig) -> None:
    """Batches of 7 are 3 and 4 samples, 33 test images 16 and 17; also if one process began."""
    train(config, folder / "one", data=fake_data())
    one, two = (Run.of(config, folder / name) for name in ("one", "two"))
    alone, together = (Checkpoint.load(run.checkpoint) for run in (one, two))
    for name, tensor in alone.tensors.items():
        if name.startswith("generator."):
            continue
        # float32, three steps of twenty layers; sums are taken in another order
        torch.testing.assert_close(together.tensors[name], tensor, rtol=2e-3, atol=2e-5)
    assert [r["train_loss"] for r in two.metrics()] == pytest.approx(
        [r["train_loss"] for r in one.metrics()], rel=1e-5
    )
    for theirs, ours in zip(two.metrics(), one.metrics(), strict=True):
        for name in ("step", "samples", "test_error", "top5_error", "domain_errors"):
            assert theirs[name] == ours[name]
        for layer, usage in ours["modes"].items():
            assert theirs["modes"][layer]["shares"] == pytest.approx(usage["shares"], abs=1e-3)


def test_statistics_of_every_rank_for_itself(folder: Path, found: list[dict[str, Any]]) -> None:
    """The first layer's running mean is that of rank 0's part of the batches."""
    name = "model.stem.norm.running_mean"
    tensors = Checkpoint.load(Run.of(PER_RANK, folder / "two").checkpoint).tensors
    train(PER_RANK, folder / "one", data=fake_data())
    whole = Checkpoint.load(Run.of(PER_RANK, folder / "one").checkpoint).tensors
    assert not torch.allclose(tensors[name], whole[name], rtol=1e-2)
    assert found[0]["per rank"] == found[1]["per rank"]
    assert found[0]["per rank"]["ranks"] == 2


def test_all_ranks_have_the_result_of_rank_0(found: list[dict[str, Any]]) -> None:
    for name in ("uneven", "grown", "dropout", "streamed"):
        assert found[0][name] == found[1][name]


def test_all_ranks_close_the_same_modes(found: list[dict[str, Any]]) -> None:
    assert found[0]["closed"] == found[1]["closed"]
    assert min(found[0]["closed"]) <= -1e4  # some were closed


def test_streamed_images_in_shares(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "rank0")
    train(streamed("images"), folder / "one", workers=0)
    one, two = (Run.of(streamed("images"), folder / name) for name in ("one", "two"))
    assert two.metrics()[-1]["train_loss"] == pytest.approx(
        one.metrics()[-1]["train_loss"], rel=1e-4
    )
    assert one.result()["train_images"] == 16


def test_goes_on_with_another_number_of_ranks(folder: Path, found: list[dict[str, Any]]) -> None:
    assert found[0]["stopped"] == 143
    assert found[1]["stopped"] == 130
    run = Run.of(STOPPED, folder / "two")
    assert run.state == "incomplete"
    step = Checkpoint.load(run.checkpoint).position.step
    assert 16 <= step < STOPPED.total
    resumed = train(STOPPED, folder / "two", data=fake_data())
    whole = train(STOPPED, folder / "one", data=fake_data())
    assert resumed["samples_seen"] == whole["samples_seen"]
    losses = [
        [r["train_loss"] for r in Run.of(STOPPED, folder / name).metrics()]
        for name in ("one", "two")
    ]
    # float32 over 40 steps
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("small batch", "batch is 1, less than one sample for each of 2 ranks"),
        ("other command", "what to train must be the same on every rank, but rank 0 has nin"),
        ("other data", "rank 0 has 70 training and 33 test images of 4 classes"),
        ("other data", "rank 1 has 71 training and 33 test images of 4 classes"),
        ("other folder", "rank 0 has 15 training and 5 test images of 2 classes"),
        ("other folder", "rank 1 has 16 training and 5 test images of 2 classes"),
        ("missing folder", "only0/train: missing"),
        ("unreadable", "occupied"),
    ],
)
def test_every_rank_is_told_at_once(found: list[dict[str, Any]], case: str, message: str) -> None:
    for rank in range(2):
        assert message in found[rank][case]["error"]
        assert found[rank][case]["seconds"] < 5


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds threads in /proc")
def test_no_thread_is_left_when_python_ends(folder: Path) -> None:
    """One that then wants to run Python aborts the process."""
    assert [(folder / f"threads{rank}").read_text() for rank in range(2)] == ["0", "0"]


def process_of(rank: int, parent: int) -> int | None:
    """The process that torchrun started as a rank."""
    mark = f"\0RANK={rank}\0".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            ppid = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if ppid == parent and mark in (entry / "environ").read_bytes():
                return int(entry.name)
        except OSError:
            continue
    return None


def wait_for(checkpoint: Path, parent: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + SECONDS
    while not checkpoint.exists() and parent.poll() is None:
        assert time.monotonic() < deadline, f"no checkpoint within {SECONDS} s"
        time.sleep(0.01)


def kill_at_first_checkpoint(rank: int, parent: subprocess.Popen[str], checkpoint: Path) -> None:
    wait_for(checkpoint, parent)
    victim = process_of(rank, parent.pid)
    assert victim is not None
    os.kill(victim, signal.SIGKILL)


def mortal(runs: Path, **changed: int) -> list[str]:
    """The command that trains `MORTAL`, with some settings changed."""
    arguments = ["-m", "modenorm", "train", "--device", "cpu", "--workers", "1"]
    arguments += ["--checkpoint-every", "0", "--runs", str(runs)]
    for name, value in (MORTAL | changed).items():
        option = "--" + name.replace("_", "-")
        arguments += [option] if value is True else [option, str(value)]
    return arguments


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")
def test_a_killed_rank_and_the_restart(folder: Path, tmp_path: Path) -> None:
    """SIGKILL of the rank that writes: torchrun starts all again, from the last checkpoint."""
    run = Run.of(recipe(**MORTAL), tmp_path)
    command = torchrun("--max-restarts=1", "--monitor-interval=0.1", *mortal(tmp_path))
    with subprocess.Popen(
        command, cwd=folder / "rank0", env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    ) as parent:
        try:
            kill_at_first_checkpoint(0, parent, run.checkpoint)  # just when workers start
            # ends only when no worker of a killed rank is left that could write
            _, errors = parent.communicate(timeout=SECONDS)
        finally:
            parent.terminate()  # torchrun then ends its ranks
    assert parent.returncode == 0, errors
    assert "exitcode: -9" in errors
    same_end(run, Run.of(recipe(**MORTAL), folder / "two"))


@pytest.mark.parametrize("started_by", ["torchrun", "Slurm"])
def test_all_processes_are_told_to_end(folder: Path, tmp_path: Path, started_by: str) -> None:
    """SIGTERM of a training and its workers: it keeps a checkpoint and goes on another time."""
    run = Run.of(recipe(**MORTAL | {"total": 9999}), tmp_path)  # far from its end
    arguments = mortal(tmp_path, total=9999)
    command = torchrun(*arguments) if started_by == "torchrun" else [sys.executable, *arguments]
    where = {"cwd": folder / "rank0", "env": ENVIRONMENT, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **where) as training:
        try:
            wait_for(run.checkpoint, training)  # just when workers start
            time.sleep(0.5)
            os.killpg(training.pid, signal.SIGTERM)  # torchrun passes it on to groups of its own
            _, errors = training.communicate(timeout=SECONDS)
        finally:
            training.terminate()
    assert "give the same command to go on" in errors
    assert "DataLoader" not in errors
    assert started_by == "torchrun" or (training.returncode == 143 and "Traceback" not in errors)
    assert run.state == "incomplete"


def test_a_worker_does_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would if it imported a program that trains without asking for its name."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(ValueError, match=r'put .* under `if __name__ == "__main__":`'):
        train(fake_config(), Path("nowhere"), data=fake_data(), device="cpu")


def test_shares_are_everything_once() -> None:
    for count in (0, 1, 5, 33, 256):
        for size in (1, 2, 3, 7):
            parts = [range(count)[Ranks(rank, size).share(count)] for rank in range(size)]
            assert [i for part in parts for i in part] == list(range(count))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """As a loader's worker would that outlives a killed training."""
    run = Run.of(fake_config(), tmp_path)
    reader, writer = os.pipe()
    with run.hold():
        pid = os.fork()
        if pid == 0:
            os.write(writer, b"running")
            time.sleep(30)
            os._exit(0)
        os.read(reader, 7)
    try:
        with run.hold():
            pass
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)
