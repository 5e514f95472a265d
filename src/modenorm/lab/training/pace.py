"""How much of a training is prepared, captured and queued at a time.

A device that works on many trainings must always have something of each to do, and the host no more
than it can: it prepares steps in chunks, launches several at once, and looks at numbers late.
"""

from typing import NamedTuple

from modenorm.lab.training.config import TrainConfig
from modenorm.lab.training.ranks import Ranks

__all__ = ["CHUNK", "SHORT_CHUNK", "Pace"]

CHUNK = {"cuda": 256, "cpu": 16}
"""Steps prepared at once; the loss is looked at after each chunk."""
SHORT_CHUNK = 16
"""The same where steps are long: on images of files, or with other ranks that may want to stop."""
SAMPLES = 1 << 15
"""Prepared at once on a GPU, if that is more steps: those of small batches are short."""
LONG_CHUNK = 1024
"""But not more: two or three chunks are queued on a stream at a time."""
TURN = {"cuda": 16, "cpu": 1}
"""Steps queued before others have their turn."""
TOGETHER = 4
"""Short steps that are captured as one graph, as the host needs time for each."""
LONG_TOGETHER = 16
"""The same of compiled networks, so that a stream takes seconds of work while the host is busy."""
AHEAD = {"cuda": 2, "cpu": 0}
"""Things sent to the host that may be on their way while more steps are queued."""
LAUNCHES = 900
"""Most that are queued on one stream: with a thousand the host has to wait for it, and all other
trainings wait for the host."""
LAUNCHES_AROUND = 8
"""Those of a chunk that are no steps: its batches, its loss, an evaluation."""


class Pace(NamedTuple):
    """Of one training.

    Attributes:
        chunk: Steps prepared at once.
        turn: Steps queued before others have their turn.
        together: Steps captured as one graph.
        room: Things that may be on their way to the host while more steps are queued.
        far: The same while the host won't be back for long: as many as a stream takes.
    """

    chunk: int
    turn: int
    together: int
    room: int
    far: int

    @classmethod
    def of(cls, config: TrainConfig, kind: str, ranks: Ranks, *, compiled: bool) -> "Pace":
        """That of a configuration on a kind of device, "cuda" or "cpu"."""
        chunk = _chunk(config, kind, ranks)
        together = 1 if config.stream else LONG_TOGETHER if compiled else TOGETHER
        room = AHEAD[kind] if ranks.size == 1 else 0
        most = LAUNCHES // (chunk // together + LAUNCHES_AROUND)
        return cls(chunk, TURN[kind], together, room, max(most, room) if room else 0)


def _chunk(config: TrainConfig, kind: str, ranks: Ranks) -> int:
    if ranks.size > 1 or config.stream:
        return SHORT_CHUNK
    longer = SAMPLES // config.batch if kind == "cuda" else 0
    return min(max(CHUNK[kind], longer), LONG_CHUNK)
