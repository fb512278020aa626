"""The tidy table: a row a planned cell, machines kept apart, missing cells named."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pandas as pd
import pytest
from fabricate import Spec, config_of, fabricate, ids_of

from kvstudy.analysis import run, table
from kvstudy.analysis.plan import AnalysisError, read_plan
from kvstudy.grid.schema import Cell
from kvstudy.grid.store import Layout, write_json


def test_row_holds_axes_results_and_memory(tmp_path: Path) -> None:
    spec = Spec("h2o", rate=1.0, budget=0.3, rule="realdrop", seed=2)
    frame = table.build(read_plan(fabricate(tmp_path, "one", [spec])), tmp_path)
    row = frame.iloc[0]
    assert row["framework"] == "h2o" and row["rule"] == "realdrop"
    assert row["budget_share"] == 0.3 and row["budget_attended"] == pytest.approx(0.312)
    assert row["rate"] == 1.0 and pd.isna(row["concurrency"]) and row["seed"] == 2
    assert row["outcome"] == "ok" and row["verdict"] == "VALID" and row["weights"] == "pretrained"
    assert row["ttft.p50.low"] <= row["ttft.p50"] <= row["ttft.p50.high"]
    assert row["memory.kv_live_peak.device"] > 0
    assert frame.attrs["units"]["ttft.p50"] == "s"
    assert frame.attrs["machines"][row["fingerprint"]]["cpu"] == "Made-Up CPU 9000"


def test_attrs_and_types_survive_the_file(tmp_path: Path) -> None:
    frame = table.build(read_plan(fabricate(tmp_path, "one", [Spec(), Spec(rate=None, concurrency=4)])), tmp_path)
    frame.to_parquet(tmp_path / "cells.parquet", index=False)
    again = table.read_table(tmp_path / "cells.parquet")
    assert again.attrs == frame.attrs
    pd.testing.assert_frame_equal(again, frame)


def test_missing_cell_has_a_row_and_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = fabricate(tmp_path, "two", [Spec(), Spec("vllm", absent=True)])
    assert (
        run.main(["--plan", str(plan), "--results", str(tmp_path), "--out", str(tmp_path / "two/cells.parquet")]) == 0
    )
    printed = capsys.readouterr().out
    assert "1 of 2 cells measured" in printed and "not measured: vllm_" in printed
    frame = table.read_table(tmp_path / "two/cells.parquet")
    assert list(frame["outcome"]) == ["ok", "missing"]
    assert len(pd.read_csv(tmp_path / "two/cells.csv")) == 2


def test_a_study_without_any_result_still_has_its_table(tmp_path: Path) -> None:
    plan = fabricate(tmp_path, "none", [Spec(absent=True)])
    assert (
        run.main(["--plan", str(plan), "--results", str(tmp_path), "--out", str(tmp_path / "none/cells.parquet")]) == 0
    )


def test_cells_of_two_machines_are_refused_and_can_be_chosen(tmp_path: Path) -> None:
    plan = read_plan(fabricate(tmp_path, "mix", [Spec(), Spec("vllm", fingerprint="beef00000000")]))
    with pytest.raises(AnalysisError, match="different machines") as caught:
        table.build(plan, tmp_path)
    assert "beef00000000" in str(caught.value) and plan.cells[1].id in str(caught.value)
    chosen = table.build(plan, tmp_path, fingerprint="beef")
    assert list(chosen["outcome"]) == ["missing", "ok"]


def test_broken_summary_is_named(tmp_path: Path) -> None:
    plan = read_plan(fabricate(tmp_path, "one", [Spec()]))
    path = Layout(tmp_path).cell(plan.cells[0].id) / "summary.json"
    summary = json.loads(path.read_text())
    path.write_text(json.dumps({**summary, "typo": 1}))
    with pytest.raises(AnalysisError, match=r"summary\.json is not a summary: typo"):
        table.build(plan, tmp_path)
    path.write_text(json.dumps({**summary, "schema_version": 99}))
    with pytest.raises(AnalysisError, match="schema version 99"):
        table.build(plan, tmp_path)


def test_no_plan_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run.main(["--plan", str(tmp_path / "p"), "--results", str(tmp_path), "--out", str(tmp_path / "c.parquet")])
    assert code == 2 and capsys.readouterr().err.count("\n") == 1


def test_replicates_share_a_point_and_frameworks_a_setting(tmp_path: Path) -> None:
    specs = [Spec(seed=0), Spec(seed=1), Spec("vllm", seed=0), Spec("h2o", seed=0, budget=0.3)]
    frame = table.build(read_plan(fabricate(tmp_path, "s", specs)), tmp_path)
    assert frame["point"][0] == frame["point"][1] != frame["point"][2]
    assert frame["setting"][0] == frame["setting"][2] == frame["setting"][3] != frame["setting"][1]


def test_axes_agree_with_the_typed_cell() -> None:
    config = config_of(Spec("full", rate=0.5, seed=3))
    config["model"] |= {"package": "p", "package_version": "1", "gguf": "*"}
    cell = Cell(**config)
    axes = table.axes_of(cell.model_dump(mode="json"))
    assert axes["model"] == cell.model.name and axes["weights"] == cell.model.weights
    assert axes["rate"] == 0.5 and axes["prompt_tokens"] == 192.0 and axes["output_tokens"] == 40.0


def test_ten_thousand_cells_in_half_a_minute(tmp_path: Path) -> None:
    """A tenth of the size here, against a tenth of the time: 10,000 cells must take 30 s at most."""
    plan_path = fabricate(tmp_path, "big", [Spec()])
    template = json.loads(plan_path.read_text())["cells"][0]
    layout = Layout(tmp_path)
    summary = (layout.cell(template["id"]) / "summary.json").read_text()
    cells = []
    for seed in range(1000):
        config = {**template["config"], "seed": seed + 10}
        cell, deployment = ids_of(config)
        layout.cell(cell).mkdir()
        (layout.cell(cell) / "summary.json").write_text(summary)
        cells.append({"id": cell, "deployment": deployment, "visit": "v", "config": config})
    write_json(plan_path, {"study": {"name": "big", "title": "", "question": ""}, "cells": cells, "left_out": []})
    begin = time.perf_counter()
    frame = table.build(read_plan(plan_path), tmp_path)
    assert len(frame) == 1000 and time.perf_counter() - begin < 3.0
