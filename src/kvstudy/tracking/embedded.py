"""An SQLite store of MLflow's, made whole, checked, and ready for many writes while `kvstudy track` runs."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from kvstudy.grid.store import HALF, sweep

#: Seconds to wait for a database that somebody else has locked.
BUSY_S = 5.0

#: File systems of one machine. SQLite's write-ahead log needs memory that all who open the file share.
LOCAL = frozenset({"apfs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})


class TrackingError(Exception):
    """MLflow cannot be written now; the text is one line and holds no secret."""


def sqlite_path(uri: str) -> Path | None:
    """The database file of an SQLite URI."""
    match = re.match(r"^sqlite(?:\+\w+)?:///(.*?)(?:\?.*)?$", uri)
    return Path(match.group(1)) if match else None


def _check(path: Path) -> None:
    """Fail at once where MLflow would first retry for minutes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except sqlite3.DatabaseError as error:
        raise TrackingError(f"{path}: {error}") from error
    finally:
        connection.close()


def _make(path: Path) -> None:
    """A store without experiments, whole or absent: MLflow cannot go on with one whose making was cut off."""
    from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    sweep(path.parent)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", suffix=HALF, dir=path.parent) as folder:
        half = Path(folder) / path.name
        store = SqlAlchemyStore(f"sqlite:///{half}", DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH)
        store.engine.dispose()
        half.replace(path)


class Connections:
    """What MLflow has open of an embedded store. `local`: whether its disk is this machine's alone."""

    def __init__(self, local: bool) -> None:
        self.local = local
        self._engines: set[Any] = set()

    def seen(self, connection: Any) -> None:
        """SQLAlchemy's event of an engine that gives out a connection."""
        self._engines.add(connection.engine)

    def close(self) -> None:
        """Close all that is idle: neither a change of the journal's mode nor a fork goes with open connections."""
        for engine in self._engines:
            engine.dispose()


@contextlib.contextmanager
def ready(path: Path) -> Iterator[Connections]:
    """The store ready for many writes, in the block, and afterwards one plain file again.

    A run is five transactions to MLflow, each of which would wait for the disk three times, and its rows lie all over
    the tables' indices. A write-ahead log waits for the disk once in thousands of pages; a power cut then costs the
    last runs at most, which the next `kvstudy track` writes again.
    """
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    _check(path)
    if not path.exists():
        _make(path)
    connections = Connections(_is_local(path))

    def configure(connection: Any, _: Any) -> None:
        if connections.local:
            for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "wal_autocheckpoint = 10000"):
                connection.execute(f"PRAGMA {pragma}")
        connection.execute("PRAGMA cache_size = -65536")  # KiB

    event.listen(Engine, "connect", configure)
    event.listen(Engine, "engine_connect", connections.seen)
    try:
        yield connections
    finally:
        event.remove(Engine, "connect", configure)
        event.remove(Engine, "engine_connect", connections.seen)
        connections.close()
        if connections.local:
            # Somebody else, a browser's server for one, may have it open: then the next one puts it back.
            with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(path)) as connection:
                connection.execute("PRAGMA journal_mode = DELETE")


def _is_local(path: Path) -> bool:
    """Whether a file is on a disk of this machine alone."""
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next((mounts[at] in LOCAL for at in path.resolve().parents if at in mounts), False)
