"""What a visit is doing now, in a small file of its own, for `kvstudy status` and for a retry on a cluster.

A visit measures cells or scores their quality. The file is there from the moment it begins until all of its cells are
whole. It says `running`, `failed` (a fault of the installation: trying again changes nothing), `stopped` (a full disk)
or `interrupted` (by a person or a cluster). One that says `running` and whose process is gone was killed. Nobody waits
for these files, and none is needed to go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import psutil

from kvstudy.grid import store

Doing = Literal["running", "failed", "stopped", "interrupted"]

#: A visit on another machine says something every ten seconds or beats; one that was silent this long is gone.
SILENT_S = 300.0
BEAT_S = 60.0


@dataclass(frozen=True)
class State:
    """A visit that has begun and is not done. `pid` and `born` name its process on `host`."""

    visit: str
    doing: Doing = "running"
    cell: str | None = None  # at hand; of a quality visit, which scores its cells together, the part at hand
    cause: str | None = None
    log: str | None = None
    since: float = 0.0
    host: str = ""
    pid: int = 0
    born: float = 0.0
    heard: float = 0.0  # when its file was last touched

    def alive(self) -> bool:
        """Whether its process lives; of one on another machine, whether its log was written to lately."""
        if self.host != socket.gethostname():
            written = [self.since, self.heard]
            if self.log and Path(self.log).exists():
                written.append(Path(self.log).stat().st_mtime)
            return time.time() - max(written) < SILENT_S
        try:
            return abs(psutil.Process(self.pid).create_time() - self.born) < 2.0
        except psutil.Error:
            return False


def read(path: Path) -> State | None:
    """The state in a file; None where there is none, or none of this version."""
    try:
        return replace(State(**json.loads(path.read_text(encoding="utf-8"))), heard=path.stat().st_mtime)
    except (OSError, ValueError, TypeError):
        return None


def not_again(path: Path, attempt: int) -> str | None:
    """Why a retry changes nothing: the last try ended in a fault of the installation, and this is its cause."""
    before = read(path)
    return before.cause if attempt > 1 and before is not None and before.doing == "failed" else None


class Journal:
    """Keeps a visit's state file up to date."""

    def __init__(self, path: Path, visit: str, log: Path | None) -> None:
        self._path = path
        self._state = State(
            visit,
            log=str(log.absolute()) if log else None,
            since=time.time(),
            host=socket.gethostname(),
            pid=os.getpid(),
            born=psutil.Process().create_time(),
        )
        store.sweep(path.parent)  # of states that a kill left half written
        self._over = threading.Event()

    def running(self, cell: str | None = None) -> None:
        """It lives, and has `cell` at hand."""
        self._write(replace(self._state, cell=cell, since=time.time()))

    def beat(self) -> None:
        """From now on show every minute that it lives, for work that says nothing for longer."""

        def touch() -> None:
            while not self._over.wait(BEAT_S):
                with contextlib.suppress(OSError):
                    os.utime(self._path)

        threading.Thread(target=touch, daemon=True).start()

    def ended(self, doing: Doing, cause: str) -> None:
        """It ends without all of its cells, for a cause in one line."""
        self._over.set()
        self._write(replace(self._state, doing=doing, cause=" ".join(cause.split()), since=time.time()))

    def done(self) -> None:
        """All of its cells are whole."""
        self._over.set()
        self._path.unlink(missing_ok=True)

    def _write(self, state: State) -> None:
        self._state = state
        store.write_json(self._path, asdict(state))


def note(journal: Journal | None, doing: Doing, cause: str) -> None:
    """Leave word of an end, where it is known whose; a full disk must not hide what ended the visit."""
    if journal is not None:
        with contextlib.suppress(OSError):
            journal.ended(doing, cause)
