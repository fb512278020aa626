"""What a person is told of how far a study is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvstudy.cli import main
from kvstudy.grid.plan import Plan, make_plan, write_plan
from kvstudy.grid.store import SUMMARY, Layout, staged, write_json, write_text
from kvstudy.measure import state
from kvstudy.measure.command import main as measure
from kvstudy.measure.progress import of_study, read_progress


@pytest.fixture
def plan(checkout: Path, results: Path) -> Plan:
    """Six cells of a minute, a visit each."""
    made = make_plan(checkout / "conf", ["study=tiny", "load.duration_s=60", "sweep=cell"])
    write_plan(made, results)
    return made


def store_cell(results: Path, cell: str, outcome: str = "ok", cause: str | None = None) -> None:
    with staged(Layout(results).cell(cell)) as folder:
        visit = {"bring_up_s": 20.0, "warm_up_s": 0.0, "load_s": 60.0, "drain_s": 40.0}
        write_json(folder / SUMMARY, {"schema_version": 1, "outcome": outcome, "cause": cause, "visit": visit})


def test_cells_done_and_time_left_by_the_pace_so_far(plan: Plan, results: Path) -> None:
    layout = Layout(results)
    assert of_study("tiny", layout).startswith(f"study tiny: 0 of {len(plan.cells)} cells done, about 10 min")
    store_cell(results, plan.cells[0].cell_id)
    assert of_study("tiny", layout) == f"study tiny: 1 of {len(plan.cells)} cells done, about 10 min left"


def test_no_plan_says_nothing(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert of_study("tiny", Layout(results)) == ""
    assert main(["status", "study=tiny", "--results", str(results)]) == 2
    assert "no plan of a study 'tiny'" in capsys.readouterr().err


def test_status_tells_done_running_failed_and_left(
    plan: Plan, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = Layout(results)
    well, badly, now, fault, killed, _ = plan.visits
    store_cell(results, well.cells[0].cell_id)
    store_cell(results, badly.cells[0].cell_id, "oom", "out of memory: 9 GiB resident, limit 8 GiB")
    log = results / "logs" / "visits" / "x.log"
    write_text(log, "bringing up\nand then\n")
    state.Journal(layout.state("tiny", now.id), now.id, log).running(now.cells[0].cell_id)
    state.Journal(layout.state("tiny", fault.id), fault.id, log).ended("failed", "no model:\n run kvstudy prepare")
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    gone = state.State(killed.id, log=str(log), since=time.time(), host=os.uname().nodename, pid=child.pid, born=1.0)
    child.wait()
    write_json(layout.state("tiny", killed.id), vars(gone))

    before = {path: path.stat().st_mtime_ns for path in results.rglob("*")}
    assert main(["status", "study=tiny", "--results", str(results)]) == 1
    said = capsys.readouterr().out
    assert "6 cells: 2 done, 1 running, 2 failed, 1 left; expected end" in said, said
    assert f"running  {now.cells[0].cell_id}" in said and f"process {os.getpid()}" in said
    assert "oom: out of memory: 9 GiB resident" in said and str(layout.cell(badly.cells[0].cell_id)) in said
    assert "no model: run kvstudy prepare" in said and str(log) in said
    assert "ended without a word" in said and "its log ends: and then" in said
    assert before == {path: path.stat().st_mtime_ns for path in results.rglob("*")}, "it only reads"

    found = read_progress("tiny", layout)
    assert found is not None and len(found.left) == 1
    elsewhere = state.State(now.id, host="another", since=time.time(), pid=psutil.Process().pid)
    assert elsewhere.alive()
    assert not state.State(now.id, host="another", since=time.time() - 2 * state.SILENT_S).alive()


def test_status_tells_what_of_the_quality_runs_has_failed_and_is_left(
    plan: Plan, results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = Layout(results)
    (visit,) = plan.quality
    path = layout.state("tiny", visit.id)
    total = len(visit.cells)

    def said(code: int) -> str:
        assert main(["status", "study=tiny", "--results", str(results)]) == code
        return capsys.readouterr().out

    assert f"quality: {total} cells: 0 scored, 0 running, 0 failed, {total} left" in said(0)
    store_cell(results, visit.cells[0].cell_id)
    journal = state.Journal(path, visit.id, results / "q.log")
    journal.running("greedy-48 (2/4)")
    now = said(0)
    assert f"quality: {total} cells: 1 scored, {total - 1} running, 0 failed, 0 left" in now
    assert f"scoring  {visit.id}: greedy-48 (2/4), for" in now and "6 cells: 0 done, 0 running, 0 failed" in now
    journal.ended("failed", "no text:\n name one")
    now = said(1)
    assert f"1 scored, 0 running, {total - 1} failed, 0 left" in now and visit.cells[1].cell_id in now
    assert "no text: name one" in now and f"log: {results / 'q.log'}" in now
    journal.done()
    assert f"1 scored, 0 running, 0 failed, {total - 1} left" in said(0)

    # One on another machine that is silent for long beats, and is known to live by that.
    monkeypatch.setattr(state, "BEAT_S", 0.02)
    long_ago = time.time() - 2 * state.SILENT_S
    write_json(path, vars(state.State(visit.id, host="another", since=long_ago)))
    os.utime(path, (long_ago, long_ago))
    assert f"{total - 1} failed" in said(1)
    journal = state.Journal(path, visit.id, None)
    journal.beat()
    until = time.monotonic() + 10
    while path.stat().st_mtime < long_ago + 1 and time.monotonic() < until:
        time.sleep(0.02)
    assert f"{total - 1} running, 0 failed" in said(0)
    journal.done()


def test_a_visit_leaves_word_of_its_fault_and_a_retry_changes_nothing(
    plan: Plan, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    visit = plan.visits[0]
    layout = Layout(results)
    arguments = [
        *("--visit", str(layout.visit("tiny", visit.id)), "--results", str(results)),
        *("--marker", str(layout.marker("tiny", visit.id)), "--log", str(results / "x.log")),
    ]
    stderr = sys.stderr
    try:
        assert measure(arguments) == 2
        left = state.read(layout.state("tiny", visit.id))
        assert left is not None and left.doing == "failed" and "is not prepared" in str(left.cause)
        assert measure([*arguments, "--attempt", "2"]) == 2
    finally:
        sys.stderr = stderr
    assert "not tried again" in capsys.readouterr().err
    assert not layout.marker("tiny", visit.id).exists()
    # What was merely interrupted is tried again.
    write_json(layout.state("tiny", visit.id), vars(state.State(visit.id, doing="interrupted")))
    try:
        assert measure([*arguments, "--attempt", "2"]) == 2
    finally:
        sys.stderr = stderr
    said = capsys.readouterr().err
    assert "is not prepared" in said and "not tried again" not in said


@pytest.mark.parametrize("text", ["{", "[]", '{"cells": 3}', '{"cells": [], "visits": [3]}'])
def test_a_damaged_plan_is_one_line(plan: Plan, results: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    write_text(Layout(results).plan("tiny"), text)
    assert main(["status", "study=tiny", "--results", str(results)]) == 2
    assert "is damaged: `kvstudy grid study=tiny`" in capsys.readouterr().err
