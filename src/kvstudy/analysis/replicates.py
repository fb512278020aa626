"""Replicates over seeds -> one row a measurement point and metric, with an interval that says what it is.

With three seeds or more the value is the mean over seeds and the interval Student's t over them (the
seeds draw different prompts and arrivals, so it covers all that varies). With fewer, the spread over
seeds cannot be estimated: the interval is the hull of the within-cell intervals, and is labelled so.
Failed and gated cells are never averaged in; they are counted.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import stats

from kvstudy.analysis.table import AXES, MISSING, metric_ids, usable

#: Seeds from which an interval over seeds is given.
ENOUGH_SEEDS = 3
CONFIDENCE = 0.95

OVER_SEEDS = "t over seeds"
WITHIN_CELL = "within cell"


def points(table: pd.DataFrame, metrics: list[str] | None = None) -> pd.DataFrame:
    """One row a point and metric.

    Columns: `point`, `deployment`, the axes but the seed, `state` (`ok`, `failed`, `gated`, `debug`, `missing`;
    what is true of the point when no seed of it is usable), `failure` (outcome or reason of the first
    that is not), counts of seeds (`seeds`, `ok`, `failed`, `gated`, `missing`), `saturated`, `metric`,
    `unit`, `value`, `low`, `high`, `interval`, `n` (samples, all seeds), `starred`, `infinite`, and
    `cells` (ids, space separated): the cells that the number came from.
    """
    names = metric_ids(table.columns) if metrics is None else metrics
    units = table.attrs.get("units", {})
    base = _conditions(table)
    if base.empty:
        return pd.DataFrame()
    good = table[usable(table)]
    cells = good.groupby("point", sort=False)["cell"].agg(" ".join)
    frames = []
    for metric in names:
        if f"{metric}.starred" not in table:
            continue
        frame = base.join(_aggregate(good, metric))
        frame.insert(len(base.columns), "metric", metric)
        frame["unit"] = units.get(metric, "")
        frame["cells"] = cells.reindex(frame.index).fillna("")
        frames.append(frame)
    if not frames:
        return pd.DataFrame()
    out = pd.concat(frames).reset_index()
    for flag in ("starred", "infinite"):
        out[flag] = out[flag].eq(True)
    out["n"] = out["n"].fillna(0).astype("int64")
    return out


def _conditions(table: pd.DataFrame) -> pd.DataFrame:
    """A row a point: its axes, state and counts of seeds."""
    work = table.copy()
    work.attrs = {}
    good = usable(work)
    is_missing = work["outcome"] == MISSING
    work["_ok"] = good
    work["_missing"] = is_missing
    work["_failed"] = ~is_missing & (work["outcome"] != "ok")
    work["_debug"] = ~is_missing & work["source"].eq("debug").fillna(False).astype(bool)
    work["_gated"] = ~is_missing & (work["outcome"] == "ok") & ~good & ~work["_debug"]
    why = work["outcome"].astype("string").where(work["_failed"], work["reasons"])
    work["_why"] = why.where(work["_failed"] | work["_gated"])
    axes = [axis for axis in AXES if axis != "seed"]
    groups = work.groupby("point", sort=False)
    base = groups[["deployment", "workload_key", *axes, "budget_attended", "budget_kept", "source"]].first()
    # The mean over seeds is what was measured; `first` would silently take one seed's share.
    for share in ("budget_attended", "budget_kept"):
        base[share] = work[good].groupby("point", sort=False)[share].mean()
    base["seeds"] = groups["seed"].nunique()
    for name in ("ok", "failed", "gated", "missing"):
        base[name] = groups[f"_{name}"].sum().astype("int64")
    debug = np.where(groups["_debug"].any(), "debug", "missing")
    state = np.where(base["failed"] > 0, "failed", np.where(base["gated"] > 0, "gated", debug))
    base["state"] = np.where(base["ok"] > 0, "ok", state)
    base["failure"] = groups["_why"].first()
    base["saturated"] = groups["saturated"].any()
    kinds = [name for name in ("count.error", "count.timeout", "count.censored") if name in work]
    base["unanswered"] = groups[kinds].sum().sum(axis=1) if kinds else 0
    return base


def _aggregate(good: pd.DataFrame, metric: str) -> pd.DataFrame:
    columns = [metric, *(f"{metric}.{part}" for part in ("low", "high", "n", "starred", "infinite"))]
    part = good[["point", *columns]].copy()
    part.attrs = {}
    part.columns = ["point", "value", "low", "high", "n", "starred", "infinite"]
    groups = part.groupby("point", sort=False)
    infinite = groups["infinite"].any()
    values = groups["value"]
    count = values.count()
    mean = values.mean().where(~infinite)
    deviation = values.std(ddof=1)
    over_seeds = (count >= ENOUGH_SEEDS) & ~infinite
    quantile = stats.t.ppf(0.5 + CONFIDENCE / 2, np.maximum(count - 1, 1))
    half = quantile * deviation / np.sqrt(count.clip(lower=1))
    hull = groups.agg(low=("low", "min"), high=("high", "max"))
    has_hull = hull["low"].notna() & hull["high"].notna()
    interval = np.where(over_seeds, OVER_SEEDS, np.where(has_hull & ~infinite, WITHIN_CELL, "none"))
    return pd.DataFrame(
        {
            "value": mean,
            "low": np.where(over_seeds, mean - half, hull["low"].where(~infinite)),
            "high": np.where(over_seeds, mean + half, hull["high"].where(~infinite)),
            "interval": interval,
            "n": groups["n"].sum(),
            "starred": groups["starred"].any(),
            "infinite": infinite,
        }
    )
