"""One layer, forward and backward: torch's norms, mode norms for several K, and the copy floor.

The floor is eight reads or writes of the tensor, measured as four copies of it in the same run.
A norm is timed only after its output and all gradients agree with the reference on a few samples.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import modenorm
from modenorm import reference
from modenorm.kernels.cpp.module import autograd_nodes
from modenorm.lab.bench.loop import LoopModeNorm
from modenorm.lab.bench.names import split_name
from modenorm.lab.bench.timing import alternating, device_time, peak_memory, wall_time

__all__ = ["CPU_SHAPES", "GPU_SHAPES", "Case", "measure", "norm_names"]

GPU_SHAPES = (
    (128, 6, 28, 28),
    (128, 16, 32, 32),
    (128, 64, 32, 32),
    (256, 64, 56, 56),
    (256, 256, 56, 56),
    (256, 512, 28, 28),
    (256, 1024, 14, 14),
    (256, 2048, 7, 7),
    (1024, 64, 112, 112),
)
CPU_SHAPES = ((128, 16, 32, 32), (128, 64, 16, 16), (32, 64, 56, 56))
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}
CPU_SECONDS = 3.0
"""For each norm, of steps that alternate with the others'."""
EAGER_TURNS, EAGER_SECONDS = 4, 0.05
LAYOUTS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}


@dataclass(frozen=True)
class Case:
    """A tensor to normalise."""

    shape: tuple[int, int, int, int]
    dtype: str
    layout: str
    device: str

    def __post_init__(self) -> None:
        known = {"dtype": list(TOLERANCES), "layout": list(LAYOUTS)}
        for what, values in known.items():
            if (value := getattr(self, what)) not in values:
                raise ValueError(f"{what} is {value!r}; it must be one of {', '.join(values)}")

    def tensor(self, num_samples: int | None = None, seed: int = 0) -> Tensor:
        """Random numbers in this case's type and layout."""
        generator = torch.Generator(self.device).manual_seed(seed)
        shape = (num_samples or self.shape[0], *self.shape[1:])
        values = torch.empty(shape, device=self.device, dtype=getattr(torch, self.dtype))
        values = values.to(memory_format=LAYOUTS[self.layout])
        return values.normal_(generator=generator)

    @property
    def bytes(self) -> int:
        """Size of the tensor."""
        return torch.Size(self.shape).numel() * getattr(torch, self.dtype).itemsize

    def norm(self, name: str) -> nn.Module:
        """A norm by its name: bn, gn, mgn2, mn1, mn2, loop2, ..."""
        channels, dtype = self.shape[1], getattr(torch, self.dtype)
        makers: dict[str, Callable[[int], nn.Module]] = {
            "bn": lambda _: nn.BatchNorm2d(channels),
            "gn": lambda _: nn.GroupNorm(1 + (channels % 2 == 0), channels, dtype=dtype),
            "mn": lambda k: modenorm.ModeNorm2d(channels, k),
            "mgn": lambda k: modenorm.ModeGroupNorm(channels, k),
            "loop": lambda k: LoopModeNorm(channels, k),
        }
        kind, count = split_name(name)
        if kind not in makers:
            raise ValueError(
                f"norm is {name!r}; it must be one of {', '.join(makers)}, with K behind it: mn2"
            )
        torch.manual_seed(0)
        return makers[kind](count).to(self.device)


def norm_names(modes: Iterable[int], loop: bool = True) -> list[str]:
    """The columns of the benchmark."""
    modes = list(modes)
    names = ["bn", "gn", *(f"mn{k}" for k in modes), "mgn2"]
    return [*names, *(f"loop{k}" for k in modes if k in (2, 8))] if loop else names


def measure(case: Case, names: Iterable[str], wall: bool = True) -> list[dict[str, Any]]:
    """One row per norm, the floor and batch norm first."""
    autograd_nodes()  # waits for the compiler
    x, dy = case.tensor(seed=1), case.tensor(seed=2)
    times = {name: _checked_time(case, name, x, dy) for name in names}
    floor = _time_in_turns(case, times, x, dy) if case.device == "cpu" else _copy_floor(x)
    if wall:
        _time_eager(case, times, x, dy)
    return [_row(case, name, floor, times[name], times.get("bn")) for name in times]


def _row(
    case: Case, name: str, floor: float, times: dict[str, Any], batch_norm: dict[str, Any] | None
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "shape": "x".join(map(str, case.shape)),
        "dtype": case.dtype,
        "layout": case.layout,
        "norm": name,
        "floor_us": floor,
    }
    if not times:
        return row | {"error": "out of memory"}
    row |= times
    if batch_norm:
        row["to_bn"] = row["device_us"] / batch_norm["device_us"]
        if row["peak_bytes"]:
            row["memory_to_bn"] = row["peak_bytes"] / batch_norm["peak_bytes"]
        if "eager_us" in row:
            row["eager_to_bn"] = row["eager_us"] / batch_norm["eager_us"]
    row["to_floor"] = row["device_us"] / floor
    row["gb_per_s"] = 8 * case.bytes / row["device_us"] / 1e3
    return row


