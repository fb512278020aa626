"""What a visit is doing now, in a small file of its own, for `kvstudy status` and for a retry on a cluster.

The file is there from the moment a visit begins until all of its cells are whole. It says `running`, `failed` (a fault
of the installation: trying again changes nothing), `stopped` (a full disk) or `interrupted` (by a person or a cluster).
One that says `running` and whose process is gone was killed. Nobody waits for these files, and none is needed to go on.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import psutil

from kvstudy.grid import store

Doing = Literal["running", "failed", "stopped", "interrupted"]

#: A visit on another machine says something at least every ten seconds; one that was silent this long is gone.
SILENT_S = 300.0


@dataclass(frozen=True)
class State:
    """A visit that has begun and is not done. `pid` and `born` name its process on `host`."""

    visit: str
    doing: Doing = "running"
    cell: str | None = None
    cause: str | None = None
    log: str | None = None
    since: float = 0.0
    host: str = ""
    pid: int = 0
    born: float = 0.0

    def alive(self) -> bool:
        """Whether its process lives; of one on another machine, whether its log was written to lately."""
        if self.host != socket.gethostname():
            written = [self.since]
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
        return State(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


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

    def running(self, cell: str | None = None) -> None:
        """It lives, and measures `cell`."""
        self._write(replace(self._state, cell=cell, since=time.time()))

    def ended(self, doing: Doing, cause: str) -> None:
        """It ends without all of its cells, for a cause in one line."""
        self._write(replace(self._state, doing=doing, cause=" ".join(cause.split()), since=time.time()))

    def done(self) -> None:
        """All of its cells are whole."""
        self._path.unlink(missing_ok=True)

    def _write(self, state: State) -> None:
        self._state = state
        store.write_json(self._path, asdict(state))
