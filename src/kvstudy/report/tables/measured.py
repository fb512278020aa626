"""The tables of what was measured: cells, setup, attribution, claims, guide."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from kvstudy.analysis.recommend import leave_one_out, measured
from kvstudy.analysis.table import read_provenance
from kvstudy.grid.store import CONFIG
from kvstudy.report import style, words
from kvstudy.report.data import StudyData, memory_bytes, series_of, with_series
from kvstudy.report.latex import Column, Table
from kvstudy.report.tables.registry import table

#: Rows of the attribution table from which only the highest load of each comparison is printed.
MOST_RATIOS = 40

#: An interval whose ends differ by more than this factor is wide, and the note says why there are such.
WIDE = 4.0

#: Metrics of the summary table, in order.
SUMMARY_METRICS = ("throughput.output", "goodput", "ttft.p50", "tpot.p50", "e2el.p50")


def load_of(row: pd.Series) -> str:
    """A row's load as a cell of a table has room for."""
    return words.load(row).replace("requests", "req").replace("request", "req")


def heads_of(frame: pd.DataFrame) -> list[str]:
    """For each row the model, workload and KV memory, those of them that differ between rows."""
    several = [key for key in ("model", "workload_key", "kv_memory_mib") if frame[key].nunique() > 1]
    heads = []
    for _, row in frame.iterrows():
        parts = [str(row["model"])] if "model" in several else []
        parts += [words.workload(row, frame)] if "workload_key" in several else []
        parts += [f"KV {words.plain(row['kv_memory_mib'])} MiB"] if "kv_memory_mib" in several else []
        heads.append(" · ".join(parts))
    return heads


def _verdict(row: pd.Series) -> str:
    if row["state"] == "missing":
        return "not measured"
    if row["state"] == "debug":
        return "debugging run, no speeds"
    if row["state"] == "failed":
        return words.OUTCOMES.get(str(row["failure"]), str(row["failure"]))
    if row["state"] == "gated":
        return f"INVALID: {str(row['failure']).replace(';', ', ')}"
    bad = int(row["failed"]) + int(row["gated"])
    notes = ["saturated"] if row["saturated"] else []
    unanswered = int(row["unanswered"])
    notes += [f"{unanswered} not answered"] if unanswered else []
    notes += [f"{bad} of {int(row['seeds'])} seeds not usable"] if bad else []
    return ", ".join(["VALID", *notes])


@table("summary")
def summary(data: StudyData) -> Table:
    """A row a deployment and load: medians, throughput, live KV, admitted requests, verdict."""
    frame = data.points
    metrics = [m for m in SUMMARY_METRICS if not frame.empty and (frame["metric"] == m).any()]
    shown = {m: data.shown(m) for m in metrics}
    title = "Every deployment under every load"
    if frame.empty:
        return Table("summary", title, "", [], [], pd.DataFrame(), "no cell of this study has been measured")
    base = frame.drop_duplicates("point").set_index("point")
    wide = frame.pivot(index="point", columns="metric", values=["value", "low", "high", "starred", "infinite"])
    usable = data.usable()
    live = (memory_bytes(usable, "kv_live", "device") / words.MIB).groupby(usable["point"]).max()
    host = (memory_bytes(usable, "kv_live", "host") / words.MIB).groupby(usable["point"]).max()
    running = bool(usable["running_peak"].notna().any())
    admitted = usable.groupby("point")["running_peak"].max()
    requests = usable.groupby("point")["count.ok"].sum() if "count.ok" in usable else pd.Series(dtype=float)

    lines = {label: place for place, (label, _, _) in enumerate(series_of(data.cells))}
    base["_line"] = base["series"].map(lines)
    base = base.sort_values(
        ["model", "workload", "workload_key", "kv_memory_mib", "_line", "load", "rate", "concurrency", "burstiness"]
    )
    offered = frame[frame["metric"] == "rate.offered"].set_index("point")["value"]
    columns = [Column("Deployment", numeric=False), Column("Load", numeric=False)]
    columns += [Column("Offered", "req/s")] if len(offered) else []
    columns += [Column(_short(m, shown[m].label), shown[m].unit) for m in metrics]
    columns += [Column("KV live", "MiB")]
    columns += [Column("KV host", "MiB")] if host.fillna(0).gt(0).any() else []
    columns += [Column("Running")] if running else []
    columns += [Column("n"), Column("Verdict", numeric=False)]
    rows: list[list[str]] = []
    records: list[dict[str, Any]] = []
    for point, row in base.iterrows():
        cells = [str(row["series"]), load_of(row)]
        cells += [words.number(_float(offered.get(point)))] if len(offered) else []
        record = {key: row[key] for key in ("series", "framework", "model", "workload", "load", "rate", "concurrency")}
        record |= {key: row[key] for key in ("budget_share", "budget_attended", "kv_memory_mib", "seeds", "ok")}
        record["rate.offered"] = offered.get(point)
        for metric in metrics:
            value, starred = wide.at[point, ("value", metric)], wide.at[point, ("starred", metric)]
            infinite = wide.at[point, ("infinite", metric)]
            text = "∞" if infinite is True else words.number(_float(value, shown[metric].factor))
            cells.append(f"{text}*" if starred is True and text != "–" else text)
            for part in ("value", "low", "high", "starred", "infinite"):
                record[f"{metric}.{part}"] = wide.at[point, (part, metric)]
        cells.append(words.number(_float(live.get(point))))
        record["kv_live_peak_device_mib"] = live.get(point)
        if any(c.label == "KV host" for c in columns):
            cells.append(words.number(_float(host.get(point))))
        record["kv_live_peak_host_mib"] = host.get(point)
        if running:
            cells.append(words.integer(_float(admitted.get(point))))
            record["running"] = admitted.get(point)
        n = requests.get(point)
        cells += [words.integer(_float(n)), _verdict(row)]
        record |= {"requests_ok": n, "verdict": _verdict(row), "cells": row["cells"], "point": point}
        rows.append(cells)
        records.append(record)
    note = (
        "Medians over requests in the steady window; n: requests answered. * too few samples to be quoted. Load is the "
        "rate that was asked for, Offered what was drawn from it in the window."
    )
    if running:
        note += " Running: the most requests in the batch at once."
    made = pd.DataFrame.from_records(records)
    groups = [str(s) for s in base["series"]]
    sources = [str(text).split() for text in base["cells"]]
    return Table("summary", title, note, columns, rows, made, groups=groups, heads=heads_of(base), cells=sources)


