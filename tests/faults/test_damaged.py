"""Files of the store that a disk or a hand has damaged: each stage names the file and what to do, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from fabricate import Spec, fabricate

from kvstudy import cli
from kvstudy.analysis import run as analysis
from kvstudy.analysis.plan import read_plan
from kvstudy.grid.store import CONFIG, LOG, MEMORY, PROVENANCE, REQUESTS, SUMMARY, Layout

SPECS = [Spec("vllm", 1.0), Spec("full", 1.0), Spec("h2o", 1.0, budget=0.3)]


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def analyse(root: Path, plan: Path) -> int:
    """Without claims, whose intervals take longest and read nothing more."""
    (root / "claims").mkdir(exist_ok=True)
    out = ["--out", str(root / "study" / "cells.parquet"), "--claims", str(root / "claims")]
    return analysis.main(["--plan", str(plan), "--results", str(root), *out])


@pytest.mark.parametrize("name", [SUMMARY, REQUESTS])
def test_analysis_names_the_cell_and_goes_on_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    plan = fabricate(tmp_path, "study", SPECS)
    cell = Layout(tmp_path).cell(read_plan(plan).cells[1].id)
    damage(cell / name)
    assert analyse(tmp_path, plan) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(cell / name) in said and "measured anew" in said
    cell.rename(tmp_path / "away")
    assert analyse(tmp_path, plan) == 0
    assert f"not measured: {cell.name}" in capsys.readouterr().out


def test_the_timeline_names_the_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = fabricate(tmp_path, "study", SPECS)
    assert analyse(tmp_path, plan) == 0
    for cell in read_plan(plan).cells:
        damage(Layout(tmp_path).cell(cell.id) / MEMORY)
    capsys.readouterr()
    where = ["--study-dir", str(tmp_path / "study"), "--results", str(tmp_path)]
    assert cli.main(["figure", "memory_timeline", *where]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and MEMORY in said and "measured anew" in said


def test_what_no_number_depends_on_stops_nothing(tmp_path: Path) -> None:
    plan = fabricate(tmp_path, "study", SPECS)
    for cell, name in zip(read_plan(plan).cells, (PROVENANCE, CONFIG, LOG), strict=True):
        damage(Layout(tmp_path).cell(cell.id) / name)
    assert analyse(tmp_path, plan) == 0


def test_a_table_that_is_cut_off_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = fabricate(tmp_path, "study", SPECS)
    assert analyse(tmp_path, plan) == 0
    damage(tmp_path / "study" / "cells.parquet")
    capsys.readouterr()
    where = ["--study-dir", str(tmp_path / "study"), "--results", str(tmp_path)]
    assert cli.main(["table", "all", *where]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "cells.parquet" in said
