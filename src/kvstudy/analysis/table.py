"""Plan + store -> one tidy table, a row a planned cell.

The table is what every later step reads: figures, tables, claims and tracking never go back to the plan
for an axis. Axis columns have plain names (`framework`, `rate`, ...); measured columns have dotted ones:
`ttft.p50`, `ttft.p50.low`, `.high`, `.n`, `.starred`, `.infinite`; `memory.kv_live_peak.device` (bytes);
`count.ok`. A cell that was not measured has its row too, with outcome `missing`.

Only `summary.json` is read, once a cell, so that 10,000 cells take seconds and no cache can go stale.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from kvstudy.analysis.plan import AnalysisError, Plan, PlannedCell
from kvstudy.grid.records import SCHEMA_VERSION, Summary
from kvstudy.grid.schema import digest
from kvstudy.grid.store import PROVENANCE, SUMMARY, Layout

#: Columns that say what was asked, in reading order. All of them exist in every table.
AXES = (
    "framework",
    "implementation",
    "rule",
    "variant",
    "scheduler",
    "model",
    "weights",
    "parameters",
    "dtype",
    "workload",
    "text",
    "prompt_tokens",
    "long_prompt_tokens",
    "long_share",
    "output_tokens",
    "shared_share",
    "turns",
    "load",
    "rate",
    "token_rate",
    "burstiness",
    "concurrency",
    "slo",
    "budget_share",
    "budget_of",
    "budget_tokens",
    "kv_memory_mib",
    "hardware",
    "device",
    "gpus",
    "link_gbps",
    "seed",
)

#: Columns that say what came of it.
RESULTS = (
    "outcome",
    "cause",
    "verdict",
    "reasons",
    "saturated",
    "flags",
    "source",
    "fingerprint",
    "budget_attended",
    "budget_kept",
    "running_peak",
    "waiting_peak",
    "prefix_hits",
    "prefix_expected",
    "result_sha",
)

#: Keys of a row that identify it. Rows that share a `point` (all but the seed) are replicates; rows that
#: share a `setting` (model, hardware, KV memory, workload, load, seed) may be compared request by request;
#: `workload_key` tells workloads apart whose name is the same.
KEYS = ("cell", "deployment", "visit", "point", "setting", "workload_key")

MISSING = "missing"

#: What to do about a damaged cell; nothing is deleted unasked.
MEASURE_ANEW = "move the cell's folder away and run the study again; only that cell is measured anew"


def deployment_axes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The axes of what a resolved cell or quality cell brings up, and its seed, as flat columns."""
    framework, model, hardware = config["framework"], config["model"], config["hardware"]
    budget, parameters = config.get("budget", {}), model.get("parameters")
    return {
        "framework": framework["name"],
        "implementation": framework.get("implementation", ""),
        "rule": framework.get("rule", "") or "",
        "variant": variant_of(framework),
        "scheduler": framework.get("scheduler") or framework.get("serving") or "",
        "model": model["name"],
        "weights": "random" if model.get("source") == "random" or framework.get("weights") == "dummy" else "pretrained",
        "parameters": float(parameters) if parameters is not None else None,
        "dtype": model.get("dtype", ""),
        "budget_share": float(budget.get("share", 1.0)),
        "budget_of": budget.get("of", "prompt"),
        "budget_tokens": float(budget["tokens"]) if budget.get("tokens") is not None else None,
        "kv_memory_mib": float(config["kv_memory_mib"]),
        "hardware": hardware["name"],
        "device": hardware.get("device", ""),
        "gpus": float(hardware.get("gpus", 0)),
        "link_gbps": float(hardware["link_gbps"]) if hardware.get("link_gbps") is not None else None,
        "seed": int(config["seed"]),
    }


