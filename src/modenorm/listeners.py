"""Who may listen to a layer: what is called with its gates, and what asks for their cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

__all__ = ["GateListener", "Heard", "UsagePenalty"]

GateListener = Callable[[Tensor], None]


class UsagePenalty(Protocol):
    """Asks a layer what the usage of its modes costs: the entropy, times a strength."""

    @property
    def strength(self) -> Tensor:
        """A number."""

    def hear(self, cost: Tensor) -> None:
        """Take what a forward's usage costs."""


class Heard(nn.Module):
    """A layer whose gates somebody may hear; nobody hears those of its copies and pickles."""

    gate_listener: GateListener | None
    usage_penalty: UsagePenalty | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "gate_listener": None, "usage_penalty": None}