def _short(metric: str, label: str) -> str:
    return {"throughput.output": "Output", "goodput": "Goodput"}.get(metric, label.replace("median ", ""))


def _float(value: Any, factor: float = 1.0) -> float | None:
    return None if value is None or pd.isna(value) else float(value) * factor


@table("setup")
def setup(data: StudyData) -> Table:
    """A row a framework: implementation, version, and the settings that it was started with."""
    columns = [Column(label, numeric=False) for label in ("Framework", "Implementation", "Version")]
    columns.append(Column("Settings", numeric=False, wide=True))
    rows = []
    records = []
    seen: set[tuple[str, ...]] = set()
    measured = data.table[data.table["fingerprint"].notna()]
    order = sorted(measured.index, key=lambda i: style.rank(str(measured.at[i, "framework"])))
    for index in order:
        row = measured.loc[index]
        key = tuple(str(row[name]) for name in ("framework", "implementation", "rule", "variant", "scheduler"))
        if key in seen:
            continue
        seen.add(key)
        folder = data.cell_dir(str(row["cell"]))
        framework = _config(folder).get("framework", {})
        cells = [
            words.framework(key[0]),
            key[1],
            version_of(framework, read_provenance(folder)),
            settings_of(framework),
        ]
        rows.append(cells)
        records.append(dict(zip(("framework", "implementation", "version", "settings"), cells, strict=True)))
    empty = "" if rows else "no cell of this study has been measured"
    return Table("setup", "Frameworks and their settings", "", columns, rows, pd.DataFrame(records), empty)


