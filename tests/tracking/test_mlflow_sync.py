"""MLflow follows the store: once, again, after a change, after a loss, and when it cannot be reached."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from fabricate import Spec, config_of, fabricate

from kvstudy import processes
from kvstudy.analysis.plan import read_plan
from kvstudy.analysis.table import read_cell
from kvstudy.grid.records import Metric, Summary, Verdict
from kvstudy.grid.store import MEASURES, Layout, write_json
from kvstudy.tracking import embedded, logged
from kvstudy.tracking import mlflow_sync as tracking

SPECS = [Spec("vllm", 1.0), Spec("full", 1.0), Spec("h2o", 1.0, budget=0.3, outcome="oom")]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def uri(root: Path) -> str:
    return f"sqlite:///{root}/mlflow.db"


@pytest.fixture(scope="module")
def plan_path(root: Path) -> Path:
    return fabricate(root, "study", SPECS)


@pytest.fixture(scope="module")
def client(root: Path, uri: str, plan_path: Path) -> Iterator[Any]:
    """MLflow after a first reconciliation (opening a fresh store takes seconds, so it is made once)."""
    done = tracking.sync(read_plan(plan_path), root, uri)
    assert (done.created, done.replaced, done.removed, done.unchanged) == (3, 0, 0, 0)
    yield tracking._client(uri)


def cells(client: Any) -> dict[str, Any]:
    experiment = client.get_experiment_by_name("study")
    runs = client.search_runs([experiment.experiment_id])
    return {run.data.tags["cell_id"]: run for run in runs if run.data.tags["kind"] == "cell"}


def test_a_run_holds_what_a_person_looks_for(client: Any, root: Path, plan_path: Path) -> None:
    plan = read_plan(plan_path)
    run = cells(client)[plan.cells[1].id]
    summary, _ = read_cell(Layout(root).cell(plan.cells[1].id))  # type: ignore[misc]
    assert run.data.params["framework"] == "full" and run.data.params["rate"] == "1"
    assert run.data.params["kv_memory_mib"] == "64" and run.data.params["framework.block_size"] == "32"
    assert "framework.implementation" not in run.data.params
    assert run.data.metrics["ttft/p50"] == summary.metrics["ttft.p50"].value
    assert run.data.metrics["axis/rate"] == 1.0
    assert run.data.metrics["goodput/value"] == summary.metrics["goodput"].value
    assert run.data.tags["outcome"] == "ok" and run.data.tags["verdict"] == "VALID"
    assert run.data.tags["mlflow.parentRunId"] and run.data.tags["result_sha"]
    assert run.info.end_time - run.info.start_time == 42_000
    names = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert names == {"summary.json", "config.yaml", "provenance.json", "log.txt"}
    assert run.info.artifact_uri.startswith((root / "mlartifacts" / "study").as_uri())


def test_timeline_is_steps_and_keeps_its_peak(client: Any, root: Path, plan_path: Path) -> None:
    cell = read_plan(plan_path).cells[1].id
    run = cells(client)[cell]
    history = client.get_metric_history(run.info.run_id, "timeline_mib/kv_live.device")
    assert 10 < len(history) <= logged.MOST_POINTS
    assert [h.step for h in history] == sorted({h.step for h in history})
    summary, _ = read_cell(Layout(root).cell(cell))  # type: ignore[misc]
    assert max(h.value for h in history) == summary.memory["kv_live_peak.device"] / 2**20  # type: ignore[operator]


def test_a_failed_cell_is_a_failed_run_with_its_outcome(client: Any, plan_path: Path) -> None:
    run = cells(client)[read_plan(plan_path).cells[2].id]
    assert run.info.status == "FAILED" and run.data.tags["outcome"] == "oom"


def test_a_quality_cell_is_a_run_of_its_study(client: Any, root: Path, uri: str) -> None:
    path = fabricate(root, "scored", [Spec("h2o", budget=0.3)])
    config = config_of(Spec("h2o", budget=0.3))
    config = {key: value for key, value in config.items() if key not in ("workload", "load")}
    config["quality"] = {"name": "made-up", "perplexity": {"contexts": [256, 1024], "items": 8, "continuation": 33}}
    id_ = "h2o_made-up-0123456789"
    write_json(path, json.loads(path.read_text()) | {"quality": [{"id": id_, "deployment": "d", "config": config}]})
    folder = Layout(root).cell(id_)
    metrics = {
        f"perplexity@{context}": Metric(value=value, unit="", n=8) for context, value in ((256, 10.5), (1024, 9.5))
    }
    summary = Summary(
        cell=id_, deployment="d", outcome="ok", verdict=Verdict(status="VALID"), metrics=metrics, fingerprint="f",
        budget={"share": 0.3, "attended": 0.29, "kept": 0.29},
    )  # fmt: skip
    write_json(folder / "summary.json", summary.model_dump(mode="json"))
    same = {"measure": "perplexity", "context": 256, "attended_share": 0.29, "kv_bytes": 3 * 2**20}
    rows = [same | {"depth": depth, "diff": diff} for depth, diff in ((float("nan"), 0.7), (0.5, 9.0))]
    rows.append(same | {"measure": "kl", "attended_share": 0.27, "depth": float("nan"), "diff": float("nan")})
    pd.DataFrame(rows).to_parquet(folder / MEASURES)
    done = tracking.sync(read_plan(path), root, uri)
    run, parent = client.get_run(done.runs[id_]), client.get_run(done.parent_run_id)
    assert run.data.tags["mlflow.parentRunId"] == done.parent_run_id
    assert {name: run.data.tags[name] for name in ("kind", "quality", "framework", "verdict")} == {
        "kind": "quality", "quality": "made-up", "framework": "h2o", "verdict": "VALID",
    }  # fmt: skip
    assert "workload" not in run.data.tags
    assert run.data.params["budget_share"] == "0.3" and run.data.params["quality.perplexity.contexts"] == "256,1024"
    found = run.data.metrics
    assert (found["perplexity/256"], found["perplexity/1024"], found["perplexity_diff/256"]) == (10.5, 9.5, 0.7)
    assert found["attended_share/256"] == pytest.approx(0.28) and found["kv_mib/256"] == 3.0
    assert found["budget/attended"] == 0.29 and found["axis/budget_share"] == 0.3
    assert parent.data.metrics["cells/scored"] == 1.0 and parent.data.metrics["cells/planned"] == 1.0
    assert run.info.run_name == "h2o b=0.3 · smollm2-135m-instruct · quality made-up · seed 0"
    assert {item.path for item in client.list_artifacts(run.info.run_id)} == {"summary.json", MEASURES}


def test_again_changes_nothing(client: Any, root: Path, uri: str, plan_path: Path) -> None:
    before = {cell: run.info.run_id for cell, run in cells(client).items()}
    done = tracking.sync(read_plan(plan_path), root, uri)
    assert (done.created, done.replaced, done.removed, done.unchanged) == (0, 0, 0, 3)
    assert {cell: run.info.run_id for cell, run in cells(client).items()} == before


def test_changed_unfinished_and_vanished(client: Any, root: Path, uri: str, plan_path: Path) -> None:
    plan = read_plan(plan_path)
    changed, unfinished, vanished = (cell.id for cell in plan.cells)
    path = Layout(root).cell(changed) / "summary.json"
    write_json(path, {**json.loads(path.read_text()), "flags": ["saturated"]})
    client.delete_tag(cells(client)[unfinished].info.run_id, "result_sha")
    hidden = root / "hidden"
    Layout(root).cell(vanished).rename(hidden)
    done = tracking.sync(plan, root, uri)
    assert (done.created, done.replaced, done.removed, done.unchanged) == (0, 2, 1, 0)
    after = cells(client)
    assert set(after) == {changed, unfinished} and after[changed].data.tags["flags"] == "saturated"
    hidden.rename(Layout(root).cell(vanished))
    assert tracking.sync(plan, root, uri).created == 1


def test_several_processes_write_what_one_does(
    client: Any, root: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same cells in other studies; and a writer that fails, or is killed, is no success."""
    monkeypatch.setattr(tracking, "RUNS_A_WRITER", 1)
    monkeypatch.setattr(processes, "cores", lambda: 2)
    started: list[Any] = []
    start, one, own = ForkProcess.start, tracking._Writing.one, os.getpid()
    monkeypatch.setattr(ForkProcess, "start", lambda process: (started.append(process), start(process))[1])

    def sync(study: str, act: Callable[[], object]) -> tracking.Outcome:
        plan = read_plan(fabricate(root, study, SPECS))
        last = plan.cells[-1]
        monkeypatch.setattr(tracking._Writing, "one", lambda mine, cell: (cell is last and act(), one(mine, cell))[1])
        return tracking.sync(plan, root, uri)

    with pytest.raises(tracking.TrackingError, match="division by zero"):
        sync("failing", lambda: 1 / 0)
    with pytest.raises(tracking.TrackingError, match="a worker was killed before 1 of 3 items"):
        sync("killed", lambda: os.getpid() != own and os.kill(os.getpid(), signal.SIGKILL))
    done = sync("crowd", lambda: None)
    assert len(started) == 6 and not any(process.is_alive() for process in started)
    assert (done.created, len(done.runs)) == (3, 3)
    assert not list(root.glob("mlflow.db-*")), "it is left as one plain file"
    alone = cells(client)
    for cell, run_id in done.runs.items():
        mine, other = client.get_run(run_id).data, alone[cell].data
        assert mine.metrics == other.metrics and mine.params == other.params
        assert mine.tags == other.tags | {"mlflow.parentRunId": done.parent_run_id}


