"""Work spread over processes: all of it, or an error; and no worker outlives who spread it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvstudy.processes import WorkerFailed, spread

ENDLESS = """
import os, sys, time
from kvstudy.processes import spread
def work(item):
    open(f"{sys.argv[1]}/{os.getpid()}", "w").close()
    time.sleep(0.02)
for _ in spread(work, range(10**6), 2):
    pass
"""


def test_each_item_is_worked_on_once_by_several_processes() -> None:
    items = [f"item {number}" for number in range(20)]
    found = dict(spread(lambda item: (item.upper(), os.getpid()), items, 3))
    assert {item: text for item, (text, _) in found.items()} == {item: item.upper() for item in items}
    assert len({pid for _, pid in found.values()} - {os.getpid()}) == 3
    alone = list(spread(lambda item: (item, os.getpid()), items, 1))
    assert alone == [(item, (item, os.getpid())) for item in items]


def test_a_worker_that_raises_or_is_killed_is_an_error() -> None:
    with pytest.raises(WorkerFailed, match="division by zero"):
        list(spread(lambda item: 1 / item, [3, 2, 1, 0], 2))
    with pytest.raises(WorkerFailed, match="a worker was killed before 2 of 4 items"):
        list(spread(lambda item: item or os.kill(os.getpid(), signal.SIGKILL), [1, 0, 1, 1], 2))


def test_workers_end_with_who_spread_the_work(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(item for item in sys.path if item)}
    running = subprocess.Popen([sys.executable, "-c", ENDLESS, str(tmp_path)], env=env)
    until = time.monotonic() + 20
    while len(list(tmp_path.iterdir())) < 2:
        assert running.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    running.kill()
    running.wait()
    workers = [int(path.name) for path in tmp_path.iterdir()]

    def lives(pid: int) -> bool:
        return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE

    while any(map(lives, workers)):
        assert time.monotonic() < until
        time.sleep(0.02)
