"""Captions made from the data: what every reader must be told of workload, arrivals, seeds, intervals, machine."""

from __future__ import annotations

import pandas as pd

from kvstudy.analysis.replicates import OVER_SEEDS
from kvstudy.report import words
from kvstudy.report.data import StudyData


def interval_text(frame: pd.DataFrame) -> str:
    """What the error bars are."""
    kinds = set(frame.loc[frame["state"] == "ok", "interval"]) - {"none"}
    if not kinds:
        return ""
    if kinds == {OVER_SEEDS}:
        return "Bars: 95 % intervals, Student's t over seeds"
    if OVER_SEEDS in kinds:
        return "Bars: 95 % intervals, Student's t over seeds where three or more succeeded, else within the cell"
    return "Bars: 95 % intervals within the cell (one run, so they do not cover the spread between runs)"


def samples_text(data: StudyData, frame: pd.DataFrame) -> str:
    """Requests behind a point: a latency's own n, or that of the latencies of the same points."""
    families = {str(metric).partition(".")[0] for metric in frame["metric"]}
    requests = frame if families <= {"ttft", "tpot", "e2el"} else data.metric("e2el.p50")
    counts = requests.loc[(requests["state"] == "ok") & requests["point"].isin(set(frame["point"])), "n"]
    counts = counts[counts > 0]
    if counts.empty:
        return ""
    low, high = int(counts.min()), int(counts.max())
    return f"n = {low} requests a point" if low == high else f"n = {low} to {high} requests a point"


def setting_text(data: StudyData, frame: pd.DataFrame) -> str:
    """Workload, arrivals, seeds and machine: what every caption must state."""
    table = data.table[data.table["point"].isin(set(frame["point"]))] if "point" in frame else data.table
    models = []
    for name, part in table.groupby("model", sort=True):
        first = part.iloc[0]
        marked = ", random weights" if first["weights"] == "random" else ""
        models.append(f"{name} ({first['dtype']}{marked})")
    texts = [words.TEXTS.get(str(text), str(text)) for text in sorted(set(table["text"]))]
    arrivals = [words.ARRIVALS.get(str(kind), str(kind)) for kind in sorted(set(table["load"]))]
    seeds = sorted({int(seed) for seed in table["seed"]})
    seed_text = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds ({words.span(seeds)})"
    pools = words.span([float(value) for value in table["kv_memory_mib"].unique()])
    noun = "Model" if len(models) == 1 else "Models"
    return ". ".join(
        [
            f"{noun} {words.listed(models)}",
            f"Workload {words.listed(sorted(set(table['workload'])))}: {words.listed(texts)}; "
            f"{words.listed(arrivals)}; {seed_text}; KV memory {pools} MiB",
            f"Machine: {data.machine()}",
        ]
    )


def marks_text(frame: pd.DataFrame) -> str:
    """What the marks that are in the figure mean."""
    parts = []
    ok = frame["state"] == "ok"
    if (ok & frame["saturated"]).any():
        parts.append("open markers: saturated")
    if (frame["state"] == "failed").any():
        kinds = [
            words.OUTCOMES.get(str(k), str(k))
            for k in sorted(set(frame.loc[frame["state"] == "failed", "failure"].dropna()))
        ]
        parts.append(f"crosses: failed ({words.listed(kinds)})")
    if (frame["state"] == "gated").any():
        reasons = sorted(
            {r for text in frame.loc[frame["state"] == "gated", "failure"].dropna() for r in str(text).split(";") if r}
        )
        parts.append(f"struck circles: INVALID, value not shown ({words.listed(reasons)})")
    if (ok & frame["starred"]).any():
        parts.append("faint points: too few samples for this percentile, not to be quoted")
    if "infinite" in frame and (ok & frame["infinite"]).any():
        parts.append("arrows: failures push this percentile to infinity")
    if not parts:
        return ""
    text = "; ".join(parts)
    return text[0].upper() + text[1:]


def joined(*sentences: str) -> str:
    """Sentences, those that are not empty, as one caption."""
    return " ".join(f"{sentence.rstrip('.')}." for sentence in sentences if sentence)
