"""What becomes of requests where KV memory is short: a row a point, for the table and for the sentence about it.

Only loads that were offered at several KV memories are looked at: elsewhere there is nothing to compare.
"""

from __future__ import annotations

import pandas as pd

from kvstudy.analysis.table import MISSING
from kvstudy.report import words
from kvstudy.report.data import StudyData, series_of

#: What one load is, but for the KV memory that it meets.
LOAD = ["model", "workload_key", "hardware", "load", "rate", "burstiness", "concurrency"]

ADMITS, QUEUES, PREEMPTS, REFUSES = "admits all", "queues", "preempts", "refuses"


def observed(data: StudyData) -> pd.DataFrame:
    """A row a point, by load, line, and KV memory from ample to small; empty where no load met several memories.

    Beside the axes: `running` and `waiting`, the most requests at once; `queued`, `preempted` and `refused` for each
    request offered, NaN where the server does not count them; `offered`; `kind`, the worst of what happened; `cells`.
    """
    cells = data.cells
    several = cells.groupby(LOAD, dropna=False)["kv_memory_mib"].transform("nunique") > 1
    gated = (cells["outcome"] == "ok") & (cells["verdict"] != "VALID").fillna(True)
    shown = several & ~gated & (cells["outcome"] != MISSING) & (cells["source"] != "debug").fillna(True)
    cells = cells[shown.astype(bool)]
    if cells.empty:
        return pd.DataFrame()
    seeds = cells.groupby("point", sort=False)
    found = seeds[[*LOAD, "workload", "kv_memory_mib", "series", "framework"]].first()
    for name in ("prompt_tokens", "output_tokens", "long_share", "shared_share", "turns"):
        found[name] = seeds[name].first()
    found["offered"] = _sum(cells, "count.offered")
    found["running"] = _peak(cells, "running_peak")
    found["waiting"] = _peak(cells, "waiting_peak")
    for name, count in (
        ("queued", "count.queued_for_memory"),
        ("preempted", "count.preemptions"),
        ("refused", "count.error"),
    ):
        found[name] = _sum(cells, count) / found["offered"].where(found["offered"] > 0)
    bad = cells["outcome"].where(cells["outcome"] != "ok").groupby(cells["point"], sort=False).first()
    found["kind"] = [_kind(row, outcome) for (_, row), outcome in zip(found.iterrows(), bad, strict=True)]
    found["cells"] = seeds["cell"].agg(" ".join)
    lines = {label: place for place, (label, _, _) in enumerate(series_of(data.cells))}
    found["_line"] = found["series"].map(lines)
    order = [*LOAD, "_line", "kv_memory_mib"]
    return found.sort_values(order, ascending=[name != "kv_memory_mib" for name in order]).reset_index()


def _sum(cells: pd.DataFrame, column: str) -> pd.Series:
    """Over the seeds of a point; NaN where none of them has it."""
    values = cells[column] if column in cells else pd.Series(float("nan"), index=cells.index)
    return values.groupby(cells["point"], sort=False).sum(min_count=1)


def _peak(cells: pd.DataFrame, column: str) -> pd.Series:
    values = cells[column] if column in cells else pd.Series(float("nan"), index=cells.index)
    return values.groupby(cells["point"], sort=False).max()


def _kind(row: pd.Series, outcome: object) -> str:
    """The worst of what happened to a point's requests."""
    if isinstance(outcome, str):
        return REFUSES if outcome == "unsupported" else words.OUTCOMES.get(outcome, outcome)
    if row["preempted"] > 0:
        return PREEMPTS
    if row["queued"] > 0 or row["running"] < row["concurrency"]:
        return QUEUES
    # An open loop on a server that does not say why a request waits.
    waits = pd.isna(row["queued"]) and pd.isna(row["concurrency"]) and row["waiting"] > 0
    return QUEUES if waits else ADMITS


def course(part: pd.DataFrame) -> str:
    """What happens along the KV memory, largest first: `admits all at 96, queues from 48 to 9.6`."""
    runs: list[tuple[str, list[float]]] = []
    for _, row in part.iterrows():
        if not runs or runs[-1][0] != row["kind"]:
            runs.append((row["kind"], []))
        runs[-1][1].append(float(row["kv_memory_mib"]))
    texts = []
    for kind, memories in runs:
        first, last = words.plain(memories[0]), words.plain(memories[-1])
        texts.append(f"{kind} at {first}" if first == last else f"{kind} from {first} to {last}")
    return ", ".join(texts)
