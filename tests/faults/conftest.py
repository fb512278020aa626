"""Makes the scripted visits of tests/measure importable, and a process that runs them over and over."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for folder in ("measure", "analysis"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))

from trial import Zygote  # noqa: E402


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    running = Zygote(tmp_path_factory.mktemp("zygote"))
    yield running
    running.close()
