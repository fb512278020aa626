"""Memory, reserved and live, device and host apart: by deployment, and over the course of a load."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvstudy.grid.store import MEMORY
from kvstudy.report import style, words
from kvstudy.report.data import StudyData, memory_bytes
from kvstudy.report.figures.captions import joined, setting_text
from kvstudy.report.figures.drawing import empty, grid, legend, line_handle
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


@figure("memory_timeline", "KV memory over time")
def memory_timeline(data: StudyData) -> Drawn:
    """KV live and reserved, and the process, second by second, of one load and seed."""
    cells = data.usable()
    cells = cells[cells["source"] != "simulated"]
    chosen = _timeline_cells(cells)
    frames = {}
    for row in chosen.itertuples(index=False):
        path = data.cell_dir(str(row.cell)) / MEMORY
        if path.is_file():
            timeline = pd.read_parquet(path)
            if not timeline.empty:
                frames[str(row.series)] = timeline
    if not frames:
        return empty("no valid cell of this study has a memory timeline")
    wanted = [
        ("KV cache, device", ("kv_live", "kv_reserved"), "device"),
        ("KV cache, host", ("kv_live", "kv_reserved"), "host"),
        ("process, device", ("process",), "device"),
        ("process, resident", ("process",), "host"),
    ]
    panels = [
        panel
        for panel in wanted
        if any(((f["kind"].isin(panel[1])) & (f["tier"] == panel[2]) & (f["bytes"] > 0)).any() for f in frames.values())
    ]
    if not panels:
        return empty("the memory timelines of this study hold neither KV nor process bytes")
    drawing, axes_list, wide = grid(len(panels))
    lines = [line for line in data.lines(chosen) if line[0] in frames]
    for axes, (title, kinds, tier) in zip(axes_list, panels, strict=True):
        top = 0.0
        for label, name, variant in lines:
            for kind in kinds:
                part = frames[label]
                part = part[(part["kind"] == kind) & (part["tier"] == tier)].sort_values("t_s")
                if part.empty:
                    continue
                reserved = kind == "kv_reserved"
                axes.plot(
                    part["t_s"],
                    part["bytes"] / MIB,
                    color=style.look(name).colour,
                    linestyle=(0, (1, 2)) if reserved else style.DASHES[variant % len(style.DASHES)],
                    linewidth=0.9,
                    drawstyle="steps-post",
                    alpha=0.8 if reserved else 1,
                )
                top = max(top, float(part["bytes"].max()) / MIB)
        axes.set_title(title)
        axes.set_xlabel("time since the load began (s)")
        axes.set_ylabel("MiB")
        axes.set_ylim(0, top * 1.1 or 1)
        axes.set_xlim(left=0)
    handles = [line_handle(*line, marker=False) for line in lines]
    handles.append(Line2D([], [], color=style.GREY, linestyle=(0, (1, 2)), label="reserved"))
    legend(drawing, handles, wide)
    first = chosen.iloc[0]
    at = words.load(first["rate"], first["concurrency"])
    caption = joined(
        f"Memory over the course of one load ({at}, seed {int(first['seed'])}): KV entries in use × bytes an "
        "entry (solid or dashed), the pool reserved for them (dotted), and the server process",
        setting_text(data, chosen),
    )
    return Drawn(drawing, caption, wide)


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
