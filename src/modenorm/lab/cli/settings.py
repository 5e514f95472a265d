"""What options of `modenorm train` stand for, and which say nothing."""

import json
from typing import Any

import torch

from modenorm.lab.training import TrainConfig
from modenorm.lab.training.closing import DEFAULT_SPARSITY

MAX_MODES = 8  # of --modes auto
NORMS_WITH = {"modes": ("mn", "mgn"), "groups": ("gn",), "gate": ("mn",), "variance": ("mgn",)}
"""The norms that an option is for."""


def ignored(config: TrainConfig, of_norms: dict[str, Any], device: str | None) -> list[str]:
    """A sentence for each option that makes no difference.

    >>> ignored(TrainConfig(model="nin", dataset="cifar10"), {"modes": 2, "gate": None}, "cpu")
    ['--modes 2 is ignored: it is for mn and mgn alone.']
    """
    notes = [
        f"--{name} {value} is ignored: it is for {' and '.join(NORMS_WITH[name])} alone."
        for name, value in of_norms.items()
        if value is not None and config.norm not in NORMS_WITH[name]
    ]
    on_cpu = not torch.cuda.is_available() if device is None else device.startswith("cpu")
    if config.compile and on_cpu:
        notes.append("--compile is ignored: models are compiled on GPUs only.")
    return notes


def integers(text: str) -> tuple[int, ...]:
    """Read whole numbers with commas between them."""
    try:
        return tuple(int(part.replace("_", "")) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"--milestones is {text!r}, expected whole numbers like 80,120") from None


def modes_settings(
    norm: str | None, text: str | None, max_modes: int | None, sparsity: float | None
) -> dict[str, Any]:
    """The settings that --norm and --modes stand for.

    >>> modes_settings("mn", "stage1.*=4,*=2", None, None)
    {'norm': 'mn', 'modes': {'stage1.*': 4, '*': 2}}
    """
    if text == "auto":
        return _automatic_modes(norm, max_modes, sparsity)
    for name, value in (("--max-modes", max_modes), ("--sparsity", sparsity)):
        if value is not None:
            raise ValueError(f"{name} is {value}, but it is for --modes auto alone: leave it out")
    norm = norm or ("bn" if text is None else "mn")
    if text is None:
        return {"norm": norm}
    modes = int(text) if text.isdecimal() else _modes_of_layers(text)
    return {"norm": norm, "modes": modes}


def settings_of_norm(settings: dict[str, Any]) -> dict[str, Any]:
    """Without what is not given, or not for this norm: so a training has one name.

    >>> settings_of_norm({"norm": "gn", "modes": 4, "groups": 2, "gate": None})
    {'norm': 'gn', 'groups': 2}
    """
    norm = settings["norm"]
    return {
        name: value
        for name, value in settings.items()
        if value is not None and norm in NORMS_WITH.get(name, (norm,))
    }


def _automatic_modes(
    norm: str | None, max_modes: int | None, sparsity: float | None
) -> dict[str, Any]:
    if norm not in (None, "mn"):
        raise ValueError(f"--norm is {norm}, but --modes auto is for mn alone: use --norm mn")
    sparsity = DEFAULT_SPARSITY if sparsity is None else sparsity
    if not sparsity > 0:
        raise ValueError(f"sparsity is {sparsity}; --modes auto needs a --sparsity above 0")
    return {"norm": "mn", "modes": max_modes or MAX_MODES, "sparsity": sparsity}


def _modes_of_layers(text: str) -> dict[str, int]:
    pairs = [tuple(map(str.strip, part.rpartition("=")[::2])) for part in text.split(",")]
    if not all(name and number.isdecimal() for name, number in pairs):
        raise ValueError(
            f"--modes is {text!r}, expected a number, auto, or numbers for layers such as "
            "stage1.*=4,*=2"
        )
    found = {name: int(number) for name, number in pairs}
    if len(found) < len(pairs):
        raise ValueError(f"--modes is {text!r}, but each pattern may be there once: remove one")
    return found


def assignment(text: str) -> tuple[str, Any]:
    """Read NAME=VALUE; the value is JSON where it can be, and text otherwise."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ValueError(f"--options is {text!r}, expected NAME=VALUE, such as activation=sigmoid")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
