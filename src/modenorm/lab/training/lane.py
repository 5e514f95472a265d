"""Where a training queues its work, and how numbers come back from there.

Nothing waits for a number before it queues more work: numbers are sent to the host, and looked at
in the order of sending once they have arrived. So a device that works on many trainings always
has something of each to do.
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Turns = Generator[bool, None, None]
"""A training's turns: True after it queued work, False while it waits for the device."""


class Parcel(NamedTuple):
    """Tensors on their way to the host."""

    tensors: list[Tensor]
    sent: torch.cuda.Event | None

    def has_arrived(self) -> bool:
        """Whether the tensors can be looked at."""
        return self.sent is None or self.sent.query()


class Lane:
    """Where one training queues its work: a CUDA stream of its own, or the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def enter(self) -> torch.cuda.StreamContext:
        """Queue what follows on this lane; does nothing on the CPU."""
        return torch.cuda.stream(self.stream)

    def join(self) -> None:
        """Let this lane wait for what was queued outside of it, such as the initial weights."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def synchronize(self) -> None:
        """Wait for all work on this lane."""
        if self.stream is not None:
            self.stream.synchronize()

    def send(self, tensors: Sequence[Tensor]) -> Parcel:
        """Send tensors to the host as they are after all that is queued."""
        with self.enter():
            copies = [_copy(tensor) for tensor in tensors]
        return Parcel(copies, self.stream.record_event() if self.stream else None)

    def fetch(self, tensor: Tensor) -> Generator[bool, None, Tensor]:
        """Bring a tensor to the host, giving up turns until it has arrived."""
        parcel = self.send([tensor])
        while not parcel.has_arrived():
            yield False
        return parcel.tensors[0]


class Inbox:
    """What a lane sends to the host, and what is to be done with it.

    Args:
        lane: The sender.
        room: Parcels that may be on their way while more work is queued; may be changed.
    """

    def __init__(self, lane: Lane, room: int) -> None:
        self.room = room
        self._lane = lane
        self._expected: deque[tuple[Parcel, Callable[[list[Tensor]], None]]] = deque()

    def expect(self, tensors: Sequence[Tensor], open: Callable[[list[Tensor]], None]) -> None:
        """Send tensors to the host, to be opened after all that was sent before them."""
        self._expected.append((self._lane.send(tensors), open))

    def opened(self, *, to_the_last: bool = False) -> Turns:
        """Open parcels as they arrive, giving up turns until there is room for more."""
        while len(self._expected) > (0 if to_the_last else self.room):
            if self._expected[0][0].has_arrived():
                self._open_first()
            else:
                yield False

    def open_all(self) -> None:
        """Wait for the lane and open what it sent."""
        self._lane.synchronize()
        while self._expected:
            self._open_first()

    def forget(self) -> None:
        """Leave closed what is under way; who would open it is then held by nothing here."""
        self._expected.clear()

    def _open_first(self) -> None:
        parcel, open = self._expected.popleft()
        open(parcel.tensors)


def _copy(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
