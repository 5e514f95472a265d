"""Hear every layer's gates while a model runs, and record them.

Letters: N samples, C channels, K modes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from modenorm.buffers import recomputing
from modenorm.checks import check_module
from modenorm.layers import ModeGroupNorm, ModeNorm
from modenorm.listeners import Listener

__all__ = ["GateRecording", "listening", "mode_layers", "record_gates", "uncompiled"]

DEFAULT_LIMIT = 2**20
ENTRY = 128  # what a kept tensor costs beside its values, counted in values
KINDS = (ModeNorm, ModeGroupNorm)


class GateRecording(dict[str, list[Tensor]]):
    """Layer name → gates of each recorded forward: (N, K) of mode norms, (N, C, K) of group ones.

    Args:
        limit: Most values kept of one layer.

    Attributes:
        steps: Layer name → which forwards, counted from 0, the entries belong to.

    Example:
        >>> import modenorm
        >>> layer = modenorm.ModeNorm1d(4, num_modes=2)
        >>> with modenorm.record_gates(layer) as recording:
        ...     y = layer(torch.randn(6, 4))
        >>> {name: [gates.shape for gates in found] for name, found in recording.items()}
        {'': [torch.Size([6, 2])]}
        >>> recording.steps
        {'': [0]}
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.steps: dict[str, list[int]] = {}
        self._limit = limit

    def _listener(self, name: str) -> Listener:
        return _Track(self, name, self._limit).add


class _Track:
    """One layer's part of a recording: a forward costs one append, and no operator in evaluation.

    The gates are the tensor that the layer has computed for itself; nothing changes it.
    """

    __slots__ = ("_kept", "_limit", "_name", "_recording", "_seen", "_size", "_steps", "_stride")

    def __init__(self, recording: GateRecording, name: str, limit: int) -> None:
        self._recording, self._name, self._limit = recording, name, limit
        self._kept: list[Tensor] = []
        self._steps: list[int] = []
        self._seen, self._stride, self._size = 0, 1, 0

    def add(self, gates: Tensor) -> None:
        step = self._seen
        self._seen = step + 1
        if step == 0:
            self._recording[self._name], self._recording.steps[self._name] = self._kept, self._steps
        if step % self._stride:
            return
        if gates.requires_grad:
            gates = gates.detach()
        values = gates.numel()
        if values > self._limit:
            most = self._limit // (values // len(gates))  # samples
            gates = gates[:: -(-len(gates) // most)].clone()
            values = gates.numel()
        self._kept.append(gates)
        self._steps.append(step)
        self._size += values + ENTRY
        if self._size > self._limit:
            self._thin_out()

    def _thin_out(self) -> None:
        """Forget every second forward until the rest is within the limit."""
        while len(self._kept) > 1 and self._size > self._limit:
            self._stride *= 2
            chosen = [i for i, step in enumerate(self._steps) if step % self._stride == 0]
            self._kept[:] = [self._kept[i] for i in chosen]
            self._steps[:] = [self._steps[i] for i in chosen]
            self._size = sum(entry.numel() + ENTRY for entry in self._kept)


def mode_layers(model: nn.Module) -> dict[str, ModeNorm | ModeGroupNorm]:
    """The model's mode norms and mode group norms by name, in the order of definition."""
    check_module(model)
    return {name: module for name, module in model.named_modules() if isinstance(module, KINDS)}


@contextlib.contextmanager
def listening(
    listeners: Iterable[tuple[nn.Module, Listener]], kind: str = "gate_listener"
) -> Iterator[None]:
    """Add listeners to layers; those that were there before go on hearing, and return at the end.

    A forward that activation checkpointing repeats is not heard again. Those that came later may
    stay for longer.

    Args:
        listeners: Layers, and what is called with what is heard of each.
        kind: The attribute of `HasListeners` that says what that is.
    """
    added: list[tuple[dict[str, Any], _Link]] = []
    try:
        for layer, listener in listeners:
            attributes = vars(layer)  # what nn.Module's own way would look through takes longer
            link = _Link(attributes.get(kind), listener)
            added.append((attributes, link))
            attributes[kind] = link
        yield
    finally:
        for attributes, link in reversed(added):
            attributes[kind] = _without(attributes[kind], link)


class _Link:
    """A listener and those that were there before it."""

    __slots__ = ("before", "new")

    def __init__(self, before: Listener | None, new: Listener) -> None:
        self.before, self.new = before, new

    def __call__(self, heard: Tensor) -> None:
        if self.before is not None:
            self.before(heard)
        if not recomputing():
            self.new(heard)


def _without(listener: Listener | None, link: _Link) -> Listener | None:
    """A layer's listener after one link of it has gone."""
    if listener is link:
        return link.before
    if isinstance(listener, _Link):
        listener.before = _without(listener.before, link)
    return listener


@contextlib.contextmanager
def record_gates(model: nn.Module, limit: int = DEFAULT_LIMIT) -> Iterator[GateRecording]:
    """Record the gates of every mode norm and mode group norm during the `with` block.

    The model, its outputs and gradients stay as they are. Gates are kept detached on their device,
    so nothing waits for it. Recordings may be nested. A compiled model runs uncompiled meanwhile. A
    replayed CUDA graph calls no Python, so nothing of it is recorded: run the model itself.

    Args:
        model: Any model.
        limit: Most values kept of one layer, no fewer than one sample has. When more arrive, every
            second forward is forgotten, so what is kept stays spread over the whole recording
            (`steps` tells which forwards); of a single forward beyond the limit, evenly spaced
            samples are kept.

    Example:
        >>> import modenorm, torch
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), modenorm.ModeNorm2d(8, num_modes=4))
        >>> with record_gates(model) as gates:
        ...     y = model(torch.randn(16, 3, 8, 8))
        >>> {name: [g.shape for g in seen] for name, seen in gates.items()}
        {'1': [torch.Size([16, 4])]}
    """
    layers = mode_layers(model)
    _check_limit(limit, layers)
    recording = GateRecording(limit)
    heard = [(layer, recording._listener(name)) for name, layer in layers.items()]
    with uncompiled, listening(heard):
        yield recording


def _check_limit(limit: int, layers: Mapping[str, ModeNorm | ModeGroupNorm]) -> None:
    if not limit >= 1:
        raise ValueError(f"limit is {limit}; it must be at least 1 value per layer")
    for name, layer in layers.items():
        one = layer.num_modes * (layer.num_channels if isinstance(layer, ModeGroupNorm) else 1)
        if one > limit:
            raise ValueError(
                f"limit is {limit}, but one sample of {name or 'the layer'} has {one} gates; give "
                f"at least that many"
            )


class _Uncompiled:
    """Compiled models run as they are written: every entry of a list would compile them again.

    From the first `with` to the end of the last, in whatever order they end.
    """

    def __init__(self) -> None:
        self._open = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        self._open += 1
        # without Dynamo nothing is compiled, and importing it takes long
        if self._stance is None and "torch._dynamo" in sys.modules:
            self._stance = torch.compiler.set_stance("force_eager")

    def __exit__(self, *_: object) -> None:
        self._open -= 1
        if self._open == 0 and self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None


uncompiled = _Uncompiled()
