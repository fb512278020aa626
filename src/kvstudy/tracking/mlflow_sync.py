"""Bring MLflow up to date with the store: an experiment a study, a parent run, and a run a cell, measured or scored.

The files are the truth, MLflow is a copy that may be behind: a cell's run whose `result_sha` tag equals the
hash of its summary is left alone, another is replaced (params are immutable in MLflow), one whose cell is
gone is removed. `result_sha` is written last, so that a run that was cut off is replaced the next time.

There is one writer at a time (a file lock): sixteen processes that open a fresh SQLite store break it for
good. When the store cannot be reached or is locked, the command says so in a line and ends with code 3;
nothing measured is lost, and the next `kvstudy track` catches up.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from kvstudy.analysis.plan import AnalysisError, Plan, PlannedCell, read_plan
from kvstudy.analysis.table import axes_of, deployment_axes, read_cell, read_provenance
from kvstudy.grid.records import Summary
from kvstudy.grid.secrets import redact
from kvstudy.grid.store import CONFIG, LOG, MEASURES, MEMORY, PROVENANCE, SUMMARY, Layout, write_json

#: Raised when what is logged of a cell changes, so that runs logged before are replaced.
FORMAT = 2

#: Points of a cell's memory timeline, all kinds together; more tell no more in MLflow's charts, and each costs a row.
MOST_POINTS = 60

#: MLflow's own limits for one `log_batch`.
_MOST_METRICS, _MOST_PARAMS = 1000, 100

LOCK_WAIT_S = 300.0
UNREACHABLE = 3
MIB = 2**20


class TrackingError(Exception):
    """MLflow cannot be written now; the text is one line and holds no secret."""


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


# --- what is logged ------------------------------------------------------------------------------


def result_sha(cell_dir: Path, sha: str) -> str:
    """Hash of what a run shows of a cell: its summary and, should it ever change, this format."""
    return hashlib.sha256(f"{FORMAT}:{cell_dir.name}:{sha}".encode()).hexdigest()


def _axes(config: Mapping[str, Any]) -> dict[str, Any]:
    """A cell's axes; a quality cell has a suite where another has a workload and a load."""
    if "quality" not in config:
        return axes_of(config)
    return deployment_axes(config) | {"quality": config["quality"]["name"]}


