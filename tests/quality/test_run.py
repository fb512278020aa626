"""A quality visit as the workflow runs it: whole cells, a served spot check, nothing scored twice or lost."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from kvstudy.analysis.plan import read_plan
from kvstudy.analysis.quality import build_quality
from kvstudy.cli import main
from kvstudy.grid.plan import load_plan
from kvstudy.grid.records import ITEM_COLUMNS
from kvstudy.grid.store import ITEMS, Layout, is_whole
from kvstudy.measure import state
from kvstudy.quality import run
from kvstudy.quality.score import Scorer


@pytest.fixture
def as_a_background_job() -> Iterator[None]:
    """SIGINT ignored, as shells start such jobs."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    for number in numbers:
        signal.signal(number, before[number])


def test_a_visit_is_taken_up_where_it_was_and_checked_against_a_served_deployment(
    checkout: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    as_a_background_job: None,
) -> None:
    monkeypatch.chdir(checkout)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    results = tmp_path / "results"
    layout = Layout(results)
    argv = ["quality", "study=tiny", "--results", str(results)]
    scored: list[int] = []
    whole = Scorer.perplexity

    def counting(self: Scorer, items: list[object], context: int) -> object:
        scored.append(context)
        if scored == [24, 48]:
            signal.raise_signal(signal.SIGINT)
        return whole(self, items, context)  # type: ignore[arg-type]

    monkeypatch.setattr(Scorer, "perplexity", counting)
    assert main(argv) == 130
    assert "run again to go on" in capfd.readouterr().err
    (visit,) = load_plan(layout.plan("tiny")).quality
    assert not any(is_whole(layout.cell(cell.cell_id)) for cell in visit.cells)
    left = state.read(layout.state("tiny", visit.id))
    assert left is not None and left.doing == "interrupted" and str(left.cell).startswith("perplexity-48")
    assert main(argv) == 0
    assert scored == [24, 48, 48] and not layout.state("tiny", visit.id).exists()
    for cell in visit.cells:
        summary = json.loads((layout.cell(cell.cell_id) / "summary.json").read_text())
        assert (summary["outcome"], summary["verdict"]["status"]) == ("ok", "VALID")
        assert summary["deployment"] == cell.deployment.id
        check = summary["checks"]["served_path"]
        assert check["tokens"] == 16 and check["mean_abs"] < 1e-4
        items = pd.read_parquet(layout.cell(cell.cell_id) / ITEMS)
        assert list(items.columns) == list(ITEM_COLUMNS)
        assert set(items["context"]) == {24, 48} and set(items["item"]) == {0, 1}
    assert layout.quality_marker("tiny", visit.id).is_file()
    assert not list((results / "quality").iterdir())
    # All is there: nothing is scored again.
    layout.quality_marker("tiny", visit.id).unlink()
    assert main(argv) == 0 and scored == [24, 48, 48]


def test_a_fault_is_left_word_of_and_a_retry_changes_nothing(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(checkout)
    assert main(["grid", "study=tiny", "--results", str(tmp_path)]) == 0
    layout = Layout(tmp_path)
    (visit,) = load_plan(layout.plan("tiny")).quality
    argv = ["--visit", str(layout.quality_visit("tiny", visit.id)), "--results", str(tmp_path)]
    argv += ["--marker", str(layout.quality_marker("tiny", visit.id)), "--log", str(tmp_path / "q.log")]
    assert run.main(argv) == 2
    left = state.read(layout.state("tiny", visit.id))
    assert left is not None and left.doing == "failed" and "is not prepared" in str(left.cause)
    assert left.log == str(tmp_path / "q.log")
    capfd.readouterr()
    assert run.main([*argv, "--attempt", "2"]) == 2
    assert "not tried again" in capfd.readouterr().err


def test_deployments_that_read_a_prompt_in_different_ways_are_not_scored_on_one_reading(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkout)
    ways = "framework.prefill=blocked,chunked_lossy"
    assert main(["grid", "study=tiny", "framework=full,h2o", ways, "--results", str(tmp_path)]) == 0
    visits = load_plan(Layout(tmp_path).plan("tiny")).quality
    read = [{getattr(cell.framework, "prefill", None) for cell in visit.cells} for visit in visits]
    assert sorted(read, key=str) == [{"blocked"}, {"chunked_lossy"}]


def test_a_rule_that_couples_requests_is_a_cell_that_says_unsupported(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(checkout)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    asked = ["study=tiny", "framework=infinigen", "framework.rule=speed", "budget.share=0.5"]
    assert main(["quality", *asked, "--results", str(tmp_path)]) == 0
    (visit,) = load_plan(Layout(tmp_path).plan("tiny")).quality
    (cell,) = visit.cells
    summary = json.loads((Layout(tmp_path).cell(cell.cell_id) / "summary.json").read_text())
    why = "infinigen's rule 'speed' lets a batch's first request decide for the others"
    assert (summary["outcome"], summary["cause"]) == ("unsupported", why)
    assert why in capfd.readouterr().err
    assert build_quality(read_plan(Layout(tmp_path).plan("tiny")), tmp_path).empty


def test_a_served_path_that_differs_makes_the_cells_invalid() -> None:
    scoring = object.__new__(run.Scoring)
    scoring.checks, scoring.reasons = {}, {}

    class Cell:
        cell_id = "a"

    scoring._checked([Cell()], "served_path", "a", [0.0, 0.3])  # type: ignore[list-item]
    assert scoring.reasons == {"a": ["served_path_differs"]}
    assert scoring.checks["a"]["served_path"]["mean_abs"] == 0.15
