"""The first Ctrl-C or SIGTERM lets trainings keep what they have done; then they stop."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Terminated(KeyboardInterrupt):
    """Stopped by SIGTERM, as Slurm and `docker stop` send it."""


class Interruption(threading.Event):
    """Set when trainings have to stop; `reason` is what to raise then."""

    reason: type[KeyboardInterrupt] = KeyboardInterrupt


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """The exit code of a process that such a signal has ended.

    >>> exit_code(KeyboardInterrupt()), exit_code(Terminated())
    (130, 143)
    """
    return 128 + (signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT)


@contextlib.contextmanager
def noticing_interrupts() -> Iterator[Interruption]:
    """Turn the first Ctrl-C or SIGTERM into an event; a second Ctrl-C interrupts as usual.

    A second SIGTERM changes nothing: torchrun passes on to its ranks what Slurm has sent to all.
    """
    interrupted = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return

    def interrupt(signum: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, usual[signal.SIGINT])

    def terminate(signum: int, frame: FrameType | None) -> None:
        interrupted.reason = Terminated
        interrupted.set()

    handlers = {signal.SIGINT: interrupt, signal.SIGTERM: terminate}
    usual = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    try:
        yield interrupted
    finally:
        for signum, handler in usual.items():
            signal.signal(signum, handler)