def axes_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The axes of a resolved cell as flat columns; unknown frameworks and loads need no change here."""
    workload, load = config["workload"], config["load"]
    slo: Mapping[str, Any] = load.get("slo") or {}
    shared: Mapping[str, Any] = workload.get("shared_prefix") or {}
    return deployment_axes(config) | {
        "workload": workload["name"],
        "text": workload.get("text", {}).get("kind", ""),
        "prompt_tokens": typical(workload.get("prompt")),
        "long_prompt_tokens": typical(workload.get("long_prompt")),
        "long_share": float(workload.get("long_share", 0.0)),
        "output_tokens": typical(workload.get("output")),
        "shared_share": float(shared.get("share", 0.0)),
        "turns": float(shared["turns"]) if shared.get("kind") == "sessions" else None,
        "load": load["name"],
        "rate": float(load["rate"]) if load.get("rate") is not None else None,
        "token_rate": float(load["token_rate"]) if load.get("token_rate") is not None else None,
        "burstiness": float(load["burstiness"]) if load.get("burstiness") is not None else None,
        "concurrency": _in_flight(load),
        "slo": " ".join(f"{key.removesuffix('_s')}<={value:g}s" for key, value in slo.items() if value is not None),
    }


def _in_flight(load: Mapping[str, Any]) -> float | None:
    """Requests in flight of a closed loop, or at once of a burst; other loads have a rate, or no level at all."""
    found = load.get("concurrency", load.get("requests"))
    return float(found) if found is not None else None


def variant_of(framework: Mapping[str, Any]) -> str:
    """Options that make a framework another thing to compare, as a reader names them; empty where there are none."""
    # The prefill that policies have by default is exact; another is another thing to compare.
    prefill = framework.get("prefill")
    parts = [str(prefill).replace("_", " ")] if prefill in ("full_matrix", "chunked_lossy") else []
    parts += ["prefix caching"] if framework.get("prefix_caching") else []
    parts += [f"{framework['kv_cache_dtype']} KV"] if framework.get("kv_cache_dtype", "auto") != "auto" else []
    parts += ["host offload"] if framework.get("offload_mib") else []
    alpha = framework.get("alpha") if framework.get("implementation") == "native" else None
    parts += [] if alpha is None else ["no threshold" if alpha == "none" else f"alpha {alpha:g}"]
    return ", ".join(parts)


def typical(length: Mapping[str, Any] | None) -> float | None:
    """Centre of a length distribution in tokens: the value, the middle of the range, or the median."""
    if length is None:
        return None
    if "tokens" in length:
        return float(length["tokens"])
    if "median" in length:
        return float(length["median"])
    return (float(length["low"]) + float(length["high"])) / 2


def setting_of(cell: PlannedCell) -> str:
    """Name of what a cell is compared under: its config but for framework, budget and sweep mode."""
    apart = ("framework", "budget", "sweep")
    return digest({key: value for key, value in cell.config.items() if key not in apart})


def point_of(cell: PlannedCell) -> str:
    """Name of the measurement point of a cell: its config without the seed."""
    rest = {key: value for key, value in cell.config.items() if key != "seed"}
    return f"{cell.deployment}:{digest(rest)}"


def read_cell(cell_dir: Path) -> tuple[Summary, str] | None:
    """The summary of a measured cell and the hash of its bytes; None where it was not measured.

    Raises
    ------
    AnalysisError
        The summary is there but is not one of this version.
    """
    path = cell_dir / SUMMARY
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        summary = Summary.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise AnalysisError(f"{path} is not a summary: {where}: {first['msg']}: {MEASURE_ANEW}") from None
    if summary.schema_version != SCHEMA_VERSION:
        raise AnalysisError(f"{path} has schema version {summary.schema_version}, this code reads {SCHEMA_VERSION}")
    return summary, hashlib.sha256(raw).hexdigest()


def _result_columns(summary: Summary, sha: str, units: dict[str, str]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "outcome": summary.outcome,
        "cause": summary.cause,
        "verdict": summary.verdict.status,
        "reasons": ";".join(summary.verdict.reasons),
        "saturated": "saturated" in summary.flags,
        "flags": ";".join(summary.flags),
        "source": summary.source,
        "fingerprint": summary.fingerprint,
        "budget_attended": summary.budget.get("attended"),
        "budget_kept": summary.budget.get("kept"),
        "running_peak": _checked(summary, "concurrency", "running_peak"),
        "waiting_peak": _checked(summary, "concurrency", "waiting_peak"),
        # Shares of prompt tokens: answered from cached prefixes, and what a cache never short of room would answer.
        "prefix_hits": _checked(summary, "prefix_hits", "share"),
        "prefix_expected": _checked(summary, "prefix_hits", "expected"),
        "result_sha": sha,
    }
    for name, metric in summary.metrics.items():
        units.setdefault(name, metric.unit)
        row[name] = metric.value
        row[f"{name}.low"] = metric.low
        row[f"{name}.high"] = metric.high
        row[f"{name}.n"] = metric.n
        row[f"{name}.starred"] = metric.starred
        row[f"{name}.infinite"] = metric.infinite
    row.update({f"memory.{kind}": value for kind, value in summary.memory.items()})
    row.update({f"count.{kind}": value for kind, value in summary.counts.items()})
    row.update({f"visit.{kind}": value for kind, value in summary.visit.items()})
    row.update({f"window.{kind}": value for kind, value in summary.window.items()})
    return row


def _checked(summary: Summary, check: str, name: str) -> float | None:
    """A number of one of the cell's checks, where the server let it be known."""
    found = summary.checks.get(check)
    value = found.get(name) if isinstance(found, Mapping) else None
    return float(value) if value is not None else None


