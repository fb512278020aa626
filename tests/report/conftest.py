"""Made-up studies for the tests of the report (`fabricate` lies with the tests of the analysis)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "analysis"))

from fabricate import Spec, fabricate

from kvstudy.analysis import run
from kvstudy.report.data import StudyData


def analysed(root: Path, specs: list[Spec]) -> StudyData:
    """Fabricate a study named `s` and run the analysis on it."""
    plan = fabricate(root, "s", specs, [{"cell": "vllm b0.3", "reason": "keeps the whole cache"}])
    arguments = ["--plan", str(plan), "--results", str(root), "--out", str(root / "s" / "cells.parquet")]
    assert run.main(arguments) == 0
    return StudyData.load(root / "s")


@pytest.fixture
def study(tmp_path: Path) -> Callable[[list[Spec]], StudyData]:
    """Make a study of one's own."""
    return lambda specs: analysed(tmp_path, specs)


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> StudyData:
    """A study in which most things happen: two loads, a failure, a gated cell, budgets. Not to be changed."""
    specs = [Spec(name, rate) for name in ("vllm", "full") for rate in (1.0, 3.0)]
    specs += [Spec("h2o", 1.0, budget=0.3), Spec("h2o", 3.0, budget=0.3, outcome="oom")]
    specs += [
        Spec("infinigen", 1.0, budget=0.3, reasons=("client_bound",)),
        Spec("infinigen", 3.0, budget=0.3),
    ]
    return analysed(tmp_path_factory.mktemp("mixed"), specs)


@pytest.fixture(autouse=True)
def close_figures() -> Iterator[Any]:
    """Keep no figure open between tests."""
    yield
    plt.close("all")
