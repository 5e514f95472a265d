"""A whole training step of a network: batch norm, mode norms, mode group norm, side by side.

ResNet-50 comes from torchvision where it can be imported, ResNet18 from the laboratory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import modenorm
from modenorm.lab.bench.names import split_name
from modenorm.lab.bench.timing import peak_memory, wall_time
from modenorm.lab.models import check_size, create_model
from modenorm.lab.training.step import compiled as as_kernels

__all__ = ["measure_model", "model_names", "network", "training_step"]

NORMS = ("bn", "mn2", "mn8", "mgn2")
DTYPES = ("float32", "bfloat16", "float16")


def model_names() -> list[str]:
    """The networks that can be built here."""
    try:
        import torchvision  # noqa: F401
    except Exception:
        return ["resnet18"]
    return ["resnet18", "resnet50"]


def measure_model(
    name: str,
    *,
    batch: int = 256,
    size: int = 224,
    dtype: str = "bfloat16",
    norms: Iterable[str] = NORMS,
    compiled: Iterable[bool] = (False, True),
    device: str = "cuda",
) -> Iterator[dict[str, Any]]:
    """One row per norm and mode of execution, batch norm first."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    check_size(name, (size, size), "this benchmark", "set --size 32 or choose resnet18")
    images = torch.randn(batch, 3, size, size, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (batch,), device=device)
    for mode in compiled:
        batch_norm = None
        for norm in norms:
            row: dict[str, Any] = {
                "model": name,
                "norm": norm,
                "compiled": mode,
                "batch": batch,
                "size": size,
                "dtype": dtype,
            }
            model = network(name, norm).to(device)
            step = training_step(model, images, labels, dtype, compiled=mode)
            row["step_us"] = wall_time(step, 1.5)
            row["peak_bytes"] = peak_memory(step)
            row["images_per_s"] = batch / row["step_us"] * 1e6
            batch_norm = batch_norm or row
            row["to_bn"] = row["step_us"] / batch_norm["step_us"]
            if row["peak_bytes"]:
                row["memory_to_bn"] = row["peak_bytes"] / batch_norm["peak_bytes"]
            yield row
            torch.compiler.reset()


def network(name: str, norm: str, num_classes: int = 1000) -> nn.Module:
    """A network with a norm such as mn2, channels_last."""
    kind, modes = split_name(norm)
    torch.manual_seed(0)
    if name != "resnet50":
        model = create_model(name, num_classes=num_classes, norm=kind, modes=modes)
    else:
        model = _resnet50(kind, modes, num_classes)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _resnet50(norm: str, modes: int, num_classes: int) -> nn.Module:
    if "resnet50" not in model_names():
        raise ValueError(
            "resnet50 is torchvision's, which cannot be imported: install it or choose resnet18"
        )
    from torchvision.models import resnet50

    layers = {
        "bn": nn.BatchNorm2d,
        "mn": lambda channels: modenorm.ModeNorm2d(channels, modes),
        "mgn": lambda channels: modenorm.ModeGroupNorm(channels, modes),
    }
    if norm not in layers:
        raise ValueError(f"norm is {norm!r}; for resnet50 it must be one of {', '.join(layers)}")
    model: nn.Module = resnet50(norm_layer=layers[norm], num_classes=num_classes)
    return model


def training_step(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    dtype: str,
    *,
    compiled: bool = False,
    penalty: nn.Module | None = None,
) -> Callable[[], None]:
    """Forward, backward and update, with a penalty on the loss if there is one."""
    learnt = [*model.parameters(), *(penalty.parameters() if penalty is not None else ())]
    optimizer = torch.optim.SGD(learnt, 0.01, momentum=0.9, fused=images.is_cuda)
    forward = as_kernels(model) if compiled else model
    kind = getattr(torch, dtype)

    def step() -> None:
        with torch.autocast(images.device.type, kind, enabled=kind != torch.float32):
            loss = nn.functional.cross_entropy(forward(images), labels)
        if penalty is not None:
            loss = loss + penalty()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
