"""MLflow is a copy that may be behind: many writers lose nothing, and what could not be written is caught up."""

from __future__ import annotations

import json
import os
import resource
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from fabricate import Spec, fabricate

from kvstudy.analysis.plan import read_plan
from kvstudy.tracking import embedded
from kvstudy.tracking import mlflow_sync as tracking

#: Processes, forked once everything is imported, that open a fresh store at the same moment.
CROWD = """
import os, sys, time
from kvstudy.tracking import mlflow_sync
import mlflow.store.tracking.sqlalchemy_store
root = sys.argv[1]
children = []
for number in range({writers}):
    child = os.fork()
    if child == 0:
        name = f"study{{number}}"
        code = mlflow_sync.main(["--plan", f"{{root}}/plan/{{name}}/plan.json", "--results", root,
                                 "--out", f"{{root}}/tracking/{{name}}.json"])
        sys.stdout.flush()
        os._exit(code)
    children.append(child)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


@pytest.mark.parametrize("writers", [4, pytest.param(16, marks=pytest.mark.long)])
def test_writers_at_once_lose_nothing(tmp_path: Path, writers: int) -> None:
    specs = [Spec("vllm", 1.0), Spec("full", 1.0, outcome="oom")]
    plans = [read_plan(fabricate(tmp_path, f"study{number}", specs)) for number in range(writers)]
    code = CROWD.format(writers=writers)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(item for item in sys.path if item)}
    env.pop("MLFLOW_TRACKING_URI", None)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    client = tracking._client(f"sqlite:///{tmp_path}/mlflow.db")
    for plan in plans:
        experiment = client.get_experiment_by_name(plan.name)
        runs = [run for run in client.search_runs([experiment.experiment_id]) if "cell_id" in run.data.tags]
        assert sorted(run.data.tags["cell_id"] for run in runs) == sorted(cell.id for cell in plan.cells)
        assert all(run.data.tags["result_sha"] and run.data.metrics for run in runs)
        written = json.loads((tmp_path / "tracking" / f"{plan.name}.json").read_text())
        assert written["runs"] == {run.data.tags["cell_id"]: run.info.run_id for run in runs}


def test_what_a_locked_or_damaged_store_refused_is_caught_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cells stay as they are, the command says so in a line, and the same command goes on."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    plan = fabricate(tmp_path, "study", [Spec("full", 1.0), Spec("vllm", 1.0)])
    command = ["--plan", str(plan), "--results", str(tmp_path), "--out", str(tmp_path / "tracking" / "study.json")]
    before = {path: path.read_bytes() for path in tmp_path.glob("store/*/*")}
    database = tmp_path / "mlflow.db"
    database.write_bytes(b"not a database" * 100)
    assert tracking.main(command) == tracking.UNREACHABLE
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(database) in said and "catches up" in said
    database.unlink()
    # A disk that fills while the tables are made must not leave a store that MLflow takes for its own.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        assert tracking.main(command) == tracking.UNREACHABLE
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "catches up" in said, said
    assert not list(tmp_path.glob("*mlflow*"))
    holder = sqlite3.connect(database, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    monkeypatch.setattr(embedded, "BUSY_S", 0.2)
    assert tracking.main(command) == tracking.UNREACHABLE
    holder.close()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "locked" in said and not (tmp_path / "tracking" / "study.json").exists()
    assert tracking.main(command) == 0
    assert "2 new" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in tmp_path.glob("store/*/*")} == before
