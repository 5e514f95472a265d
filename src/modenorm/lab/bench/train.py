"""The laboratory's own trainings: time of a step, of an evaluation, and of watching the modes.

The step is the one of `modenorm train`, through `train_many`: captured as a CUDA graph on a GPU,
several trainings side by side. Images are noise; what they show does not change the speed. Or they
are the files of an image folder, decoded while they are needed.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modenorm.lab.bench.names import split_name
from modenorm.lab.bench.timing import alternating, extra
from modenorm.lab.data import DataSet, ImageSet
from modenorm.lab.models import check_size
from modenorm.lab.training import TrainConfig, Training, train_many
from modenorm.lab.training.checkpoint import build_model
from modenorm.lab.training.evaluate import count_errors
from modenorm.lab.training.pace import CHUNK, SHORT_CHUNK
from modenorm.lab.training.queue import side_by_side
from modenorm.lab.training.runner import choose_device
from modenorm.lab.training.sources import SharedData
from modenorm.lab.training.usage import ModeUsage
from modenorm.modes.recording import record_gates

__all__ = ["CASES", "TrainCase", "measure_training"]

EVALUATION_SECONDS = 3.0
"""For each of the three evaluations that are compared."""
PIXEL_BYTES = 600_000_000
"""Most memory for the images of one case."""
DEEP = {
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "dtype": "bfloat16",
    "channels_last": True,
    "compile": True,
    "augment": True,
}


@dataclass(frozen=True)
class TrainCase:
    """A training to measure.

    Attributes:
        settings: Arguments of `TrainConfig` that say what a step does.
        size: Side of the images.
        classes: Number of classes.
        steps_per_evaluation: Distance between evaluations in the paper's recipe.
        images: Training images at most; as many test images, but at most 10,000.
        folder: Images to stream, in place of noise; then one training has all cores.
        beside: Trainings side by side; None for as many as fill a GPU.
    """

    settings: dict[str, Any]
    size: int
    classes: int
    steps_per_evaluation: int = 391
    images: int = 50_000
    folder: Path | None = None
    beside: int | None = None

    @property
    def parallel(self) -> int:
        """Trainings side by side."""
        return self.beside or (1 if self.folder else side_by_side(self.settings["model"]))

    def config(self, norm: str, steps: int, seed: int = 0) -> TrainConfig:
        """One of the trainings."""
        kind, count = split_name(norm)
        source: dict[str, Any] = {"dataset": "noise"}
        if self.folder:
            source = {"dataset": f"folder:{self.folder}", "stream": True, "image_size": self.size}
        return TrainConfig(
            **source,
            norm=kind,
            modes=count,
            groups=count,
            unit="updates",
            total=steps,
            eval_every=steps,
            lr=0.01,
            seed=seed,
            **self.settings,
        )

    def data(self) -> dict[str, DataSet]:
        """Noise to train and to evaluate on, by its name; nothing for a folder."""
        if self.folder:
            return {}
        count = min(self.images, PIXEL_BYTES // (3 * self.size**2))
        noise = DataSet("noise", self._images(count), self._images(min(count, 10_000)))
        return {"noise": noise}

    def _images(self, count: int) -> ImageSet:
        generator = torch.Generator().manual_seed(count)
        shape = (count, 3, self.size, self.size)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        labels = torch.randint(self.classes, (count,), generator=generator)
        names = tuple(map(str, range(self.classes)))
        return ImageSet(images, labels, torch.zeros_like(labels), names, ("noise",))


CASES = {
    "lenet": TrainCase({"model": "lenet", "batch": 128}, 32, 40, 782),
    **{
        model: TrainCase({**DEEP, "model": model, "batch": 128}, 32, 10)
        for model in ("nin", "vgg13", "resnet20", "resnet56")
    },
    "resnet18": TrainCase({**DEEP, "model": "resnet18", "batch": 256, "crop": "resized"}, 64, 200),
}


def measure_training(
    case: TrainCase, norms: Iterable[str], *, steps: int, rounds: int, device: str | None = None
) -> Iterator[dict[str, Any]]:
    """One row per norm; the norms take turns, and each keeps its fastest round.

    Args:
        case: What to train.
        norms: Such as bn and mn2; the first one is what the others are compared with.
        steps: Steps of every training: more than two chunks of them.
        rounds: How often each norm has its turn.
        device: "cuda", "cpu", or None for the best there is.
    """
    size, advice = (case.size, case.size), "set --size 32 or choose resnet20"
    check_size(case.settings["model"], size, "this benchmark", advice)
    target, norms = choose_device(device), list(norms)
    least = 2 * (SHORT_CHUNK if case.folder else CHUNK[target.type])
    if steps <= least:
        raise ValueError(f"steps is {steps}, but must exceed {least}: set --steps")
    data = case.data()
    rates = dict.fromkeys(norms, 0.0)
    for _ in range(rounds):
        for norm in norms:
            rates[norm] = max(rates[norm], _images_per_second(case, norm, steps, data, target))
    for norm in norms:
        step_us = case.settings["batch"] * 1e6 / rates[norm]
        yield {
            **{name: case.settings[name] for name in ("model", "batch")},
            "dtype": case.settings.get("dtype", "float32"),
            "compile": case.settings.get("compile", False),
            "size": case.size,
            "parallel": case.parallel,
            "images": case.folder.name if case.folder else "noise",
            "norm": norm,
            "step_us": step_us,
            "images_per_s": rates[norm],
            "speed_to_first": rates[norm] / rates[norms[0]],
            **({} if case.folder else _evaluation(case, norm, step_us, data, target)),
        }


def _images_per_second(
    case: TrainCase, norm: str, steps: int, data: dict[str, DataSet], device: torch.device
) -> float:
    """Of all trainings together, while all of them are in progress."""
    seen: dict[int, list[tuple[float, int]]] = {}

    def note(training: Training) -> None:
        if not training.position.metrics:
            reached = (time.perf_counter(), training.position.step)
            seen.setdefault(training.run.config.seed, []).append(reached)

    with tempfile.TemporaryDirectory() as folder:
        train_many(
            [case.config(norm, steps, seed) for seed in range(case.parallel)],
            Path(folder),
            data=data,
            device=device,
            parallel=case.parallel,
            checkpoint_every=1e9,
            listener=note,
            start_together=True,
        )
    # first chunks, in which others are still being captured, are left out
    spans = [(points[0], points[-1]) for points in seen.values()]
    speeds = [(last[1] - first[1]) / (last[0] - first[0]) for first, last in spans]
    return sum(speeds) * float(case.settings["batch"])


def _evaluation(
    case: TrainCase, norm: str, step_us: float, data: dict[str, DataSet], device: torch.device
) -> dict[str, float]:
    """Time of an evaluation, and what recording gates and logging modes add to it, in percent."""
    config = case.config(norm, 1)
    placed = SharedData(device, None, data).get(config)
    model = build_model(config, case.classes, torch.Generator().manual_seed(0)).to(device)
    if config.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    dtype = getattr(torch, config.dtype)

    def plain() -> None:
        count_errors(model, placed.test, 1, dtype)

    def recorded() -> None:
        with record_gates(model):
            plain()

    def logged() -> None:
        usage = ModeUsage(model)
        count_errors(model, placed.test, 1, dtype, forward=usage)
        usage.totals(placed.test.domains, 1).cpu()

    plain_us, recorded_us, logged_us = alternating((plain, recorded, logged), EVALUATION_SECONDS)
    eval_us = statistics.median(plain_us)
    recording, logging = extra(recorded_us, plain_us), extra(logged_us, plain_us)
    return {
        "eval_us": eval_us,
        "eval_turns": len(plain_us),
        "record_gates_percent": 100 * recording.value / eval_us,
        "record_gates_percent_within": 100 * recording.within / eval_us,
        "log_modes_percent_of_eval": 100 * logging.value / eval_us,
        "log_modes_percent_of_training": 100
        * logging.value
        / (step_us * case.steps_per_evaluation),
    }