def build(plan: Plan, results: Path, fingerprint: str | None = None) -> pd.DataFrame:
    """The tidy table of a study.

    Parameters
    ----------
    plan
        The study.
    results
        The results folder that holds `store/`.
    fingerprint
        Keep only cells of the machine whose fingerprint begins so; the others count as missing.

    Raises
    ------
    AnalysisError
        The study holds cells of more than one machine and `fingerprint` does not choose between them.
    """
    layout = Layout(results)
    units: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    for cell in plan.cells:
        row: dict[str, Any] = {
            "cell": cell.id,
            "deployment": cell.deployment,
            "visit": cell.visit,
            "point": point_of(cell),
            "setting": setting_of(cell),
            "workload_key": digest(cell.config["workload"]),
            **axes_of(cell.config),
        }
        found = read_cell(layout.cell(cell.id))
        if found is not None and (fingerprint is None or found[0].fingerprint.startswith(fingerprint)):
            row.update(_result_columns(*found, units))
        else:
            row["outcome"] = MISSING
        rows.append(row)
    table = _frame(rows)
    check_one_machine(table)
    table.attrs = {
        "study": {"name": plan.name, "title": plan.title, "question": plan.question},
        "units": units,
        "machines": machines(table, results),
    }
    return table


def _frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    table = pd.DataFrame.from_records(rows)
    for column in (*KEYS, *AXES, *RESULTS):
        if column not in table:
            table[column] = None
    fixed = [*KEYS, *AXES, *RESULTS]
    table = table[[*fixed, *sorted(set(table.columns) - set(fixed))]].copy()
    numeric = [
        "parameters",
        "prompt_tokens",
        "long_prompt_tokens",
        "output_tokens",
        "rate",
        "token_rate",
        "turns",
        "burstiness",
        "concurrency",
        "budget_tokens",
        "link_gbps",
    ]
    numeric += ["budget_attended", "budget_kept", "running_peak", "waiting_peak", "prefix_hits", "prefix_expected"]
    for column in table.columns:
        if column in numeric or ("." in column and not column.endswith((".starred", ".infinite"))):
            table[column] = pd.to_numeric(table[column]).astype("float64")
        elif column == "saturated" or column.endswith((".starred", ".infinite")):
            table[column] = table[column].eq(True)
    text = ["cause", "verdict", "reasons", "flags", "source", "fingerprint", "result_sha"]
    for column in text:
        table[column] = table[column].astype("string")
    return table


def check_one_machine(table: pd.DataFrame) -> None:
    """Refuse to pool cells of different hardware fingerprints.

    Raises
    ------
    AnalysisError
        Names the fingerprints and cells of each.
    """
    groups = by_fingerprint(table)
    if len(groups) <= 1:
        return
    lines = []
    for fingerprint, cells in groups.items():
        shown = ", ".join(cells[:3]) + (f" and {len(cells) - 3} more" if len(cells) > 3 else "")
        lines.append(f"  {fingerprint}: {len(cells)} cells ({shown})")
    raise AnalysisError(
        "these cells were measured on different machines and are not pooled; choose one with "
        "--fingerprint:\n" + "\n".join(lines)
    )