def test_figures_and_report_are_on_the_parent(client: Any, root: Path, uri: str, plan_path: Path) -> None:
    folder = root / "study"
    (folder / "figures").mkdir(parents=True)
    (folder / "figures" / "a.png").write_bytes(b"made up")
    (folder / "report.pdf").write_bytes(b"made up")
    done = tracking.sync(read_plan(plan_path), root, uri)
    assert {item.path for item in client.list_artifacts(done.parent_run_id)} == {"figures", "report.pdf"}
    parent = client.get_run(done.parent_run_id)
    assert parent.data.metrics["cells/measured"] == 3.0 and parent.data.tags["kind"] == "study"


def arguments(root: Path, plan_path: Path, uri: str) -> list[str]:
    out = str(root / "tracking" / "study.json")
    return ["--plan", str(plan_path), "--results", str(root), "--uri", uri, "--out", out]


def test_command_writes_the_map(client: Any, root: Path, uri: str, plan_path: Path) -> None:
    assert tracking.main(arguments(root, plan_path, uri)) == 0
    written = json.loads((root / "tracking" / "study.json").read_text())
    assert written["runs"] == {cell: run.info.run_id for cell, run in cells(client).items()}


def test_locked_database_is_one_line_and_code_3(
    client: Any, root: Path, uri: str, plan_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(embedded, "BUSY_S", 0.2)
    holder = sqlite3.connect(root / "mlflow.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        assert tracking.main(arguments(root, plan_path, uri)) == tracking.UNREACHABLE
    finally:
        holder.close()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "locked" in said and "catches up" in said


def test_second_writer_waits_and_says_so(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    with lock.open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(tracking.TrackingError, match="another"), tracking.single_writer(lock, 0.2):
            pass
    with tracking.single_writer(lock, 0.2):
        pass


def test_unreachable_server_is_one_line_without_the_password(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    plan_path = fabricate(tmp_path, "study", [Spec(absent=True)])
    assert tracking.main(arguments(tmp_path, plan_path, "http://me:hunter2@127.0.0.1:9")) == tracking.UNREACHABLE
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "hunter2" not in said


def test_password_is_not_shown() -> None:
    assert tracking.redacted("postgresql://me:hunter2@db:5432/m") == "postgresql://me:***@db:5432/m"
    assert tracking.redacted("sqlite:///results/mlflow.db") == "sqlite:///results/mlflow.db"
    assert "hunter2" not in tracking._clean("cannot open hunter2", "http://me:hunter2@x")
