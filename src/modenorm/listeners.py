"""Listeners of a layer: functions that get its gates, or the usage of its modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

__all__ = ["HasListeners", "Listener"]

Listener = Callable[[Tensor], None]


class HasListeners(nn.Module):
    """A layer with optional listeners; its copies and pickles have none.

    Attributes:
        gate_listener: Is called with the gates of every forward: (N, K), or (N, C, K) in a mode
            group norm.
        usage_listener: Is called, by mode norms alone, with the gates' mean over the samples, (K,),
            where it can learn: it is found on the way, and its gradient needs no memory for those
            of the gates.
    """

    gate_listener: Listener | None
    usage_listener: Listener | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "gate_listener": None, "usage_listener": None}
