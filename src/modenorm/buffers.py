"""The tensors of a module; running estimates are float32 at least, updated once per step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Float32Buffers", "members", "recomputing", "running_dtype"]

HALF_TYPES = (torch.float16, torch.bfloat16)


def running_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """The type of running estimates in a layer of this type: half types would lose the updates."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return torch.float32 if dtype in HALF_TYPES else dtype


def members(module: nn.Module, names: tuple[str, ...]) -> list[Any]:
    """Parameters, buffers and modules by name, five times faster than as attributes.

    What something else keeps under such a name (FSDP, a parametrization) is an attribute only.
    """
    known = {**module._parameters, **module._buffers, **module._modules}
    return [known[name] if name in known else getattr(module, name) for name in names]


def recomputing() -> bool:
    """Whether a backward pass is running: a forward inside it repeats one (checkpointing)."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class Float32Buffers(nn.Module):
    """A module whose floating-point buffers stay float32 through `.half()` and `.bfloat16()`.

    Also when a state of such types is loaded with `assign=True`.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Float32Buffers:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in self._buffers.items():
            old = before[name]
            if buffer is not None and buffer.dtype in HALF_TYPES:
                whole = old is not None and old.device.type != "meta"
                source = old if whole and old is not None else buffer
                self._buffers[name] = source.to(device=buffer.device, dtype=torch.float32)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        for name, buffer in self._buffers.items():
            if buffer is not None and buffer.dtype in HALF_TYPES:
                self._buffers[name] = buffer.float()