def params_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Axes under plain names, every other setting under its dotted one; numbers without unit or padding."""
    flat = {name: value for name, value in _axes(config).items() if value not in (None, "")}
    for group, value in config.items():
        for name, inner in _flatten(value, group):
            leaf = name.rpartition(".")[2]
            # What is an axis already has a plain name.
            if leaf != "name" and leaf not in flat and name.replace(".", "_") not in flat:
                flat[name] = inner
    return {name: _text(value) for name, value in flat.items() if value is not None}


def _flatten(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{key}")
    elif value is not None:
        yield prefix, value


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, list | tuple):
        return ",".join(_text(inner) for inner in value)
    return str(value)


def metrics_of(config: Mapping[str, Any], summary: Summary) -> dict[str, float]:
    """Metrics by name: a slash makes MLflow's charts group them.

    Numeric axes are among them (`axis/rate`), since MLflow sorts params as text and charts metrics only.
    """
    found: dict[str, float] = {}
    for name, metric in summary.metrics.items():
        if metric.value is not None:
            found[_grouped(name)] = metric.value
    for name, value in summary.memory.items():
        if value is not None:
            found[f"memory_mib/{name}"] = value / MIB
    for name, share in summary.budget.items():
        if share is not None:
            found[f"budget/{name}"] = share
    found |= {f"count/{name}": float(value) for name, value in summary.counts.items()}
    found |= {f"visit_s/{name.removesuffix('_s')}": v for name, v in summary.visit.items() if v is not None}
    for name, value in _axes(config).items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[f"axis/{name}"] = float(value)
    return found


def _grouped(name: str) -> str:
    family, _, rest = name.replace("@", ".", 1).partition(".")  # perplexity@256: after 256 tokens
    return f"{family}/{rest}" if rest else f"{family}/value"


def compared_of(cell_dir: Path) -> dict[str, float]:
    """Of a quality cell, by context: differences from the full cache, share attended, KV held, as in the table."""
    columns = ["measure", "context", "depth", "diff", "attended_share", "kv_bytes"]
    try:
        rows = pq.read_table(cell_dir / MEASURES, columns=columns, use_threads=False).to_pylist()
    except (OSError, ValueError):
        return {}
    every: dict[str, list[float]] = {}
    for row in rows:
        if row["depth"] is None or math.isnan(row["depth"]):
            shown = {f"{row['measure']}_diff": row["diff"], "attended_share": row["attended_share"]}
            shown["kv_mib"] = row["kv_bytes"] / MIB if row["kv_bytes"] is not None else None
            for name, value in shown.items():
                if value is not None and math.isfinite(value):
                    every.setdefault(f"{name}/{row['context']}", []).append(value)
    return {name: sum(values) / len(values) for name, values in every.items()}


def timeline_of(cell_dir: Path) -> list[tuple[str, float, float]]:
    """(name, seconds, MiB) of the memory timeline: first and last of what never changes, the peaks of what does.

    Those that change share what is left of `MOST_POINTS` equally.
    """
    try:
        with pq.ParquetFile(cell_dir / MEMORY) as file:
            table = file.read(use_threads=False)
    except (OSError, ValueError):
        return []
    names = np.array(
        [f"timeline_mib/{kind}.{tier}" for kind, tier in zip(*_columns(table, "kind", "tier"), strict=True)]
    )
    seconds, sizes = (table[name].to_numpy() for name in ("t_s", "bytes"))
    series: dict[str, npt.NDArray[np.intp]] = {}
    for name in sorted(set(names.tolist())):
        rows = np.flatnonzero(names == name)
        series[name] = rows[np.argsort(seconds[rows], kind="stable")]
    flat = {name: len(set(sizes[rows].tolist())) == 1 for name, rows in series.items()}
    share = (MOST_POINTS - 2 * sum(flat.values())) // max(1, len(series) - sum(flat.values()))
    out: list[tuple[str, float, float]] = []
    for name, rows in series.items():
        if flat[name]:
            kept = rows[[0, -1]] if len(rows) > 1 else rows
        else:
            # The largest of each stretch of time: thinning by every k-th sample would lose peaks.
            parts = np.array_split(rows, min(max(share, 2), len(rows)))
            kept = np.array([part[np.argmax(sizes[part])] for part in parts])
        out += [(name, float(seconds[row]), float(sizes[row]) / MIB) for row in kept]
    return out


def _columns(table: pa.Table, *names: str) -> list[list[Any]]:
    return [table[name].to_pylist() for name in names]


def tags_of(cell: PlannedCell, summary: Summary) -> dict[str, str]:
    """Tags to filter by; `result_sha` is not among them, it is written when all else is."""
    axes = _axes(cell.config)
    tags = {
        "kind": "quality" if "quality" in axes else "cell",
        "cell_id": cell.id,
        "mlflow.note.content": f"Cell `{cell.id}`: its folder in `store/` of the results holds requests and memory.",
        "deployment": cell.deployment,
        "outcome": summary.outcome,
        "verdict": summary.verdict.status,
        "reasons": ", ".join(summary.verdict.reasons),
        "flags": ", ".join(summary.flags),
        "cause": summary.cause or "",
        "framework": axes["framework"],
        "implementation": axes["implementation"],
        "model": axes["model"],
        "workload": axes.get("workload"),
        "quality": axes.get("quality"),
        "source": summary.source,
        "weights": axes["weights"],
        "fingerprint": summary.fingerprint,
        "starred": ", ".join(name for name, metric in summary.metrics.items() if metric.starred)[:4000],
        "infinite": ", ".join(name for name, metric in summary.metrics.items() if metric.infinite)[:4000],
    }
    return {name: value for name, value in tags.items() if value}


def run_name(config: Mapping[str, Any]) -> str:
    """A run's name as a person reads it: framework, budget, model, load or suite, seed."""
    axes = _axes(config)
    budget = f" b={axes['budget_share']:g}" if axes["budget_share"] < 1 else ""
    budget = f" {axes['variant']}{budget}" if axes["variant"] else budget
    if "quality" in axes:
        return f"{axes['framework']}{budget} · {axes['model']} · quality {axes['quality']} · seed {axes['seed']}"
    at = axes["load"]
    if axes["rate"] is not None:
        at = f"{axes['rate']:g}/s" if at == "poisson" else f"{at} {axes['rate']:g}/s"
    elif axes["concurrency"] is not None:
        at = f"{axes['concurrency']:g} in flight"
    return f"{axes['framework']}{budget} · {axes['model']} · {axes['workload']} {at} · seed {axes['seed']}"


def times_of(cell_dir: Path, summary: Summary) -> tuple[int, int]:
    """Start and end of a cell in milliseconds, when it was written less how long it took."""
    try:
        written = read_provenance(cell_dir)["time"]
        end = datetime.fromisoformat(written.replace("Z", "+00:00")).timestamp()
    except (KeyError, ValueError, AttributeError):
        end = (cell_dir / SUMMARY).stat().st_mtime
    length = sum(summary.visit.get(name) or 0.0 for name in ("load_s", "drain_s"))
    return int((end - length) * 1000), int(end * 1000)


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


