"""What MLflow shows of a cell: params, metrics, a timeline, tags, a name and times, from the cell's files."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from kvstudy.analysis.plan import PlannedCell
from kvstudy.analysis.table import axes_of, deployment_axes, read_provenance
from kvstudy.grid.records import Summary
from kvstudy.grid.store import MEASURES, MEMORY, SUMMARY

#: Raised when what is logged of a cell changes, so that runs logged before are replaced.
FORMAT = 2

#: Points of a cell's memory timeline, all kinds together; more tell no more in MLflow's charts, and each costs a row.
MOST_POINTS = 60

MIB = 2**20


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
