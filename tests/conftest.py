"""What every test may use: the checkout, and a results folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkout() -> Path:
    return Path(__file__).resolve().parents[1]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results"
