"""The registry of tables: how one is added, and how one is written as CSV and LaTeX."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvstudy.analysis.plan import AnalysisError
from kvstudy.grid.store import write_text
from kvstudy.report.data import StudyData
from kvstudy.report.latex import Table, latex

TABLES: dict[str, Callable[[StudyData], Table]] = {}


def table(name: str) -> Callable[[Callable[[StudyData], Table]], Callable[[StudyData], Table]]:
    """Register a table under a name."""

    def register(make: Callable[[StudyData], Table]) -> Callable[[StudyData], Table]:
        TABLES[name] = make
        return make

    return register


def write(name: str, data: StudyData, out_dir: Path) -> Table:
    """Make a table and write its CSV and LaTeX files.

    Raises
    ------
    AnalysisError
        There is no table of that name.
    """
    if name not in TABLES:
        raise AnalysisError(f"no table '{name}'; there are {', '.join(TABLES)}")
    made = TABLES[name](data)
    write_text(out_dir / f"{name}.csv", made.frame.to_csv(index=False))
    write_text(out_dir / f"{name}.tex", latex(made))
    return made
