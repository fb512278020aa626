"""The table of admission: who runs, waits, is preempted or refused, by KV memory."""

from __future__ import annotations

import pandas as pd

from kvstudy.report import words
from kvstudy.report.admission import observed
from kvstudy.report.data import StudyData
from kvstudy.report.latex import Column, Table
from kvstudy.report.tables.registry import table


@table("admission")
def admission(data: StudyData) -> Table:
    """A row a deployment, a load at a time, its KV memory from ample to small."""
    title = "Admission, by KV memory"
    frame = observed(data)
    if frame.empty:
        reason = "no load of this study was measured at several KV memories"
        return Table("admission", title, "", [], [], frame, reason)
    columns = [Column("Deployment", numeric=False), Column("KV memory", "MiB"), Column("Running"), Column("Waiting")]
    columns += [Column(label, "%") for label in ("Queued", "Preempted", "Refused")]
    columns += [Column("n"), Column("So it", numeric=False)]
    rows, heads = [], []
    for _, row in frame.iterrows():
        rows.append(
            [
                str(row["series"]),
                words.plain(row["kv_memory_mib"]),
                words.integer(row["running"]),
                words.integer(row["waiting"]),
                *(words.number(100 * row[name]) for name in ("queued", "preempted", "refused")),
                words.integer(row["offered"]),
                str(row["kind"]),
            ]
        )
        named = [str(row["model"])] if frame["model"].nunique() > 1 else []
        named += [words.workload(row, frame), words.load(row)]
        heads.append(" · ".join(named))
    note = (
        "Running and Waiting: the most requests at once, as the server counts them or, where it keeps no peak (vLLM), "
        "as sampled. Queued: requests that had to wait for KV memory; Preempted: times that one was thrown out and had "
        "to be computed again; Refused: errors; each for a hundred offered (n), an en dash where the server does not "
        "count it. A closed loop asks again for what was refused."
    )
    return Table(
        "admission",
        title,
        note,
        columns,
        rows,
        pd.DataFrame(frame.drop(columns="_line")),
        groups=[str(s) for s in frame["series"]],
        heads=heads,
        cells=[str(text).split() for text in frame["cells"]],
    )