def _config(folder: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    except OSError:
        return {}
    return value if isinstance(value, dict) else {}


def version_of(framework: dict[str, Any], provenance: dict[str, Any]) -> str:
    """The version a framework ran at: its own package's pin, or this project's version and commit."""
    pins = framework.get("pins") or {}
    own = [name for name in pins if str(framework.get("name")) in name]
    if framework.get("implementation") != "native" and pins:
        return ", ".join(f"{name} {pins[name]}" for name in own or sorted(pins)[:1])
    commit = str(provenance.get("commit") or "")[:10]
    dirty = ", changed" if commit and provenance.get("dirty") else ""
    version = f"kvstudy {provenance.get('kvstudy', '')}".strip()
    return f"{version} ({commit}{dirty})" if commit else version


def settings_of(framework: dict[str, Any]) -> str:
    """Options of a framework as `name = value`, without what has a column of its own."""
    apart = {"name", "implementation", "pins", "title", "bring_up_s"}
    parts = []
    for name, value in framework.items():
        if name in apart or value in (None, [], (), ""):
            continue
        parts.append(f"{name} = {'yes' if value is True else 'no' if value is False else value}")
    return ", ".join(parts)


@table("attribution")
def attribution(data: StudyData) -> Table:
    """A row a comparison and load: the paired ratios of each metric."""
    title = "What is due to the engine and what to the policy"
    frame = data.attribution
    if frame.empty:
        reason = "no two valid cells of this study share model, memory, workload, load and seed"
        return Table("attribution", title, "", [], [], frame, reason)
    names = dict(zip(data.cells["deployment"], data.cells["series"], strict=True))
    metrics = [m for m in ("throughput.output", "ttft", "tpot", "e2el") if (frame["metric"] == m).any()]
    columns = [Column("Part", numeric=False), Column("Ratio", numeric=False)]
    columns += [Column("Load", numeric=False)]
    columns += [Column({"throughput.output": "Output"}.get(m, m.upper()), numeric=False) for m in metrics]
    columns += [Column("n")]
    rows: list[list[str]] = []
    groups: list[str] = []
    bold: set[tuple[int, int]] = set()
    axes = ["workload_key", "long_share", "shared_share", "turns", "prompt_tokens", "output_tokens"]
    frame = frame.merge(data.table[axes].drop_duplicates("workload_key"), on="workload_key", how="left")
    frame["_order"] = frame["part"].map({"engine": 0, "policy": 1, "total": 2})
    frame["_level"] = frame["rate"].fillna(frame["concurrency"])
    pair = ["model", "workload_key", "kv_memory_mib", "_order", "candidate", "baseline", "load", "burstiness"]
    note = ""
    if len(frame[[*pair, "_level"]].drop_duplicates()) > MOST_RATIOS:
        frame = frame[frame["_level"] == frame.groupby(pair, dropna=False)["_level"].transform("max")]
        note = "The highest load of each comparison; the CSV file holds all. "
    firsts = []
    sources: list[list[str]] = []
    for key, group in frame.groupby([*pair, "_level"], sort=True, dropna=False):
        first = group.iloc[0]
        firsts.append(first)
        cells = [
            str(first["part"]),
            f"{names.get(first['candidate'], first['candidate_framework'])} / "
            f"{names.get(first['baseline'], first['baseline_framework'])}",
            load_of(first) + (" †" if first["saturated"] else ""),
        ]
        for metric in metrics:
            found = group[group["metric"] == metric]
            if len(found) and (found.iloc[0]["low"] > 1 or found.iloc[0]["high"] < 1):
                bold.add((len(rows), len(cells)))
            cells.append(words.bracketed(*found.iloc[0][["ratio", "low", "high"]]) if len(found) else "–")
        paired = group.loc[group["metric"] != "throughput.output", "n"]
        cells.append(words.integer(float(paired.max()) if len(paired) else None))
        rows.append(cells)
        groups.append(str(key[3]))
        sources.append([cell for text in group["cells"] for cell in str(text).split()])
    kinds = [str(kind) for kind in dict.fromkeys(frame["interval"]) if kind != "none"]
    note += (
        "Ratio of the first to the second, geometric mean over the requests that both answered (n), paired "
        "by request on the same drawn workload; output throughput is paired by cell. Below 1 is less "
        f"time, or fewer tokens. In brackets the 95 % interval ({words.listed(kinds)}); bold: excludes 1."
    )
    if (frame["high"] > WIDE * frame["low"]).any():
        note += " Wide intervals: the window holds few requests, or few that do not wait in one queue."
    if frame["saturated"].any():
        note += " † one of the two was saturated: latencies there measure the queue."
    return Table(
        "attribution",
        title,
        note,
        columns,
        rows,
        data.attribution,
        groups=groups,
        heads=heads_of(pd.DataFrame(firsts)),
        bold=bold,
        cells=sources,
    )


@table("claims")
def claims(data: StudyData) -> Table:
    """A row a claim: what was claimed, what became of it, and the number that decided."""
    title = "Claims of the field, decided by these cells"
    if not data.claims:
        return Table("claims", title, "", [], [], pd.DataFrame(), "no claims were decided for this study")
    columns = [
        Column("", numeric=False),
        Column("Claim", numeric=False, wide=True),
        Column("Verdict", numeric=False),
        Column("Decided by", numeric=False, wide=True),
    ]
    rows: list[list[str]] = []
    records = []
    bold: set[tuple[int, int]] = set()
    for claim in data.claims:
        if claim["status"] in ("supported", "contradicted"):
            bold.add((len(rows), 2))
        rows.append([claim["id"], claim["statement"], claim["status"], decided_by(claim)])
        keys = ("id", "statement", "source", "status", "reason")
        records.append({**{key: claim[key] for key in keys}, "cells": " ".join(claim["cells"])})
    note = (
        "Supported: the whole 95 % interval lies within the bound everywhere the claim speaks of; "
        "contradicted: somewhere it lies outside; inconclusive: it spans the bound. The number shown is the "
        "one that decides most sharply; all are in claims.json, with their cells."
    )
    sources = [list(claim["cells"]) for claim in data.claims]
    return Table("claims", title, note, columns, rows, pd.DataFrame(records), bold=bold, cells=sources)


def decided_by(claim: dict[str, Any]) -> str:
    """The reason, and the number of the claim's own status that lies furthest on that side of its bound."""
    numbers = [n for n in claim["numbers"] if n["status"] == claim["status"]]
    if claim["status"] == "not testable" or not numbers:
        return str(claim["reason"])
    width = [abs(math.log(n["value"])) if n["value"] > 0 else math.inf for n in numbers]
    sharpest = numbers[width.index(max(width))]
    interval = f"[{words.number(sharpest['low'])}, {words.number(sharpest['high'])}]"
    return f"{sharpest['what']}: {words.number(sharpest['value'])} {interval}, bound {sharpest['bound']}"


#: What the guide ranks by: metric, header, and whether more is better.
GUIDE = (
    ("throughput.output", "Most output", True),
    ("ttft.p50", "Lowest TTFT", False),
    ("tpot.p50", "Lowest TPOT", False),
    ("kv_live", "Least KV on the device", False),
    ("kv_total", "Least KV, host included", False),
)


@table("guide")
def guide(data: StudyData) -> Table:
    """A row a setting: which deployment is best by each metric, where the intervals tell."""
    title = "Which strategy, by what matters"
    frame = measured(data.table)
    frame = frame[(frame["state"] == "ok") & frame["value"].notna() & ~frame["starred"]] if len(frame) else frame
    if frame.empty:
        return Table("guide", title, "", [], [], frame, "no cell of this study gave a valid number")
    frame = with_series(frame[frame["level"].notna()])
    columns = [Column("Load", numeric=False)]
    columns += [Column(header, numeric=False, wide=True) for _, header, _ in GUIDE]
    rows: list[list[str]] = []
    firsts, records, sources = [], [], []
    keys = ["model", "workload_key", "kv_memory_mib", "hardware", "load", "level", "burstiness"]
    for _, part in frame.groupby(keys, sort=True, dropna=False):
        if part["series"].nunique() < 2:
            continue
        first = part.iloc[0]
        best = {metric: leaders(part[part["metric"] == metric], more) for metric, _, more in GUIDE}
        everyone = part["series"].nunique()
        rows.append(
            [
                load_of(first),
                *(
                    "no telling apart" if len(names) == everyone > 2 else " ≈ ".join(in_brief(part, names)) or "–"
                    for names in best.values()
                ),
            ]
        )
        firsts.append(first)
        sources.append([cell for text in part["cells"] for cell in str(text).split()])
        records.append(
            {key: first[key] for key in ("model", "workload", "kv_memory_mib", "rate", "concurrency")}
            | {metric: " | ".join(names) for metric, names in best.items()}
        )
    if not rows:
        return Table("guide", title, "", [], [], frame, "no two deployments were measured under the same load")
    note = (
        "≈: the intervals overlap the best one's, so there is no telling them apart (KV at its peak: within 5 %). "
        f"Quality is not in this table. {_reach(measured(data.table))}"
    )
    heads = heads_of(pd.DataFrame(firsts))
    return Table("guide", title, note, columns, rows, pd.DataFrame(records), heads=heads, cells=sources)


def in_brief(part: pd.DataFrame, names: list[str]) -> list[str]:
    """Lines of one strategy that differ in their budgets alone as one: the best, and how many more there are."""
    line_of = dict(zip(part["series"], part["line"], strict=True))
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(str(line_of[name]), []).append(name)
    return [
        one if not others else f"{one}, {others[0]}" if len(others) == 1 else f"{one} and {len(others)} other budgets"
        for one, *others in alike.values()
    ]


def _reach(frame: pd.DataFrame) -> str:
    """What `kvstudy recommend` can say from these cells, and how good its intervals are on them."""
    known = [one for one in leave_one_out(frame) if one.predicted]
    if not known:
        return (
            "kvstudy recommend answers for what was measured here; between settings it answers once some setting "
            "was measured between two others (three rates), which tells how far an interpolation is off."
        )
    predicted, covered = sum(one.predicted for one in known), sum(one.covered for one in known)
    refused = sum(one.refused for one in known)
    return (
        "For rates, contexts and memories between these: kvstudy recommend, which interpolates and refuses to "
        f"extrapolate. Left out one at a time, {covered} of {predicted} measured values "
        f"({100 * covered / predicted:.0f} %) lie in its 95 % intervals; {refused} it refused, having nothing beyond."
    )


def leaders(part: pd.DataFrame, more: bool) -> list[str]:
    """The best lines: the one with the best value, and those whose interval overlaps its own."""
    part = part.drop_duplicates("series").sort_values("value", ascending=not more)
    if part.empty:
        return []
    low = part["low"].fillna(part["value"] * 0.975).to_numpy(dtype=float)
    high = part["high"].fillna(part["value"] * 1.025).to_numpy(dtype=float)
    near = (low <= high[0]) & (high >= low[0])
    return [str(name) for name, close in zip(part["series"], near, strict=True) if close]
