"""How a job is interrupted: Ctrl-C and SIGTERM alike, and neither where something must not be left half done."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator


def interruptible() -> None:
    """Make SIGINT and SIGTERM raise `KeyboardInterrupt` in the main thread.

    SIGINT, too: shells start background jobs with it ignored, and Python leaves that so.
    """

    def interrupted(signum: int, _: object) -> None:
        raise KeyboardInterrupt(signal.Signals(signum).name)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupted)


@contextlib.contextmanager
def signals_held() -> Iterator[list[int]]:
    """Hold SIGINT and SIGTERM back while something must not be left half done; they come when the block ends.

    Yields those that have come. An event loop's own code may swallow an exception that a handler raises in it, so a
    load runs in such a block too and asks.
    """
    held: list[int] = []
    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, lambda signum, _: held.append(signum))
    except ValueError:  # not the main thread: whoever runs us there handles signals
        pass
    try:
        yield held
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if held:
            os.kill(os.getpid(), held[0])
