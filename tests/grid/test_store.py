"""Writing: whole or absent, and untouched when nothing changed."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvstudy.grid import store


def test_an_unchanged_file_keeps_its_time(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    assert store.write_json(path, {"x": 1})
    before = path.stat().st_mtime_ns
    assert not store.write_json(path, {"x": 1})
    assert path.stat().st_mtime_ns == before
    assert store.write_json(path, {"x": 2})


def test_not_a_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        store.write_json(tmp_path / "a.json", {"x": float("nan")})
    assert not list(tmp_path.iterdir())


def test_staged_is_whole_or_absent(tmp_path: Path) -> None:
    target = tmp_path / "store" / "cell"
    with pytest.raises(OSError, match="No space"), store.staged(target) as folder:
        (folder / "half").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not target.exists()
    assert not list(target.parent.iterdir())
    with store.staged(target) as folder:
        (folder / store.SUMMARY).write_text("{}")
        assert not target.exists()
    assert store.is_whole(target)


def test_nothing_measured_is_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "cell"
    target.mkdir()
    with pytest.raises(FileExistsError, match="ever overwritten"), store.staged(target):
        pass