def by_fingerprint(table: pd.DataFrame) -> dict[str, list[str]]:
    """Measured cells of the table by the fingerprint of the machine, the largest group first."""
    measured = table[table["fingerprint"].notna()]
    groups: dict[str, list[str]] = {}
    for fingerprint, cell in zip(measured["fingerprint"], measured["cell"], strict=True):
        groups.setdefault(str(fingerprint), []).append(str(cell))
    return dict(sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])))


def machines(table: pd.DataFrame, results: Path) -> dict[str, dict[str, Any]]:
    """The detected hardware of each fingerprint, from the provenance of its first cell."""
    layout = Layout(results)
    found: dict[str, dict[str, Any]] = {}
    for fingerprint, cells in by_fingerprint(table).items():
        found[fingerprint] = read_provenance(layout.cell(cells[0])).get("hardware", {}) or {}
    return found


def read_columns(path: Path, columns: list[str]) -> pa.Table:
    """Some columns of a parquet file of a measured cell, in a fifth of the time that a frame takes.

    Raises
    ------
    AnalysisError
        It is not there or damaged.
    """
    with _legible(path), pq.ParquetFile(path) as file:
        return file.read(columns, use_threads=False)


@contextmanager
def _legible(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise AnalysisError(f"{path} is damaged ({' '.join(str(error).split())[:120]}): {MEASURE_ANEW}") from None


def read_measured(path: Path, columns: list[str] | None = None) -> pd.DataFrame:
    """A parquet file of a measured cell.

    Raises
    ------
    AnalysisError
        It is not there or damaged.
    """
    with _legible(path):
        return pd.read_parquet(path, columns=columns)


def read_provenance(cell_dir: Path) -> dict[str, Any]:
    """The provenance of a cell, empty where there is none."""
    try:
        value = json.loads((cell_dir / PROVENANCE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def missing(table: pd.DataFrame) -> list[str]:
    """Ids of planned cells that have no result yet, in plan order."""
    return [str(cell) for cell in table.loc[table["outcome"] == MISSING, "cell"]]


def metric_ids(columns: Iterable[str]) -> list[str]:
    """Ids of the metrics that a table or its column names hold."""
    names = set(columns)
    return sorted(name for name in names if f"{name}.starred" in names)


def usable(table: pd.DataFrame) -> pd.Series:
    """Rows whose numbers may be pooled: measured to the end, not gated, and no debugging run of a fork."""
    valid = (table["verdict"] == "VALID").fillna(False).astype(bool)
    return (table["outcome"] == "ok") & valid & (table["source"] != "debug").fillna(True).astype(bool)


def with_offered(frame: pd.DataFrame) -> pd.DataFrame:
    """Add what makes two rows' loads equals although their rates or their names differ.

    `offered`: tokens a second where a load is given by them (workloads of different lengths then have rates of their
    own), else requests a second. `loop`: arrivals of any burstiness are `open`. `burstiness`: Poisson's is 1.
    """
    return frame.assign(
        offered=pd.to_numeric(frame["token_rate"]).fillna(frame["rate"]),
        loop=frame["load"].replace({"poisson": "open", "gamma": "open"}),
        burstiness=pd.to_numeric(frame["burstiness"]).mask(frame["load"] == "poisson", 1.0),
    )


def read_table(path: Path) -> pd.DataFrame:
    """The table that `analysis.run` wrote.

    Raises
    ------
    AnalysisError
        There is none.
    """
    try:
        table = pd.read_parquet(path)
    except FileNotFoundError:
        raise AnalysisError(f"no table at {path}; make it with `kvstudy analyse`") from None
    except ValueError:
        raise AnalysisError(f"{path} is not a table of cells; name the study's cells.parquet") from None
    for column in set(RESULTS) - set(table.columns):  # which an older version did not write
        table[column] = float("nan")
    absent = [axis for axis in AXES if axis not in table]
    if absent:
        raise AnalysisError(f"{path} has no column {absent[0]}: an older version made it, run `kvstudy analyse` again")
    return table
