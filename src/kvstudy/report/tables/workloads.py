"""What becomes of the parts of a workload: short and long requests apart, and prefixes that prompts share."""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvstudy.report import style, words
from kvstudy.report.data import StudyData
from kvstudy.report.latex import Column, Table
from kvstudy.report.tables.measured import heads_of, load_of
from kvstudy.report.tables.registry import table

#: Metrics of both tables, and their headers.
LATENCIES = {"ttft.p50": "TTFT", "ttft.p90": "TTFT p90", "tpot.p50": "TPOT", "e2el.p50": "E2EL"}
OUTPUT = "throughput.output"
CLASSES = ("short", "long")

_LOAD = ["load", "token_rate", "rate", "burstiness", "concurrency"]
#: What a row is, in the files that hold full precision.
_AXES = ["series", "model", "workload", "long_share", "shared_share", "turns", "kv_memory_mib", *_LOAD]


def _points(data: StudyData) -> pd.DataFrame:
    """A row a usable point, in the order of a table."""
    frame = data.points
    if frame.empty:
        return frame
    frame = frame[frame["state"] == "ok"].drop_duplicates("point")
    frame = frame.assign(_rank=[style.rank(str(name))[0] for name in frame["framework"]])
    order = ["model", "workload", "kv_memory_mib", "turns", "shared_share", "long_share", *_LOAD, "_rank", "series"]
    return frame.sort_values(order, kind="stable", na_position="first")


class _Numbers:
    """Metrics by point."""

    def __init__(self, data: StudyData, metrics: list[str]) -> None:
        self._of = {metric: data.metric(metric).set_index("point") for metric in metrics}

    def record(self, metric: str, point: Any) -> dict[str, Any]:
        """The value, be it infinite, with all that belongs to it; empty where there is none."""
        found = self._of[metric]
        row: dict[str, Any] = found.loc[point].to_dict() if point in found.index else {"value": None, "infinite": False}
        names = ("value", "low", "high", "n", "starred", "infinite")
        return {name: row[name] for name in names} if row["infinite"] or not pd.isna(row["value"]) else {}

    def text(self, metric: str, point: Any, factor: float) -> str:
        """The value as it is printed; an en dash where there is none."""
        row = self.record(metric, point)
        if not row:
            return "–"
        text = "∞" if row["infinite"] else words.number(float(row["value"]) * factor)
        return text + ("*" if row["starred"] else "")


def _table(
    name: str, title: str, note: str, columns: list[Column], found: list[tuple[pd.Series, list[str], dict[str, Any]]]
) -> Table:
    """A table from (row, printed cells, numbers)."""
    axes = pd.DataFrame([row for row, _, _ in found])
    records = [{**{axis: row[axis] for axis in _AXES}, **numbers, "cells": row["cells"]} for row, _, numbers in found]
    return Table(
        name,
        title,
        note,
        [Column("Deployment", numeric=False), Column("Load", numeric=False), *columns],
        [[str(row["series"]), load_of(row), *cells] for row, cells, _ in found],
        pd.DataFrame(records),
        groups=[str(row["load"]) for row, _, _ in found],
        heads=heads_of(axes),
        cells=[str(row["cells"]).split() for row, _, _ in found],
    )


@table("classes")
def classes(data: StudyData) -> Table:
    """A row a deployment, load and class of requests: the latencies of short and of long ones apart."""
    title, frame = "Short and long requests apart", _points(data)
    found = []
    if not frame.empty:
        known = {(m, c): m.replace(".", f".{c}.") for m in LATENCIES for c in CLASSES}
        numbers = _Numbers(data, list(known.values()))
        factors = {metric: data.shown(metric).factor for metric in LATENCIES}
        for _, row in frame.iterrows():
            for name in CLASSES:
                at = row["point"]
                if numbers.record(known["ttft.p50", name], at):
                    texts = [numbers.text(known[m, name], at, factors[m]) for m in LATENCIES]
                    of = {m: numbers.record(known[m, name], at) for m in LATENCIES}
                    flat = {f"{m}.{part}": value for m, parts in of.items() for part, value in parts.items()}
                    n = words.integer(float(of["ttft.p50"]["n"]))
                    found.append((row, [name, *texts, n], {"class": name, **flat}))
    if not found:
        return Table("classes", title, "", [], [], pd.DataFrame(), "no measured load mixes short and long requests")
    columns = [Column("Requests", numeric=False), *_latencies(data), Column("n")]
    note = "Of one load, whose requests are drawn short or long. n: requests in the window. * too few to be quoted."
    return _table("classes", title, note, columns, found)


@table("prefixes")
def prefixes(data: StudyData) -> Table:
    """A row a deployment and load: what prompts share, what of it was answered from a cache, and the speeds."""
    title, frame = "Shared prefixes", _points(data)
    if not frame.empty:
        # With what does not share, under the same load, so that the table says what sharing is worth.
        alike = ["model", "workload", "kv_memory_mib", "long_share", "prompt_tokens", "output_tokens", *_LOAD]
        shares = frame.assign(_shares=(frame["shared_share"] > 0) | frame["turns"].notna())
        frame = frame[shares.groupby(alike, dropna=False)["_shares"].transform("any")]
    if frame.empty:
        return Table("prefixes", title, "", [], [], pd.DataFrame(), "no measured load has prompts that share a prefix")
    cached = data.usable().groupby("point")[["prefix_expected", "prefix_hits"]].mean()
    metrics = [OUTPUT, *LATENCIES]
    numbers = _Numbers(data, metrics)
    factors = {metric: data.shown(metric).factor for metric in metrics}
    found = []
    for _, row in frame.iterrows():
        at = row["point"]
        share = cached.loc[at]
        texts = [words.number(100 * value) if share.gt(0).any() else "–" for value in share]
        texts += [numbers.text(metric, at, factors[metric]) for metric in metrics]
        flat = {f"{m}.{part}": value for m in metrics for part, value in numbers.record(m, at).items()}
        found.append((row, texts, {**share.to_dict(), **flat}))
    columns = [Column("Expected", "%"), Column("Cached", "%"), Column("Output", data.shown(OUTPUT).unit)]
    note = (
        "Cached: prompt tokens that the server answered from its prefix cache. Expected: those that a cache never "
        "short of room would answer, which is what prompts share in whole blocks. A dash: nothing is kept between "
        "requests, every prompt is computed whole. * too few samples to be quoted."
    )
    return _table("prefixes", title, note, [*columns, *_latencies(data)], found)


def _latencies(data: StudyData) -> list[Column]:
    return [Column(header, data.shown(metric).unit) for metric, header in LATENCIES.items()]
