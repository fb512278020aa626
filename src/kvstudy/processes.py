"""Work on many items by processes forked from this one, which see all that it holds without being sent it."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class WorkerFailed(Exception):
    """A worker raised, and this is what it said; or it was killed."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spread(work: Callable[[Item], Answer], items: Sequence[Item], count: int) -> Iterator[tuple[Item, Answer]]:
    """Every item with what `work` makes of it, as they come, from `count` processes; in order from this one for one.

    Answers are sent, so they are plain values. What is open in this process, a database for one, is no worker's to use.

    Raises
    ------
    WorkerFailed
        Not all items were worked on; the workers have ended.
    """
    if count < 2:
        yield from ((item, work(item)) for item in items)
        return
    context = multiprocessing.get_context("fork")
    workers, answers = [], []
    gc.freeze()  # what is shared stays so as long as nobody looks for garbage in it
    try:
        for number in range(count):
            answer, sender = context.Pipe(duplex=False)
            answers.append(answer)
            theirs = (work, items, range(number, len(items), count), sender, answers)
            workers.append(context.Process(target=_some, args=theirs, daemon=True))
            workers[-1].start()
            sender.close()
        left = len(items)
        while answers:
            for answer in [one for one in wait(answers) if isinstance(one, Connection)]:
                try:
                    at, found = answer.recv()
                except EOFError:
                    answers.remove(answer)
                    continue
                if at is None:
                    raise WorkerFailed(found)
                left -= 1
                yield items[at], found
        if left:
            raise WorkerFailed(f"a worker was killed before {left} of {len(items)} items were done")
    finally:
        gc.unfreeze()
        for worker in workers:
            worker.terminate()
            worker.join()


def _some(
    work: Callable[[Any], Any],
    items: Sequence[Any],
    mine: Sequence[int],
    sender: Connection,
    inherited: list[Connection],
) -> None:
    """A worker's life. It ends with its parent, once nobody has the other end of the pipe any more."""
    for answer in inherited:
        answer.close()
    try:
        for at in mine:
            sender.send((at, work(items[at])))
    except (BrokenPipeError, KeyboardInterrupt):
        os._exit(1)
    except Exception as error:
        with contextlib.suppress(BrokenPipeError):
            sender.send((None, str(error) or type(error).__name__))