def _checked_time(case: Case, name: str, x: Tensor, dy: Tensor) -> dict[str, Any]:
    """The times of a norm that is right; none if it does not fit into memory."""
    try:
        check(case, name)
        return _time(case, name, x, dy)
    except torch.OutOfMemoryError:
        return {}


def _time(case: Case, name: str, x: Tensor, dy: Tensor) -> dict[str, Any]:
    norm = case.norm(name)
    step = _step(norm, x, dy)
    row: dict[str, Any] = {"peak_bytes": peak_memory(step)}
    if case.device != "cpu":
        row["device_us"] = device_time(step)
    if not name.startswith("loop"):
        norm.eval()
        with torch.no_grad():
            row["eval_us"] = device_time(lambda: norm(x))
    return row


def _step(norm: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], None]:
    parameters = list(norm.parameters())
    x = x.detach().requires_grad_()

    def step() -> None:
        torch.autograd.grad(norm(x), [x, *parameters], dy)

    return step


def _time_eager(case: Case, times: dict[str, dict[str, Any]], x: Tensor, dy: Tensor) -> None:
    """Wall time of eager calls; norms take turns, as nothing is as restless as a host."""
    steps = {name: _step(case.norm(name), x, dy) for name, row in times.items() if row}
    for _ in range(EAGER_TURNS):
        for name, step in steps.items():
            found = wall_time(step, EAGER_SECONDS)
            times[name]["eager_us"] = min(found, times[name].get("eager_us", found))


def _time_in_turns(case: Case, times: dict[str, dict[str, Any]], x: Tensor, dy: Tensor) -> float:
    """Add medians of steps that alternate to the norms' times; returns the floor's.

    Other programs slow a CPU down for seconds at a time: what is timed one after the other can't be
    compared.
    """
    other, names = torch.empty_like(x), list(times)
    steps: list[Callable[[], object]] = [lambda: other.copy_(x)]
    steps += [_step(case.norm(name), x, dy) for name in names]
    floor, *found = (statistics.median(each) for each in alternating(steps, CPU_SECONDS))
    for name, median in zip(names, found, strict=True):
        times[name]["device_us"] = median
    return 4 * floor


def _copy_floor(x: Tensor) -> float:
    other = torch.empty_like(x)
    return 4 * device_time(lambda: other.copy_(x))


def check(case: Case, name: str) -> None:
    """Refuse a norm whose output or gradients differ from the reference on a small batch."""
    x, dy = case.tensor(4, seed=3), case.tensor(4, seed=4)
    norm = case.norm(name)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, mean=0.5, std=0.3)
    found = _results(norm, list(norm.parameters()), x, dy)
    wanted = _results(*_truth(norm), x.double(), dy.double())
    results = ("the output", "the gradient of x", "the gradients of parameters")
    for what, value, truth in zip(results, found, wanted, strict=True):
        error = ((value.double() - truth).norm() / truth.norm()).item()
        if not error < TOLERANCES[case.dtype]:
            raise ValueError(
                f"{name} is wrong at {case}: relative error of {what} is {error:.1e}, allowed "
                f"{TOLERANCES[case.dtype]:.0e}; it is not timed"
            )


def _results(
    norm: Callable[[Tensor], Tensor], parameters: list[Tensor], x: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the gradient of x, and those of the parameters in one vector.

    Together, since those of gates may be zero: with one mode they are.
    """
    x = x.detach().requires_grad_()
    y = norm(x)
    dx, *others = torch.autograd.grad(y, [x, *parameters], dy)
    return y.detach(), dx, torch.cat([gradient.double().flatten() for gradient in others])


def _truth(norm: nn.Module) -> tuple[Callable[[Tensor], Tensor], list[Tensor]]:
    """The same function by reference.py or by torch's own norm, in float64; its parameters."""
    norm = copy.deepcopy(norm).double()
    parameters: list[Tensor] = list(norm.parameters())
    if isinstance(norm, (nn.BatchNorm2d, nn.GroupNorm)):
        return norm, parameters
    given = dict(norm.named_parameters())
    weight, bias = given["weight"], given["bias"]
    if isinstance(norm, modenorm.ModeGroupNorm):
        gate = given["gate_weight"], given["gate_bias"]
        return lambda x: reference.mode_group_norm(x, *gate, weight, bias), parameters

    def truth(x: Tensor) -> Tensor:
        logits = x.mean((2, 3)) @ given["gate.weight"].t() + given["gate.bias"]
        return reference.mode_norm(
            x, torch.softmax(logits, 1), None, None, weight, bias, training=True
        )

    return truth, parameters
