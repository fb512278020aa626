"""The names that the Snakefile knows are the ones that exist."""

from __future__ import annotations

from kvstudy import report
from kvstudy.report import figures, tables


def test_the_snakefile_knows_every_figure_and_table() -> None:
    assert {name: kind.category for name, kind in figures.FIGURES.items()} == report.FIGURES
    assert set(report.TABLES) == set(tables.TABLES)
