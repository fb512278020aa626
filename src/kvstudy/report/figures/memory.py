"""Memory, reserved and live, device and host apart: by deployment, and over the course of a load."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvstudy.analysis.table import read_measured
from kvstudy.grid.store import MEMORY
from kvstudy.report import style, words
from kvstudy.report.data import StudyData, memory_bytes
from kvstudy.report.figures.captions import joined, setting_text
from kvstudy.report.figures.drawing import MOST_PANELS, empty, grid, legend
from kvstudy.report.figures.registry import Drawn, figure
from kvstudy.report.words import MIB


@figure("kv_memory", "KV memory, reserved and live")
def kv_memory(data: StudyData) -> Drawn:
    """Reserved and live KV on device and host, and the process total, a row a deployment."""
    cells = data.usable()
    simulated = cells[cells["source"] == "simulated"]
    cells = cells[cells["source"] != "simulated"]
    kinds = [(kind, tier) for kind in ("kv_reserved", "kv_live", "process") for tier in ("device", "host")]
    frame = cells[["deployment", "model", "kv_memory_mib", "framework", "budget_share", "series"]].copy()
    for kind, tier in kinds:
        frame[f"{kind}.{tier}"] = memory_bytes(cells, kind, tier) / MIB
    names = [f"{kind}.{tier}" for kind, tier in kinds]
    if frame.empty or frame[names].isna().all().all():
        return empty("no valid cell of this study recorded the memory of a policy that frees it for real")
    first = frame.groupby("deployment", sort=False)[
        ["model", "kv_memory_mib", "framework", "budget_share", "series"]
    ].first()
    rows = first.join(frame.groupby("deployment", sort=False)[names].max()).reset_index()
    rows["_rank"] = [style.rank(str(name)) for name in rows["framework"]]
    rows = rows.sort_values(
        ["model", "kv_memory_mib", "_rank", "budget_share", "series"],
        ascending=[True, True, True, False, True],
    )
    most = 36
    cut = len(rows) - most
    rows = rows.head(most)
    several = [key for key in ("model", "kv_memory_mib") if rows[key].nunique() > 1]
    labels = []
    for _, row in rows.iterrows():
        extra = [str(row["model"])] if "model" in several else []
        extra += [f"pool {words.plain(row['kv_memory_mib'])} MiB"] if "kv_memory_mib" in several else []
        labels.append(", ".join([str(row["series"]), *extra]))
    drawing = _memory_bars(rows, labels)
    note = ""
    if len(simulated):
        names_text = words.listed(sorted({words.framework(str(name)) for name in simulated["framework"]}))
        note = f"Left out: {words.count(len(simulated), 'simulated cell')} ({names_text}), which free nothing"
    table = data.table[data.table["deployment"].isin(set(rows["deployment"]))]
    caption = joined(
        "Memory by deployment, never mixed: the KV pool that is reserved (light), the most KV entries in use "
        "at any time over all valid loads × bytes an entry (dark), on the device and on the host where a "
        "framework holds any there, and the peak of the whole server process",
        "Reserved says what was set aside, live what the strategy needed",
        note,
        f"{cut} further deployments are in the tables" if cut > 0 else "",
        setting_text(data, table),
    )
    return Drawn(drawing, caption, True)


def _memory_bars(rows: pd.DataFrame, labels: list[str]) -> Figure:
    panels = [("KV cache, device", "kv_reserved.device", "kv_live.device")]
    panels.append(("KV cache, host", "kv_reserved.host", "kv_live.host"))
    panels = [p for p in panels if rows[[p[1], p[2]]].fillna(0).to_numpy().any()]
    for tier, title in (("device", "process, device"), ("host", "process, resident")):
        if rows[f"process.{tier}"].notna().any():
            panels.append((title, "", f"process.{tier}"))
    height = 0.75 + 0.24 * len(rows)
    drawing, grid = plt.subplots(1, len(panels), figsize=(style.PAGE, height), sharey=True, squeeze=False)
    places = np.arange(len(rows))[::-1]
    colours = [style.look(str(name)).colour for name in rows["framework"]]
    for axes, (title, reserved, live) in zip(grid.flat, panels, strict=True):
        if reserved:
            light = rows[reserved].fillna(0).to_numpy(dtype=float)
            some = light > 0
            axes.barh(places[some], light[some], height=0.74, color="#E6E6E6", edgecolor="#777777", linewidth=0.5)
        dark = rows[live].to_numpy(dtype=float)
        axes.barh(places, np.nan_to_num(dark), height=0.4 if reserved else 0.6, color=colours, edgecolor="none")
        top = float(np.nanmax([*np.nan_to_num(dark), *(rows[reserved].fillna(0) if reserved else [0.0])]))
        axes.set_xlim(0, top * 1.24 if top else 1)
        for place, value, behind in zip(places, dark, rows[reserved].fillna(0) if reserved else dark, strict=True):
            text = words.number(float(value)) if np.isfinite(value) else "none"
            at = max(float(np.nan_to_num(value)), float(np.nan_to_num(behind)))
            axes.annotate(
                text,
                (at, place),
                (2, 0),
                textcoords="offset points",
                va="center",
                fontsize=6,
                color="#333333",
            )
        axes.set_title(title)
        axes.set_xlabel("MiB")
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", visible=True)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    grid.flat[0].set_yticks(places, labels)
    grid.flat[0].set_ylim(-0.6, len(rows) - 0.4)
    handles = [
        Patch(facecolor="#E6E6E6", edgecolor="#777777", linewidth=0.5, label="reserved"),
        Patch(facecolor=style.GREY, label="live or resident, peak (labelled)"),
    ]
    legend(drawing, handles, True)
    return drawing


#: What the timeline shows of a deployment: kind and tier.
COURSES = (("kv_live", "device"), ("kv_reserved", "device"), ("kv_live", "host"))
DASHED = (0, (4, 1.5))


@figure("memory_timeline", "KV memory over time")
def memory_timeline(data: StudyData) -> Drawn:
    """KV live and reserved over the course of one load and seed, a panel a deployment on common axes."""
    cells = data.usable()
    cells = cells[cells["source"] != "simulated"]
    chosen = _timeline_cells(cells)
    frames = {}
    for row in chosen.itertuples(index=False):
        path = data.cell_dir(str(row.cell)) / MEMORY
        if path.is_file():
            timeline = read_measured(path)
            if timeline["kind"].isin(["kv_live", "kv_reserved"]).any():
                frames[str(row.series)] = timeline
    if not frames:
        return empty("no valid cell of this study has a timeline of KV memory")
    lines = [line for line in data.lines(chosen) if line[0] in frames][:MOST_PANELS]
    drawing, axes_list, wide = grid(len(lines), height=1.25)
    host = False
    for axes, (label, name, _) in zip(axes_list, lines, strict=True):
        colour = style.look(name).colour
        live, reserved, away = (_course(frames[label], *of) for of in COURSES)
        axes.fill_between(live.index, live, step="post", color=colour, alpha=0.25, linewidth=0)
        axes.plot(live.index, live, color=colour, linewidth=0.9, drawstyle="steps-post")
        axes.plot(reserved.index, reserved, color=style.GREY, linestyle=(0, (1, 2)), linewidth=0.9)
        if away.gt(0).any():
            host = True
            axes.plot(away.index, away, color=colour, linestyle=DASHED, linewidth=0.9, drawstyle="steps-post")
        axes.set_title(label)
        if axes.get_subplotspec().is_last_row():  # type: ignore[union-attr]
            axes.set_xlabel("time (s)")
        if axes.get_subplotspec().is_first_col():  # type: ignore[union-attr]
            axes.set_ylabel("MiB")
    top = max(float(axes.dataLim.y1) for axes in axes_list)
    end = max(float(axes.dataLim.x1) for axes in axes_list)
    for axes in axes_list:
        axes.set_ylim(0, top * 1.08 or 1)
        axes.set_xlim(0, end)
    handles: list[Patch | Line2D] = [
        Patch(facecolor=style.GREY, alpha=0.4, label="in use, device"),
        Line2D([], [], color=style.GREY, linestyle=(0, (1, 2)), label="reserved, device"),
    ]
    if host:
        handles.append(Line2D([], [], color=style.GREY, linestyle=DASHED, label="in use, host"))
    legend(drawing, handles, wide)
    first = chosen.iloc[0]
    at = words.load(first)
    caption = joined(
        f"KV memory over the course of one load ({at}, seed {int(first['seed'])}), a panel a deployment on common "
        "axes: entries in use × bytes an entry (filled), the pool reserved for them (dotted), and entries in use on "
        "the host (dashed) where a framework holds any there; time from the load's begin",
        setting_text(data, chosen),
    )
    return Drawn(drawing, caption, wide)


def _course(timeline: pd.DataFrame, kind: str, tier: str) -> pd.Series:
    """Bytes of a kind on a tier over time, in MiB by seconds."""
    part = timeline[(timeline["kind"] == kind) & (timeline["tier"] == tier)].sort_values("t_s")
    return part.set_index("t_s")["bytes"].astype("float64") / MIB


def _timeline_cells(cells: pd.DataFrame) -> pd.DataFrame:
    """Cells of one setting, a cell a line: the highest load at which most lines have a result."""
    settings = [part.drop_duplicates("series") for _, part in cells.groupby("setting", sort=True)]
    if not settings:
        return cells
    enough = 0.75 * max(len(part) for part in settings)

    def level(part: pd.DataFrame) -> tuple[float, int, int]:
        first = part.iloc[0]
        return (words.level(first["rate"], first["concurrency"]), len(part), -int(first["seed"]))

    part = max((part for part in settings if len(part) >= enough), key=level)
    return part if len(part) <= 8 else part.drop_duplicates("framework")
