"""Makes the scripted visits of tests/measure importable, and a process that runs them over and over."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "measure"))

from trial import Zygote


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    running = Zygote(tmp_path_factory.mktemp("zygote"))
    yield running
    running.close()