def sqlite_path(uri: str) -> Path | None:
    """The database file of an SQLite URI."""
    match = re.match(r"^sqlite(?:\+\w+)?:///(.*?)(?:\?.*)?$", uri)
    return Path(match.group(1)) if match else None


def _check_sqlite(path: Path, wait_s: float) -> None:
    """Fail at once where MLflow would first retry for minutes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return
    connection = sqlite3.connect(path, timeout=wait_s, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except sqlite3.DatabaseError as error:
        raise TrackingError(f"{path}: {error}") from error
    finally:
        connection.close()


def _client(uri: str) -> Any:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("DO_NOT_TRACK", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "1")
    # An unreachable server is reported in seconds, not after MLflow's seven growing retries.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    from mlflow.tracking import MlflowClient

    for name in ("alembic", "mlflow", "urllib3"):  # after the import, which sets MLflow's own level
        logging.getLogger(name).setLevel(logging.ERROR)
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
    with single_writer(results / "tracking" / ".lock", lock_wait_s):
        database = sqlite_path(uri)
        if database is not None:
            _check_sqlite(database, min(lock_wait_s, 5.0))
        try:
            return _reconcile(_client(uri), plan, results, uri, study_dir or Layout(results).study(plan.name))
        except (TrackingError, AnalysisError, KeyboardInterrupt):
            raise
        except Exception as error:  # MLflow raises its own, SQLAlchemy's and requests' errors alike
            raise TrackingError(f"MLflow at {redacted(uri)}: {_clean(str(error), uri)}") from error


def _reconcile(client: Any, plan: Plan, results: Path, uri: str, study_dir: Path) -> Outcome:
    layout = Layout(results)
    done = Outcome(experiment_id=_experiment(client, plan, results, uri))
    parent, children = _existing(client, done.experiment_id)
    done.parent_run_id = parent or _new_parent(client, done.experiment_id, plan)
    wanted: set[str] = set()
    tally: dict[str, int] = {"planned": len(plan.cells), "measured": 0, "valid": 0, "failed": 0}
    tally |= {"scored": 0} if plan.quality else {}
    for cell in (*plan.cells, *plan.quality):
        folder = layout.cell(cell.id)
        found = read_cell(folder)
        if found is None:
            continue
        summary, sha = found
        wanted.add(cell.id)
        if "quality" in cell.config:
            tally["scored"] += 1
        else:
            tally["measured"] += 1
            tally["failed"] += summary.outcome != "ok"
            tally["valid"] += summary.outcome == "ok" and summary.verdict.status == "VALID"
        mark = result_sha(folder, sha)
        runs = children.get(cell.id, [])
        if len(runs) == 1 and runs[0][1] == mark:
            done.runs[cell.id] = runs[0][0]
            done.unchanged += 1
            continue
        for run_id, _ in runs:
            client.delete_run(run_id)
        done.runs[cell.id] = _log_cell(client, done, cell, folder, summary, mark)
        done.created += not runs
        done.replaced += bool(runs)
    for cell_id, runs in children.items():
        if cell_id not in wanted:
            for run_id, _ in runs:
                client.delete_run(run_id)
                done.removed += 1
    _log_parent(client, done, plan, tally, study_dir)
    return done


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


def _log_cell(client: Any, done: Outcome, cell: PlannedCell, folder: Path, summary: Summary, mark: str) -> str:
    from mlflow.entities import Metric, Param, RunTag

    start, end = times_of(folder, summary)
    tags = {"mlflow.parentRunId": done.parent_run_id, **tags_of(cell, summary)}
    run = client.create_run(done.experiment_id, start_time=start, run_name=run_name(cell.config), tags=tags)
    run_id = str(run.info.run_id)
    values = metrics_of(cell.config, summary) | compared_of(folder)
    metrics = [Metric(name, value, end, 0) for name, value in values.items()]
    points = timeline_of(folder)
    # Steps are milliseconds since the load began, so that timelines of different cells line up.
    steps = [Metric(name, value, start + int(t * 1000), int(t * 1000)) for name, t, value in points]
    metrics += steps[: _MOST_METRICS - len(metrics)]
    params = [Param(name, value[:6000]) for name, value in sorted(params_of(cell.config).items())]
    _keep(client, run, [folder / name for name in (SUMMARY, CONFIG, PROVENANCE, LOG, MEASURES)])
    client.set_terminated(run_id, "FINISHED" if summary.outcome == "ok" else "FAILED", end)
    # The mark goes with the last of it, in one call: a call costs more than what it writes.
    client.log_batch(run_id, metrics=metrics, params=params[:_MOST_PARAMS], tags=[RunTag("result_sha", mark)])
    return run_id


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
