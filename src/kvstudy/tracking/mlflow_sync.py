"""Bring MLflow up to date with the store: an experiment a study, a parent run, and a run a cell, measured or scored.

The files are the truth, MLflow is a copy that may be behind: a cell's run whose `result_sha` tag equals the
hash of its summary is left alone, another is replaced (params are immutable in MLflow), one whose cell is
gone is removed. `result_sha` is written last, so that a run that was cut off is replaced the next time.

There is one such command at a time (a file lock), and it makes a fresh SQLite store beside its place and renames
it: sixteen processes that open one at once break it for good, and so does the end of the one that makes it. Into
one that is there, several of its processes write: a run is mostly MLflow's own Python. When the store cannot be
reached or is locked, the command says so in a line and ends with code 3; nothing measured is lost, and the next
`kvstudy track` catches up.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

from kvstudy import processes
from kvstudy.analysis.plan import AnalysisError, Plan, PlannedCell, read_plan
from kvstudy.analysis.table import read_cell
from kvstudy.grid.records import Summary
from kvstudy.grid.secrets import redact
from kvstudy.grid.store import CONFIG, LOG, MEASURES, PROVENANCE, SUMMARY, Layout, write_json
from kvstudy.tracking import embedded
from kvstudy.tracking.embedded import TrackingError
from kvstudy.tracking.logged import (
    FORMAT,
    compared_of,
    metrics_of,
    params_of,
    result_sha,
    run_name,
    tags_of,
    timeline_of,
    times_of,
)

#: MLflow's own limits for one `log_batch`.
_MOST_METRICS, _MOST_PARAMS = 1000, 100

LOCK_WAIT_S = 300.0
UNREACHABLE = 3

#: Processes that write into an SQLite store at most (it lets one write at a time), and new runs that are worth one.
MOST_WRITERS = 4
RUNS_A_WRITER = 50


@dataclass
class Outcome:
    """What a reconciliation did: run ids by cell, and how many runs were touched."""

    experiment_id: str = ""
    parent_run_id: str = ""
    runs: dict[str, str] = field(default_factory=dict)
    created: int = 0
    replaced: int = 0
    removed: int = 0
    unchanged: int = 0


# --- reaching MLflow -----------------------------------------------------------------------------


def redacted(uri: str) -> str:
    """The URI without the password in it."""
    return re.sub(r"(://[^/@:]*):[^@/]*@", r"\1:***@", uri)


def _clean(text: str, uri: str) -> str:
    """One line of an error's text, with no secret of the URI in it."""
    password = urlsplit(uri).password
    text = redact(text.replace(uri, redacted(uri)))
    for written in (password, unquote(password)) if password else ():
        text = text.replace(written, "***")
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
    return line if len(line) <= 300 else line[:297] + "..."


