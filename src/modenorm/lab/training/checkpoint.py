"""Checkpoints: one safetensors file, with everything that is not a tensor as JSON in its header.

One file, replaced as a whole, cannot disagree with itself. Reading it runs no code.
"""

import json
import math
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from modenorm.lab.models import create_model
from modenorm.lab.training.config import TrainConfig
from modenorm.lab.training.files import write_whole

FORMAT = "modenorm training 1"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: the file and what was expected."""


@dataclass
class Position:
    """How far a training has come.

    Attributes:
        step: Finished steps.
        seconds: Time spent on them.
        metrics: The records of all evaluations so far.
    """

    step: int = 0
    seconds: float = 0.0
    metrics: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class About:
    """What a model has to know about its data, so that it can be used without them."""

    classes: tuple[str, ...]
    domain_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def differences(self, other: "About") -> list[str]:
        """Describe in what `other` differs."""
        found = []
        for kind in ("classes", "domain_names"):
            mine, theirs = getattr(self, kind), getattr(other, kind)
            if len(mine) != len(theirs):
                found.append(f"{len(theirs)} {kind} instead of {len(mine)}")
            elif mine != theirs:
                pairs = zip(mine, theirs, strict=True)
                one, another = next(pair for pair in pairs if pair[0] != pair[1])
                found.append(f"{kind} with {another!r} instead of {one!r}")
        for kind in ("mean", "std"):
            mine, theirs = getattr(self, kind), getattr(other, kind)
            if len(mine) != len(theirs) or not all(map(math.isclose, mine, theirs)):
                found.append(f"{kind} {theirs} instead of {mine}")
        return found


@dataclass(frozen=True)
class Checkpoint:
    """A training at rest. Tensors are named model.*, momentum.*, generator.* and loss.sum.

    `data` describes the data it was trained on; None in checkpoints of earlier versions.
    """

    config: TrainConfig
    about: About
    position: Position
    tensors: dict[str, Tensor]
    data: str | None = None

    def save(self, path: Path) -> None:
        """Replace the file at `path`, or leave it as it was and raise OSError."""
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        header = {
            "format": FORMAT,
            "config": json.loads(self.config.to_json()),
            "about": asdict(self.about),
            "position": asdict(self.position),
            "data": self.data,
            "crc32": _checksum(tensors),
        }
        text = json.dumps(header)
        write_whole(path, save(tensors, {"training": text, "training crc32": _text_checksum(text)}))

    @classmethod
    def load(cls, path: Path) -> "Checkpoint":
        """Read a checkpoint; raises `CheckpointError` for anything else."""
        text, tensors = _read(path)
        try:
            header = json.loads(text)
            if header["format"] != FORMAT:
                raise CheckpointError(
                    f"{path} has format {header['format']!r}, expected {FORMAT!r}: "
                    "use the version of modenorm that wrote it"
                )
            if header.get("crc32", checksum := _checksum(tensors)) != checksum:
                raise CheckpointError(
                    f"{path} has tensors of another checksum than when it was written: restore it "
                    "from a copy, or delete it to start again"
                )
            about = {name: tuple(values) for name, values in header["about"].items()}
            return cls(
                config=TrainConfig.from_json(json.dumps(header["config"])),
                about=About(**about),
                position=_position(header["position"]),
                tensors=tensors,
                data=header.get("data"),
            )
        except CheckpointError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is no checkpoint of a training ({error}): choose another file"
            ) from None

    def check_config(self, config: TrainConfig, path: Path) -> None:
        """Refuse a checkpoint that is of another training than that of `config`."""
        differences = config.differences(self.config)
        if differences:
            raise CheckpointError(
                f"{path} is of another training ({'; '.join(differences)}): move it away or "
                "choose another folder for the runs"
            )

    def check_data(self, about: About, data: str, path: Path) -> None:
        """Refuse a checkpoint that was trained on other data, as after a class was renamed."""
        differences = about.differences(self.about)
        if self.data not in (None, data):
            differences.append(f"{self.data} instead of {data}")
        if differences:
            raise CheckpointError(
                f"{path} was trained on other data ({'; '.join(differences)}): restore the data it "
                "was trained on, or delete the run's directory to start again"
            )

    def check_length(self, total: int, path: Path) -> None:
        """Refuse a checkpoint beyond the last step, as after images were taken from a folder."""
        if self.position.step > total:
            raise CheckpointError(
                f"{path} is at step {self.position.step}, beyond the training's last, {total}: "
                "restore the data it was trained on, or delete it to start again"
            )

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors of one part, such as "model", without its prefix."""
        prefix = name + "."
        return {
            key.removeprefix(prefix): tensor
            for key, tensor in self.tensors.items()
            if key.startswith(prefix)
        }


def _position(values: dict[str, Any]) -> Position:
    position = Position(**values)
    if type(position.step) is not int or position.step < 0:
        raise ValueError(f"its step is {position.step!r}")
    return position


def _checksum(tensors: dict[str, Tensor]) -> str:
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, value)
    return f"{value:08x}"


def _text_checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def _read(path: Path) -> tuple[str, dict[str, Tensor]]:
    """What a safetensors file says of its training, and its tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: give the path of a checkpoint") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error}): restore it from a copy, or delete "
            "it to start again"
        ) from None
    header = metadata.get("training")
    if header is None:
        raise CheckpointError(f"{path} holds no training, only tensors: choose another file")
    if metadata.get("training crc32", checksum := _text_checksum(header)) != checksum:
        raise CheckpointError(
            f"{path} has a header of another checksum than when it was written: restore it from a "
            "copy, or delete it to start again"
        )
    return header, tensors


def build_model(config: TrainConfig, num_classes: int, generator: torch.Generator) -> nn.Module:
    """Create the model of a configuration with its initial weights, on the CPU."""
    return create_model(
        config.model,
        num_classes=num_classes,
        norm=config.norm,
        modes=config.modes,
        groups=config.groups,
        where=config.where,
        momentum=config.running_momentum,
        gate=config.gate,
        variance=config.variance,
        generator=generator,
        **config.options,
    )


def load_state(model: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    """Copy weights and buffers into a model; names and shapes must agree.

    Raises:
        CheckpointError: They are of another model. Nothing is changed.
    """
    expected = model.state_dict()
    _check_names(expected, state, path)
    model.load_state_dict(state)


def copy_tensors(targets: dict[str, Tensor], state: dict[str, Tensor], path: Path) -> None:
    """Copy tensors into others of the same names and shapes, as `load_state` does."""
    _check_names(targets, state, path)
    for name, target in targets.items():
        target.copy_(state[name])


def _check_names(expected: dict[str, Tensor], state: dict[str, Tensor], path: Path) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    for name, tensor in expected.items():
        if shapes.pop(name, None) != tuple(tensor.shape):
            found = tuple(state[name].shape) if name in state else "nothing"
            raise CheckpointError(
                f"{path} is of another model: it holds {found} for {name!r}, expected "
                f"{tuple(tensor.shape)}: use the configuration it was trained with"
            )
    if shapes:
        raise CheckpointError(
            f"{path} is of another model: expected no {min(shapes)!r}: use the configuration it "
            "was trained with"
        )


def load_model(path: Path, device: torch.device | str = "cpu") -> tuple[nn.Module, Checkpoint]:
    """Rebuild the trained model of a checkpoint, in evaluation mode, and tell what it was."""
    checkpoint = Checkpoint.load(path)
    num_classes = len(checkpoint.about.classes)
    model = build_model(checkpoint.config, num_classes, torch.Generator().manual_seed(0))
    load_state(model, checkpoint.part("model"), path)
    return model.to(device).eval(), checkpoint
