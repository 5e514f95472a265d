"""What the ranks of test_ranks.py run: `torchrun ranks_child.py FOLDER`."""

import atexit
import dataclasses
import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from fake_data import fake_config, fake_data, fake_images

from modenorm.lab.data import DataSet
from modenorm.lab.training import TrainConfig, Training, recipe, runner, train
from modenorm.lab.training.interrupts import exit_code

UNEVEN = fake_config(model="resnet20", batch=7, total=3, milestones=(2,), eval_every=2)
GROWN = dataclasses.replace(UNEVEN, seed=1)
"""A training that one process begins."""
PER_RANK = fake_config(model="resnet20", batch=7, total=3, norm="bn", sync=False)
STOPPED = fake_config(model="resnet20", norm="gn", batch=5, total=24, milestones=(), eval_every=18)
MORTAL = {
    "model": "resnet20",
    "dataset": "folder:images",
    "image_size": 16,
    "stream": True,
    "crop": "resized",
    "norm": "mn",
    "batch": 5,
    "lr": 0.01,
    "unit": "updates",
    "total": 32,
    "eval_every": 32,
}
"""A training that one test kills; also arguments of the command line."""
DROPOUT = fake_config(norm="bn", batch=6, total=3)


def streamed(name: str, **changes: Any) -> TrainConfig:
    """A training on an image folder in the working directory."""
    settings = {
        "model": "resnet20",
        "norm": "mn",
        "dataset": f"folder:{name}",
        "image_size": 16,
        "stream": True,
        "crop": "resized",
        "batch": 5,
        "total": 3,
        "milestones": (),
        "eval_every": 3,
    }
    return fake_config(**settings | changes)


def failure(config: TrainConfig, folder: Path, **options: Any) -> dict[str, Any]:
    """How a training is refused, and after how many seconds."""
    began = time.monotonic()
    try:
        train(config, folder, device="cpu", **options)
    except (ValueError, OSError) as error:
        return {"error": str(error), "seconds": time.monotonic() - began}
    return {"error": None}


def stop(training: Training) -> None:
    """Terminate rank 0, which alone has a listener."""
    if training.position.step >= 16:
        signal.raise_signal(signal.SIGTERM)


def closed_state(runs: Path) -> list[float]:
    """Sums of all tensors right after modes were closed, in an automatic training."""
    sums: list[float] = []

    class Watched(Training):
        def _close(self) -> None:
            super()._close()
            sums.extend(float(tensor.double().sum()) for tensor in self.model.state_dict().values())

    runner.Training = Watched  # type: ignore[misc]
    config = streamed("images", modes=3, sparsity=0.1, total=6, eval_every=6)
    train(config, runs, device="cpu", workers=0)
    runner.Training = Training  # type: ignore[misc]
    return sums


def threads() -> set[str]:
    """The numbers of this process's threads."""
    return set(os.listdir("/proc/self/task"))


def tell_leftover_threads(path: Path, known: set[str]) -> None:
    """Write how many threads have been started since they were `known`, and not ended."""
    deadline = time.monotonic() + 5  # the system lists a thread a little longer than it lives
    while threads() - known and time.monotonic() < deadline:
        time.sleep(0.01)
    path.write_text(str(len(threads() - known)))


def main(folder: Path) -> None:
    """Train, stop and fail in all ways that need several ranks."""
    rank = int(os.environ["RANK"])
    if Path("/proc/self/task").exists():  # registered first, called last
        atexit.register(tell_leftover_threads, folder / f"threads{rank}", threads())
    gc.disable()  # models that became garbage are still there when the process ends
    runs, found = folder / "two", {}
    os.chdir(folder / f"rank{rank}")
    configs = {"uneven": UNEVEN, "grown": GROWN, "per rank": PER_RANK, "dropout": DROPOUT}
    for name, config in configs.items():
        found[name] = train(config, runs, data=fake_data(), device="cpu")
    found["streamed"] = train(streamed("images"), runs, device="cpu", workers=0)
    found["closed"] = closed_state(runs)
    train(recipe(**MORTAL), runs, device="cpu", workers=0)
    try:
        train(STOPPED, runs, data=fake_data(), device="cpu", listener=stop)
    except KeyboardInterrupt as interrupt:
        found["stopped"] = exit_code(interrupt)
    found["small batch"] = failure(fake_config(batch=1), runs, data=fake_data())
    found["other command"] = failure(fake_config(seed=rank), runs, data=fake_data())
    other = DataSet("fake", fake_images(70 + rank), fake_images(33, seed=1))
    found["other data"] = failure(fake_config(), runs, data={"fake": other})
    found["other folder"] = failure(streamed("differs"), runs, workers=0)
    found["missing folder"] = failure(streamed("only0"), runs, workers=0)
    found["unreadable"] = failure(streamed("images"), folder / "occupied")
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
