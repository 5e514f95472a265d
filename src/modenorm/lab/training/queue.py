"""Which training starts next beside those in progress, so that a GPU is never idle.

A training that starts or ends keeps the thread that feeds the GPU from all others: something is
built, captured or written. Networks whose steps are long have enough queued to bridge that.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

from modenorm.lab.training.runs import Run

__all__ = ["Queue", "side_by_side"]

SIDE_BY_SIDE = {
    **dict.fromkeys(("lenet", "lenet1989"), 30),
    **dict.fromkeys(("resnet20", "resnet56", "resnet110"), 16),
    "resnet18": 6,  # all that Table 4 has, since two that are left over don't fill a GPU
}
"""Trainings that fill a GPU, of networks whose steps are small, or few."""
LARGE_SIDE_BY_SIDE = 4
"""The same of others: more of them would only share the cache."""
PART = Fraction(1, 4)
"""Of a GPU: what trainings that aren't compiled take while compiled ones are waiting."""


class Queue:
    """Trainings that wait for room: the shares of those in progress add up to one GPU or less.

    Those that aren't compiled come first, as the others are compiled meanwhile. Once one of them
    has ended the compiled ones begin, large networks first, so that small ones fill the GPU until
    the end; those that aren't compiled, which start and end often, go on in a part beside them.

    Args:
        runs: What to train.
        parallel: Trainings side by side; None for as many as fill a GPU.
        compiles: Whether networks are compiled where a run asks for it; if not, runs stay in order.
    """

    def __init__(self, runs: Sequence[Run], parallel: int | None, compiles: bool) -> None:
        self._parallel, self._compiles = parallel, compiles
        self._plain = deque(run for run in runs if not self._is_compiled(run))
        large_first = sorted(filter(self._is_compiled, runs), key=self._share, reverse=True)
        self._compiled = deque(large_first)
        self._compiled_wait = bool(self._plain)
        self._started = 0
        of_kinds = {run.config.kind: run.path for run in reversed(large_first)}
        self._firsts = set(of_kinds.values())

    @property
    def waiting(self) -> list[Run]:
        """Those that have not started, in about the order in which they will."""
        return [*self._plain, *self._compiled]

    def take(self, active: Iterable[Run]) -> Run | None:
        """What may start beside the trainings in progress; None if there is nothing, or no room."""
        if not (self._plain or self._compiled):
            return None
        active = list(active)
        self._compiled_wait &= len(active) == self._started  # none has ended
        free = 1 - sum(map(self._share, active))
        for waiting, room in (
            (self._plain, min(free, self._room_for_plain(active))),
            (self._compiled, 0 if self._compiled_wait else free),
        ):
            if waiting and self._share(waiting[0]) <= room:
                self._started += 1
                return waiting.popleft()
        return None

    def takes_long(self, run: Run) -> bool:
        """Whether the host is busy for seconds when it starts, even if all kernels are on disk.

        It is the first of those that differ by their seeds alone, and its network is traced.
        """
        return run.path in self._firsts

    def take_early(self, ready: Callable[[Run], bool]) -> Run | None:
        """One that takes long to start, to be begun before there is room for it; each but once.

        It stays in the queue, and is one of those that are going to fill the GPU next.

        Args:
            ready: Whether all that is compiled for a run is on disk.
        """
        room = Fraction(1)
        for run in self._compiled:
            room -= self._share(run)
            if room < 0:
                break
            if run.path in self._firsts and ready(run):
                self._firsts.remove(run.path)
                return run
        return None

    def _room_for_plain(self, active: Sequence[Run]) -> Fraction:
        if self._compiled_wait or not self._compiled or not self._plain:
            return Fraction(1)
        taken = [self._share(run) for run in active if not self._is_compiled(run)]
        least = self._share(self._plain[0])  # room for one, whatever its share
        return max(PART, least) - sum(taken)

    def _is_compiled(self, run: Run) -> bool:
        return self._compiles and run.config.compile

    def _share(self, run: Run) -> Fraction:
        """How much of a GPU a training takes."""
        return Fraction(1, self._parallel or side_by_side(run.config.model))


def side_by_side(model: str) -> int:
    """Trainings of a network that fill a GPU."""
    return SIDE_BY_SIDE.get(model, LARGE_SIDE_BY_SIDE)