@contextlib.contextmanager
def single_writer(path: Path, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """Hold the lock that makes this process the only one that writes to MLflow.

    Raises
    ------
    TrackingError
        Another process holds it for longer than `wait_s`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        until = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise TrackingError(f"another `kvstudy track` is writing ({path} is locked)") from None
                time.sleep(0.1)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)


def _quiet() -> None:
    """MLflow without telemetry, links on standard output, long waits and logs of what it raises anyway."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("DO_NOT_TRACK", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "1")
    # An unreachable server is reported in seconds, not after MLflow's seven growing retries.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    import mlflow.tracking  # noqa: F401 - sets its own level

    for name in ("alembic", "mlflow", "urllib3"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _client(uri: str) -> Any:
    _quiet()
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


# --- reconciling ---------------------------------------------------------------------------------


def sync(
    plan: Plan,
    results: Path,
    uri: str,
    study_dir: Path | None = None,
    lock_wait_s: float = LOCK_WAIT_S,
) -> Outcome:
    """Make MLflow show exactly the measured cells of the plan, and the study's figures and report.

    Raises
    ------
    TrackingError
        MLflow cannot be reached or is locked.
    """
    study_dir = study_dir or Layout(results).study(plan.name)
    with single_writer(results / "tracking" / ".lock", lock_wait_s):
        database = embedded.sqlite_path(uri)
        try:
            _quiet()
            if database is None:
                return _reconcile(_client(uri), plan, results, uri, study_dir)
            with embedded.ready(database) as connections:
                return _reconcile(_client(uri), plan, results, uri, study_dir, connections)
        except (TrackingError, AnalysisError, KeyboardInterrupt):
            raise
        except Exception as error:  # MLflow raises its own, SQLAlchemy's and requests' errors alike
            raise TrackingError(f"MLflow at {redacted(uri)}: {_clean(str(error), uri)}") from error


def _reconcile(
    client: Any, plan: Plan, results: Path, uri: str, study_dir: Path, connections: embedded.Connections | None = None
) -> Outcome:
    done = Outcome(experiment_id=_experiment(client, plan, results, uri))
    parent, children = _existing(client, done.experiment_id)
    done.parent_run_id = parent or _new_parent(client, done.experiment_id, plan)
    writing = _Writing(client, Layout(results), done.experiment_id, done.parent_run_id, children)
    tally: dict[str, int] = {"planned": len(plan.cells), "measured": 0, "valid": 0, "failed": 0}
    tally |= {"scored": 0} if plan.quality else {}
    for cell, seen in writing.all((*plan.cells, *plan.quality), connections):
        if seen is None:
            continue
        done.runs[cell.id] = seen.run_id
        if "quality" in cell.config:
            tally["scored"] += 1
        else:
            tally["measured"] += 1
            tally["failed"] += not seen.ok
            tally["valid"] += seen.valid
        done.created += seen.how == "created"
        done.replaced += seen.how == "replaced"
        done.unchanged += seen.how == "unchanged"
    for cell_id, runs in children.items():
        if cell_id not in done.runs:
            for run_id, _ in runs:
                client.delete_run(run_id)
                done.removed += 1
    _log_parent(client, done, plan, tally, study_dir)
    return done


class Seen(NamedTuple):
    """A measured cell and its run, once that is up to date."""

    run_id: str
    how: Literal["created", "replaced", "unchanged"]
    ok: bool
    valid: bool


@dataclass(frozen=True)
class _Writing:
    """Brings runs of cells up to date. `children`: the runs that each cell has, with their completion marks."""

    client: Any
    layout: Layout
    experiment_id: str
    parent_run_id: str
    children: Mapping[str, Sequence[tuple[str, str | None]]]

    def all(
        self, cells: Sequence[PlannedCell], connections: embedded.Connections | None
    ) -> Iterator[tuple[PlannedCell, Seen | None]]:
        """Every cell's run; None for cells that were not measured. Into a local SQLite store from several processes."""
        new = sum(cell.id not in self.children for cell in cells)
        count = min(MOST_WRITERS, processes.cores(), new // RUNS_A_WRITER)
        if connections is None or not connections.local:
            count = 1
        elif count > 1:
            connections.close()
        return processes.spread(self.one, cells, count)

    def one(self, cell: PlannedCell) -> Seen | None:
        """The cell's run, written unless it is there; None if the cell was not measured."""
        folder = self.layout.cell(cell.id)
        found = read_cell(folder)
        if found is None:
            return None
        summary, sha = found
        mark = result_sha(folder, sha)
        runs = self.children.get(cell.id, [])
        ok = summary.outcome == "ok"
        valid = ok and summary.verdict.status == "VALID"
        if len(runs) == 1 and runs[0][1] == mark:
            return Seen(runs[0][0], "unchanged", ok, valid)
        for run_id, _ in runs:
            self.client.delete_run(run_id)
        return Seen(self._log(cell, folder, summary, mark), "replaced" if runs else "created", ok, valid)

    def _log(self, cell: PlannedCell, folder: Path, summary: Summary, mark: str) -> str:
        from mlflow.entities import Metric, Param, RunTag

        start, end = times_of(folder, summary)
        tags = {"mlflow.parentRunId": self.parent_run_id, **tags_of(cell, summary)}
        name = run_name(cell.config)
        run = self.client.create_run(self.experiment_id, start_time=start, run_name=name, tags=tags)
        run_id = str(run.info.run_id)
        values = metrics_of(cell.config, summary) | compared_of(folder)
        metrics = [Metric(name, value, end, 0) for name, value in values.items()]
        points = timeline_of(folder)
        # Steps are milliseconds since the load began, so that timelines of different cells line up.
        steps = [Metric(name, value, start + int(t * 1000), int(t * 1000)) for name, t, value in points]
        metrics += steps[: _MOST_METRICS - len(metrics)]
        params = [Param(name, value[:6000]) for name, value in sorted(params_of(cell.config).items())]
        _keep(self.client, run, [folder / name for name in (SUMMARY, CONFIG, PROVENANCE, LOG, MEASURES)])
        self.client.set_terminated(run_id, "FINISHED" if summary.outcome == "ok" else "FAILED", end)
        # The mark goes with the last of it, in one call: a call costs more than what it writes.
        mark_tag = RunTag("result_sha", mark)
        self.client.log_batch(run_id, metrics=metrics, params=params[:_MOST_PARAMS], tags=[mark_tag])
        return run_id


def _experiment(client: Any, plan: Plan, results: Path, uri: str) -> str:
    found = client.get_experiment_by_name(plan.name)
    if found is not None:
        if found.lifecycle_stage == "deleted":
            client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)
    # Left to itself MLflow puts artefacts of an embedded store into ./mlruns of whoever runs it.
    local = not uri.startswith(("http://", "https://", "databricks"))
    place = (results / "mlartifacts" / plan.name).resolve().as_uri() if local else None
    return str(client.create_experiment(plan.name, artifact_location=place))


def _existing(client: Any, experiment_id: str) -> tuple[str | None, dict[str, list[tuple[str, str | None]]]]:
    """The parent run, and of each cell its runs with their completion mark."""
    parent: str | None = None
    children: dict[str, list[tuple[str, str | None]]] = {}
    token: str | None = None
    while True:
        page = client.search_runs([experiment_id], max_results=1000, page_token=token)
        for run in page:
            tags = run.data.tags
            if tags.get("kind") == "study":
                parent = parent or run.info.run_id
            elif "cell_id" in tags:
                children.setdefault(tags["cell_id"], []).append((run.info.run_id, tags.get("result_sha")))
        token = page.token
        if not token:
            return parent, children


def _new_parent(client: Any, experiment_id: str, plan: Plan) -> str:
    tags = {"kind": "study", "study": plan.name}
    run = client.create_run(experiment_id, run_name=plan.title, tags=tags)
    return str(run.info.run_id)


def _keep(client: Any, run: Any, files: Sequence[Path]) -> None:
    """Put files with a run; straight into its folder where that is one of this machine, which is five times faster."""
    place = urlsplit(str(run.info.artifact_uri))
    local = Path(unquote(place.path)) if place.scheme in ("", "file") and not place.netloc else None
    if local is not None:
        local.mkdir(parents=True, exist_ok=True)
    for path in files:
        if not path.is_file():
            continue
        if local is not None:
            shutil.copyfile(path, local / path.name)
        else:
            client.log_artifact(run.info.run_id, str(path))


def _log_parent(client: Any, done: Outcome, plan: Plan, tally: Mapping[str, int], study_dir: Path) -> None:
    """Figures, tables and report on the parent run, again only when they differ."""
    files = _study_files(study_dir)
    seen = hashlib.sha256(json.dumps([FORMAT, dict(tally), plan.title, plan.question]).encode())
    for path in files:
        seen.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    mark = seen.hexdigest()
    if client.get_run(done.parent_run_id).data.tags.get("result_sha") == mark:
        return
    for name, value in tally.items():
        client.log_metric(done.parent_run_id, f"cells/{name}", float(value))
    progress = f"{tally['measured']} of {tally['planned']} cells measured, {tally['valid']} valid."
    progress += f" {tally['scored']} of {len(plan.quality)} cells scored for quality." if plan.quality else ""
    note = f"**{plan.question}**\n\n{progress}"
    client.set_tag(done.parent_run_id, "mlflow.note.content", note)
    client.set_experiment_tag(done.experiment_id, "mlflow.note.content", note)
    # Without this MLflow opens an experiment as one of traces and prompts, and the runs are a click away.
    client.set_experiment_tag(done.experiment_id, "mlflow.experimentKind", "custom_model_development")
    for path in files:
        folder = path.parent.name if path.parent != study_dir else None
        client.log_artifact(done.parent_run_id, str(path), folder)
    client.set_terminated(done.parent_run_id)
    client.set_tag(done.parent_run_id, "result_sha", mark)


def _study_files(study_dir: Path) -> list[Path]:
    files = [path for folder in ("figures", "tables") for path in sorted((study_dir / folder).glob("*.*"))]
    files += [study_dir / name for name in ("report.pdf", "paper.pdf", "report.html", "cells.csv", "attribution.csv")]
    return [path for path in files if path.is_file()]


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code (3: MLflow is not reachable now, cells are kept)."""
    parser = argparse.ArgumentParser(prog="kvstudy track", description=__doc__.split("\n")[0])
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument(
        "--uri", help="tracking URI (default: $MLFLOW_TRACKING_URI, else mlflow.db in the results folder)"
    )
    parser.add_argument("--study-dir", type=Path, help="folder of figures and report (default: results/<study>)")
    parser.add_argument("--out", type=Path, required=True, help="JSON of cell id -> run id")
    options = parser.parse_args(argv)
    uri = options.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{options.results}/mlflow.db"
    try:
        plan = read_plan(options.plan)
        done = sync(plan, options.results, uri, options.study_dir)
    except AnalysisError as error:
        print(f"kvstudy: {error}", file=sys.stderr)
        return 2
    except TrackingError as error:
        print(
            f"kvstudy: MLflow was not updated: {error}. Measured cells are kept; `kvstudy track` catches up.",
            file=sys.stderr,
        )
        return UNREACHABLE
    write_json(
        options.out,
        {
            "study": plan.name,
            "uri": redacted(uri),
            "experiment_id": done.experiment_id,
            "parent_run_id": done.parent_run_id,
            "runs": dict(sorted(done.runs.items())),
        },
    )
    print(
        f"{plan.name}: {len(done.runs)} runs in MLflow ({done.created} new, {done.replaced} replaced, "
        f"{done.removed} removed, {done.unchanged} unchanged)"
    )
    return 0
