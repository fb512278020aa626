"""The rule of harness_version: code that can change a measured number does not change in silence."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def harness(checkout: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("harness", checkout / ".ci" / "harness.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entry(version: int, sources: str, why: str = "") -> dict[str, object]:
    return {"version": version, "sources": sources, "why": why}


def test_unchanged_code_passes(harness: ModuleType) -> None:
    assert harness.problem([entry(1, "a")], "a", 1) is None


def test_changed_code_asks_for_a_version_or_a_reason(harness: ModuleType) -> None:
    assert "raise HARNESS_VERSION" in harness.problem([entry(1, "a")], "b", 1)
    assert "says no reason" in harness.problem([entry(1, "a"), entry(1, "b")], "b", 1)
    assert harness.problem([entry(1, "a"), entry(1, "b", "docstrings only")], "b", 1) is None
    assert harness.problem([entry(1, "a"), entry(2, "b")], "b", 2) is None
    assert "log's last entry says 1" in harness.problem([entry(1, "a")], "a", 2)


def test_comments_and_layout_do_not_count(harness: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "src" / "kvstudy" / "engine" / "a.py"
    source.parent.mkdir(parents=True)
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    source.write_text("x = 1\n")
    before = harness.sources_digest()
    source.write_text("x   =  1  # a comment\n")
    assert harness.sources_digest() == before
    source.write_text("x = 2\n")
    assert harness.sources_digest() != before
